"""Training depths: exact distributions that the draws follow, with draws that depend on (seed, train_step) alone."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from alcoda.depth.sample import MOST_LOOPS, Depth, Fixed, LogNormal, LogNormalPoisson, LoopPlan, Uniform
from alcoda.errors import UsageError

N_LOOPS = 8
SAMPLERS = {
    "fixed": Fixed(),
    "fixed, last 3": Fixed(loops=5, last_k=3),
    "uniform": Uniform(),
    "uniform, 3 to 6, last 4": Uniform(min=3, max=6, last_k=4),
    "lognormal": LogNormal(),
    "lognormal, tight": LogNormal(mean=4, sigma=1.0, min=2, max=6),
    "lognormal_poisson": LogNormalPoisson(),
    "huginn": LogNormalPoisson(mean=32, last_k=8),
    "lognormal_poisson, clipped": LogNormalPoisson(mean=6, max=9, last_k=8),
}
resolved = pytest.mark.parametrize("depth", [d.resolve(N_LOOPS) for d in SAMPLERS.values()], ids=list(SAMPLERS))


def test_every_registered_sampler_is_tested() -> None:
    assert {d.kind for d in SAMPLERS.values()} == set(Depth.choices)


@resolved
def test_the_distribution_sums_to_one(depth: Depth) -> None:
    pmf = depth.pmf()
    assert sum(pmf.values()) == pytest.approx(1, abs=1e-9)
    assert min(pmf) >= 1
    assert min(pmf.values()) >= 0
    assert depth.max_loops == max(pmf)


N_DRAWS = 4000


def departure(draws: list[int], pmf: dict[int, float]) -> float:
    """The largest distance of the two distribution functions."""
    counts, off, below, expected = Counter(draws), 0.0, 0, 0.0
    for n in range(1, max(max(draws), max(pmf)) + 1):
        below, expected = below + counts[n], expected + pmf.get(n, 0)
        off = max(off, abs(below / len(draws) - expected))
    return off


BOUND = math.sqrt(math.log(2 / 1e-9) / (2 * N_DRAWS))
"""Dvoretzky-Kiefer-Wolfowitz: P(departure > x) <= 2 exp(-2 n x^2), so a false alarm has probability 1e-9 (0.052)."""


@resolved
def test_draws_follow_the_distribution(depth: Depth) -> None:
    draws = [depth.draw(0, step).n_loops for step in range(N_DRAWS)]
    assert departure(draws, depth.pmf()) < BOUND
    assert set(draws) <= set(depth.pmf())


def test_control_a_neighbouring_distribution_is_noticed() -> None:
    draws = [Uniform(max=8).draw(0, step).n_loops for step in range(N_DRAWS)]
    assert departure(draws, Uniform(max=9).pmf()) > BOUND
    draws = [LogNormalPoisson(mean=8).draw(0, step).n_loops for step in range(N_DRAWS)]
    assert departure(draws, LogNormalPoisson(mean=7).pmf()) > BOUND
    assert departure([n - 1 for n in draws if n > 1], LogNormalPoisson(mean=8).pmf()) > BOUND


@resolved
def test_means_are_those_of_the_distribution(depth: Depth) -> None:
    plans = [depth.draw(1, step) for step in range(N_DRAWS)]
    mean = depth.mean_loops
    std = math.sqrt(sum(p * (n - mean) ** 2 for n, p in depth.pmf().items()))
    error = 6 * std / math.sqrt(N_DRAWS) + 1e-9  # six sigma: a false alarm in 10^9
    assert np.mean([plan.n_loops for plan in plans]) == pytest.approx(mean, abs=error)
    assert np.mean([plan.n_grad for plan in plans]) == pytest.approx(depth.mean_grad_loops, abs=error)


@pytest.mark.parametrize("top", [1, 4, 6, 10])
def test_mean_of_uniform(top: int) -> None:
    assert Uniform(max=top).mean_loops == pytest.approx((top + 1) / 2, rel=1e-12)


@pytest.mark.parametrize("mean", [4.0, 8.0, 32.0])
def test_mean_of_huginns_sampler_is_one_above_its_rate(mean: float) -> None:
    assert LogNormalPoisson(mean=mean).mean_loops == pytest.approx(mean + 1, rel=1e-8)
    # Var = E[rate] + Var[rate], Var[rate] = mean^2 (exp(sigma^2) - 1)
    pmf = LogNormalPoisson(mean=mean).pmf()
    variance = sum(p * (n - mean - 1) ** 2 for n, p in pmf.items())
    assert variance == pytest.approx(mean + mean**2 * (math.exp(0.25) - 1), rel=1e-6)


@pytest.mark.parametrize("sigma", [1e-6, 0.25, 0.75, 1.0, 1.25, 1.5])
@pytest.mark.parametrize("mean", [0.5, 8.0, 32.0])
def test_mean_of_huginns_sampler_at_every_sigma(mean: float, sigma: float) -> None:
    pmf = LogNormalPoisson(mean=mean, sigma=sigma).pmf()
    assert sum(n * p for n, p in pmf.items()) == pytest.approx(mean + 1, rel=1e-3)
    # The mean could be right of a distribution with gaps: P(n = 1 + k) is E[P(Poisson(rate) = k)].
    rates = np.exp(math.log(mean) - sigma**2 / 2 + sigma * np.linspace(-9, 9, 20_001))
    share = np.exp(-(np.linspace(-9, 9, 20_001) ** 2) / 2)
    for n in (1, 2, 10, 100):
        expected = share @ np.exp((n - 1) * np.log(rates) - rates - math.lgamma(n)) / share.sum()
        assert pmf.get(n, 0) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_the_largest_distribution_is_listed_and_its_draws_are_bounded() -> None:
    depth = LogNormalPoisson(mean=MOST_LOOPS, sigma=1.5)
    pmf = depth.pmf()
    assert depth.max_loops == max(pmf) == MOST_LOOPS and sum(pmf.values()) == pytest.approx(1, abs=1e-9)
    assert max(depth.draw(0, step).n_loops for step in range(20)) == MOST_LOOPS
    assert LogNormal().resolve(MOST_LOOPS).max_loops == MOST_LOOPS


def test_mean_of_lognormal_is_near_its_mean() -> None:
    # Rounding is to the nearest and a bound of 400 cuts nothing.
    assert LogNormal(mean=20, max=400).mean_loops == pytest.approx(20, rel=1e-3)


def test_lognormal_by_hand() -> None:
    # mean 2, sigma 1: ln x ~ N(ln 2 - 1/2, 1); P(n = 1) = P(x < 1.5) = Phi(ln 1.5 - ln 2 + 1/2) = Phi(0.21232)
    pmf = LogNormal(mean=2, sigma=1, max=3).pmf()
    assert pmf[1] == pytest.approx(0.58407, abs=1e-5)
    assert pmf[2] == pytest.approx(0.76520 - 0.58407, abs=1e-5)  # Phi(ln 2.5 - ln 2 + 1/2) = Phi(0.72314)
    assert pmf[3] == pytest.approx(1 - 0.76520, abs=1e-5)


def test_huginns_bound_gathers_the_tail() -> None:
    free, cut = LogNormalPoisson(mean=6).pmf(), LogNormalPoisson(mean=6, max=9).pmf()
    assert max(cut) == 9
    assert cut[9] == pytest.approx(sum(p for n, p in free.items() if n >= 9), rel=1e-9)
    assert all(cut[n] == pytest.approx(free[n], rel=1e-12) for n in range(1, 9))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 12))
def test_the_last_k_loops_carry_gradients(n: int, k: int) -> None:
    plan = Fixed(loops=n, last_k=k).draw(0, 0)
    assert plan == LoopPlan(max(n - k, 0), min(n, k))
    assert plan.n_loops == n


def test_mean_of_grad_loops_by_hand() -> None:
    assert Uniform(max=4, last_k=2).mean_grad_loops == pytest.approx((1 + 2 + 2 + 2) / 4)
    assert Uniform(max=4).mean_grad_loops == pytest.approx(2.5)


@resolved
def test_a_draw_is_a_function_of_seed_and_step(depth: Depth) -> None:
    forward = [depth.draw(7, step) for step in range(50)]
    np.random.seed(0)
    backward = [depth.draw(7, step) for step in reversed(range(50))]
    assert forward == backward[::-1]
    if len(depth.pmf()) > 1:
        assert forward != [depth.draw(8, step) for step in range(50)]
        assert len(set(forward)) > 1


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (Fixed(), Fixed(loops=8)),
        (Fixed(loops=3), Fixed(loops=3)),
        (Uniform(min=2), Uniform(min=2, max=8)),
        (Uniform(max=3), Uniform(max=3)),
        (LogNormal(), LogNormal(mean=8, max=32)),
        (LogNormal(mean=4.5), LogNormal(mean=4.5, max=18)),
        (LogNormalPoisson(), LogNormalPoisson(mean=8)),
    ],
)
def test_what_is_left_out_comes_from_the_models_depth(depth: Depth, expected: Depth) -> None:
    assert depth.resolve(8) == expected
    assert depth.resolve(8).resolve(5) == expected


@pytest.mark.parametrize("depth", [Fixed(), Uniform(), LogNormal(), LogNormalPoisson()])
def test_an_unresolved_sampler_says_so(depth: Depth) -> None:
    with pytest.raises(ValueError, match="resolve the sampler"):
        depth.pmf()
    with pytest.raises(ValueError, match="resolve the sampler"):
        depth.draw(0, 0)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Uniform, {"min": 5, "max": 4}, "needs min <= max, got min=5, max=4"),
        (LogNormal, {"min": 5, "max": 4}, "needs min <= max, got min=5, max=4"),
        (LogNormal, {"mean": 9, "max": 8}, "mean=9 lies outside min=1 .. max=8"),
        (LogNormal, {"mean": 1.5, "min": 2, "max": 8}, "mean=1.5 lies outside min=2 .. max=8"),
        (LogNormal, {"sigma": 0}, "greater than 0"),
        (LogNormalPoisson, {"mean": float("inf")}, "finite number"),
        (Fixed, {"loops": 0}, "greater than or equal to 1"),
        (Fixed, {"last_k": 0}, "greater than or equal to 1"),
        (Fixed, {"loops": 2.0}, "valid integer"),
        (Fixed, {"loops": 10_001}, "less than or equal to 10000"),
        (Uniform, {"max": 10**9}, "less than or equal to 10000"),
        (Uniform, {"min": 10**9}, "less than or equal to 10000"),
        (LogNormal, {"max": 10**8}, "less than or equal to 10000"),
        (LogNormal, {"min": 10**8}, "less than or equal to 10000"),
        (LogNormal, {"mean": 1e300}, "less than or equal to 10000"),
        (LogNormal, {"sigma": 1e200}, "less than or equal to 1.5"),
        (LogNormalPoisson, {"mean": 1e300}, "less than or equal to 10000"),
        (LogNormalPoisson, {"max": 10**8}, "less than or equal to 10000"),
        (LogNormalPoisson, {"sigma": 3}, "less than or equal to 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind: type[Depth], fields: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind(**fields)


@pytest.mark.parametrize(
    ("depth", "n_loops", "message"),
    [
        (Uniform(min=5), 4, r"depth.min=5 is above the model's n_loops=4"),
        (LogNormal(min=5), 4, r"depth.mean=4 lies outside min=5 .. max=16"),
        (Fixed(), 20_000, r"loops: input should be less than or equal to 10000"),
        (LogNormal(max=6), 8, r"depth.mean=8 lies outside min=1 .. max=6"),
    ],
)
def test_a_sampler_that_does_not_fit_the_model_is_a_usage_error(depth: Depth, n_loops: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        depth.resolve(n_loops)
