"""Owns the model: loads it, keeps the engine's thread, lets requests in, and says how it is."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from alcoda.errors import UsageError, did_you_mean
from alcoda.serve.audit import Audit
from alcoda.serve.errors import ApiError
from alcoda.serve.metrics import Metrics
from alcoda.serve.settings import Settings

if TYPE_CHECKING:
    from alcoda.engine.llm import LM
    from alcoda.engine.request import Completion
    from alcoda.engine.service import Service
    from alcoda.serve.chat import Chat
    from alcoda.serve.tiers import Catalogue

T = TypeVar("T")
LOG = logging.getLogger("alcoda.serve")
State = Literal["new", "loading", "ready", "draining", "failed"]
RETRY_S = 1
LET_GO_S = 1.0
"""In which a client is to take the end of an answer that was given up; then its connection is cut."""
STOP_S = 5.0
"""In which the engine's thread is to end: its launch, or the job between two, goes on for so long at most."""
TOKENIZERS = 2
"""Threads that read prompts."""


class Worker:
    """Of one server.

    Args:
        load: gives the model; is called in a thread.
        options: fields of the engine's `Options`.

    Attributes:
        n_open: completions (and prompts that are scored) that were let in and have not ended.
        n_requests: that are being answered, and came before the server was told to end.
        failure: why it does not work.
    """

    def __init__(self, load: Callable[[], LM], settings: Settings, options: Mapping[str, Any]) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.auditor = Audit(settings.audit, self.metrics)
        self.state: State = "new"
        self.failure: BaseException | None = None
        self.n_open = self.n_requests = 0
        self.service: Service | None = None
        self.catalogue: Catalogue
        self.chat: Chat
        self.loaded = asyncio.Event()
        """Set once the model is there, or has failed to be."""
        self._load, self._options = load, options
        self._pool = ThreadPoolExecutor(TOKENIZERS, "alcoda-prompts")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posts: deque[Callable[[], None]] = deque()
        self._is_posted = False
        self._free = asyncio.Event()
        self._gone = asyncio.Event()
        self._bodies: set[asyncio.Timeout] = set()

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load, within the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.state = "loading"
        self._loader = threading.Thread(target=self._open, name="alcoda-load", daemon=True)
        self._loader.start()

    def _open(self) -> None:
        try:
            self._make()
        except BaseException as error:
            self.failure, state = error, "failed"
        else:
            state = "ready"
        assert self._loop is not None
        if self._gone.is_set() and self.service is not None:  # the server ended meanwhile, and found none to stop
            self.service.background.stop(timeout_s=STOP_S)
        with suppress(RuntimeError):  # its loop too
            self._loop.call_soon_threadsafe(self._opened, state)

    def _make(self) -> None:
        lm = self._load()
        if self.settings.audit and lm.decodes_only:
            raise UsageError(
                "audit: texts are read again by the whole model, and this one decodes only; leave out one of the two"
            )
        from alcoda.engine.options import Options
        from alcoda.model.cache_policy import pick_cache
        from alcoda.serve.chat import Chat
        from alcoda.serve.tiers import Catalogue

        name = self.settings.name or lm.loaded.run.path.resolve().name
        most = lm.n_loops if self.settings.loops is None else lm.model.config.check_loops(self.settings.loops)
        if most < lm.n_loops:
            raise UsageError(
                f"loops={most}: the model's own depth is {lm.n_loops}, which requests get that ask for none; give "
                f"{lm.n_loops} or more, and for less depth a tier (default_tier of --policy)"
            )
        self.catalogue = Catalogue(lm, name, self.settings.policy, most)
        self.chat = Chat(lm.tokenizer, lm.loaded.chat_template)
        lm.tokenizer.decode_bytes([0])  # its tables are made at the first use
        asked = {name: value for name, value in self._options.items() if value is not None}
        names = {field.name for field in fields(Options)}
        for unknown in sorted(asked.keys() - names):
            raise UsageError(f"engine: unknown key {unknown!r}{did_you_mean(unknown, names)}")
        options = Options(**asked | {"cache": pick_cache(asked.get("cache"), lm.model.config)})
        service = lm.service(options, max(most, *self.catalogue.loops.values()))
        service.__enter__()
        self.service = service
        self.metrics.watch(self)

    def notes(self) -> list[str]:
        """What whoever started the server may not expect of it."""
        assert self.service is not None
        seq_len = self.lm.model.config.seq_len
        notes = [f"no tiers: {self.catalogue.note}"] if self.catalogue.note else []
        if self.context < seq_len:
            notes.append(
                f"requests of more than {self.context} tokens with what is to follow are refused, though the model's "
                f"context holds {seq_len}: there is room for keys of no more (--cache-tokens)"
            )
        return notes

    @property
    def context(self) -> int:
        """Tokens of a prompt and what follows, at most."""
        assert self.service is not None
        room = self.service.background.engine.runner.arena.n_tokens
        return min(self.lm.model.config.seq_len, room + 1)  # the last token leaves no keys

    def _opened(self, state: State) -> None:
        self.state = state if self.state == "loading" else self.state
        self.loaded.set()

    async def drain(self, seconds: float) -> None:
        """Let nobody in any more, and wait for those who are; after so many seconds `hurry`."""
        self.state = "draining"
        loop = asyncio.get_running_loop()
        for body in self._bodies:
            if not body.expired():
                body.reschedule(loop.time())
        loop.call_later(seconds, self.hurry)
        while self.n_requests and not self._gone.is_set():
            self._free.clear()
            await self._free.wait()
        if self.n_requests:
            LOG.warning("requests that had not ended and are given up: %d", self.n_requests)

    def hurry(self) -> None:
        """End what still runs."""
        self._gone.set()
        self._free.set()

    @property
    def is_left(self) -> bool:
        """Whether a thread of it still runs, once it is closed."""
        return self._loader.is_alive() or (self.service is not None and self.service.background.is_alive)

    async def close(self) -> None:
        """End the engine's thread; what still runs is cancelled."""
        self.state = "draining"
        self.hurry()
        if self.service is not None and not await asyncio.to_thread(self.service.background.stop, timeout_s=STOP_S):
            LOG.error("the engine's thread has not ended within %g s and is left behind", STOP_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- how it is ----------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether it works, or may come to."""
        return self.state != "failed" and (self.service is None or self.service.background.is_alive)

    def check_ready(self) -> None:
        """ApiError (503) where requests are not taken, with the reason."""
        self.check_not_ending()
        if self.state != "ready":
            text = "the model could not be loaded" if self.state == "failed" else "the model is being loaded"
            raise ApiError(503, text, code=self.state, headers={"Retry-After": str(RETRY_S)})
        assert self.service is not None
        if not self.service.background.is_alive:
            raise ApiError(503, "the engine has stopped", code="stopped")
        if self.service.background.stalled_s > self.settings.stall_s:
            raise ApiError(503, "the engine does not go on", code="stalled", headers={"Retry-After": str(RETRY_S)})

    def check_not_ending(self) -> None:
        """ApiError (503) where the server ends."""
        if self.state == "draining":
            raise ApiError(503, "the server is ending", code="draining", headers={"Retry-After": str(RETRY_S)})

    @property
    def lm(self) -> LM:
        """The model."""
        assert self.service is not None, "it is there once the server is ready"
        return self.service.lm

    @property
    def places(self) -> int:
        """Completions that run at one time."""
        return 0 if self.service is None else self.service.background.engine.places

    @property
    def n_waiting(self) -> int:
        """Completions that wait for a place."""
        return max(0, self.n_open - self.places)

    # -- requests -----------------------------------------------------------------------------------------------------

    def enter(self, n: int) -> None:
        """Let in ``n`` completions; ApiError (429) where too many wait already."""
        room = self.places + self.settings.max_waiting
        if n > room:
            raise ApiError(400, f"{n} completions in one request: this server has room for {room}", param="n")
        if self.n_open + n > room:
            raise ApiError(
                429,
                f"{self.n_waiting} completions wait already, of at most {self.settings.max_waiting}: ask again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_S)},
            )
        self.n_open += n

    def leave(self, n: int = 1) -> None:
        """So many have ended."""
        self.n_open -= n

    @asynccontextmanager
    async def body(self, seconds: float) -> AsyncGenerator[None]:
        """A request's body is read. TimeoutError where it is not there in time, or as soon as the server ends."""
        async with asyncio.timeout(0 if self.state == "draining" else seconds) as limit:
            self._bodies.add(limit)
            try:
                yield
            finally:
                self._bodies.discard(limit)

    @contextmanager
    def request(self) -> Generator[None]:
        """One more request is being answered, to the last byte that is sent."""
        if self.state == "draining":  # it is refused, and those who ask again and again do not keep the server
            yield
            return
        self.n_requests += 1
        try:
            yield
        finally:
            self.n_requests -= 1
            if not self.n_requests:
                self._free.set()

    def audit(self, completion: Completion) -> None:
        """A completion has ended: it may be read again at full depth."""
        if self.settings.audit and self.service is not None:
            self.auditor.offer(self.lm, self.service.background, completion, self.post)

    async def gone(self) -> None:
        """Once what still runs is to end."""
        await self._gone.wait()

    async def read(self, job: Callable[[], T]) -> T:
        """``job`` (texts into tokens) beside the event loop.

        Raises:
            ApiError: the server ended before its turn came.
        """

        def unless_gone() -> T:
            if self._gone.is_set():
                raise given_up()
            return job()

        return await asyncio.get_running_loop().run_in_executor(self._pool, unless_gone)

    def post(self, act: Callable[[], None]) -> None:
        """Do something in the event loop; from the engine's thread. All that a launch posts wakes the loop once."""
        self._posts.append(act)
        if not self._is_posted:
            self._is_posted = True
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop has ended: nobody is left to be told
                self._posts.clear()

    def _flush(self) -> None:
        self._is_posted = False
        try:
            while self._posts:
                self._posts.popleft()()
        finally:
            if self._posts:  # one failed: the others are done all the same
                self.post(lambda: None)


def given_up() -> ApiError:
    """What the request of a client is that has left, or of a server that ends. (A new one each: an error that is raised
    keeps what it was raised in.)"""
    return ApiError(503, "the client has left, or the server ends", code="cancelled")


def new_id(prefix: str) -> str:
    """Of an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"


def described(worker: Worker) -> list[dict[str, Any]]:
    """The models, as /v1/models lists them."""
    catalogue = worker.catalogue
    return [
        {
            "id": name,
            "object": "model",
            "created": worker.metrics.created,
            "owned_by": "alcoda",
            "alcoda": {
                "tier": tier,
                "n_loops": catalogue.loops.get(tier or "", catalogue.n_loops),
                "mean_loops": catalogue.mean_loops.get(tier or "", float(catalogue.n_loops)),
                "max_loops": catalogue.max_loops,
                "context": worker.context,
                "is_chat": worker.chat.has_template,
            },
        }
        for name, tier in catalogue.models().items()
    ]
