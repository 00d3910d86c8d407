"""An engine in a thread of its own: what it says is what it says without, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import small

from alcoda.engine.background import Background
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.request import Completion, Request
from alcoda.errors import UsageError

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9), (10, 11)]


def engine() -> Engine:
    return Engine(small(), Options(width=4, places=2), dtype=torch.float64)


def until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


async def whole(background: Background, request: Request) -> list[Completion]:
    ended = [one async for one in background.stream(request) if one.finish is not None]
    return sorted(set(ended), key=lambda one: one.stream)


def test_many_at_one_time_say_what_each_says_alone() -> None:
    expected = [found.ids for (found,) in engine().run([Request(prompt, 8) for prompt in PROMPTS])]
    made = engine()

    async def ask() -> list[list[Completion]]:
        return await asyncio.gather(*(whole(background, Request(prompt, 8)) for prompt in PROMPTS))

    with Background(made) as background:
        assert [one.ids for (one,) in asyncio.run(asyncio.wait_for(ask(), 60))] == expected
        assert background.is_alive
    made.check_idle()


def test_all_of_n_are_told() -> None:
    with Background(engine()) as background:
        found = asyncio.run(asyncio.wait_for(whole(background, Request((1, 2), 6, n=3)), 60))
    assert [one.stream for one in found] == [0, 1, 2] and {one.finish for one in found} == {"length"}


def test_who_leaves_early_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    made, goes = engine(), threading.Event()
    step = made.step

    def held() -> Any:
        """Once there is a token, nothing goes on before its reader has left."""
        if made.stats.tokens:
            goes.wait(60)
        return step()

    monkeypatch.setattr(made, "step", held)

    async def leave(background: Background) -> Completion:
        stream = background.stream(Request((1, 2), 29))
        first = await anext(stream)
        await stream.aclose()
        goes.set()
        await whole(background, Request((3,), 2))  # after this, the engine has seen the cancellation
        return first

    with Background(made) as background:
        first = asyncio.run(asyncio.wait_for(leave(background), 60))
    assert first.finish == "cancelled" and len(first.tokens) < 29
    made.check_idle()


def test_a_loop_that_ends_first_ends_nobody_else() -> None:
    """The engine has still to tell of a completion when the event loop of the caller is closed."""
    made, goes = engine(), threading.Event()

    async def leave(background: Background) -> None:
        asked = asyncio.ensure_future(whole(background, Request((1, 2), 29)))
        while not made.has_work:
            await asyncio.sleep(0)
        asked.cancel()

    with Background(made) as background:
        held = background.call(goes.wait)
        asyncio.run(leave(background))
        goes.set()
        assert held.result(60)
        (found,) = asyncio.run(asyncio.wait_for(whole(background, Request((3,), 2)), 60))
        assert found.finish == "length" and background.is_alive
    made.check_idle()


def test_a_cancellation_that_overtakes_its_request_holds_nothing() -> None:
    """Another thread asks and cancels between the engine's look at the one and at the other."""
    made = engine()
    (asked,) = made.submit(Request((1, 2), 5))
    made._end(asked, "cancelled")
    for _ in made.steps():
        pass
    assert asked.finish == "cancelled" and not asked.tokens
    made.check_idle()


@pytest.mark.parametrize("drain", [False, True])
def test_stopping(drain: bool) -> None:
    made, told = engine(), list[Completion]()
    background = Background(made)
    with background:
        (asked,) = background.submit(Request((1, 2), 29), told.append)
        background.stop(drain)
    assert asked.finish in ({"length"} if drain else {"cancelled", "length"})  # it may have been quick
    assert told and told[-1].finish is not None
    made.check_idle()
    with pytest.raises(RuntimeError, match="has stopped"):
        background.submit(Request((1,), 2), told.append)


def test_a_thread_that_does_not_end_is_not_waited_for() -> None:
    goes, begins, background = threading.Event(), threading.Event(), Background(engine())
    with background:
        background.call(lambda: (begins.set(), goes.wait(60)))
        assert begins.wait(60)
        assert not background.stop(timeout_s=0.05) and background.is_alive
        goes.set()
        assert background.stop(timeout_s=60) and not background.is_alive


@pytest.mark.parametrize("kind", ["read", "loop", "read_out", "job"])
def test_what_does_not_go_on_is_told(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every launch, though what is in it waits for nothing else; and never of a thread that waits for work."""
    made, goes, begins = engine(), threading.Event(), threading.Event()

    def holds(*arguments: Any) -> Any:
        begins.set()
        goes.wait(60)
        return None if kind == "job" else before(*arguments)

    if kind != "job":
        before = getattr(made.runner, kind)
        monkeypatch.setattr(made.runner, kind, holds)
    with Background(made) as background:
        assert background.stalled_s == 0
        if kind == "job":
            background.call(holds)
        else:
            background.submit(Request((1, 2, 3), 3), lambda completion: None)
        assert begins.wait(60)
        until(lambda: background.stalled_s > 0.05)
        goes.set()
        until(lambda: background.stalled_s == 0)
    made.check_idle()


def test_who_is_gone_without_a_word_holds_no_place() -> None:
    """Its loop was closed in the middle of it, and its generator is still there."""
    made, loop = engine(), asyncio.new_event_loop()
    with Background(made) as background:
        held = background.call((goes := threading.Event()).wait)
        stream = background.stream(Request((1, 2), 29))

        async def begin() -> None:
            stream.__anext__().__await__().send(None)  # as far as it goes without a token, and no task that is pending

        loop.run_until_complete(begin())
        loop.close()
        goes.set()
        assert held.result(60)
        until(lambda: background.stalled_s == 0 and not made.running)
        assert made.stats.tokens < 10
    made.check_idle()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_fails_leaves_nobody_waiting() -> None:
    def fails(completion: Completion) -> None:
        raise ValueError("a listener's")

    async def ask(background: Background) -> list[list[Completion]]:
        others = [asyncio.ensure_future(whole(background, Request((3,), 29)))]
        await asyncio.sleep(0)
        background.submit(Request((1, 2), 29), fails)
        others += [asyncio.ensure_future(whole(background, Request((n,), 29))) for n in (4, 5)]
        await asyncio.sleep(0)
        goes.set()
        return await asyncio.gather(*others)

    with Background(engine()) as background:
        background.call((goes := threading.Event()).wait)
        found = asyncio.run(asyncio.wait_for(ask(background), 60))
        assert [one.finish for (one,) in found] == ["error"] * 3
        assert not background.is_alive and isinstance(background.failure, ValueError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_ends_the_thread_is_told_of() -> None:
    def leaves() -> None:
        raise SystemExit(3)

    with Background(engine()) as background:
        with pytest.raises(SystemExit):
            background.call(leaves).result(60)
        background.stop()
        assert isinstance(background.failure, SystemExit) and background.stalled_s == 0


def test_what_cannot_be_is_refused_at_once() -> None:
    with Background(engine()) as background, pytest.raises(UsageError, match="no tokens"):
        background.submit(Request((), 2), print)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    monkeypatch.setattr(made, "step", lambda: 1 / 0)
    with Background(made) as background:
        (found,) = asyncio.run(asyncio.wait_for(whole(background, Request((1, 2), 4)), 60))
        assert found.finish == "error" and "division by zero" in str(found.error)
        assert not background.is_alive and isinstance(background.failure, ZeroDivisionError)
