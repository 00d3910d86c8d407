"""Requests sent to a server: at times drawn beforehand (open loop), or so many at one time (closed loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from alcoda.serve.load.client import Answer

TICK_S = 0.01
"""How often the event loop is asked how late it is."""

Send = Callable[[int, Answer], Awaitable[None]]
"""Sends the request of this number, and fills in its answer."""


@dataclass
class Driven:
    """What became of the requests of one run.

    Attributes:
        answers: in the order in which they were due.
        began, ended: by `time.perf_counter`: the clock's start, and the last answer's end (at least as long as asked).
        send_late_s: how long after it was due each was sent (open loop).
        loop_late_s: how late the event loop woke, every hundredth of a second: a client that is late itself measures
            itself.
        interrupted: whether it was stopped before its end.
    """

    answers: list[Answer]
    began: float
    ended: float = 0.0
    send_late_s: list[float] = field(default_factory=list)
    loop_late_s: list[float] = field(default_factory=list)
    interrupted: bool = False


def arrivals(rate_per_s: float, duration_s: float, rng: random.Random) -> list[float]:
    """Times of a Poisson process, in seconds from its start; at least one."""
    times: list[float] = []
    now = rng.expovariate(rate_per_s)
    while now < duration_s or not times:
        times.append(min(now, duration_s))
        now += rng.expovariate(rate_per_s)
    return times


async def open_loop(
    send: Send, times_s: Sequence[float], duration_s: float, done: Callable[[], None] = lambda: None
) -> Driven:
    """Send each request when it is due, whatever the answers before it do; returns when all have ended.

    Where it is cancelled, what is not answered is ``unfinished``.
    """
    # A moment ahead, so that the first ones are not late by what setting up takes.
    began = time.perf_counter() + 0.05
    driven = Driven([Answer(began + at) for at in times_s], began)
    running: set[asyncio.Task[None]] = set()

    async def one(number: int, answer: Answer) -> None:
        await send(number, answer)
        done()

    async def all_of_them() -> None:
        for number, answer in enumerate(driven.answers):
            await asyncio.sleep(max(0.0, answer.due - time.perf_counter()))
            driven.send_late_s.append(time.perf_counter() - answer.due)
            task = asyncio.create_task(one(number, answer))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.gather(*running)

    await _watched(all_of_them(), running, driven)
    # What was not sent any more was never asked for.
    driven.answers = [answer for answer in driven.answers if answer.sent]
    driven.ended = max([began + (0 if driven.interrupted else duration_s), *(a.end for a in driven.answers)])
    return driven


async def closed_loop(
    send: Send, concurrency: int, duration_s: float, done: Callable[[], None] = lambda: None
) -> Driven:
    """So many clients, each of which sends its next request when it has the answer to its last one, for so long; what
    runs then is waited for."""
    began = time.perf_counter()
    driven = Driven([], began)
    running: set[asyncio.Task[None]] = set()

    async def client() -> None:
        while True:  # once at least: nothing would say nothing
            answer = Answer(time.perf_counter())
            driven.answers.append(answer)
            await send(len(driven.answers) - 1, answer)
            done()
            if answer.error is not None:  # a server that refuses is not asked a thousand times a second
                await asyncio.sleep(0.1)
            if time.perf_counter() >= began + duration_s:
                return

    async def all_of_them() -> None:
        running.update(asyncio.create_task(client()) for _ in range(concurrency))
        await asyncio.gather(*running)

    await _watched(all_of_them(), running, driven)
    driven.answers = [answer for answer in driven.answers if answer.sent]
    driven.ended = max([time.perf_counter() if driven.interrupted else began, *(a.end for a in driven.answers)])
    return driven


async def _watched(work: Awaitable[None], running: set[asyncio.Task[None]], driven: Driven) -> None:
    """Await work beside a clock that says how late the event loop is."""

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            driven.loop_late_s.append(time.perf_counter() - before - TICK_S)

    clock = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:  # Ctrl-C: what there is is told
        driven.interrupted = True
    finally:
        for task in (clock, *running):
            task.cancel()
        for task in (clock, *running):
            with suppress(asyncio.CancelledError):
                await task
