"""Prompts of a run's own text, as its training would have mixed them: what decoding is timed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alcoda.data.config import DataConfig
from alcoda.data.shuffle import permutation
from alcoda.errors import UsageError
from alcoda.measure.text import streams_of
from alcoda.training.load import LoadedRun

_KEY = 0x9207


def prompts_of(run: LoadedRun, data: str, n: int, n_tokens: int, seed: int = 0) -> list[tuple[int, ...]]:
    """The first ``n_tokens`` tokens of ``n`` rows of a split of the run's data, or of a corpus.

    Rows are cut as in training, and come from each source by its share of the mixture, within it in an order of
    ``seed``; where a source has too few, they come again.

    Raises:
        UsageError: a text of fewer tokens; and as `alcoda.measure.text.streams_of`.
    """
    seq_len, rows = run.recipe.model.seq_len, {}
    streams = streams_of(run, data)
    share = shares(run.recipe.data, list(streams))
    for i, (name, stream) in enumerate(streams.items()):
        n_rows = (stream.n_tokens - n_tokens) // seq_len + 1 if stream.n_tokens >= n_tokens else 0
        if n_rows and share[name] > 0:
            rows[name] = permutation(n_rows, _KEY, seed, i).tolist()
    if not rows:
        longest = max(stream.n_tokens for stream in streams.values())
        raise UsageError(f"{data} has at most {longest} tokens a source, and a prompt takes {n_tokens}: ask for fewer")
    drawn, prompts = dict.fromkeys(rows, 0), []
    for _ in range(n):
        # The source that is furthest behind its share.
        name = min(rows, key=lambda one: (drawn[one] + 1) / share[one])
        start = rows[name][drawn[name] % len(rows[name])] * seq_len
        drawn[name] += 1
        prompts.append(tuple(streams[name].read(start, start + n_tokens).tolist()))
    return prompts


def shares(config: DataConfig, names: Sequence[str]) -> Mapping[str, float]:
    """Of each text held out, the weight of its source; of stages, what they have together. Sources that the config does
    not name are taken in order. A text that is no source's (``valid``) has weight 1."""
    weights = {source.name: (source.weight, 1 + len(source.stages)) for source in config.mix if source.name is not None}
    known = {f"{name}-{n}" if n > 1 else name: weight for name, (weight, n) in weights.items()}
    unnamed = [source.weight for source in config.mix if source.name is None]
    others = [name for name in names if name not in known]
    given = dict(zip(others, unnamed, strict=False)) if len(others) == len(unnamed) else dict.fromkeys(others, 1.0)
    return {name: known[name] if name in known else given[name] for name in names}
