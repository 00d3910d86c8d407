"""An engine that runs in a thread of its own, for callers that wait: `asyncio`, a server."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import torch

from alcoda.engine.engine import Engine
from alcoda.engine.request import Completion, Request

T = TypeVar("T")
Listener = Callable[[Completion], None]
"""Is told, in the engine's thread, that a completion has new tokens or has ended. What it raises ends the thread."""


class Background:
    """Runs an engine while there is work, and sleeps while there is none.

    >>> with Background(engine) as background:
    ...     async for completion in background.stream(request):
    ...         print(completion.tokens[-1].token)

    Attributes:
        failure: what ended the thread, if anything did; all that was running has ended with it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._listeners: dict[Completion, Listener] = {}
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._idle_jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._ticked, self._rests = monotonic(), True
        self._change = threading.Condition()
        self._stops = False
        self._thread = threading.Thread(target=self._work, name="alcoda-engine", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_alive(self) -> bool:
        """Whether requests are worked on."""
        return self._thread.is_alive() and self.failure is None

    @property
    def stalled_s(self) -> float:
        """Seconds that a launch or a job has taken so far; 0 where the thread waits for work."""
        return 0.0 if self._rests else monotonic() - self._ticked

    def call(self, job: Callable[[], T], when_idle: bool = False) -> Future[T]:
        """Do something with the model in the engine's thread, between two launches; what comes of it.

        Args:
            when_idle: only while no request waits for a place.

        Raises:
            RuntimeError: the thread has ended.
        """
        future: Future[T] = Future()
        with self._change:
            if self._stops or not self.is_alive:
                raise RuntimeError("the engine has stopped")
            (self._idle_jobs if when_idle else self._jobs).append((job, future))
            self._change.notify()
        return future

    def submit(self, request: Request, listener: Listener) -> list[Completion]:
        """Ask for a request's completions, from any thread.

        Raises:
            UsageError: as `Engine.submit`.
            RuntimeError: the thread has ended.
        """
        with self._change:
            if self._stops or not self.is_alive:
                raise RuntimeError("the engine has stopped")
            made = self.engine.submit(request)
            self._listeners |= dict.fromkeys(made, listener)
            self._change.notify()
        return made

    def cancel(self, completion: Completion) -> None:
        """End a completion before the next launch, from any thread."""
        with self._change:
            self.engine.cancel(completion)
            self._change.notify()

    async def stream(self, request: Request) -> AsyncIterator[Completion]:
        """The request's completions, each whenever it has new tokens or has ended; they are cancelled where the caller
        leaves before that."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Completion]()

        def tell(completion: Completion) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, completion)
            except RuntimeError:  # the caller's loop has ended, and so did it without a word
                self.cancel(completion)

        made = self.submit(request, tell)
        running = set(made)
        try:
            while running:
                completion = await queue.get()
                ended = completion.finish is not None
                if ended and completion not in running:
                    continue  # it was told of more than once
                if ended:
                    running.discard(completion)
                yield completion
        finally:
            for completion in running:
                self.cancel(completion)

    def stop(self, drain: bool = False, timeout_s: float | None = None) -> bool:
        """End the thread; with ``drain`` once all that runs has ended, else all of it is cancelled.

        Args:
            timeout_s: to wait for that; None: as long as it takes.

        Returns:
            Whether it has ended.
        """
        with self._change:
            self._stops = True
            if not drain:
                for completion in list(self._listeners):
                    self.engine.cancel(completion)
            self._change.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            with self.engine.runner.passes():
                while self._wait():
                    self._do_job()
                    if self.engine.has_work:
                        self._tell(self.engine.step() or [])
        except BaseException as error:
            with self._change:  # who asks now is refused
                self.failure = error
                left = list(self._listeners)
            for completion in left:
                completion.finish, completion.error = "error", f"the engine has stopped: {error}"
                with suppress(Exception):  # it may be what failed: the others are told all the same
                    self._tell([completion])
            raise
        finally:
            self._rests = True
            with self._change:
                jobs = [*self._jobs, *self._idle_jobs]
                self._jobs.clear()
                self._idle_jobs.clear()
            for _, future in jobs:
                future.cancel()

    def _wait(self) -> bool:
        """Until there is work; whether there is any more to come."""
        with self._change:
            while not (self.engine.has_work or self._jobs or self._idle_jobs):
                if self._stops:
                    return False
                self._rests = True
                self._change.wait()
            if self._stops and not self.engine.has_work:
                return False
        self._ticked = monotonic()  # before it no longer rests: others read both
        self._rests = False
        return True

    def _do_job(self) -> None:
        """The next job, if one is due. The engine's precision is not the job's: it has its own."""
        with self._change:
            is_free = not self.engine.has_waiting
            jobs = self._jobs or (self._idle_jobs if is_free else None)
            if not jobs:
                return
            job, future = jobs.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            with torch.no_grad(), torch.autocast(self.engine.runner.device.type, enabled=False):
                found = job()
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(found)

    def _tell(self, changed: list[Completion]) -> None:
        for completion in changed:
            ended = completion.finish is not None
            with self._change:  # whoever asked has put its listener there by then
                listener = self._listeners.pop(completion, None) if ended else self._listeners.get(completion)
            if listener is not None:
                listener(completion)
