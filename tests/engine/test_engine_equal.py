"""Requests that decode together are what each is alone, whatever else the engine does at that time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import (
    ATOL,
    HOUSE,
    LOOPS,
    alone,
    check_alone,
    check_same,
    copy_wrongly,
    drive,
    engine_of,
    exits_of,
    mixed,
    small,
)

from alcoda.depth.rules import Fixed, Kl, SecondOrder, StateChange
from alcoda.engine.cache import Arena, Span
from alcoda.engine.decode import decode
from alcoda.engine.request import Item, Request
from alcoda.engine.runner import Runner
from alcoda.model.exit_keys import CopiedKeys
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import prefills

over_house = pytest.mark.parametrize("fields", HOUSE.values(), ids=HOUSE)
SOME = ("grt", "window", "memory")
over_some = pytest.mark.parametrize("fields", [HOUSE[name] for name in SOME], ids=SOME)
PROMPT = (3, 41, 7, 7, 20, 63, 1)


def grt() -> RecurrentLM:
    return small(**HOUSE["grt"])


# -- together is alone (invariant 1) ----------------------------------------------------------------------------------


@over_house
def test_together_is_alone(fields: dict[str, Any]) -> None:
    model = small(**fields)
    kinds = ["state", "kl", "second_order", *(["gate"] if model.config.exit_gate.has_gate else [])]
    check_alone(engine_of(model), mixed([None, *exits_of(model, *kinds)], 6), every=2)


@pytest.mark.parametrize(
    "options", [{"width": 1}, {"width": 7, "places": 2}, {"cache_tokens": 20, "min_coda": 3}], ids=str
)
def test_whatever_the_order_and_the_room(options: dict[str, Any]) -> None:
    model = grt()
    requests = mixed([None, *exits_of(model, "state")], 5)
    for order in (requests, requests[::-1]):
        check_alone(engine_of(model, **options), order, every=1)


def test_the_reference_is_decode() -> None:
    """What all here is held against, against the readers' own loop."""
    model = grt()
    (test,) = exits_of(model, "state")
    for request in (Request(PROMPT, 6), Request(PROMPT, 6, test=test)):
        depths: list[torch.Tensor] = []
        found = alone(model, request)
        ids = decode(model, PROMPT, loops=LOOPS, max_tokens=6, rule=request.test, depths=depths, dtype=torch.float64)
        assert list(ids) == found.tokens
        if depths:
            assert torch.cat(depths, 1)[0].tolist() == [*found.prompt_loops, *found.loops[1:]]


def test_neighbours_that_are_cancelled_change_nothing() -> None:
    model = grt()
    requests = [replace(request, stop_ids=frozenset(), max_tokens=8) for request in mixed(exits_of(model, "state"), 5)]
    engine = engine_of(model, width=6, draft_loops=1)

    def cancel(n: int) -> None:
        if n in (4, 9):
            gone = min((c for c in engine.running if c.tokens), key=lambda c: c.request.name)
            engine.cancel(gone)

    ended = [c for (c,) in drive(engine, requests, every=1, before=cancel)]
    cancelled = [c for c in ended if c.finish == "cancelled"]
    assert len(cancelled) == 2
    for completion in ended:
        expected = alone(model, completion.request)
        if completion in cancelled:
            found = [token.token for token in completion.tokens]
            assert 0 < len(found) < 8 and found == expected.tokens[: len(found)], "it keeps what it has"
        else:
            check_same(engine, completion, expected)


def test_each_of_n_completions_is_itself() -> None:
    model = grt()
    request = replace(mixed([None], 2)[1], n=4, max_tokens=8)
    assert request.sampling.temperature > 0
    engine = engine_of(model)
    (completions,) = drive(engine, [request])
    assert [c.stream for c in completions] == [0, 1, 2, 3]
    assert len({tuple(t.token for t in c.tokens) for c in completions}) > 1, "streams have noise of their own"
    for completion in completions:
        check_same(engine, completion, alone(model, request, completion.stream))


def test_control_a_row_that_reads_its_neighbours_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spans = grt(), []

    def first(self: Runner, item: Item) -> Span:
        spans.append(item.completion.span)
        return spans[0]

    monkeypatch.setattr(Runner, "_span", first)
    with pytest.raises(AssertionError, match="request"):
        check_alone(engine_of(model), [Request(PROMPT[:n], 5) for n in (3, 7, 5)])


# -- depths (invariants 3, 8) -----------------------------------------------------------------------------------------


@over_some
def test_a_threshold_of_zero_is_the_fixed_depth_is_the_plain_forward(fields: dict[str, Any]) -> None:
    model, found = small(**fields), []
    rules = (StateChange(threshold=0.0), Kl(threshold=0.0), Fixed(), None)
    requests = [Request(PROMPT, 5, test=rule and rule.build(model, LOOPS)) for rule in rules]
    engine = engine_of(model)
    for (completion,) in drive(engine, requests):
        assert {token.loops for token in completion.tokens} == {LOOPS}
        found.append((completion.ids, engine.logits_TV(completion)))
    for ids, logits_TV in found[1:]:
        assert ids == found[0][0] and (logits_TV - found[0][1]).abs().max() <= ATOL
    if not model.config.memory.carries:
        with torch.no_grad():
            plain_TV = model(torch.tensor([[*PROMPT, *found[0][0][:-1]]]), LOOPS)[0, len(PROMPT) - 1 :]
        assert (plain_TV - found[0][1]).abs().max() <= ATOL
    # Control: a rule that fires is not.
    assert (
        drive(engine, [Request(PROMPT, 5, test=StateChange(threshold=9.0).build(model, LOOPS))])[0][0].tokens[1].loops
        == 1
    )


def test_each_request_has_its_own_bounds() -> None:
    model = grt()
    cases = {
        2: StateChange(threshold=1e9, min_loops=2),
        3: StateChange(threshold=0.0, max_loops=3),
        1: Kl(threshold=1e9, min_loops=1, max_loops=1),
        4: SecondOrder(threshold=1e9, hits=2, horizon=1),  # it can say nothing before loop 3, and acts one later
    }
    requests = [Request(PROMPT, 4, test=rule.build(model, LOOPS), name=loops) for loops, rule in cases.items()]
    requests += [Request(PROMPT, 4, loops=loops, name=loops) for loops in (1, 3)]
    requests += [Request(PROMPT, 4, test=StateChange(threshold=0.0).build(model, 2), name=2)]
    engine = engine_of(model, width=8, draft_loops=1)
    for (completion,) in drive(engine, requests, every=1):
        assert {*completion.prompt_loops, *(t.loops for t in completion.tokens)} == {completion.request.name}
        check_same(engine, completion, alone(model, completion.request))


# -- prompts (invariants 4, 7) ----------------------------------------------------------------------------------------


@over_some
def test_chunks_of_a_prompt_change_nothing(fields: dict[str, Any]) -> None:
    """Exits of a prompt that is read in pieces are those of one that is read token by token."""
    model = small(**fields)
    prompt = tuple(torch.randint(64, (13,), generator=torch.Generator().manual_seed(2)).tolist())
    for test in exits_of(model, "state", "kl"):
        request = Request(prompt, 2, test=test)
        expected = alone(model, request)
        assert len(set(expected.prompt_loops)) > 1
        for chunk_tokens in (1, 5, 64):
            engine = engine_of(model, chunk_tokens=chunk_tokens)
            check_same(engine, drive(engine, [request])[0][0], expected)


def test_control_a_prompt_whose_keys_are_not_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grt()
    request = Request(PROMPT, 2, test=exits_of(model, "state")[0])
    expected = alone(model, request)
    leave = CopiedKeys.leave

    def late(self: CopiedKeys, loop: int, leaves_BT: torch.Tensor) -> None:
        leave(self, loop, leaves_BT & (torch.arange(leaves_BT.size(1)) > 0))

    monkeypatch.setattr(CopiedKeys, "leave", late)
    engine = engine_of(model, chunk_tokens=2)
    (completion,) = drive(engine, [request])[0]
    with pytest.raises(AssertionError, match="request"):
        check_same(engine, completion, expected)


def check_read_again(model: RecurrentLM, request: Request) -> None:
    """At each step, the text so far as a prompt gives the same next token, from the same logits."""
    engine = engine_of(model)
    (whole,) = drive(engine, [request])[0]
    steps = [replace(request, prompt=(*request.prompt, *whole.ids[:n]), max_tokens=1) for n in range(len(whole.tokens))]
    for n, (step,) in enumerate(drive(engine, steps)):
        assert step.ids == whole.ids[n : n + 1], f"step {n}: another token"
        assert step.tokens[0].loops == whole.tokens[n].loops, f"step {n}: other loops"
        off = (engine.logits_TV(step)[0] - engine.logits_TV(whole)[n]).abs().max()
        assert off <= ATOL, f"step {n}: logits are off by {off:.3g}"


@over_some
def test_decoding_is_reading_it_all_again(fields: dict[str, Any]) -> None:
    model = small(**fields)
    for test in (None, exits_of(model, "state")[0]):
        check_read_again(model, Request(PROMPT, 6, test=test))


def test_control_deeper_slots_that_are_no_copies_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grt()
    monkeypatch.setattr(Arena, "copy_deeper", copy_wrongly)
    with pytest.raises(AssertionError, match="step"):
        check_read_again(model, Request(PROMPT, 9, test=exits_of(model, "state")[0]))


# -- memories ---------------------------------------------------------------------------------------------------------


MEMORIES: dict[str, dict[str, Any]] = {
    "core": {"kind": "prev_token", "source": "core"},
    "final": {"kind": "prev_token", "source": "final", "lag": 2},
    "prelude": {"kind": "prev_token", "source": "prelude.0", "mean_of": 2},
}


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_a_memory_is_read_as_each_prefill_says(memory: dict[str, Any]) -> None:
    model = small(memory=memory, inject="concat")
    texts = {}
    for kind, prefill in prefills().items():
        request = Request(PROMPT, 5, prefill=prefill, name=kind)
        engine = engine_of(model, chunk_tokens=3)
        # Another prompt beside it, which is read exactly.
        (completion,), _ = drive(engine, [request, Request(PROMPT[::-1], 5)])
        ids = decode(model, PROMPT, loops=LOOPS, max_tokens=5, prefill=prefill, dtype=torch.float64)
        assert completion.ids == list(ids), f"prefill {kind}: other tokens"
        check_same(engine, completion, alone(model, request))
        texts[kind] = engine.logits_TV(completion)[0]
    assert (texts["zero"] - texts["exact"]).abs().max() > 1e-6, "control: the prefill makes a difference"


def test_control_a_memory_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(memory=MEMORIES["core"], inject="concat")
    monkeypatch.setattr(Runner, "remember", lambda *args: None)
    with pytest.raises(AssertionError, match="request"):
        check_alone(engine_of(model), [Request(PROMPT, 5)])
