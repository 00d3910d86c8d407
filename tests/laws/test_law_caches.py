"""Law 3, of caches of one slot for all loops: against a slow reference, and against textbook attention by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from space import GRT, cases, house
from torch import Tensor

from alcoda.depth.replay import replay
from alcoda.errors import UsageError
from alcoda.laws.caches import (
    CHEAP,
    RULE,
    B,
    T,
    check_batches,
    check_one_slot,
    check_refusal,
    check_same,
    differ,
    no_cheap_cache,
)
from alcoda.laws.exits import at_work, mixes
from alcoda.laws.law import LawBroken
from alcoda.laws.subject import Subject, depths, make_plain, tokens
from alcoda.model.cache_policy import CachePolicy, LastCache, MeanCache
from alcoda.model.config import ModelConfig
from alcoda.model.exit_keys import LastLoopKeys, MeanKeys
from alcoda.model.prefill import Reader

HOUSE: dict[str, dict[str, Any]] = {
    "grt": {**GRT, "n_coda": 2},
    "anchor": {"keys": "anchor", "carry": "hyper"},
    "memory": {"memory": "prev_token", "inject": "concat"},
}
over_house = pytest.mark.parametrize("fields", HOUSE.values(), ids=HOUSE)
SPACE = [case for case in cases() if no_cheap_cache(Subject(case.config)) is None]
SLOW = {"marks": pytest.mark.slow}
"""Two cases of three: the store knows little of a design."""
over_space = pytest.mark.parametrize(
    "config", [pytest.param(case.config, id=case.name, **(SLOW if i % 3 else {})) for i, case in enumerate(SPACE)]
)


def grt() -> Any:
    return make_plain(house(**HOUSE["grt"]))


@over_house
def test_a_cache_holds_what_its_definition_says(fields: dict[str, Any]) -> None:
    model = make_plain(house(**fields))
    check_one_slot(model)
    check_same(model)
    check_batches(model)
    check_refusal(model)


@over_space
def test_it_does_in_every_design(config: ModelConfig) -> None:
    model = make_plain(config)
    check_one_slot(model)
    check_same(model)
    off = differ(model, depths(config)[-1]) if not config.has_weights_by_loop else {}
    # The control: a slot a loop is another model, where loops make keys of their own.
    if config.keys.own_keys:
        assert len(off) == 2 and min(off.values()) > 1e-6
    else:
        assert max(off.values(), default=0.0) < 1e-10


def test_the_space_has_enough_of_them() -> None:
    assert len(SPACE) >= 10 and len({case.config.keys.own_keys for case in SPACE}) == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sharing": "untied"}, "cache 'mean': with sharing 'untied', loops have weights of their own"),
        ({"sharing": "lora"}, "with sharing 'lora', loops have weights of their own"),
        ({"route": "expert_choice"}, "with route 'expert_choice', loops have weights of their own"),
        ({"route": "token_choice"}, "with route 'token_choice', a loop reads only the tokens that ran it"),
        ({"n_core": 0, "n_loops": 1}, r"this model is dense \(n_core=0\) and keeps no keys of loops"),
    ],
)
def test_loops_that_cannot_share_a_slot_are_refused(fields: dict[str, Any], says: str) -> None:
    model = make_plain(house(**fields))
    with pytest.raises(UsageError, match=says):
        Reader(model, 1, cache=MeanCache())
    assert "declared: cache 'mean'" in str(no_cheap_cache(Subject(model.config)))


# -- by hand ----------------------------------------------------------------------------------------------------------


def by_hand(w: dict[str, Tensor], x_TD: Tensor, n_loops: int, cache: CachePolicy) -> Tensor:
    """States of a core of one attention, ``h = e + o(softmax(q k / sqrt(D)) v)`` at each loop, with no MLP, norm or
    position, in one head, token by token: written from the definition alone."""
    left: list[tuple[Tensor, Tensor]] = []
    out = []
    for e_D in x_TD:
        h_D, own = e_D, list[tuple[Tensor, Tensor]]()
        for _ in range(n_loops):
            q, k, v = (w[name] @ h_D for name in "qkv")
            own.append((k, v))
            ks, vs = (torch.stack([*(one[i] for one in left), own[-1][i]]) for i in (0, 1))
            h_D = e_D + w["o"] @ (torch.softmax(ks @ q / len(q) ** 0.5, 0) @ vs)
        out.append(h_D)
        if cache.kind == "last":
            left.append(own[-1])
        else:
            left.append((sum(k for k, _ in own) / n_loops, sum(v for _, v in own) / n_loops))  # pyrefly: ignore
    return torch.stack(out)


class Bare(torch.nn.Module):
    """The same attention through a store of the project."""

    def __init__(self, w: dict[str, Tensor], store: LastLoopKeys) -> None:
        super().__init__()
        self.w, self.store = w, store

    def token(self, e_D: Tensor, n_loops: int) -> Tensor:
        self.store.open(1, n_loops, None, None, e_D.device)
        h_D = e_D
        for loop in range(n_loops):
            q, k, v = (self.w[name] @ h_D for name in "qkv")
            k_BGSK, v_BGSK = self.store.write(("core", 0, loop), k[None, None, None], v[None, None, None])
            weights = torch.softmax(k_BGSK[0, 0] @ q / len(q) ** 0.5, 0)
            h_D = e_D + self.w["o"] @ (weights @ v_BGSK[0, 0])
        return h_D


@pytest.mark.parametrize("cache", CHEAP, ids=lambda cache: cache.kind)
def test_stores_against_attention_by_hand(cache: CachePolicy) -> None:
    generator = torch.Generator().manual_seed(0)
    w = {name: torch.randn(4, 4, generator=generator, dtype=torch.float64) for name in "qkvo"}
    x_TD = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    for n_loops in (1, 2, 5):
        store = cache.store({"core": 9}, 2)
        assert isinstance(store, LastLoopKeys)
        bare = Bare(w, store)
        found = torch.stack([bare.token(e_D, n_loops) for e_D in x_TD])
        assert torch.allclose(found, by_hand(w, x_TD, n_loops, cache), rtol=0, atol=1e-12)
        assert list(store.slots) == [("core", 0, 0)]
    others = [by_hand(w, x_TD, 5, one) for one in (MeanCache(), LastCache())]
    assert (others[0] - others[1]).abs().max() > 1e-3


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_control_a_mean_that_forgets_a_loop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write = MeanKeys.write

    def forgets(self: MeanKeys, slot: Any, *keys: Tensor) -> Any:
        if slot[2] == 1:
            return LastLoopKeys.write(self, slot, *keys)
        return write(self, slot, *keys)

    monkeypatch.setattr(MeanKeys, "write", forgets)
    with pytest.raises(LawBroken, match="cache mean, 3 loops: not as defined: off by"):
        check_one_slot(grt())


def test_control_a_mean_over_loops_that_others_ran_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is out beside one that loops on."""
    write = MeanKeys.write

    def counts_all(self: MeanKeys, slot: Any, *keys: Tensor) -> Any:
        active, self.active_BT = self.active_BT, None
        try:
            return write(self, slot, *keys)
        finally:
            self.active_BT = active

    monkeypatch.setattr(MeanKeys, "write", counts_all)
    with pytest.raises(LawBroken, match=r"cache mean, exit state.*not as defined"):
        check_one_slot(grt())
    with pytest.raises(LawBroken, match="-padded"):
        check_batches(grt())


def test_control_a_slot_that_is_never_written_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write = LastLoopKeys.write

    def first(self: LastLoopKeys, slot: Any, *keys: Tensor) -> Any:
        held = write(self, slot, *keys)
        if slot[0] == "core" and slot[2] and not isinstance(self, MeanKeys):
            held[0][:, :, -1] *= 1.001
        return held

    monkeypatch.setattr(LastLoopKeys, "write", first)
    with pytest.raises(LawBroken, match="cache last, 3 loops: not as defined"):
        check_one_slot(grt())


def test_control_caches_of_several_loops_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grt()
    monkeypatch.setattr(type(model.config.keys), "own_keys", False)  # a choice that says of its keys what is not so
    with pytest.raises(LawBroken, match="cache last, 3 loops: not cache per_loop"):
        check_same(model)


def test_tokens_leave_at_several_loops() -> None:
    """The law on tokens that all leave together would say little."""
    model, ids_BT = grt(), tokens(B, T)
    for cache in CHEAP:
        found = [replay(model, ids_BT, test, cache=cache) for _, test in at_work(model, ids_BT, (RULE,))]
        assert any(map(mixes, found))
