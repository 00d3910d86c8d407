"""Who is let in, how long it may take, and what is left of those who leave."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import WAIT_S, Held, ask, expire, in_thread, metric, serving, until, web

from alcoda.engine.llm import LM
from alcoda.serve.call import Call
from alcoda.serve.server import Server

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "What", "max_tokens": 80, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def small(lm: LM) -> Iterator[Server]:
    """Two run and one waits."""
    with serving(lm, {"width": 2, "places": 2}, max_waiting=1, max_n=2) as made:
        yield made


def test_a_full_queue(small: Server) -> None:
    with Held(small):
        held = [in_thread(lambda: web.post(small.url + COMPLETIONS, json=LONG, timeout=WAIT_S)) for _ in range(3)]
        until(lambda: small.worker.n_open == 3, "three are let in")
        assert metric(small, "alcoda_waiting") + metric(small, "alcoda_running") == 3
        found = web.post(small.url + COMPLETIONS, json=LONG)
        assert found.status_code == 429 and found.headers["retry-after"] == "1"
        assert found.json()["error"]["code"] == "queue_full"
    for thread, _ in held:
        thread.join()
    assert [answers[0].status_code for _, answers in held] == [200] * 3
    assert web.post(small.url + COMPLETIONS, json={**LONG, "prompt": ["a"] * 4}).status_code == 400, "never any room"


def test_the_openai_client_asks_again(small: Server) -> None:
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=4) as client, Held(small) as held:
        threads = [in_thread(lambda: web.post(small.url + COMPLETIONS, json=LONG, timeout=WAIT_S)) for _ in range(3)]
        until(lambda: small.worker.n_open == 3, "three are let in")
        asks, found = in_thread(lambda: client.completions.create(model="tiny", prompt="a", max_tokens=2))
        until(lambda: metric(small, 'alcoda_requests_total{code="429",endpoint="/v1/completions"}') >= 1, "refused")
        held.goes.set()
        for thread in (asks, *(thread for thread, _ in threads)):
            thread.join()
    assert found[0].usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(small: Server, stream: bool) -> None:
    with Held(small):
        body = {**LONG, "timeout": 0.05, "stream": stream}
        found = web.post(small.url + COMPLETIONS, json=body, timeout=WAIT_S)
        assert found.status_code == 408, found.text
        assert found.json()["error"]["code"] == "deadline_exceeded" and found.headers["x-should-retry"] == "false"
    until(lambda: small.worker.n_open == 0, "its place is free")


def test_a_deadline_of_the_server(lm: LM) -> None:
    with serving(lm, deadline_s=0.05) as made, Held(made):
        found = web.post(made.url + COMPLETIONS, json={**LONG, "timeout": 50}, timeout=WAIT_S)
        assert found.status_code == 408 and "0.05 s" in found.json()["error"]["message"]


def test_a_deadline_in_a_stream_ends_it_with_an_error(small: Server, calls: list[Call]) -> None:
    with Held(small, launches=12):
        body = {**LONG, "timeout": 600, "stream": True}
        with web.stream("POST", small.url + COMPLETIONS, json=body, timeout=WAIT_S) as answer:
            every = answer.iter_lines()
            lines = [next(every)]
            expire(small, calls[0])
            lines += [line for line in every if line]
    assert answer.status_code == 200 and '"deadline_exceeded"' in lines[-1] and "[DONE]" not in "".join(lines)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_a_place_running_or_waiting(small: Server, stream: bool) -> None:
    async def leaves() -> None:
        async with httpx.AsyncClient(base_url=small.url, timeout=WAIT_S) as client:
            tasks = [asyncio.create_task(client.post(COMPLETIONS, json={**LONG, "stream": stream})) for _ in range(3)]
            while small.worker.n_open < 3:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    before = metric(small, 'alcoda_completions_total{finish="cancelled"}')
    with Held(small):
        asyncio.run(leaves())
        until(lambda: small.worker.n_requests == 0, "nobody waits for an answer")
    until(lambda: small.worker.n_open == 0, "all places are free")
    assert metric(small, 'alcoda_completions_total{finish="cancelled"}') == before + 3
    assert metric(small, "alcoda_cache_tokens_used") == 0


def test_who_leaves_in_the_middle_of_a_stream(small: Server) -> None:
    with web.stream("POST", small.url + COMPLETIONS, json={**LONG, "stream": True}, timeout=WAIT_S) as answer:
        next(answer.iter_lines())
    until(lambda: small.worker.n_open == 0 and small.worker.n_requests == 0, "its place is free")


def test_half_a_body(small: Server) -> None:
    """Who says more than comes is no request, and holds nothing."""
    host, port = small.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    ask(small, max_tokens=1)
    until(lambda: small.worker.n_requests == 0, "it holds nothing")


def test_ending_lets_requests_end(lm: LM) -> None:
    with serving(lm) as made:
        with Held(made):
            thread, found = in_thread(lambda: web.post(made.url + COMPLETIONS, json=LONG, timeout=WAIT_S))
            until(lambda: made.worker.n_open == 1, "it is let in")
            assert made._loop is not None
            made._loop.call_soon_threadsafe(made.end)
            until(lambda: made.worker.state == "draining", "it drains")
            assert web.get(made.url + "/ready").status_code == 503
            assert web.get(made.url + "/health").status_code == 200
            late = web.post(made.url + COMPLETIONS, json=LONG)
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
        thread.join()
    assert found[0].status_code == 200 and found[0].json()["usage"]["completion_tokens"] == 80


@pytest.mark.parametrize("how", ["too long", "a second signal"])
def test_ending_at_once(lm: LM, how: str) -> None:
    with serving(lm, drain_s=0.05 if how == "too long" else 600.0) as made, Held(made) as held:
        thread, found = in_thread(lambda: web.post(made.url + COMPLETIONS, json=LONG, timeout=WAIT_S))
        until(lambda: made.worker.n_open == 1, "it is let in")
        assert made._loop is not None
        made._loop.call_soon_threadsafe(made.end)
        if how == "a second signal":
            made._loop.call_soon_threadsafe(made.end)
        thread.join(WAIT_S)
        held.goes.set()
    assert not found or found[0].status_code == 503


def test_not_ready_until_the_model_is_there(lm: LM) -> None:
    from alcoda.serve.settings import Settings

    go = threading.Event()

    def load() -> LM:
        go.wait(WAIT_S)
        return lm

    made = Server(load, Settings(port=0), {"width": 2})
    starts, _ = in_thread(made.start)
    until(lambda: bool(made.url), "the port is open")
    found = web.get(made.url + "/ready", timeout=WAIT_S)
    assert found.status_code == 503 and found.json()["error"]["code"] == "loading"
    assert web.post(made.url + COMPLETIONS, json=LONG).status_code == 503
    assert web.get(made.url + "/v1/models").status_code == 503
    assert web.get(made.url + "/health").status_code == 200
    assert "alcoda_ready 0.0" in web.get(made.url + "/metrics").text
    go.set()
    starts.join(WAIT_S)
    assert web.get(made.url + "/ready").json()["status"] == "ready"
    ask(made)
    made.stop()


def test_an_engine_that_does_not_go_on(lm: LM) -> None:
    with serving(lm, stall_s=0.05) as made:
        with Held(made):
            thread, found = in_thread(lambda: web.post(made.url + COMPLETIONS, json=LONG, timeout=WAIT_S))
            until(lambda: web.get(made.url + "/ready").status_code == 503, "it is not ready")
            assert web.get(made.url + "/ready").json()["error"]["code"] == "stalled"
            assert web.get(made.url + "/health").status_code == 200
        thread.join()
        assert found[0].status_code == 200
        until(lambda: web.get(made.url + "/ready").status_code == 200, "it is ready again")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_has_ended(lm: LM) -> None:
    made = Server(lambda: lm, _settings(), {"width": 2})
    with made:
        assert made.worker.service is not None
        made.worker.service.background.engine.step = lambda: 1 / 0  # pyrefly: ignore
        found = web.post(made.url + COMPLETIONS, json=LONG, timeout=WAIT_S)
        assert found.status_code == 500 and found.json()["error"]["code"] == "engine_error"
        assert web.get(made.url + "/health").status_code == 503, "the process is to be started anew"
        assert web.post(made.url + COMPLETIONS, json=LONG).status_code == 503


def _settings() -> Any:
    from alcoda.serve.settings import Settings

    return Settings(port=0)


@pytest.mark.parametrize(("room", "is_told"), [(94, True), (95, False), (None, False)])
def test_room_for_less_than_a_context(lm: LM, room: int | None, is_told: bool) -> None:
    with serving(lm, {"cache_tokens": room}) as made:
        assert [note[:35] for note in made.worker.notes()] == ["requests of more than 95 tokens wit"] * is_told
        (one, *_) = web.get(f"{made.url}/v1/models").json()["data"]
        assert one["alcoda"]["context"] == (95 if is_told else 96)
        body = {"prompt": [3] * 50, "temperature": 0, "ignore_eos": True}
        for n, fits in ((45, True), (46, not is_told)):  # as it is told: up to 95 tokens in all
            answer = web.post(f"{made.url}/v1/completions", json={**body, "max_tokens": n})
            assert answer.status_code == (200 if fits else 400), answer.text
        if is_told:
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
            assert "this server's cache holds 95: shorten prompt, or lower max_tokens to 45" in error["message"]
        # A chat goes on for as long as there is room; what is only scored needs none.
        found = ask(made, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], ignore_eos=True)
        assert found["usage"]["total_tokens"] == (95 if is_told else 96)
        scored = {"prompt": [3] * 96, "max_tokens": 0, "echo": True, "logprobs": 1}
        assert web.post(f"{made.url}/v1/completions", json=scored).status_code == 200
