"""What is told where nobody reads it any more: work goes on."""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Iterator

import pytest

from alcoda import progress, show
from alcoda.training.stop import stop_on_signal


@pytest.fixture
def stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """stderr is a pipe or a terminal; the descriptor at its other end."""
    other, ours = pty.openpty() if request.param == "terminal" else os.pipe()
    with os.fdopen(ours, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        yield other


@pytest.mark.parametrize("stderr", ["pipe", "terminal"], indirect=True)
def test_it_is_said_and_then_nobody_listens(stderr: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    progress.say("heard")
    assert os.read(stderr, 100).startswith(b"heard")
    with progress.bar("training", 10) as advance:
        advance(1, "loss 1.0")
        time.sleep(0.2)
        assert b"training" in os.read(stderr, 10_000)
        os.close(stderr)
        advance(1, "loss 0.9")
        time.sleep(0.2)  # a bar is drawn ten times a second
    progress.say("unheard")
    show.say("unheard")


@pytest.mark.parametrize("stderr", ["pipe"], indirect=True)
def test_a_signal_stops_where_nobody_listens(stderr: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(stderr)

    def write(descriptor: int, text: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", write)
    with stop_on_signal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
