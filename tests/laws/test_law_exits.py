"""Law 3: tokens that leave the loop early. One pass over a text is what reading token by token computes.

The space has few models that tokens can leave, so each case is taken with tied loops and without expert choice; each
checks some of the rules, and all are checked on the house models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from space import GRT, cases, house
from torch import Tensor

from alcoda.depth import exiting
from alcoda.depth.replay import replay
from alcoda.depth.rules import NEVER, rules
from alcoda.depth.watch import KlTest, Seen, StateTest, TraceTest
from alcoda.errors import UsageError
from alcoda.laws.exits import (
    LOOPS,
    at_work,
    check_batches,
    check_causal,
    check_frozen_keys,
    check_never,
    check_replay,
    check_trace,
    mixes,
)
from alcoda.laws.law import LawBroken
from alcoda.laws.subject import make_plain, tokens
from alcoda.model.config import ModelConfig
from alcoda.model.exit_keys import CopiedKeys, LastKeys

KINDS = sorted(set(rules()) - {"trace", "gate"})  # few models have an exit gate: those of the house do
HOUSE: dict[str, dict[str, Any]] = {
    "grt": {**GRT, "exit_gate": "linear", "n_coda": 2},
    "anchor": {"keys": "anchor", "carry": "hyper", "exit_gate": "linear"},
    "memory": {"memory": "prev_token", "inject": "concat", "exit_gate": "linear"},
    "routed": {"route": "token_choice", "inject": "add", "exit_gate": "linear"},
}


def leavable(config: ModelConfig) -> ModelConfig:
    """The same design with loops that tokens can leave."""
    route = {} if config.route.shares_router else {"route": "none"}
    return config.model_copy(update={"sharing": "tied", **route})


def over_space(n_kinds: int) -> pytest.MarkDecorator:
    """Parametrises a law over the space; ``kinds`` are some of the rules, others from case to case."""
    chosen = [case for case in cases() if case.config.is_recurrent]
    every = [
        pytest.param(
            leavable(case.config), [KINDS[(n * n_kinds + i) % len(KINDS)] for i in range(n_kinds)], id=case.name
        )
        for n, case in enumerate(chosen)
    ]
    return pytest.mark.parametrize(("config", "kinds"), every)


over_house = pytest.mark.parametrize("fields", HOUSE.values(), ids=HOUSE)


@over_house
def test_a_rule_that_never_fires_is_the_fixed_depth(fields: dict[str, Any]) -> None:
    check_never(make_plain(house(**fields)))


@over_space(1)
def test_it_is_in_every_design(config: ModelConfig, kinds: list[str]) -> None:
    check_never(make_plain(config), kinds)


@over_house
def test_recorded_exits_are_the_run(fields: dict[str, Any]) -> None:
    check_trace(make_plain(house(**fields)))


@over_house
def test_replay_is_reading_token_by_token(fields: dict[str, Any]) -> None:
    check_replay(make_plain(house(**fields)))


@over_space(1)
def test_replay_is_reading_in_every_design(config: ModelConfig, kinds: list[str]) -> None:
    check_replay(make_plain(config), kinds)


@over_house
def test_exits_do_not_see_later_tokens(fields: dict[str, Any]) -> None:
    check_causal(make_plain(house(**fields)))


@over_space(1)
def test_they_do_not_in_any_design(config: ModelConfig, kinds: list[str]) -> None:
    check_causal(make_plain(config), kinds)


@over_house
def test_padded_rows_with_exits_are_the_rows_alone(fields: dict[str, Any]) -> None:
    check_batches(make_plain(house(**fields)), ["state", "kl", "gate"])


@over_space(1)
def test_they_are_in_every_design(config: ModelConfig, kinds: list[str]) -> None:
    check_batches(make_plain(config), kinds)


@pytest.mark.parametrize("fields", [{}, {"rope": True}], ids=["still", "turned"])
def test_of_frozen_keys_none_is_missing(fields: dict[str, Any]) -> None:
    check_frozen_keys(make_plain(house(keys={"kind": "anchor", **fields}, exit_gate="linear", n_coda=2)))


# -- planted faults ---------------------------------------------------------------------------------------------------


def grt() -> Any:
    return make_plain(house(**HOUSE["grt"]))


def test_control_a_rule_that_fires_is_not_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateTest, "score", lambda self, seen, kept: (-torch.ones(len(seen.h_ND)), kept))
    with pytest.raises(LawBroken, match=r"state, threshold 0.*fixed depth: tokens leave after other loops"):
        check_never(grt())


def test_control_a_pass_that_rounds_is_not_the_fixed_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    picked = exiting._picked

    def off(*args: Any) -> Any:
        out = picked(*args)
        return out._replace(y_BTD=out.y_BTD * (1 + 1e-15))

    monkeypatch.setattr(exiting, "_picked", off)
    with pytest.raises(LawBroken, match="not the fixed depth: off by"):
        check_never(grt())


def test_control_keys_that_are_made_anew_are_not_copies() -> None:
    """What `check_frozen_keys` says of frozen keys is not so of others."""
    with pytest.raises(LawBroken, match="keys made anew"):
        check_frozen_keys(grt())


def test_control_a_pass_that_keeps_no_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are out make keys anew, where reading has copies."""
    write = LastKeys.write

    def anew(self: LastKeys, *args: Any) -> Any:
        self.active_BT = None
        return write(self, *args)

    monkeypatch.setattr(LastKeys, "write", anew)
    with pytest.raises(LawBroken, match="replay is not reading"):
        check_replay(grt(), ["state"])


def test_control_copies_that_are_no_copies_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = CopiedKeys.leave

    def off(self: CopiedKeys, loop: int, leaves_BT: Tensor) -> None:
        leave(self, loop, leaves_BT)
        for (stage, _, deeper), (k_BGSK, _) in self.slots.items():
            if stage == "core" and deeper > loop:
                k_BGSK[:, :, self._start : self.n_tokens] *= 1.001

    monkeypatch.setattr(CopiedKeys, "leave", off)
    with pytest.raises(LawBroken, match="replay is not reading"):
        check_replay(grt(), ["state"])


def test_control_a_state_that_goes_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a row that loops on, a row that is out loops on too, and is not what it is alone."""
    monkeypatch.setattr(exiting, "_frozen", lambda before, after, active_BT: after)
    with pytest.raises(LawBroken, match="-padded: off by"):
        check_batches(grt(), ["state"])


def test_control_a_rule_that_looks_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    score = StateTest.score

    def ahead(self: StateTest, seen: Seen, kept: tuple[Tensor, ...]) -> Any:
        score_N, kept = score(self, seen, kept)
        return torch.frac(1e6 * score_N.roll(-1)), kept  # any change of the next token's may move this one

    monkeypatch.setattr(StateTest, "score", ahead)
    with pytest.raises(LawBroken, match="a later token: tokens leave after other loops"):
        check_causal(grt(), ["state"])


def test_control_a_rule_that_sees_its_batch_mates_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    score = KlTest.score

    def mean(self: KlTest, seen: Seen, kept: tuple[Tensor, ...]) -> Any:
        score_N, kept = score(self, seen, kept)
        return torch.frac(1e6 * (score_N + score_N[score_N.isfinite()].sum())), kept

    monkeypatch.setattr(KlTest, "score", mean)
    with pytest.raises(LawBroken, match="-padded"):
        check_batches(grt(), ["kl"])


def test_control_a_trace_that_is_a_loop_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    score = TraceTest.score
    monkeypatch.setattr(TraceTest, "score", lambda self, seen, kept: (score(self, seen, kept)[0] + 1, kept))
    with pytest.raises(LawBroken, match="trace: tokens leave after other loops"):
        check_trace(grt(), ["state"])


# -- what has no exits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sharing": "untied"}, "with sharing 'untied', loops have weights of their own"),
        ({"sharing": "lora"}, "with sharing 'lora', loops have weights of their own"),
        ({"route": "expert_choice"}, "with route 'expert_choice', loops have weights of their own"),
        ({"n_core": 0, "n_loops": 1}, r"this model is dense \(n_core=0\) and has no loop to leave"),
    ],
)
def test_loops_that_cannot_be_left_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        replay(make_plain(house(**fields)), tokens(1, 4), NEVER)


@over_house
def test_tokens_leave_at_several_loops(fields: dict[str, Any]) -> None:
    """Laws on tokens that all leave together would say little."""
    model, ids_BT = make_plain(house(**fields)), tokens(2, 6)
    found = {what: replay(model, ids_BT, test) for what, test in at_work(model, ids_BT)}
    assert sum(mixes(one) for one in found.values()) >= 5
    assert all(int(one.depths_BT.max()) <= LOOPS for one in found.values())
