"""A server that listens: in this process and thread (`Server.run`), or beside it (``with``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from alcoda.errors import RunError, UsageError
from alcoda.serve.app import make_app
from alcoda.serve.settings import Settings
from alcoda.serve.worker import LET_GO_S, Worker

if TYPE_CHECKING:
    from alcoda.engine.llm import LM

LOG = logging.getLogger("alcoda.serve")
BACKLOG = 2048


class _Uvicorn(uvicorn.Server):
    """Signals are `Server`'s."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Protocol(AutoHTTPProtocol):
    """Uvicorn's, with two things more. A request can end its connection (``state["cut"]``): ASGI has no word for a
    client that does not read. And of requests that wait behind each other the one at work is told when the client has
    left; uvicorn tells only the last."""

    _at_work: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, "cut": transport.abort}  # pyrefly: ignore

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:  # not in uvicorn 0.36: there it is as it was
        self._at_work = cycle
        super()._start_asgi_task(cycle, app)  # pyrefly: ignore

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._at_work is not None and not self._at_work.response_complete:
            self._at_work.disconnected = True
            self._at_work.message_event.set()


class Server:
    """One model behind HTTP.

    >>> with alcoda.server("mini", port=0) as server:
    ...     openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    Args:
        load: gives the model; called in a thread once the port is open.
        options: fields of the engine's `Options`.

    Attributes:
        url: where it listens.
    """

    def __init__(self, load: Callable[[], LM], settings: Settings, options: Mapping[str, Any]) -> None:
        self.settings, self._load, self._options = settings, load, options
        self.worker: Worker
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._socket: socket.socket | None = None
        self._n_signals = 0

    def open(self) -> None:
        """Take the port.

        Raises:
            RunError: it is taken, or not ours to take.
            UsageError: no such host.
        """
        host, port = self.settings.host, self.settings.port
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise UsageError(f"--host {host}: {error.strerror or error}") from None
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
        except OSError as error:
            found.close()
            raise RunError(
                f"{host} port {port} cannot be listened at: {error.strerror}. Choose another with --port (0: any that "
                "is free)"
            ) from None
        found.setblocking(False)
        bound = found.getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.url, self._socket = f"http://{shown}:{bound[1]}", found

    # -- in this thread -----------------------------------------------------------------------------------------------

    def run(self, told: Callable[[Server], None] = lambda server: None) -> None:
        """Until a signal ends it: the first lets requests end, the second does not.

        Args:
            told: is called once requests are taken.

        Raises:
            UsageError, RunError: as `open`; and where the model cannot be loaded.
        """
        if self._socket is None:
            self.open()
        signals = (signal.SIGTERM, signal.SIGINT)
        # Not the loop's own handlers: they go before the loop does, and a signal then would kill what ends well.
        before = {number: signal.signal(number, self.on_signal) for number in signals}
        try:
            self._run(told)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._failure is not None:
            raise self._failure

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """A handler: before it runs an interrupt, then `end`, afterwards nothing."""
        if self._loop is None:
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._end_aloud)

    def _end_aloud(self) -> None:
        """`end`; whoever sits before it is told why it takes a while."""
        n, drain_s = self.worker.n_requests, self.settings.drain_s
        if not self._n_signals and n and drain_s:
            LOG.warning("requests that may go on for %g s: %d; a second signal ends them at once", drain_s, n)
        self.end()

    def _run(self, told: Callable[[Server], None]) -> None:
        # uvloop and httptools where they are installed: for the loop's thread a third less work a token.
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(self._serve(told))

    async def _serve(self, told: Callable[[Server], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.worker = Worker(self._load, self.settings, self._options)
        config = uvicorn.Config(
            make_app(self.worker),
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            http=_Protocol,
        )
        self._uvicorn = _Uvicorn(config)
        opened = asyncio.create_task(self._opened(told))
        try:
            assert self._socket is not None
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            opened.cancel()
            self._socket.close()  # pyrefly: ignore

    async def _opened(self, told: Callable[[Server], None]) -> None:
        await self.worker.loaded.wait()
        if self.worker.failure is not None:
            self._failure = self.worker.failure
            self.end()
            self.end()  # there is nobody to wait for
        elif self.worker.state == "ready":
            told(self)

    def end(self) -> None:
        """Let requests end, then stop; a second time: stop now. In the event loop."""
        self._n_signals += 1
        if self._n_signals == 1:
            self._ending = asyncio.ensure_future(self._end())
        else:
            self.worker.hurry()

    async def _end(self) -> None:
        await self.worker.drain(self.settings.drain_s)
        # It waits for all that is written to be read, without an end, and then closes the worker.
        self._uvicorn.should_exit = True
        await self.worker.gone()
        await asyncio.sleep(LET_GO_S)
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()

    # -- beside it ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serve in a thread; returns once requests are taken. Raises as `run`."""
        self.open()
        ready = threading.Event()

        def work() -> None:
            try:
                self._run(lambda server: ready.set())
            except BaseException as error:
                self._failure = error
            finally:
                ready.set()

        self._thread = threading.Thread(target=work, name="alcoda-serve", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def stop(self) -> None:
        """Let requests end, and stop."""
        if self._thread is None or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.end)
        self._thread.join()
        self._thread = None

    def described(self) -> dict[str, Any]:
        """For scripts: the line that is printed when it is ready."""
        return {"url": self.url, "models": list(self.worker.catalogue.models()), "pid": os.getpid()}
