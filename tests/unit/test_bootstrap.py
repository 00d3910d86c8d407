"""The cluster bootstrap: its intervals cover as often as they say, and only where clusters are what is resampled."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alcoda.errors import UsageError
from alcoda.measure import bootstrap
from alcoda.measure.bootstrap import Interval, paired_gain, ratio_interval


def documents(rng: np.random.Generator, n: int, tokens: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """(nats, bytes), each (n, tokens): documents differ in difficulty; E nats = 2 and E bytes = 4 a token."""
    bytes_NT = rng.integers(1, 8, size=(n, tokens)).astype(float)
    nats_NT = rng.gamma(4.0, 0.5, size=(n, 1)) * rng.gamma(2.0, 0.5, size=(n, tokens))
    return nats_NT, bytes_NT


TRUTH = 2 / 4 / math.log(2)


def covered(interval: Interval) -> bool:
    return interval.low <= TRUTH <= interval.high


def test_coverage_is_near_its_level() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        nats_NT, bytes_NT = documents(rng, 100)
        hits += covered(ratio_interval(nats_NT.sum(1), bytes_NT.sum(1), n_resamples=400, seed=trial))
    # The share of 300 trials has a standard deviation of 1.3%, and percentile intervals of 100 skewed units cover
    # about 1% to 2% too seldom: 0.95 - 0.02 - 2 * 0.013 to 0.95 + 2.5 * 0.013.
    assert 0.904 <= hits / 300 <= 0.983


def test_resampling_tokens_would_cover_far_too_seldom() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(60):
        nats_NT, bytes_NT = documents(rng, 50)
        hits += covered(ratio_interval(nats_NT.ravel(), bytes_NT.ravel(), n_resamples=200, seed=trial))
    # The spread between documents, which tokens ignore, makes the true interval about twice as wide.
    assert hits / 60 < 0.8


def test_known_values() -> None:
    value, low, high = ratio_interval(np.array([math.log(2), 3 * math.log(2)]), np.array([1.0, 1.0]))
    # Resamples of two units are (1, 1), (1, 3) twice and (3, 3): both tails of 2.5% lie within the 25% at the ends.
    assert (value, low, high) == pytest.approx((2.0, 1.0, 3.0))
    # A ratio of sums, not a mean of ratios.
    assert ratio_interval(np.array([1.0, 9.0]), np.array([10.0, 10.0])).value == pytest.approx(10 / 20 / math.log(2))
    assert ratio_interval(np.array([10.0, 2.0]), np.array([10.0, 1.0])).value == pytest.approx(12 / 11 / math.log(2))


def test_equal_units_have_no_spread() -> None:
    value, low, high = ratio_interval(np.full(40, 7.0), np.full(40, 5.0))
    assert low == pytest.approx(value) == pytest.approx(high)


def test_width_agrees_with_theory() -> None:
    rng = np.random.default_rng(1)
    nats_N = rng.normal(100.0, 10.0, size=400)
    interval = ratio_interval(nats_N, np.ones(400), n_resamples=4000)
    expected = 2 * 1.96 * nats_N.std() / math.sqrt(400) / math.log(2)
    # Each end is a quantile of 4000 draws: about 2% of the width.
    assert interval.high - interval.low == pytest.approx(expected, rel=0.08)
    wider = ratio_interval(nats_N, np.ones(400), level=0.99, n_resamples=4000)
    assert wider.low < interval.low < interval.value < interval.high < wider.high


def test_pairing_is_narrower() -> None:
    rng = np.random.default_rng(2)
    nats_NT, bytes_NT = documents(rng, 60)
    nats_b_N, bytes_N = nats_NT.sum(1), bytes_NT.sum(1)
    nats_a_N = nats_b_N * 1.05 + rng.normal(0, 0.1, size=60)
    gain = paired_gain(nats_a_N, nats_b_N, bytes_N)
    a, b = ratio_interval(nats_a_N, bytes_N), ratio_interval(nats_b_N, bytes_N)
    assert gain.value == pytest.approx(a.value - b.value)
    assert gain.low > 0, "a small gain on every unit shows"
    assert gain.high - gain.low < 0.2 * (a.high - a.low)
    back = paired_gain(nats_b_N, nats_a_N, bytes_N)
    assert (back.value, back.low, back.high) == pytest.approx((-gain.value, -gain.high, -gain.low))
    assert paired_gain(nats_a_N, nats_a_N, bytes_N) == (0.0, 0.0, 0.0)


def test_seed_decides_and_chunks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    nats_NT, bytes_NT = documents(np.random.default_rng(3), 35)
    units = nats_NT.sum(1), bytes_NT.sum(1)
    once = ratio_interval(*units, seed=5)
    assert ratio_interval(*units, seed=5) == once
    assert ratio_interval(*units, seed=6) != once
    monkeypatch.setattr(bootstrap, "_CHUNK_CELLS", 100)  # two resamples at a time
    # Sums of a matrix product may be taken in another order, so equal but for rounding.
    assert ratio_interval(*units, seed=5) == pytest.approx(once, rel=1e-12)


def test_empty_units_are_allowed() -> None:
    interval = ratio_interval(np.array([0.0, 0.0, 0.0, 4.0]), np.array([0.0, 0.0, 0.0, 2.0]))
    assert interval == pytest.approx((2 / math.log(2),) * 3)


@pytest.mark.parametrize(
    ("nats", "bytes_", "options", "said"),
    [
        ([1.0], [1.0], {}, "at least 2 units to resample, not 1"),
        ([], [], {}, "not 0"),
        ([1.0, 2.0], [1.0], {}, "not 2 and 1"),
        ([1.0, math.nan], [1.0, 1.0], {}, "nats of unit 1 is not a finite number"),
        ([1.0, 2.0], [0.0, 0.0], {}, "more than 0 in all"),
        ([1.0, 2.0], [3.0, -1.0], {}, "0 or more"),
        ([[1.0, 2.0]], [[1.0, 2.0]], {}, "2 dimensions"),
        ([1.0, 2.0], [1.0, 1.0], {"level": 95}, "level is 95"),
        ([1.0, 2.0], [1.0, 1.0], {"n_resamples": 0}, "n_resamples is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(nats: list, bytes_: list, options: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ratio_interval(np.array(nats), np.array(bytes_), **options)
    with pytest.raises(UsageError, match=said):
        paired_gain(np.array(nats), np.array(nats), np.array(bytes_), **options)
