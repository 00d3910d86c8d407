"""Bits per byte at each depth, with intervals: what a model is worth, and what its loops are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alcoda import progress
from alcoda.data.config import Splits
from alcoda.data.corpora import FORMS
from alcoda.data.prepare import open_corpus, prepare
from alcoda.data.splits import Stream
from alcoda.errors import RunError, UsageError, did_you_mean
from alcoda.measure.bootstrap import MIN_DOCUMENTS, N_BLOCKS, Interval, paired_gain, ratio_interval
from alcoda.training.load import LoadedRun
from alcoda.training.score import score


@dataclass(frozen=True)
class DepthScore:
    """One depth: mean loss in nats a scored token, bits per byte of text, and its 95% interval."""

    loops: int
    loss: float
    bits_per_byte: float
    low: float
    high: float


@dataclass(frozen=True)
class Gain:
    """Bits per byte saved by going from one depth to another, paired over units, with its 95% interval."""

    from_loops: int
    to_loops: int
    bits_per_byte: float
    low: float
    high: float


@dataclass(frozen=True)
class EvalResult:
    """What `evaluate` measured.

    Attributes:
        data: a split of the run (``valid``) or a corpus.
        train_step: of the checkpoint.
        unit: ``documents`` or ``blocks``: what the bootstrap resamples.
        n_units, n_tokens, n_bytes: how much was scored.
        note: what the reader should know of the units, or None.
        by_depth: a score a depth, increasing.
        gain: from the shallowest depth to each other.
        by_source: bits per byte of each source of a mix, by depth.
    """

    data: str
    train_step: int
    unit: str
    n_units: int
    n_tokens: int
    n_bytes: int
    note: str | None
    by_depth: tuple[DepthScore, ...]
    gain: tuple[Gain, ...]
    by_source: dict[str, dict[int, float]]

    @property
    def bits_per_byte(self) -> dict[int, float]:
        """Loops -> bits per byte."""
        return {score.loops: score.bits_per_byte for score in self.by_depth}

    def to_json(self) -> dict[str, Any]:
        """For ``eval.json`` and ``--json``: ``bits_per_byte`` maps loops to values."""
        return {"bits_per_byte": self.bits_per_byte, **asdict(self)}


MISSING_SHARE = 0.02
"""A larger share of the text that no token stands for is told."""


@dataclass
class _Sums:
    """Nats and bytes by unit of one stream."""

    nats_LU: np.ndarray
    bytes_U: np.ndarray
    n_scored: int = 0
    n_documents: int = 0
    text_bytes: int = 0
    cut: bool = False


def evaluate(
    run: LoadedRun,
    loops: Sequence[int] = (),
    data: str = "valid",
    *,
    batch_size: int = 8,
    max_tokens: int | None = None,
    seed: int = 0,
) -> EvalResult:
    """Score a split of the run's data, or the whole of another corpus, at each of ``loops``.

    Args:
        run: from `alcoda.training.load.load_run`.
        loops: depths; the recipe's ``eval.loops`` where empty.
        data: ``valid`` (also train, calib, probe) or a corpus (``text:PATH`` ...).
        batch_size: rows scored at a time.
        max_tokens: score at most so many tokens of each source.
        seed: of the bootstrap.

    Raises:
        UsageError: a depth that the model does not have, or a corpus that cannot be read.
    """
    depths = sorted({run.recipe.model.check_loops(n) for n in (list(loops) or run.recipe.eval.loops)})
    streams = streams_of(run, data)
    n_tokens = sum(min(s.n_tokens, max_tokens or s.n_tokens) for s in streams.values())
    if max_tokens is not None and all(s.n_tokens <= max_tokens for s in streams.values()):
        max_tokens = None
    by_documents = all(s.n_documents >= MIN_DOCUMENTS for s in streams.values()) and max_tokens is None
    sums = {}
    with progress.bar(f"scoring {data} at {', '.join(map(str, depths))} loops", n_tokens) as advance:
        for name, stream in streams.items():
            sums[name] = _sum(run, stream, depths, by_documents, batch_size, max_tokens, advance)
    told = [note for stream in streams.values() for note in stream.notes]
    if not run.recipe.model.route.causal_at_eval:
        told.append("the route looks at the whole text, also at what is predicted: these are not bits of a prediction")
    return _result(run, data, depths, sums, by_documents, seed, told)


def streams_of(run: LoadedRun, data: str) -> Mapping[str, Stream]:
    """The streams of a split of the run's data, or of a corpus, by source."""
    parts = ("train", *Splits.model_fields)
    if data in parts:
        prepared = prepare(run.recipe.data, run.tokenizer)
        run.run.check_corpora(prepared)
        return prepared.split(data)
    if ":" in data or data in FORMS or Path(data).exists():
        return {data: open_corpus(data, run.tokenizer)}
    raise UsageError(f"data {data!r}{did_you_mean(data, (*parts, *FORMS))} (a corpus is FORM:PATH, as text:{data})")


def _sum(
    run: LoadedRun,
    stream: Stream,
    depths: list[int],
    by_documents: bool,
    batch_size: int,
    max_tokens: int | None,
    advance: progress.Advance,
) -> _Sums:
    n_tokens = stream.n_tokens if max_tokens is None else min(stream.n_tokens, max_tokens)
    if n_tokens < 2:
        raise UsageError(f"{stream.name}: {n_tokens} tokens are too few to score; at least 2 are needed")
    # Units end where a document ends, or are equal shares of the tokens.
    if by_documents:
        ends_U = np.array([stream.range_of(i)[1] for i in range(stream.n_documents)])
    else:
        ends_U = np.linspace(0, n_tokens, min(N_BLOCKS, n_tokens) + 1).round().astype(int)[1:]
    sums = _Sums(np.zeros((len(depths), len(ends_U))), np.zeros(len(ends_U)), n_documents=stream.n_documents)
    sums.text_bytes, sums.cut = stream.n_bytes, n_tokens < stream.n_tokens
    for part in score(
        run.model,
        stream,
        run.tokenizer.token_bytes_V,
        depths,
        batch_size=batch_size,
        max_tokens=max_tokens,
        dtype=run.dtype,
    ):
        n = len(part.bytes_N)
        unit_N = np.searchsorted(ends_U, np.arange(part.start, part.start + n), side="right")
        np.add.at(sums.bytes_U, unit_N, part.bytes_N)
        for row, nats_N in zip(sums.nats_LU, part.nats_LN, strict=True):
            np.add.at(row, unit_N, nats_N)
        sums.n_scored += int((part.bytes_N > 0).sum())
        advance(n)
    return sums


def _result(
    run: LoadedRun,
    data: str,
    depths: list[int],
    sums: dict[str, _Sums],
    by_documents: bool,
    seed: int,
    notes: list[str],
) -> EvalResult:
    nats_LU = np.concatenate([s.nats_LU for s in sums.values()], 1)
    bytes_U = np.concatenate([s.bytes_U for s in sums.values()])
    keep_U = bytes_U > 0
    nats_LU, bytes_U = nats_LU[:, keep_U], bytes_U[keep_U]
    n_scored = sum(s.n_scored for s in sums.values())
    if len(bytes_U) < 2:
        raise UsageError(
            f"{data}: {n_scored} of its tokens stand for text and have one before them; at least 2 are needed to score"
        )
    for n, nats_U in zip(depths, nats_LU, strict=True):
        if not np.isfinite(nats_U).all():
            raise RunError(
                f"the loss at {n} loops is not finite: the model of train step {run.train_step} diverged, or does not "
                "stand that depth; give other --loops, or another --checkpoint"
            )
    intervals = [_interval(ratio_interval, nats_U, bytes_U, seed=seed) for nats_U in nats_LU]
    gains = [_interval(paired_gain, nats_LU[0], nats_U, bytes_U, seed=seed) for nats_U in nats_LU[1:]]
    if not by_documents:
        n_documents = min(s.n_documents for s in sums.values())
        few = (
            f"{n_documents} document{'s are' if n_documents != 1 else ' is'} too few"
            if n_documents < MIN_DOCUMENTS
            else "only part of it was scored"
        )
        notes.append(f"{few}: intervals are over {len(bytes_U)} contiguous blocks of tokens")
    text_bytes, n_bytes = sum(s.text_bytes for s in sums.values()), int(bytes_U.sum())
    if abs(n_bytes - text_bytes) > MISSING_SHARE * text_bytes and not any(s.cut for s in sums.values()):
        notes.append(
            f"the scored tokens stand for {n_bytes:,} of {text_bytes:,} bytes: the tokenizer does not name all of this "
            "text, and bits per byte cannot be compared with those of other tokenizers"
        )
    return EvalResult(
        data=data,
        train_step=run.train_step,
        unit="documents" if by_documents else "blocks",
        n_units=len(bytes_U),
        n_tokens=n_scored,
        n_bytes=n_bytes,
        note="; ".join(notes) or None,
        by_depth=tuple(
            DepthScore(n, float(nats_U.sum()) / n_scored, *interval)
            for n, nats_U, interval in zip(depths, nats_LU, intervals, strict=True)
        ),
        gain=tuple(Gain(depths[0], n, *interval) for n, interval in zip(depths[1:], gains, strict=True)),
        by_source={
            name: {
                n: float(row.sum() / math.log(2) / s.bytes_U.sum()) for n, row in zip(depths, s.nats_LU, strict=True)
            }
            for name, s in sums.items()
        },
    )


def _interval(function: Any, *arrays: np.ndarray, seed: int) -> Interval:
    return function(*arrays, seed=seed)
