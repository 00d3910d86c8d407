"""Random orders that are pure functions of integers.

numpy may change what a seeded generator draws from one version to the next, and then a split or a resumed run would
silently be another one. These orders are integer arithmetic (splitmix64) and stay what they are.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x_N: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of uint64."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


def hashes(n: int, *key: int) -> np.ndarray:
    """``n`` uint64 values, a pure function of ``key`` (any integers) and the position."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + np.array([(part * _GOLDEN + 1) & (2**64 - 1)], np.uint64))
    return _mix(state + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


def permutation(n: int, *key: int) -> np.ndarray:
    """An order of ``0 .. n-1`` (int64), a pure function of ``key``."""
    return np.argsort(hashes(n, *key), kind="stable")


def uniform(n: int, *key: int) -> np.ndarray:
    """``n`` float64 values in [0, 1), a pure function of ``key``."""
    return (hashes(n, *key) >> np.uint64(11)) * 2.0**-53
