"""Bounds of one request around an exit rule: no token leaves before, and all have left after."""

from __future__ import annotations

import pytest
import torch
from engines import LOOPS, exits_of, small

from alcoda.depth.replay import replay
from alcoda.depth.rules import Fixed
from alcoda.errors import UsageError
from alcoda.laws.subject import tokens

MODEL = small()
IDS_BT = tokens(3, 12, seed=2)


@pytest.mark.parametrize("kind", ["state", "kl", "second_order"])
def test_depths_are_those_of_the_rule_within_bounds(kind: str) -> None:
    (test,) = exits_of(MODEL, kind)
    free_BT = replay(MODEL, IDS_BT, test).depths_BT
    assert len(free_BT.unique()) > 1, "the rule lets tokens leave at several loops"
    for low, high in ((None, 2), (3, None), (2, 3), (3, 3)):
        found_BT = replay(MODEL, IDS_BT, test.within(low, high)).depths_BT
        assert int(found_BT.min()) >= (low or 1) and int(found_BT.max()) <= (high or LOOPS)
    # Before the bound is reached nothing is other than without it: a ceiling only cuts.
    first_BT = replay(MODEL, IDS_BT[:, :1], test).depths_BT
    assert torch.equal(replay(MODEL, IDS_BT[:, :1], test.within(None, 2)).depths_BT, first_BT.clamp(max=2))


def test_a_floor_holds_for_a_fixed_depth() -> None:
    test = Fixed(loops=1).build(MODEL, LOOPS)
    assert set(replay(MODEL, IDS_BT, test).depths_BT.flatten().tolist()) == {1}
    assert set(replay(MODEL, IDS_BT, test.within(3)).depths_BT.flatten().tolist()) == {3}


def test_bounds_that_change_nothing_are_the_same_test() -> None:
    (test,) = exits_of(MODEL, "state")
    assert test.within() is test.within(1, LOOPS) is test
    assert test.within(2).within(1).bounds.min_loops == 2, "the narrower stays"


@pytest.mark.parametrize(
    ("low", "high", "message"), [(3, 2, "above max_loops=2"), (0, None, "1 to 4"), (None, 9, "1 to 4")]
)
def test_bounds_that_cannot_be(low: int | None, high: int | None, message: str) -> None:
    (test,) = exits_of(MODEL, "state")
    with pytest.raises(UsageError, match=message):
        test.within(low, high)
