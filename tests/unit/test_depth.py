"""Training depths: exact distributions that the draws follow, with draws that depend on (seed, train_step) alone."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from alcoda.depth.sample import (
    MOST_LOOPS,
    Curriculum,
    Depth,
    Fixed,
    HeavyTail,
    LogNormal,
    LogNormalPoisson,
    LoopPlan,
    Poisson,
    Uniform,
)
from alcoda.errors import UsageError

N_LOOPS = 8
N_DRAWS = 4000
N_ROWS = 4
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
    "heavy_tail": HeavyTail(),
    "heavy_tail, the precursor's": HeavyTail(peak=22, min=2, last_k=10),
    "poisson": Poisson(),
    "poisson, cut on both sides": Poisson(mean=3, min=2, max=5),
    "poisson, Parcae": Poisson(per="sequence", last_k=4),
    "lognormal, per sequence": LogNormal(per="sequence"),
    "curriculum": Curriculum(inner=Uniform(), steps=3000),
    "curriculum, longer than the run": Curriculum(inner=LogNormal(), steps=9000, start=2.5, last_k=3),
    "curriculum, per sequence": Curriculum(inner=Poisson(per="sequence"), steps=1000, start=2),
}
resolved = pytest.mark.parametrize(
    "depth", [d.resolve(N_LOOPS, N_DRAWS) for d in SAMPLERS.values()], ids=list(SAMPLERS)
)


def test_every_registered_sampler_is_tested() -> None:
    assert {d.kind for d in SAMPLERS.values()} == set(Depth.choices)


@resolved
def test_the_distribution_sums_to_one(depth: Depth) -> None:
    pmf = depth.pmf()
    assert sum(pmf.values()) == pytest.approx(1, abs=1e-9)
    assert min(pmf) >= 1
    assert min(pmf.values()) >= 0
    assert depth.max_loops == max(pmf)


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
    # Of the first row: rows of one step may share their depth, and then are no independent draws.
    draws = [depth.draw(0, step, N_ROWS).depths[0] for step in range(N_DRAWS)]
    assert departure(draws, depth.pmf()) < BOUND
    assert set(draws) <= set(depth.pmf())


def test_control_a_neighbouring_distribution_is_noticed() -> None:
    draws = [Uniform(max=8).draw(0, step, 1).n_loops for step in range(N_DRAWS)]
    assert departure(draws, Uniform(max=9).pmf()) > BOUND
    draws = [LogNormalPoisson(mean=8).draw(0, step, 1).n_loops for step in range(N_DRAWS)]
    assert departure(draws, LogNormalPoisson(mean=7).pmf()) > BOUND
    assert departure([n - 1 for n in draws if n > 1], LogNormalPoisson(mean=8).pmf()) > BOUND


@resolved
def test_means_are_those_of_the_distribution(depth: Depth) -> None:
    plans = [depth.draw(1, step, N_ROWS) for step in range(N_DRAWS)]
    mean = depth.mean_loops
    std = math.sqrt(sum(p * (n - mean) ** 2 for n, p in depth.pmf().items()))
    error = 6 * std / math.sqrt(N_DRAWS) + 1e-9  # six sigma: a false alarm in 10^9
    assert np.mean([plan.mean_loops for plan in plans]) == pytest.approx(mean, abs=error)
    n_grad = [np.mean([min(n, plan.n_grad) for n in plan.depths]) for plan in plans]
    assert np.mean(n_grad) == pytest.approx(depth.mean_grad_loops, abs=error)


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
    assert max(depth.draw(0, step, 1).n_loops for step in range(20)) == MOST_LOOPS
    assert LogNormal().resolve(MOST_LOOPS, 1).max_loops == MOST_LOOPS


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
    plan = Fixed(loops=n, last_k=k).draw(0, 0, 1)
    assert plan[:3] == LoopPlan(max(n - k, 0), min(n, k))[:3]
    assert 0 <= plan.draw < 1
    assert plan.n_loops == n


def test_mean_of_grad_loops_by_hand() -> None:
    assert Uniform(max=4, last_k=2).mean_grad_loops == pytest.approx((1 + 2 + 2 + 2) / 4)
    assert Uniform(max=4).mean_grad_loops == pytest.approx(2.5)


@resolved
def test_a_draw_is_a_function_of_seed_and_step(depth: Depth) -> None:
    steps = range(500, 550)
    forward = [depth.draw(7, step, N_ROWS) for step in steps]
    np.random.seed(0)
    backward = [depth.draw(7, step, N_ROWS) for step in reversed(steps)]
    assert forward == backward[::-1]
    if len(depth.pmf()) > 1:
        assert forward != [depth.draw(8, step, N_ROWS) for step in steps]
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
        (HeavyTail(), HeavyTail(peak=8, max=32)),
        (HeavyTail(peak=2.5), HeavyTail(peak=2.5, max=10)),
        (Poisson(), Poisson(mean=8, max=16)),
        (Poisson(mean=2.5), Poisson(mean=2.5, max=5)),
        (Curriculum(inner=Uniform(), steps=5), Curriculum(inner=Uniform(max=8), steps=5, run_steps=100)),
    ],
)
def test_what_is_left_out_comes_from_the_models_depth(depth: Depth, expected: Depth) -> None:
    assert depth.resolve(8, 100) == expected
    assert depth.resolve(8, 7).resolve(5, 100) == expected


@pytest.mark.parametrize("depth", [d for d in SAMPLERS.values() if d != d.resolve(N_LOOPS, 1)])
def test_an_unresolved_sampler_says_so(depth: Depth) -> None:
    with pytest.raises(ValueError, match="resolve the sampler"):
        depth.pmf()
    with pytest.raises(ValueError, match="resolve the sampler"):
        depth.draw(0, 0, 1)


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
        (HeavyTail, {"peak": 9, "max": 8}, "depth.peak=9 lies outside min=1 .. max=8"),
        (HeavyTail, {"min": 5, "max": 4}, "needs min <= max, got min=5, max=4"),
        (HeavyTail, {"sigma": 3}, "less than or equal to 1.5"),
        (Poisson, {"mean": 0.5, "max": 4}, "depth.mean=0.5 lies outside min=1 .. max=4"),
        (Poisson, {"mean": 1e300}, "less than or equal to 10000"),
        (Poisson, {"per": "token"}, "'batch' or 'sequence'"),
        (Fixed, {"per": "batch"}, "unknown key 'per'"),
        (Curriculum, {"steps": 5}, "inner"),
        (Curriculum, {"inner": "uniform"}, "steps"),
        (Curriculum, {"inner": "uniform", "steps": 0}, "greater than or equal to 1"),
        (Curriculum, {"inner": "unifrom", "steps": 5}, "did you mean 'uniform'"),
        (Curriculum, {"inner": Curriculum(inner=Uniform(), steps=5), "steps": 5}, "a curriculum of a curriculum"),
        (Curriculum, {"inner": Uniform(last_k=2), "steps": 5}, "inner has last_k=2: set last_k of the curriculum"),
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
        (HeavyTail(max=6), 8, r"depth.peak=8 lies outside min=1 .. max=6"),
        (Poisson(min=9), 8, r"depth.mean=8 lies outside min=9 .. max=16"),
        (Curriculum(inner=Uniform(min=9), steps=5), 8, r"depth.min=9 is above the model's n_loops=8"),
        (Curriculum(inner=Uniform(), steps=5, start=5), 8, r"depth.start=5 is above 4.5, the mean of depth.inner"),
    ],
)
def test_a_sampler_that_does_not_fit_the_model_is_a_usage_error(depth: Depth, n_loops: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        depth.resolve(n_loops, 100)


# -- heavy tail and truncated Poisson ---------------------------------------------------------------------------------


def test_heavy_tail_is_likeliest_at_its_peak() -> None:
    for peak in (4, 8, 22):
        pmf = HeavyTail(peak=peak, max=40 * peak).pmf()
        assert max(pmf, key=pmf.__getitem__) == peak
        assert sum(n * p for n, p in pmf.items()) == pytest.approx(peak * math.exp(1.5 * 0.435**2), rel=1e-3)
    # The log-normal of the same mean is likeliest below: the shift of mu is what puts the mode at the peak.
    other = LogNormal(mean=22, sigma=0.435, max=800).pmf()
    assert max(other, key=other.__getitem__) < 22


def test_heavy_tail_by_hand() -> None:
    # peak 2, sigma 1: ln x ~ N(ln 2 + 1, 1); P(n = 1) = P(x < 1.5) = Phi(ln 0.75 - 1) = Phi(-1.28768)
    pmf = HeavyTail(peak=2, sigma=1, max=3).pmf()
    assert pmf[1] == pytest.approx(0.09893, abs=1e-5)
    assert pmf[2] == pytest.approx(0.21862 - 0.09893, abs=1e-5)  # Phi(ln 1.25 - 1) = Phi(-0.77686)
    assert pmf[3] == pytest.approx(1 - 0.21862, abs=1e-5)


def test_truncated_poisson_by_hand() -> None:
    # 3^n / n! at n = 2, 3, 4, 5: 4.5, 4.5, 3.375, 2.025, of 14.4
    pmf = Poisson(mean=3, min=2, max=5).pmf()
    assert pmf == pytest.approx({2: 4.5 / 14.4, 3: 4.5 / 14.4, 4: 3.375 / 14.4, 5: 2.025 / 14.4}, rel=1e-12)


def test_a_poisson_that_is_cut_nowhere_has_the_mean_and_variance_of_its_rate() -> None:
    pmf = Poisson(mean=32, max=200).pmf()
    assert sum(n * p for n, p in pmf.items()) == pytest.approx(32, rel=1e-9)
    assert sum((n - 32) ** 2 * p for n, p in pmf.items()) == pytest.approx(32, rel=1e-9)
    assert sum(p for n, p in Poisson(mean=8, max=99).pmf().items() if n > 16) == pytest.approx(0.004, abs=5e-4)


# -- depths of rows ---------------------------------------------------------------------------------------------------


def test_each_row_draws_for_itself() -> None:
    depth = Poisson(per="sequence").resolve(N_LOOPS, 1)
    plans = [depth.draw(0, step, 16) for step in range(200)]
    rows = [plan.rows for plan in plans if plan.rows is not None]
    assert len(rows) == 200 and {len(row) for row in rows} == {16}
    assert all(plan.n_loops == max(plan.rows or ()) for plan in plans)
    # Independent: 16 rows of one step vary as much as rows of different steps do.
    within = np.mean([np.var(row, ddof=1) for row in rows])
    assert within == pytest.approx(np.var([row[0] for row in rows], ddof=1), rel=0.3)
    assert departure([n for row in rows for n in row], depth.pmf()) < BOUND  # 3,200 draws
    shared = Poisson().resolve(N_LOOPS, 1)
    assert all(shared.draw(0, step, 16).rows is None for step in range(200))


def test_a_row_does_not_depend_on_how_many_follow() -> None:
    for depth in (
        Poisson(per="sequence"),
        Uniform(per="sequence"),
        LogNormal(per="sequence"),
        HeavyTail(per="sequence"),
    ):
        made = depth.resolve(N_LOOPS, 1)
        few, many = made.draw(3, 5, 6).rows, made.draw(3, 5, 12).rows
        assert few is not None and many is not None and many[:6] == few


def test_plans_of_rows() -> None:
    plan = LoopPlan.of([2, 7, 3, 5], 4)
    assert plan == LoopPlan(3, 4, (2, 7, 3, 5)) and plan.n_loops == 7 and plan.mean_loops == 17 / 4
    assert plan.part(0, 2) == LoopPlan(3, 4, (2, 7)) and plan.part(1, 2) == LoopPlan(1, 4, (3, 5))
    assert [plan.part(i, 4) for i in range(4)] == [LoopPlan(0, 2), LoopPlan(3, 4), LoopPlan(0, 3), LoopPlan(1, 4)]
    assert LoopPlan.of([3, 3], None) == LoopPlan(0, 3)  # no row waits
    assert LoopPlan(1, 2).part(1, 5) == LoopPlan(1, 2) and LoopPlan(1, 2).mean_loops == 3
    with pytest.raises(ValueError, match="part 0 of 3: 4 rows do not split so"):
        plan.part(0, 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 12) | st.none())
def test_a_part_is_the_plan_of_its_rows(loops: list[int], n: int, last_k: int | None) -> None:
    rows = loops * n
    plan = LoopPlan.of(rows, last_k)
    for i in range(n):
        assert plan.part(i, n) == LoopPlan.of(rows[i * len(loops) : (i + 1) * len(loops)], last_k)


# -- curriculum -------------------------------------------------------------------------------------------------------


def test_a_curriculum_by_hand() -> None:
    # Fixed 8, from 2 loops in 4 steps: s = 1/4, 7/16, 5/8, 13/16, 1 .. -> 2, 3.5 -> 4, 5, 6.5 -> 7, 8 ..
    depth = Curriculum(inner=Fixed(loops=8), steps=4, start=2).resolve(1, 10)
    assert [depth.draw(0, step, 1).n_loops for step in range(10)] == [2, 4, 5, 7, 8, 8, 8, 8, 8, 8]
    assert depth.pmf() == pytest.approx({2: 0.1, 4: 0.1, 5: 0.1, 7: 0.1, 8: 0.6})
    short = depth.resolve(1, 3)
    assert short.pmf() == pytest.approx({2: 1 / 3, 4: 1 / 3, 5: 1 / 3}) and short.max_loops == 5
    assert depth.model_copy(update={"last_k": 4}).mean_grad_loops == pytest.approx((2 + 4 * 9) / 10)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 400), st.floats(0.01, 1))
def test_the_mean_of_a_curriculum_counts_what_is_drawn(n: int, steps: int, run_steps: int, share: float) -> None:
    depth = Curriculum(inner=Fixed(loops=n), steps=steps, start=share * n).resolve(1, run_steps)
    counts = Counter(depth.draw(0, step, 1).n_loops for step in range(run_steps))
    assert depth.pmf() == pytest.approx({loops: count / run_steps for loops, count in counts.items()}, rel=1e-9)


def test_a_curriculum_ends_in_its_inner_sampler() -> None:
    for inner in (Uniform(), Poisson(per="sequence"), LogNormalPoisson()):
        plain, made = inner.resolve(N_LOOPS, 1), Curriculum(inner=inner, steps=100).resolve(N_LOOPS, 1)
        assert [made.draw(0, t, 4) for t in range(100, 150)] == [plain.draw(0, t, 4) for t in range(100, 150)]
        assert [made.draw(0, t, 4) for t in range(50)] != [plain.draw(0, t, 4) for t in range(50)]
        means = [np.mean([made.draw(seed, t, 4).mean_loops for seed in range(300)]) for t in (0, 50, 99)]
        low = 1.0 + (plain.mean_loops - 1) / 2
        assert means[0] < 1.7 and means[1] == pytest.approx(low, rel=0.15) and means[0] < means[1] < means[2]


def test_draws_do_not_depend_on_the_length_of_the_run() -> None:
    for depth in SAMPLERS.values():
        short, long = depth.resolve(N_LOOPS, 10), depth.resolve(N_LOOPS, 10**6)
        assert [short.draw(0, t, 4) for t in range(20)] == [long.draw(0, t, 4) for t in range(20)]
