"""Bits per byte at each depth, with intervals: what a model is worth, and what its loops are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from alcoda import progress
from alcoda.errors import UsageError
from alcoda.measure.bootstrap import paired_gain, ratio_interval
from alcoda.measure.text import Sums, Text, buckets, joined
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.prefill import Prefill, Reading
from alcoda.training.load import LoadedRun
from alcoda.training.score import score

BATCH_ROWS, EXACT_ROWS = 8, 64
"""Rows scored at a time, and where they are read token by token: a pass over few tokens costs as much as over one."""


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
class PositionScore:
    """The tokens that are predicted from positions ``start`` to ``stop`` - 1 of their row: bits per byte by depth."""

    start: int
    stop: int
    n_tokens: int
    n_bytes: int
    bits_per_byte: dict[int, float]


@dataclass(frozen=True)
class EvalResult:
    """What `evaluate` measured.

    Attributes:
        data: a split of the run (``valid``) or a corpus.
        train_step: of the checkpoint.
        prefill: how rows were read: the kind of prefill and its fields; None where the model has no memory.
        chunk_tokens: in chunks of so many tokens; None: whole.
        cache: what each token left in the cache: the kind of cache and its fields.
        unit: ``documents`` or ``blocks``: what the bootstrap resamples.
        n_units, n_tokens, n_bytes: how much was scored.
        note: what the reader should know of the units, or None.
        by_depth: a score a depth, increasing.
        gain: from the shallowest depth to each other.
        by_position: up to 8 equal parts of a row; those that hold no text are left out.
        by_source: bits per byte of each source of a mix, by depth.
    """

    data: str
    train_step: int
    prefill: dict[str, Any] | None
    chunk_tokens: int | None
    cache: dict[str, Any]
    unit: str
    n_units: int
    n_tokens: int
    n_bytes: int
    note: str | None
    by_depth: tuple[DepthScore, ...]
    gain: tuple[Gain, ...]
    by_position: tuple[PositionScore, ...]
    by_source: dict[str, dict[int, float]]

    @property
    def bits_per_byte(self) -> dict[int, float]:
        """Loops -> bits per byte."""
        return {score.loops: score.bits_per_byte for score in self.by_depth}

    def to_json(self) -> dict[str, Any]:
        """For ``eval.json`` and ``--json``: ``bits_per_byte`` maps loops to values."""
        return {"bits_per_byte": self.bits_per_byte, **asdict(self)}


def evaluate(
    run: LoadedRun,
    loops: Sequence[int] = (),
    data: str = "valid",
    *,
    prefill: Prefill | str | None = None,
    chunk_tokens: int | None = None,
    cache: CachePolicy | str | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> EvalResult:
    """Score a split of the run's data, or the whole of another corpus, at each of ``loops``.

    Args:
        run: from `alcoda.training.load.load_run`.
        loops: depths; the recipe's ``eval.loops`` where empty.
        data: ``valid`` (also train, calib, probe) or a corpus (``text:PATH`` ...).
        prefill: how rows are read where the model has a memory; None: exactly, token by token.
        chunk_tokens: in chunks of so many tokens; None: whole.
        cache: what each token leaves in the cache; None: `per_loop`. Of others rows are read token by token.
        batch_size: rows scored at a time; None: `BATCH_ROWS`, or `EXACT_ROWS` where they are read token by token.
        max_tokens: score at most so many tokens of each source.
        seed: of the bootstrap.

    Raises:
        UsageError: a depth, a prefill or a cache that the model does not have, or a corpus that cannot be read.
    """
    depths = sorted({run.recipe.model.check_loops(n) for n in (list(loops) or run.recipe.eval.loops)})
    reading = run.reading(prefill, chunk_tokens, cache)
    n_rows = rows_at_a_time(batch_size, is_exact=reading is not None and reading.prefill.is_exact)
    text = Text.open(run, data, max_tokens)
    sums = {}
    with progress.bar(
        f"scoring {data} at {', '.join(map(str, depths))} loop{'s' if depths != [1] else ''}", text.n_tokens
    ) as advance:
        for name, stream in text.streams.items():
            sums[name] = text.sums(stream, len(depths), run.recipe.model.seq_len)
            for part in score(
                run.model,
                stream,
                run.tokenizer.token_bytes_V,
                depths,
                batch_size=n_rows,
                max_tokens=text.max_tokens,
                dtype=run.dtype,
                reading=reading,
                tell=advance,
            ):
                sums[name].add(part)
    return _result(run, text, reading, depths, sums, seed)


def rows_at_a_time(batch_size: int | None, is_exact: bool) -> int:
    """``batch_size``, or its default for rows that are read token by token or not."""
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size={batch_size}: at least 1 row")
    return batch_size or (EXACT_ROWS if is_exact else BATCH_ROWS)


def _result(
    run: LoadedRun, text: Text, reading: Reading | None, depths: list[int], sums: Mapping[str, Sums], seed: int
) -> EvalResult:
    nats_LU, bytes_U = joined(sums.values(), depths, text.name, run.train_step)
    n_scored, n_bytes = sum(s.n_scored for s in sums.values()), int(bytes_U.sum())
    intervals = [ratio_interval(nats_U, bytes_U, seed=seed) for nats_U in nats_LU]
    gains = [paired_gain(nats_LU[0], nats_U, bytes_U, seed=seed) for nats_U in nats_LU[1:]]
    return EvalResult(
        data=text.name,
        train_step=run.train_step,
        prefill=reading.prefill.model_dump() if reading and run.recipe.model.memory.carries else None,
        chunk_tokens=reading.chunk_tokens if reading else None,
        cache=(reading.cache if reading else PER_LOOP).model_dump(),
        unit=text.unit,
        n_units=len(bytes_U),
        n_tokens=n_scored,
        n_bytes=n_bytes,
        note="; ".join(text.notes(run, len(bytes_U), n_bytes)) or None,
        by_depth=tuple(
            DepthScore(n, float(nats_U.sum()) / n_scored, *interval)
            for n, nats_U, interval in zip(depths, nats_LU, intervals, strict=True)
        ),
        gain=tuple(Gain(depths[0], n, *interval) for n, interval in zip(depths[1:], gains, strict=True)),
        by_position=_by_position(run.recipe.model.seq_len, depths, list(sums.values())),
        by_source={name: _bits(depths, s.nats_LU.sum(1), s.bytes_U.sum()) for name, s in sums.items()},
    )


def _by_position(seq_len: int, depths: list[int], sums: Sequence[Sums]) -> tuple[PositionScore, ...]:
    ends_P = buckets(seq_len).tolist()
    nats_LP, bytes_P, scored_P = (
        np.sum([getattr(s, name) for s in sums], 0) for name in ("nats_LP", "bytes_P", "scored_P")
    )
    return tuple(
        PositionScore(
            ends_P[p], ends_P[p + 1], int(scored_P[p]), int(bytes_P[p]), _bits(depths, nats_LP[:, p], bytes_P[p])
        )
        for p in range(len(bytes_P))
        if bytes_P[p]
    )


def _bits(depths: list[int], nats_L: np.ndarray, n_bytes: float) -> dict[int, float]:
    return {n: float(nats / math.log(2) / n_bytes) for n, nats in zip(depths, nats_L, strict=True)}
