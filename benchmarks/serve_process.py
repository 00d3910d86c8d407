"""A server of one's own, for what measures one: started, waited for, watched, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_S = 120.0
END_S = 60.0


@dataclass
class Served:
    """A running server.

    Attributes:
        url: without ``/v1``.
        said: its line at the start.
        ready_s: from the start of its process until /ready answered 200.
        log: what it writes to stderr.
    """

    process: subprocess.Popen[str]
    url: str
    said: dict[str, Any]
    ready_s: float
    log: Path

    @property
    def resident_mb(self) -> float:
        """Of its process, now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a path."""
        return get(self.url + path)

    def metrics(self) -> dict[str, float]:
        """Of /metrics: every sample by its name with labels, as written there."""
        return read_metrics(self.get("/metrics")[1])

    def complaints(self) -> list[str]:
        """Lines of its log that tell of a fault: tracebacks, errors, tasks whose exception nobody took."""
        words = ("Traceback", "ERROR", "never retrieved", "was destroyed", "Exception")
        return [line for line in self.log.read_text().splitlines() if any(word in line for word in words)]


def get(url: str) -> tuple[int, str]:
    """Status and text; 0 where nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (urllib.error.URLError, OSError):
        return 0, ""


def read_metrics(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


@contextmanager
def serving(model: str = "mini", *options: str, python: Sequence[str] = (sys.executable,)) -> Iterator[Served]:
    """``alcoda serve MODEL`` on a free port while the block runs; RuntimeError where it does not get ready. Its
    Python keeps bytecode, as it does where nobody forbids it."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        began = time.perf_counter()
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*python, "-m", "alcoda", "serve", model, "--port", "0", "--json", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server did not start: {log.read_text()}")
            said = json.loads(line)
            url = said["url"].rstrip("/").removesuffix("/v1")
            while get(url + "/ready")[0] != 200:
                if process.poll() is not None or time.perf_counter() - began > READY_S:
                    raise RuntimeError(f"the server did not get ready: {log.read_text()}")
                time.sleep(0.01)
            yield Served(process, url, said, time.perf_counter() - began, log)
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> int:
    """End a server as a person does, with one signal; its exit code. One that goes on is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -signal.SIGKILL
