"""What is told where nobody reads it any more: work goes on."""

from __future__ import annotations

import os
import pty
import signal
import time

import pytest

from alcoda import progress, show
from alcoda.training.stop import stop_on_signal


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_it_is_said_and_then_nobody_listens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    reader, ours = os.pipe() if kind == "pipe" else pty.openpty()
    with os.fdopen(ours, "w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        progress.say("heard")
        assert os.read(reader, 100).startswith(b"heard")
        with progress.bar("training", 10) as advance:
            advance(1, "loss 1.0")
            time.sleep(0.2)
            assert b"training" in os.read(reader, 10_000)
            os.close(reader)
            advance(1, "loss 0.9")
            time.sleep(0.2)  # a bar is drawn ten times a second
        progress.say("unheard")
        show.say("unheard")


def test_a_signal_stops_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, text: bytes) -> int:
        raise BrokenPipeError

    with monkeypatch.context() as patch, stop_on_signal() as stop:
        patch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
