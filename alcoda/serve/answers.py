"""From a request to its answer: whole, or in events as it comes."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from alcoda.serve.answer import Answer
from alcoda.serve.call import Call
from alcoda.serve.errors import ApiError, to_json
from alcoda.serve.plan import make_plan, n_choices
from alcoda.serve.protocol import ChatBody, CompletionBody, read
from alcoda.serve.worker import Worker, given_up

LOG = logging.getLogger("alcoda.serve")
LARGE = 1 << 16
"""Bytes of a body, above which it is read beside the event loop."""


async def answer(worker: Worker, request: Request, form: type[CompletionBody] | type[ChatBody]) -> Response:
    """The answer to a request for completions.

    Raises:
        ApiError: it is not answered.
    """
    began_s = monotonic()
    worker.check_ready()
    call: Call | None = None
    watch: asyncio.Task[None] | None = None
    is_streaming = False
    try:
        raw = await request.body()
        body = read(form, raw) if len(raw) < LARGE else await worker.read(lambda: read(form, raw))
        depth = worker.catalogue.choose(body, request.state.tier, worker.n_waiting)
        n = n_choices(body, worker)
        worker.enter(n)
        try:
            plan = await worker.read(lambda: make_plan(body, worker, depth))
        except BaseException:
            worker.leave(n)
            raise
        call = Call(worker, plan, began_s, request.state.cut)
        call.start()
        watch = asyncio.create_task(_watch(call, request.receive))
        await call.score()
        if plan.stream:
            # The first event decides the status: what fails before it is an answer of its own.
            events = Events(call, watch)
            events.first = await events.next()
            is_streaming = True
            return events
        while await call.changes():
            pass
        return Response(Answer(call).whole(), media_type="application/json")
    finally:
        if not is_streaming:
            if watch is not None:
                watch.cancel()
            if call is not None:
                call.close()
                worker.metrics.whole_s.observe(monotonic() - began_s)


async def _watch(call: Call, receive: Receive) -> None:
    """Cancel the call where its client leaves, or the server ends for good."""
    left = asyncio.create_task(_left(receive))
    ends = asyncio.create_task(call.worker.gone())
    try:
        await asyncio.wait({left, ends}, return_when=asyncio.FIRST_COMPLETED)
        call.cancel(given_up())
    finally:
        left.cancel()
        ends.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events, as they come.

    Attributes:
        first: of them, which are there before the status is sent.
    """

    def __init__(self, call: Call, watch: asyncio.Task[None]) -> None:
        super().__init__(
            None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, "text/event-stream; charset=utf-8"
        )
        del self.headers["content-length"]
        self.call, self.watch, self.first = call, watch, b""
        self._made: Answer | None = None
        self._is_over = False

    async def next(self) -> bytes:
        """The next events; none after the last.

        Raises:
            ApiError: as `Call.changes`.
        """
        found = b""
        while not found and not self._is_over:
            changed = await self.call.changes()
            if self._made is None:
                self._made = Answer(self.call)
                # Where nothing is to follow the prompts, nothing changes.
                changed = changed or self.call.choices
                found = self._made.first() if self.call.plan.is_chat else b""
            found += b"".join([self._made.chunk(choice) for choice in changed])
            if self.call.has_ended:
                found += self._made.last()
                self._is_over = True
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            events = self.first
            try:
                while not self._is_over:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    events = await self.next()
            except Exception as error:
                if not isinstance(error, ApiError):
                    LOG.exception("a stream failed")
                    error = ApiError(500, f"{type(error).__name__} in the server; its log says more", code="internal")
                events = b"data: " + to_json(error.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": events, "more_body": False})
        finally:
            self.watch.cancel()
            self.call.close()
            self.call.worker.metrics.whole_s.observe(monotonic() - self.call.began_s)
