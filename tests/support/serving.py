"""Servers of small models with random weights, in this process, and what the tests ask them."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from loaded import loaded

from alcoda.depth.record import fingerprint
from alcoda.depth.rules import StateChange
from alcoda.depth.tiers import Measured, Tier, Tiers
from alcoda.depth.trajectory import trace
from alcoda.engine.llm import LM
from alcoda.serve.call import Call
from alcoda.serve.server import Server
from alcoda.serving import server
from alcoda.training.run import RunFolder

NAME = "tiny"
ENGINE = {"width": 4, "places": 4}
WAIT_S = 60.0
web = httpx.Client(timeout=WAIT_S, limits=httpx.Limits(max_keepalive_connections=0))
"""To ask with: to make one takes longer than an answer."""


def tiny(folder: Path, **fields: Any) -> LM:
    """A model with calibrated tiers: state change, at thresholds by which tokens leave at all loops."""
    lm = loaded(**{"seq_len": 96, **fields})
    run = RunFolder(folder / NAME)
    run.path.mkdir()
    lm = LM(dataclasses.replace(lm.loaded, run=run))
    ids_1T = torch.tensor([lm.tokenizer.encode("What the engine reads, it reads as the tests do.").tolist()])
    change_TR = trace(lm.model, ids_1T, lm.n_loops, ids_1T.roll(-1, 1), ["state_change"])["state_change"][0]
    low, high = (float(change_TR[:, 1:].quantile(q)) for q in (0.3, 0.7))
    Tiers(
        model=fingerprint(lm.model),
        tokenizer=lm.tokenizer.sha256,
        train_step=7,
        n_loops=lm.n_loops,
        imitates=None,
        data="calib",
        held_out_data="valid",
        flops_per_token=1.0,
        tiers=(_tier("fast", high, 2.0), _tier("balanced", low, 3.0), _tier("exact", 0.0, float(lm.n_loops))),
    ).save(run.exits_json)
    return lm


def _tier(name: str, threshold: float, mean_loops: float) -> Tier:
    one = Measured(
        n_tokens=1,
        excess=0.0,
        excess_low=0.0,
        excess_high=0.0,
        bits_per_byte=1.0,
        mean_loops=mean_loops,
        mean_loops_low=mean_loops,
        mean_loops_high=mean_loops,
        flops_per_token=1.0,
    )
    return Tier(
        name=name,
        tolerance=0.0,
        rule=StateChange(threshold=threshold),
        calib=one,
        held_out=one,
        uniform_loops=1,
        uniform_held_out=one,
    )


@contextmanager
def serving(lm: LM, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Server]:
    """A server of ``lm``; nothing is held by its engine once it has ended."""
    made = server(lm, port=0, engine={**ENGINE, **(engine or {})}, **settings)
    with made:
        yield made
    assert made.worker.n_open == 0 and made.worker.n_requests == 0
    assert made.worker.service is not None
    made.worker.service.background.engine.check_idle()


class Held:
    """Holds a server's engine before each launch, after so many ``launches``, until it is let go."""

    def __init__(self, made: Server, launches: int = 0) -> None:
        assert made.worker.service is not None
        self.engine = made.worker.service.background.engine
        self.goes, self._step, self._left = threading.Event(), self.engine.step, launches

    def __enter__(self) -> Held:
        def step() -> Any:
            if self._left:
                self._left -= 1
            else:
                self.goes.wait(WAIT_S)
            return self._step()

        self.engine.step = step  # pyrefly: ignore
        return self

    def __exit__(self, *_: object) -> None:
        self.goes.set()
        self.engine.step = self._step  # pyrefly: ignore


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that comes by itself."""
    ends_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends_s, what
        time.sleep(0.01)


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """What it gives, once the thread has ended; nothing where the connection was cut."""
    found: list[Any] = []

    def work() -> None:
        with suppress(httpx.HTTPError):
            found.append(act())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every request that is let in, to be given up when a test says so (`expire`) and not after some time."""
    found: list[Call] = []

    class Noted(Call):
        def __init__(self, *how: Any) -> None:
            super().__init__(*how)
            found.append(self)

    monkeypatch.setattr("alcoda.serve.answers.Call", Noted)
    return found


def expire(made: Server, call: Call) -> None:
    """Its deadline has come."""
    assert made._loop is not None
    made._loop.call_soon_threadsafe(call._expire)


def ask(made: Server, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """A whole answer, which is one."""
    body = {"prompt": "What", "max_tokens": 8, "temperature": 0, **body} if path == "/v1/completions" else body
    found = web.post(made.url + path, json=body, timeout=WAIT_S)
    assert found.status_code == 200, found.text
    return found.json()


def events(made: Server, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, without the word that ends it."""
    body = {"prompt": "What", "max_tokens": 8, "temperature": 0, **body} if path == "/v1/completions" else body
    with web.stream("POST", made.url + path, json={**body, "stream": True}, timeout=WAIT_S) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200, lines
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def metric(made: Server, name: str) -> float:
    """One number of /metrics."""
    lines = web.get(made.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))
