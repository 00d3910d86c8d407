"""An exception inside a launch fails its rows and nobody else (invariant 15), and random schedules of arrivals, cancels
and faults leave nothing behind (11)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_many import PARTS
from engines import HOUSE, Alone, alone, check_alone, check_same, drive, engine_of, exits_of, mixed, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from alcoda.engine.cache import Arena
from alcoda.engine.engine import Engine
from alcoda.engine.request import Completion, Request
from alcoda.engine.sampling import NOT_FINITE, Row
from alcoda.engine.scheduler import Coda, Core, Piece
from alcoda.errors import RunError
from alcoda.model.lm import RecurrentLM

PLANTED = "RuntimeError: planted"


@functools.cache
def served() -> tuple[RecurrentLM, list[Request], list[list[Alone]]]:
    """A model, requests, and what their completions are alone."""
    torch.set_num_threads(1)
    model = small(**HOUSE["grt"])
    requests = mixed([None, *exits_of(model, "state", "kl")], 9, seed=4, most_new=6)
    requests[4] = replace(requests[4], n=2)
    return model, requests, [[alone(model, r, stream) for stream in range(r.n)] for r in requests]


def fails_at(engine: Engine, name: str, call: int, after: bool = False) -> None:
    """Make a part of the runner raise at one call, before it has done anything or after."""
    part, calls = getattr(engine.runner, name), iter(range(1_000_000))

    def run(*args: Any) -> Any:
        now = next(calls) == call
        if now and not after:
            raise RuntimeError("planted")
        found = part(*args)
        if now:
            raise RuntimeError("planted")
        return found

    setattr(engine.runner, name, run)


def noted_launches(engine: Engine) -> list[set[Completion]]:
    """Whose rows are in each launch, as they come."""
    found: list[set[Completion]] = []
    next_launch = engine.scheduler.next

    def noted() -> Any:
        launch = next_launch()
        match launch:
            case Core(items):
                found.append({item.completion for item in items})
            case Coda(leaving, drafting):
                found.append({item.completion for item in (*leaving, *drafting)})
            case Piece(parts):
                found.append({part.completion for part in parts})
        return launch

    engine.scheduler.next = noted  # pyrefly: ignore
    return found


def check_prefix(completion: Completion, expected: Alone) -> None:
    found = [token.token for token in completion.tokens]
    assert found == expected.tokens[: len(found)], "what it had is what it would have been"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_an_exception_fails_its_launch_and_nobody_else(name: str, after: bool) -> None:
    model, requests, expected = served()
    engine = engine_of(model, width=4, draft_loops=1)
    launches = noted_launches(engine)
    fails_at(engine, name, 4, after)
    ended = drive(engine, requests, every=1)
    failed = {c for completions in ended for c in completions if c.error is not None}
    assert failed and all(c.error == PLANTED and c.finish == "error" for c in failed)
    assert name == "open" or any(failed == launch for launch in launches), "all of its launch, and only they"
    assert name != "open" or len(failed) == 1
    assert len(failed) < sum(map(len, ended)) and engine.stats.failures == len(failed)
    for completions, alike in zip(ended, expected, strict=True):
        for completion, one in zip(completions, alike, strict=True):
            (check_prefix(completion, one) if completion in failed else check_same(engine, completion, one))
    check_alone(engine, requests[:2])  # and the engine goes on


def test_control_a_fault_that_leaves_a_span_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests, _ = served()
    engine = engine_of(model, width=4)
    fails_at(engine, "loop", 2)
    free = Arena.free
    monkeypatch.setattr(Arena, "free", lambda self, span: None if span.start == 0 else free(self, span))
    with pytest.raises(AssertionError, match="tokens of the cache are not free"):
        drive(engine, requests)


def spoils(engine: Engine, prompt: tuple[int, ...], call: int, value: float) -> None:
    """Make the logits of the rows of one prompt ``value`` from a call on."""
    drawn, calls = engine._draw, iter(range(1_000_000))

    def spoiled(logits_NV: Tensor, rows: list[Row]) -> Any:
        logits_NV = logits_NV.clone()
        if next(calls) >= call:
            for n, row in enumerate(rows):
                if row.prompt == prompt:
                    logits_NV[n] = value
        return drawn(logits_NV, rows)

    engine._draw = spoiled  # pyrefly: ignore


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("call", [0, 5])
def test_logits_that_are_no_numbers_fail_their_request(value: float, call: int) -> None:
    model, requests, expected = served()
    requests = [replace(request, stop_ids=frozenset()) for request in requests[:4]]
    expected = [[alone(model, request)] for request in requests]
    engine = engine_of(model, width=6, draft_loops=1)
    broken = max(requests, key=lambda request: request.max_tokens)
    spoils(engine, broken.prompt, call, value)
    for (completion,), (one,) in zip(drive(engine, requests), expected, strict=True):
        if completion.request is broken:
            assert completion.finish == "error" and completion.error == NOT_FINITE
            check_prefix(completion, one)
        else:
            check_same(engine, completion, one)


def test_a_halt_that_raises_fails_its_request_only() -> None:
    model, requests, expected = served()

    def halt(completion: Completion, token: int) -> bool:
        raise KeyError("nowhere")

    engine = engine_of(model)
    asked = [replace(requests[0], halt=halt, max_tokens=5, stop_ids=frozenset()), *requests[1:4]]
    (broken,), *others = drive(engine, asked)
    assert broken.finish == "error" and broken.error == "halt: KeyError: 'nowhere'"
    for (completion,), (one,) in zip(others, expected[1:4], strict=True):
        check_same(engine, completion, one)


def test_what_the_engine_says_itself_is_said_as_it_is() -> None:
    """No name of an exception in front of a text that is for users."""
    model, requests, _ = served()
    engine = engine_of(model)

    def refuses(*args: Any) -> None:
        raise RunError("the disk is full")

    engine.runner.open = refuses  # pyrefly: ignore
    (completion,) = drive(engine, requests[:1])[0]
    assert completion.error == "the disk is full"


def test_banks_of_rules_are_given_back() -> None:
    """A server's requests bring rules of their own."""
    model, *_ = served()
    engine = engine_of(model)
    for _ in range(3):
        drive(engine, [Request((5, 9), 3, test=test) for test in exits_of(model, "state", "kl")])
        assert not engine.runner.kept


def test_cancelled_at_any_time() -> None:
    """While it waits, while it is read, in the loop, with drafts; twice; after its end."""
    model, requests, expected = served()
    last = requests[3]
    for at in range(0, 30, 3):
        engine = engine_of(model, width=6, places=2, draft_loops=1)
        gone = [c for request in requests[:3] for c in engine.submit(replace(request, stop_ids=frozenset()))]

        def cancel(n: int, at: int = at, gone: list[Completion] = gone, engine: Engine = engine) -> None:
            if n == at:
                for completion in gone * 2:
                    engine.cancel(completion)

        (completion,) = drive(engine, [last], before=cancel)[0]
        check_same(engine, completion, expected[3][0])
        assert all(c.finish in ("cancelled", "length") for c in gone)
    assert at > 20 and any(c.finish == "length" for c in gone)


# -- random schedules -------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 8)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("fail"), st.sampled_from(PARTS), st.integers(0, 4), st.booleans()),
        st.tuples(st.just("spoil"), st.integers(0, 8), st.integers(0, 6)),
    ),
    min_size=4,
    max_size=14,
)
OPTIONS = st.fixed_dictionaries(
    {
        "width": st.integers(1, 6),
        "places": st.one_of(st.none(), st.integers(1, 5)),
        "cache_tokens": st.sampled_from((None, 16, 30)),
        "chunk_tokens": st.integers(1, 6),
        "min_coda": st.one_of(st.none(), st.integers(1, 4)),
        "deterministic": st.booleans(),
    },
    optional={"draft_loops": st.integers(1, 3), "refill": st.booleans()},
).filter(lambda options: "draft_loops" not in options or options.get("refill", True))


def follow(options: dict[str, Any], actions: list[tuple[Any, ...]], sabotage: Callable[[Engine], None] = id) -> None:
    """Do as a schedule says, drain the engine, and hold every completion against itself alone."""
    model, requests, expected = served()
    engine = engine_of(model, **options)
    sabotage(engine)
    asked: list[tuple[Completion, Alone]] = []
    cancelled: set[Completion] = set()
    spoiled: set[tuple[int, ...]] = set()
    ended: list[Completion] = []

    def step() -> bool:
        changed = engine.step()
        ended.extend(c for c in changed or [] if c.finish is not None)
        return changed is not None

    with engine.runner.passes():
        for what, *how in actions:
            if what == "submit":
                asked += zip(engine.submit(requests[how[0]]), expected[how[0]], strict=True)
            elif what == "step":
                for _ in range(how[0]):
                    step()
            elif what == "cancel" and asked:
                completion = asked[how[0] % len(asked)][0]
                cancelled.add(completion)
                engine.cancel(completion)
            elif what == "fail":
                fails_at(engine, *how)
            elif what == "spoil":
                spoiled.add(requests[how[0]].prompt)
                spoils(engine, requests[how[0]].prompt, how[1], float("nan"))
        n = 0
        while step():
            n += 1
            assert n < 2000, "the engine does not come to an end"
    engine.check_idle()
    assert not engine.runner.kept
    assert len(ended) == len(set(ended)) == len(asked), "each ends, and once"
    for completion, one in asked:
        if completion.finish == "error":
            is_spoiled = completion.request.prompt in spoiled
            assert completion.error == PLANTED or (is_spoiled and completion.error == NOT_FINITE)
            check_prefix(completion, one)
        elif completion.finish == "cancelled":
            assert completion in cancelled
            check_prefix(completion, one)
        else:
            check_same(engine, completion, one)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(OPTIONS, ACTIONS)
def test_random_schedules(options: dict[str, Any], actions: list[tuple[Any, ...]]) -> None:
    follow(options, actions)


SCHEDULE: list[tuple[Any, ...]] = [
    ("submit", 1),
    ("submit", 4),
    ("step", 9),
    ("cancel", 0),
    ("submit", 7),
    ("step", 30),
]


def test_control_a_row_that_is_not_given_back_is_noticed() -> None:
    def keeps_rows(engine: Engine) -> None:
        release = engine.runner.release
        engine.runner.release = lambda items: release([i for i in items if i.row != 2])  # pyrefly: ignore

    follow({}, SCHEDULE)
    with pytest.raises(AssertionError, match="rows are not free"):
        follow({"width": 4}, SCHEDULE, keeps_rows)


def test_control_a_lost_completion_is_noticed() -> None:
    def loses(engine: Engine) -> None:
        drop = engine.scheduler.ran

        def ran(items: Any, leaves: Any) -> None:
            drop(items[:1], leaves[:1])

        engine.scheduler.ran = ran  # pyrefly: ignore

    with pytest.raises(AssertionError, match=r"requests are left|each ends"):
        follow({"width": 4}, SCHEDULE, loses)
