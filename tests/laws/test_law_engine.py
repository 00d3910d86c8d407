"""Law 3 of the engine: requests that decode together, each token at its own loop, are what each is alone.

Alone is token by token through the readers (`engines.alone`), which law 3 holds against replay. Packages that stand
side by side do not import each other, so this law is not among those of `alcoda laws`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engines import check_alone, copy_wrongly, engine_of, mixed
from space import cases, house
from torch import Tensor
from varlen import check_both

from alcoda.depth.rules import rules
from alcoda.engine.cache import Arena
from alcoda.engine.engine import Engine
from alcoda.engine.refusals import check_drafts, refuses
from alcoda.errors import UsageError
from alcoda.laws.exits import at_work
from alcoda.laws.subject import make_plain, tokens
from alcoda.model.cache_policy import LastCache, MeanCache
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM

KINDS = sorted(set(rules()) - {"trace", "gate"})  # few models have an exit gate: one of the house does
LOOPS = 3
GRT: dict[str, Any] = {
    "inject": {"kind": "concat", "noise": 0.1, "bias": True},
    "update": {"kind": "gate", "tau": 0.8, "noise": 0.1},
    "exit_gate": "linear",
}


def served(config: ModelConfig) -> ModelConfig:
    """The same design, with what the engine cannot serve taken out."""
    return config if reason_of(config) is None else config.model_copy(update=SERVED)


def reason_of(config: ModelConfig) -> str | None:
    """Why the engine refuses such a model, which its config says."""
    model: Any = SimpleNamespace(config=config)
    return refuses(model)


SERVED: dict[str, Any] = {name: ModelConfig.model_fields[name].default for name in ("sharing", "route")}


def serves_drafts(model: RecurrentLM) -> bool:
    try:
        check_drafts(model)
    except UsageError:
        return False
    return True


def check(model: RecurrentLM, kinds: Sequence[str], n: int = 0, most_new: int = 3) -> None:
    """Requests without a rule and with each of some rules, that come one after the other, in an engine whose launches
    are of three tokens: with a slot a loop, with drafts where they can be checked, and with a cache of one slot."""
    tests = [None, *(test for _, test in at_work(model, tokens(3, 6), kinds))]
    requests = mixed(tests, max(3, len(tests)), n, 5, most_new, n_loops=LOOPS)
    drafts = {"width": 6, "draft_loops": 1 + n % 2} if serves_drafts(model) else {}
    check_alone(engine_of(model, chunk_tokens=3, **drafts), requests, every=2)
    cache = (MeanCache(), LastCache())[n % 2]
    check_alone(engine_of(model, cache=cache, deterministic=n % 3 == 0), requests[1:2] if n else requests, every=3)


EVERY = [
    pytest.param(served(case.config), [KINDS[n % len(KINDS)]], n, id=case.name)
    for n, case in enumerate(cases())
    if case.config.is_recurrent
]


@pytest.mark.parametrize(("config", "kinds", "n"), EVERY)
def test_together_is_alone_in_every_design(config: ModelConfig, kinds: list[str], n: int) -> None:
    check(make_plain(config), kinds, n)


@pytest.mark.parametrize(("config", "kinds", "n"), EVERY)
def test_on_pages_it_is_the_same_in_every_design(
    config: ModelConfig, kinds: list[str], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a GPU, read by what stands for its kernel."""
    model = make_plain(config)
    tests = [None, *(test for _, test in at_work(model, tokens(3, 6), kinds))]
    requests = mixed(tests, 3, n, 7, 5, n_loops=LOOPS)
    drafts = 1 + n % 2 if serves_drafts(model) else None
    check_both(monkeypatch, model, requests, 1 + n % 5, width=6, draft_loops=drafts, deterministic=n % 4 == 0)
    check_both(monkeypatch, model, requests[1:2], cache=(LastCache(), MeanCache())[n % 2])


def test_it_is_with_every_rule() -> None:
    check(make_plain(house(**GRT)), sorted(set(rules()) - {"trace"}))


def test_a_model_without_a_loop_is_served() -> None:
    model = make_plain(house(n_core=0, n_loops=1, n_prelude=2))
    check_alone(engine_of(model, chunk_tokens=3), mixed([None], 4, n_loops=1), every=2)


def test_what_is_not_served_says_so() -> None:
    """Loops with weights of their own, and routes."""
    n_refused = 0
    for case in cases():
        if reason_of(case.config) is None:
            assert case.config.route.kind == "none" and not case.config.has_weights_by_loop
            continue
        n_refused += 1
        with pytest.raises(UsageError, match=r"the engine cannot serve this model: .*LM\.generate decodes it"):
            Engine(RecurrentLM(case.config))
    assert 0 < n_refused < len(cases())


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_control_copies_that_are_no_copies_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "copy_deeper", copy_wrongly)
    with pytest.raises(AssertionError, match="request"):
        check(make_plain(house(**GRT)), ["state"], most_new=9)


def test_control_a_row_that_reads_another_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Arena.row_places

    def of_first(self: Arena, stage: str, slots: Sequence[int], ends: Any) -> Any:
        return places(self, stage, [0] * len(slots), ends)

    monkeypatch.setattr(Arena, "row_places", of_first)
    with pytest.raises(AssertionError, match=r"request [^:]*: (other|logits)"):
        check(make_plain(house(**GRT)), ["state"], most_new=9)


def test_control_a_mean_that_is_a_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Arena.replace

    def twice(self: Arena, stage: str, places: Sequence[int], kv_N2LGK: Tensor) -> None:
        replace(self, stage, places, 2 * kv_N2LGK)

    monkeypatch.setattr(Arena, "replace", twice)
    with pytest.raises(AssertionError, match="request"):
        check(make_plain(house(**GRT)), ["state"], most_new=9)
