"""What is left of those who do not go on, at their deadline and at the server's end: of bodies that do not come, of
answers that nobody reads, of an engine that is stuck."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serving import WAIT_S, Held, ask, expire, in_thread, metric, serving, until, web

from alcoda.engine.llm import LM
from alcoda.serve.call import Call
from alcoda.serve.server import Server
from alcoda.serve.worker import LET_GO_S, given_up

MUCH = {
    "prompt": "What",
    "max_tokens": 80,
    "n": 2,
    "temperature": 1,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 5,
    "return_trajectory": True,
}
"""More than the buffers of a connection of `connected` hold."""
SLACK_S = 10.0
"""For a machine that is busy; what is to be told from it takes WAIT_S or more."""


def head(length: int) -> bytes:
    said = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return f"POST /v1/completions HTTP/1.1\r\n{said}".encode()


def post(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return head(len(raw)) + raw


@contextmanager
def connected(made: Server) -> Iterator[socket.socket]:
    """With little room for what is not read."""
    assert made._socket is not None
    made._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the connections that come
    host, port = made.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_S)
        connection.connect((host, int(port)))
        yield connection


def read(connection: socket.socket) -> bytes:
    """All that comes, to the end, or until it is cut."""
    said = b""
    try:
        while part := connection.recv(1 << 16):
            said += part
    except ConnectionResetError:
        pass
    return said


def end(made: Server, times: int = 1) -> float:
    """What a signal does; when, or before."""
    assert made._loop is not None
    began_s = time.monotonic()
    for _ in range(times):
        made._loop.call_soon_threadsafe(made.end)
    return began_s


def ended(made: Server) -> None:
    """Wait until it has."""
    assert made._thread is not None
    made._thread.join(WAIT_S)
    assert not made._thread.is_alive()


def generated(made: Server, connection: socket.socket) -> None:
    """Wait until the engine has ended all of the one answer, whose first byte is read."""
    assert connection.recv(1)
    until(lambda: made.worker.n_open == 0, "it is generated")


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """No test here leaves a traceback."""
    with caplog.at_level(logging.WARNING):
        yield caplog
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert "Cancel" not in caplog.text, "uvicorn had to cancel"


def test_a_body_that_does_not_come_while_the_server_ends(lm: LM, quiet: pytest.LogCaptureFixture) -> None:
    with serving(lm) as made, Held(made) as held, connected(made) as asks, connected(made) as early:
        asks.sendall(post({"prompt": "What", "max_tokens": 2}))
        early.sendall(head(100) + b"{")
        until(lambda: made.worker.n_open == 1 and len(made.worker._bodies) == 1, "both are there")
        began_s = end(made)
        said = early.recv(4096)
        assert time.monotonic() - began_s < SLACK_S
        assert said.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in said and b'"draining"' in said
        with connected(made) as late:
            late.sendall(head(100) + b"{")
            assert b'"draining"' in late.recv(4096)
        held.goes.set()
        assert asks.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_meets_the_deadline(lm: LM) -> None:
    with serving(lm, deadline_s=0.1) as made, connected(made) as connection:
        connection.sendall(head(100) + b"{")
        said = read(connection)
    assert said.startswith(b"HTTP/1.1 408") and b"body_timeout" in said and b"0.1 s" in said


@pytest.mark.parametrize("behind", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_who_does_not_read_is_let_go_at_the_deadline(
    lm: LM, behind: bytes, quiet: pytest.LogCaptureFixture, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not another request waits behind it on the connection."""
    monkeypatch.setattr("alcoda.serve.call.LET_GO_S", 0.05)
    with serving(lm) as made, connected(made) as connection:
        connection.sendall(post({**MUCH, "timeout": 600}) + behind)
        generated(made, connection)
        assert made.worker.n_requests == 1, "it is not sent"
        expire(made, calls[0])
        until(lambda: made.worker.n_requests == 0, "it is let go")
        said = read(connection)
        assert said.startswith(b"TTP/1.1 200") and b"[DONE]" not in said and b"deadline_exceeded" not in said
        ask(made)


def test_who_does_not_read_runs_no_longer_than_the_deadline(lm: LM) -> None:
    with serving(lm) as made, Held(made) as held, connected(made) as connection:
        connection.sendall(post({**MUCH, "timeout": 0.2}))
        until(lambda: made.worker.n_open == 2, "it is let in")
        until(lambda: made.worker.n_requests == 0, "it is given up")
        held.goes.set()
        until(lambda: made.worker.n_open == 0, "its places are free")
        assert metric(made, 'alcoda_completions_total{finish="cancelled"}') == 2


@pytest.mark.parametrize("how", ["limit", "second signal"])
def test_who_does_not_read_does_not_hold_the_end(lm: LM, how: str, quiet: pytest.LogCaptureFixture) -> None:
    with serving(lm, drain_s=0.3 if how == "limit" else 600.0) as made, connected(made) as connection:
        connection.sendall(post(MUCH))
        generated(made, connection)
        assert made.worker.n_requests == 1, "it is not sent"
        began_s = end(made, 1 if how == "limit" else 2)
        ended(made)
        assert made.worker.service is not None
        assert LET_GO_S < time.monotonic() - began_s < LET_GO_S + SLACK_S
        assert not made.worker.service.background.is_alive, "the worker is closed"
        assert b"[DONE]" not in read(connection)
    assert "given up: 1" in quiet.text


def test_a_whole_answer_that_is_not_read_does_not_hold_the_end(lm: LM, quiet: pytest.LogCaptureFixture) -> None:
    with serving(lm, drain_s=0.3) as made, connected(made) as connection:
        connection.sendall(post({**MUCH, "stream": False}))
        generated(made, connection)
        until(lambda: made.worker.n_requests == 0, "it is written")
        began_s = end(made)
        ended(made)
        assert LET_GO_S < time.monotonic() - began_s < LET_GO_S + SLACK_S, "it could be read until then"


@pytest.mark.parametrize("stream", [True, False])
def test_who_reads_slowly_reads_to_the_end(lm: LM, stream: bool, quiet: pytest.LogCaptureFixture) -> None:
    with serving(lm) as made, connected(made) as connection:
        connection.sendall(post({**MUCH, "stream": stream}))
        generated(made, connection)
        end(made)
        time.sleep(2 * LET_GO_S)
        said = read(connection)
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert "given up" not in quiet.text


def test_who_leaves_while_another_request_waits_behind(lm: LM) -> None:
    """Uvicorn tells the last request of a connection that its client has left, and not the one at work."""
    with serving(lm) as made, Held(made) as held:
        with connected(made) as connection:
            connection.sendall(post(MUCH) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: made.worker.n_open == 2, "it is let in")
        until(lambda: made.worker.n_requests == 0, "nobody waits for it")
        held.goes.set()
        until(lambda: made.worker.n_open == 0, "its places are free")
        assert metric(made, 'alcoda_completions_total{finish="cancelled"}') == 2


def test_a_prompt_that_is_scored_does_not_hold_the_deadline(
    lm: LM, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes, begins = threading.Event(), threading.Event()

    def score(*_: Any) -> None:
        begins.set()
        goes.wait(WAIT_S)

    monkeypatch.setattr("alcoda.serve.scoring.score_prompt", score)
    with serving(lm) as made:
        body = {"prompt": "What", "max_tokens": 0, "echo": True, "logprobs": 1, "timeout": 600}
        thread, found = in_thread(lambda: web.post(made.url + "/v1/completions", json=body, timeout=WAIT_S))
        assert begins.wait(WAIT_S)
        expire(made, calls[0])
        thread.join(WAIT_S)  # while it is scored
        goes.set()
        assert found[0].status_code == 408 and found[0].json()["error"]["code"] == "deadline_exceeded"


def test_requests_that_ask_again_do_not_hold_the_end(lm: LM) -> None:
    """Who is refused is not waited for."""
    with serving(lm) as made, Held(made) as held, connected(made) as connection:
        connection.sendall(post({"prompt": "What", "max_tokens": 2}))
        until(lambda: made.worker.n_open == 1, "it is let in")
        end(made)
        until(lambda: made.worker.state == "draining", "it drains")
        with connected(made) as other:
            other.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)  # which is not read
            other.recv(1)
            held.goes.set()
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            until(lambda: made._uvicorn.should_exit, "all that were let in have ended")


def test_an_engine_that_is_stuck_does_not_hold_the_end(
    lm: LM, quiet: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alcoda.serve.worker.STOP_S", 0.1)
    with serving(lm, drain_s=0.1) as made, Held(made) as held:
        with connected(made) as connection:
            connection.sendall(post({"prompt": "What", "max_tokens": 2}))
            until(lambda: made.worker.n_open == 1, "it is let in")
            began_s = end(made)
            assert b'"cancelled"' in read(connection)
        ended(made)
        assert made.worker.service is not None
        assert time.monotonic() - began_s < SLACK_S
        assert made.worker.service.background.is_alive
        held.goes.set()
        until(lambda: not made.worker.service.background.is_alive, "it ends when it can")
        made.worker.n_open = 0  # the loop that would have been told has ended
    assert "left behind" in quiet.text


def test_a_model_that_comes_after_the_end(lm: LM) -> None:
    """Its engine is stopped; no thread fails, which the suite makes an error."""
    from alcoda.serve.settings import Settings

    goes, loads = threading.Event(), threading.Event()

    def load() -> LM:
        loads.set()
        goes.wait(WAIT_S)
        return lm

    made = Server(load, Settings(port=0), {"width": 2})
    starts = threading.Thread(target=made.start)
    starts.start()
    assert loads.wait(WAIT_S)
    until(lambda: made._loop is not None and made._loop.is_running(), "it runs")
    end(made)
    starts.join(WAIT_S)
    assert made.worker.service is None
    goes.set()
    until(lambda: made.worker.service is not None, "it is there")
    until(lambda: not made.worker.service.background.is_alive, "and ends")  # pyrefly: ignore


def test_an_error_keeps_nothing_of_the_last_request() -> None:
    """One that is raised again and again keeps the frames of each time."""
    assert given_up() is not given_up()
