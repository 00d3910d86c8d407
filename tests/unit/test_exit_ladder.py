"""Ladders of thresholds, on a table of scores; one rule in the place of another."""

from __future__ import annotations

import numpy as np
import pytest

from alcoda.depth.rules import NEVER, ArgmaxStable, ExitRule, Kl, SecondOrder, StateChange
from alcoda.errors import UsageError
from alcoda.measure.calibrate import coverage, loosest, sufficient
from alcoda.measure.ladder import adjustable, expected_depths, ladder, loosest_within, matched, spread

R, N = 4, 1000
TABLE = np.array([[np.inf, 0.9, 0.5, 0.1], [np.inf, 0.2, 0.4, 0.3], [np.inf, 0.3, 0.05, 0.2]], dtype=np.float32)


# -- ladders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "depths"),
    [
        (StateChange(), [4, 4, 4]),
        (StateChange(threshold=0.2), [4, 4, 3]),  # strictly below
        (StateChange(threshold=0.25), [4, 2, 3]),
        (StateChange(threshold=(0.0, 0.0, 0.45, 0.0)), [4, 3, 3]),
        (StateChange(threshold=0.25, min_loops=3), [4, 4, 3]),
        (StateChange(threshold=0.25, max_loops=3), [3, 2, 3]),
        (StateChange(threshold=0.25, horizon=1), [4, 3, 4]),
        (StateChange(threshold=0.25, horizon=1, min_loops=4), [4, 4, 4]),
    ],
)
def test_depths_of_a_table(rule: ExitRule, depths: list[int]) -> None:
    assert expected_depths(rule, TABLE).tolist() == depths


def test_a_ladder_goes_from_none_to_all() -> None:
    rungs = ladder(StateChange(min_loops=2), TABLE)
    means = [expected_depths(rule, TABLE).mean() for rule in rungs]
    assert means[0] == 4 and means[-1] == 2 and means == sorted(means, reverse=True)
    assert all(isinstance(rule, StateChange) and rule.min_loops == 2 for rule in rungs)
    # Six scores can be below a threshold, of which one is never the first to be.
    assert {tuple(expected_depths(rule, TABLE)) for rule in rungs} >= {(4, 4, 3), (4, 2, 3), (4, 2, 2), (3, 2, 2)}
    shaped = ladder(StateChange(), TABLE, np.array([0.0, 1.0, 0.0, 0.0]))
    assert {tuple(expected_depths(rule, TABLE)) for rule in shaped} >= {(4, 4, 4), (4, 2, 4), (4, 2, 2), (2, 2, 2)}
    assert [rule.loops for rule in ladder(ArgmaxStable(), TABLE) if isinstance(rule, ArgmaxStable)] == [3, 2, 1]


def test_a_ladder_where_nothing_changes() -> None:
    still = np.zeros((5, R), dtype=np.float32)
    (rule,) = ladder(StateChange(), still)
    assert expected_depths(rule, still).tolist() == [1] * 5
    assert expected_depths(StateChange(), still).tolist() == [R] * 5


def test_spread_takes_settings_of_even_mean_loops() -> None:
    scores_NR = np.random.default_rng(0).lognormal(size=(400, 8)).astype(np.float32)
    rungs = ladder(StateChange(), scores_NR)
    picked = [expected_depths(rule, scores_NR).mean() for rule in spread(rungs, scores_NR, 7)]
    assert picked == pytest.approx([7, 6, 5, 4, 3, 2, 1], abs=0.2)
    assert spread(rungs, None, 3) == [rungs[0], rungs[len(rungs) // 2], rungs[-1]]


def test_what_has_no_threshold_is_refused() -> None:
    with pytest.raises(UsageError, match="exit 'fixed' has no threshold to choose: take state"):
        adjustable(NEVER)


# -- imitation --------------------------------------------------------------------------------------------------------


def test_scores_that_order_tokens_alike_leave_alike() -> None:
    rng = np.random.default_rng(0)
    kl_NR = rng.lognormal(size=(N, R)).astype(np.float32)
    depths_N = expected_depths(Kl(threshold=0.5), kl_NR)
    # At each loop the same order, on a scale of its own.
    own_NR = (kl_NR**2 * np.array([3.0, 0.1, 7.0, 1.0])).astype(np.float32)
    thresholds_R = matched(own_NR, depths_N)
    rule = StateChange(threshold=tuple(thresholds_R))
    assert (expected_depths(rule, own_NR) == depths_N).all()
    assert thresholds_R[:3] == pytest.approx(0.25 * np.array([3.0, 0.1, 7.0]), rel=0.05)
    assert thresholds_R[3] == 0
    found = coverage(expected_depths(rule, own_NR), depths_N)
    assert (found.before, found.same, found.after) == (0, 1, 0)
    # The control: scores that know nothing leave as often at each loop, and not the same tokens.
    blind_NR = rng.lognormal(size=(N, R)).astype(np.float32)
    others_N = expected_depths(StateChange(threshold=tuple(matched(blind_NR, depths_N))), blind_NR)
    assert np.bincount(others_N).tolist() == np.bincount(depths_N).tolist()
    assert coverage(others_N, depths_N).same < 0.6


def test_none_leaves_where_the_other_lets_none() -> None:
    assert matched(TABLE, np.full(3, 4)).tolist() == [0, 0, 0, 0]
    # Nobody can leave in the first loop, whatever the other rule does: they follow later.
    assert expected_depths(StateChange(threshold=tuple(matched(TABLE, np.ones(3)))), TABLE).tolist() == [2, 2, 2]


def test_coverage_counts() -> None:
    found = coverage(np.array([1, 2, 3, 4]), np.array([2, 2, 2, 2]))
    assert (found.before, found.same, found.after) == (0.25, 0.25, 0.5)


def test_loosest_within_a_tolerance() -> None:
    nats_RN = np.array([[4.0, 1.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    rungs = [StateChange(threshold=x) for x in (0.06, 0.25, 0.35, 1.0)]
    # The first token leaves in loop 2 at the last only, and loses 1 of 3 there.
    assert loosest_within(TABLE, nats_RN, rungs, 0.0) == rungs[2]
    assert loosest_within(TABLE, nats_RN, rungs, 0.34) == rungs[3]
    assert sufficient(nats_RN, 0.0) == 3 and sufficient(nats_RN, 0.34) == 2 and sufficient(nats_RN, 1.0) == 1


@pytest.mark.parametrize("last", range(-1, 7))
def test_bisection(last: int) -> None:
    rungs: list[ExitRule] = [StateChange(threshold=i) for i in range(7)]
    assert loosest(rungs, lambda rule: rungs.index(rule) <= last) == last


def test_second_order_needs_its_loops_first() -> None:
    scores = np.array([[np.inf, np.inf, 0.1, 0.1]], dtype=np.float32)
    assert [expected_depths(rule, scores)[0] for rule in ladder(SecondOrder(), scores)][-1] == 3
