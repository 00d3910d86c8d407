"""Confidence intervals of bits per byte by the cluster bootstrap: whole documents are resampled, not tokens.

The losses of tokens of one document depend on each other, so a document counts as one draw. Resampling tokens would
give intervals that are too narrow. Efron & Tibshirani, "An Introduction to the Bootstrap" (1993), chapters 8 and 13.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from alcoda.errors import UsageError

MIN_DOCUMENTS = 30  # under this many, cut blocks: a percentile interval of a handful of units is too narrow
N_BLOCKS = 50
_CHUNK_CELLS = 1 << 20  # counts held at once (8 MiB)


class Interval(NamedTuple):
    """An estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float


def ratio_interval(
    nats_N: np.ndarray, bytes_N: np.ndarray, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> Interval:
    """Bits per byte of all units, ``sum(nats) / ln 2 / sum(bytes)``, with its percentile interval.

    nats_N, bytes_N: the total loss and the bytes of each unit (a document, or a block of `blocks`). level: the coverage
    aimed at. The same seed and number of units draw the same resamples. Memory does not grow with ``n_resamples``
    beyond one number each. Raises `UsageError` for fewer than two units, and for numbers that make no sense.
    """
    nats_N, bytes_N = _checked(nats_N, bytes_N, level, n_resamples)
    return Interval(*(x / math.log(2) for x in _resampled(nats_N, bytes_N, level, n_resamples, seed)))


def mean_interval(
    sums_N: np.ndarray, counts_N: np.ndarray, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> Interval:
    """The mean of what units hold several of, ``sum(sums) / sum(counts)``, with its percentile interval; the rest as
    `ratio_interval`."""
    sums_N, counts_N = _checked(sums_N, counts_N, level, n_resamples, "sums", "counts")
    return _resampled(sums_N, counts_N, level, n_resamples, seed)


def _resampled(sums_N: np.ndarray, counts_N: np.ndarray, level: float, n_resamples: int, seed: int) -> Interval:
    """``sum(sums) / sum(counts)`` with its percentile interval."""
    n = len(sums_N)
    rng = np.random.default_rng(seed)
    weight = np.full(n, 1 / n)
    ratios = []
    rows = max(1, _CHUNK_CELLS // n)
    for start in range(0, n_resamples, rows):
        # Drawing n units with replacement is a multinomial draw of how often each one comes.
        counts_RN = rng.multinomial(n, weight, size=min(rows, n_resamples - start))
        sums_R, held_R = counts_RN @ sums_N, counts_RN @ counts_N
        # Units may be empty; a resample of only those has no ratio and is left out.
        ratios.append(sums_R[held_R > 0] / held_R[held_R > 0])
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(ratios), [tail, 1 - tail])
    return Interval(float(sums_N.sum() / counts_N.sum()), float(low), float(high))


def paired_gain(
    nats_a_N: np.ndarray,
    nats_b_N: np.ndarray,
    bytes_N: np.ndarray,
    level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Bits per byte of a minus that of b on the same units, resampled together: positive where b is better.

    What makes a unit hard is common to both and cancels, so this is much narrower than two intervals side by side.
    Shapes, units and errors as in `ratio_interval`.
    """
    nats_a_N, bytes_N = _checked(nats_a_N, bytes_N, level, n_resamples)
    nats_b_N, _ = _checked(nats_b_N, bytes_N, level, n_resamples)
    # Both ratios have the same denominator, so their difference is the ratio of the differences.
    return ratio_interval(nats_a_N - nats_b_N, bytes_N, level, n_resamples, seed)


def _numbers(values_N: np.ndarray, name: str) -> np.ndarray:
    values_N = np.asarray(values_N, dtype=np.float64)
    if values_N.ndim != 1:
        raise UsageError(f"{name} has {values_N.ndim} dimensions; a vector with one number a unit is needed")
    if not np.isfinite(values_N).all():
        raise UsageError(f"{name} of unit {int(np.argmin(np.isfinite(values_N)))} is not a finite number")
    return values_N


def _checked(
    nats_N: np.ndarray, bytes_N: np.ndarray, level: float, n_resamples: int, what: str = "nats", per: str = "bytes"
) -> tuple[np.ndarray, np.ndarray]:
    nats_N, bytes_N = _numbers(nats_N, what), _numbers(bytes_N, per)
    if len(nats_N) != len(bytes_N):
        raise UsageError(f"{what} and {per} need one number a unit each, not {len(nats_N)} and {len(bytes_N)}")
    if len(nats_N) < 2:
        raise UsageError(f"an interval needs at least 2 units to resample, not {len(nats_N)}; score more text")
    if (bytes_N < 0).any() or bytes_N.sum() <= 0:
        raise UsageError(f"{per} of a unit have to be 0 or more, and more than 0 in all")
    if not 0 < level < 1:
        raise UsageError(f"level is {level}; it has to be between 0 and 1, such as 0.95")
    if n_resamples < 1:
        raise UsageError(f"n_resamples is {n_resamples}; it has to be 1 or more, such as 2000")
    return nats_N, bytes_N
