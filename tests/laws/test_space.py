"""The space that the laws run over: it holds every registered choice and every legal pair of choices."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import space

from alcoda.config import Choice
from alcoda.model.blocks import BlockConfig
from alcoda.model.config import ModelConfig
from alcoda.model.recurrence.inject import Inject

REGISTRIES = tuple(
    field.annotation
    for config in (ModelConfig, BlockConfig)
    for field in config.model_fields.values()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Choice)
)


def test_the_axes_of_the_design_are_all_there() -> None:
    """docs/design, section 2."""
    assert {axis.axis for axis in REGISTRIES} == {
        *("norm", "attention", "window", "value_embed", "mlp", "position", "embedding", "head", "soft_cap"),
        *("state_init", "carry", "loop_index", "inject", "keys", "sharing", "route", "update", "loop_norm"),
        *("exit_gate", "readout_map", "memory", "final_norm"),
    }


@pytest.mark.parametrize("axis", REGISTRIES, ids=lambda axis: axis.axis)
def test_every_registered_choice_is_in_the_space(axis: type[Choice]) -> None:
    field = axis.axis if axis.axis in ModelConfig.model_fields else f"block.{axis.axis}"
    used = {space.AXES[field][row[field]].kind for row in space.covering_array()}
    assert used == set(axis.choices)


def test_every_switch_is_in_the_space() -> None:
    assert {"block.bias", "block.sandwich"} <= set(space.AXES)


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


ROUTERS = ("token_choice", "expert_choice")


def test_the_illegal_pairs_are_the_known_ones() -> None:
    def name(axis: str, i: int) -> str:
        option = space.AXES[axis][i]
        if not isinstance(option, Choice):
            return f"{axis} {option}"
        return " ".join([axis, option.kind, *(field for field, value in option if value is True)])

    every = [(axis, i) for axis in space.AXES for i in range(len(space.AXES[axis]))]
    pairs = {p for p in itertools.combinations(every, 2) if p[0][0] != p[1][0]}
    illegal = {frozenset(name(*part) for part in pair) for pair in pairs - set(space.legal_pairs())}
    assert illegal == {
        *(frozenset({f"route {kind} drop_keys", f"keys anchor{rope}"}) for kind in ROUTERS for rope in ("", " rope")),
        *(frozenset({f"route {kind}", "keys per_loop"}) for kind in ROUTERS),
        *(frozenset({f"position {kind}", "keys anchor rope"}) for kind in ("none", "learned")),
        frozenset({"block.sandwich after_add", "update lti_delta"}),
        frozenset({"loop_norm none", "final_norm shared"}),
        frozenset({"block.attention mha qk_bias v_bias", "block.bias True"}),
    }


def test_a_new_choice_enters_the_space_and_one_that_cannot_be_built_fails_clearly() -> None:
    before = dict(Inject.choices)
    try:

        class Twice(Inject):
            kind: Literal["twice"] = "twice"

        assert Twice() in dict(space.axes())["inject"]

        class Needy(Inject):
            kind: Literal["needy"] = "needy"
            rank: int

        with pytest.raises(LookupError, match=r"no law covers inject 'needy'.*REQUIRED\[\('inject', 'needy'\)\]"):
            dict(space.axes())
    finally:
        Inject.choices.clear()
        Inject.choices.update(before)
