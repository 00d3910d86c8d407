"""The space that the laws run over: it holds every registered choice and every legal pair of choices."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import space

from alcoda.config import Choice
from alcoda.model.attention import Attention
from alcoda.model.config import ModelConfig
from alcoda.model.mlp import Mlp
from alcoda.model.norms import Norm
from alcoda.model.positions import Position
from alcoda.model.recurrence.inject import Inject
from alcoda.model.recurrence.keys import CoreKeys
from alcoda.model.recurrence.loop_norm import LoopNorm
from alcoda.model.recurrence.state_init import StateInit
from alcoda.model.recurrence.update import Update

REGISTRIES = (Inject, Update, StateInit, LoopNorm, CoreKeys, Attention, Mlp, Norm, Position)


@pytest.mark.parametrize("axis", REGISTRIES, ids=lambda axis: axis.axis)
def test_every_registered_choice_is_in_the_space(axis: type[Choice]) -> None:
    field = axis.axis if axis.axis in ModelConfig.model_fields else f"block.{axis.axis}"
    used = {space.AXES[field][row[field]]["kind"] for row in space.covering_array()}
    assert used == set(axis.choices)


def test_every_switch_is_in_the_space() -> None:
    assert {"block.bias", "block.sandwich", "head", "final_norm"} <= set(space.AXES)


def test_every_legal_pair_is_covered() -> None:
    covered = {pair for row in space.covering_array() for pair in space.pairs_of(row)}
    assert covered == set(space.legal_pairs())
    assert len(space.cases()) == len({case.config for case in space.cases()}) == space.N_CASES


def test_control_a_missing_row_uncovers_a_pair() -> None:
    # One of the first rows, which are there for the pairs that only they hold.
    rows = space.covering_array()
    n_needed = next(
        n for n in itertools.count() if {p for r in rows[:n] for p in space.pairs_of(r)} == set(space.legal_pairs())
    )
    fewer = rows[: n_needed - 1]
    assert {pair for row in fewer for pair in space.pairs_of(row)} < set(space.legal_pairs())


def test_the_illegal_pairs_are_the_known_ones() -> None:
    def name(axis: str, i: int) -> str:
        option = space.AXES[axis][i]
        return f"{axis} {option['kind'] if isinstance(option, dict) else option}"

    every = [(axis, i) for axis in space.AXES for i in range(len(space.AXES[axis]))]
    pairs = {p for p in itertools.combinations(every, 2) if p[0][0] != p[1][0]}
    illegal = {frozenset(name(*part) for part in pair) for pair in pairs - set(space.legal_pairs())}
    assert illegal == {
        frozenset({"state_init zeros", "inject none"}),
        frozenset({"state_init noise", "inject none"}),
        frozenset({"loop_norm none", "final_norm shared"}),
    }


def test_a_new_choice_enters_the_space_and_one_that_cannot_be_built_fails_clearly() -> None:
    before = dict(Inject.choices)
    try:

        class Twice(Inject):
            kind: Literal["twice"] = "twice"

        assert {"kind": "twice"} in dict(space.axes())["inject"]

        class Needy(Inject):
            kind: Literal["needy"] = "needy"
            rank: int

        with pytest.raises(LookupError, match=r"no law covers inject 'needy'.*REQUIRED\[\('inject', 'needy'\)\]"):
            dict(space.axes())
    finally:
        Inject.choices.clear()
        Inject.choices.update(before)
