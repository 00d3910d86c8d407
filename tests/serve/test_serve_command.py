"""`alcoda serve` as a process: its line for scripts, its signals, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from foreign import OURO, ouro_weights, write_folder
from serving import web
from typer.testing import CliRunner

import alcoda
from alcoda.cli import app
from alcoda.errors import RunError, UsageError

ROOT = Path(__file__).parents[2]


@contextmanager
def started(*arguments: str, key: str | None = None) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process, and the line that it prints once it is ready."""
    command = [sys.executable, "-m", "alcoda", "serve", "mini", "--port", "0", "--json", *arguments]
    environment = {**os.environ, **({} if key is None else {"ALCODA_API_KEY": key})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def test_a_process_from_its_start_to_its_end() -> None:
    with started("--width", "4", "--wavefront", "2", key="secret") as (process, told):
        assert told["models"] == ["mini", "mini:fast", "mini:balanced", "mini:exact"] and told["pid"] == process.pid
        assert told["url"].startswith("http://127.0.0.1:")
        body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
        assert web.post(told["url"] + "/v1/completions", json=body, timeout=60).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        found = web.post(told["url"] + "/v1/completions", json=body, headers=headers, timeout=60).json()
        assert found["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said on stderr."""
    _, said = process.communicate(timeout=30)
    return process.returncode, said


@pytest.mark.parametrize(
    "first", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_two_signals_end_it_at_once(first: signal.Signals) -> None:
    with started("--drain", "600") as (process, told):
        body = {"prompt": ["Once"] * 16, "n": 8, "max_tokens": 120, "ignore_eos": True, "stream": True}
        with web.stream("POST", told["url"] + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # where none holds it, the connection is closed
            assert "data: " in next(lines)
            process.send_signal(first)
            while web.get(told["url"] + "/ready").status_code == 200:
                pass
            began_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code, said = ended(process)
            assert code == 0 and said.splitlines() == [
                "requests that may go on for 600 s: 1; a second signal ends them at once",
                "requests that had not ended and are given up: 1",
            ]
            assert time.monotonic() - began_s < 20, "the 600 s are not waited for"


def test_signals_while_it_ends_change_nothing() -> None:
    with started() as (process, _):
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert ended(process) == (0, "")


def test_a_signal_while_the_model_loads() -> None:
    command = [sys.executable, "-m", "alcoda", "serve", "mini", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "loading mini" in line
        url = line.split(": loading")[0]
        assert web.get(url + "/health", timeout=60).status_code == 200  # it watches for signals by then
        process.send_signal(signal.SIGTERM)
        code, said = ended(process)
        assert code == 0 and all(": ready" in line for line in said.splitlines()), "it may have been quicker"
    finally:
        process.kill()
        process.communicate()


def refused(*arguments: str) -> UsageError | RunError:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, UsageError | RunError), result.output
    return result.exception


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"port {port} cannot be listened at" in str(refused("mini", "--port", port))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/run",), "no/such/run"),
        (("mini", "--host", "no.such.host.invalid"), "--host no.such.host.invalid"),
        (("mini", "--policy", "no.yaml"), "--policy no.yaml"),
        (("mini", "--deadline", "inf"), "deadline_s: "),
        (("mini", "--loops", "3"), "loops=3: the model's own depth is 8"),
        (("mini", "--max-body", "much"), "--max-body much"),
        (("mini", "--name", "a:b"), "name: "),
        (("mini", "--api-key", "a b"), "api_keys"),
        (("mini", "--cache", "none"), "cache"),
        (("mini", "--checkpoint", "step_1"), "step_1"),
        (("mini", "--width", "100000000"), "width=100,000,000: launches of so many tokens take"),
        (("mini", "--cache-tokens", "100000000000"), "cache_tokens=100,000,000,000: keys of so many tokens take"),
        (("mini", "--allow-origin", "a.example"), "allow_origins"),
    ],
)
def test_what_cannot_be_served(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in str(refused(*arguments, "--port", "0"))


def test_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before weights are read, with what is missing and where it goes."""
    folder = write_folder(tmp_path / "theirs", OURO, ouro_weights())
    imported = alcoda.import_model(folder, tmp_path / "run").path
    monkeypatch.setattr("alcoda.engine.llm.load", lambda *_, **how: pytest.fail("weights were read"))
    for path in (folder, imported):
        said = str(refused(str(path), "--port", "0"))
        assert said.startswith(f"{path} has no tokenizer") and "tokenizer.json beside its weights" in said
    monkeypatch.undo()
    with pytest.raises(UsageError, match="has no tokenizer"), alcoda.server(alcoda.load(folder), port=0):
        pass


def test_a_folder_of_another_project_is_served(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", OURO, ouro_weights(), tokenizer=True)
    with alcoda.server(folder, port=0, engine={"width": 2}) as made:
        body = {"prompt": "a", "max_tokens": 2}
        assert web.post(made.url + "/v1/completions", json=body, timeout=60).json()["model"] == "theirs"


def test_an_option_that_the_engine_has_not(lm: alcoda.LM) -> None:
    with (
        pytest.raises(UsageError, match="engine: unknown key 'wdth'; did you mean 'width'"),
        alcoda.server(lm, port=0, engine={"wdth": 4}),
    ):
        pass


def test_help_says_what_is_served() -> None:
    said = " ".join(CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output.split())
    for word in ("run folder", "another project", "GGUF", "tokenizer.json", "comes with alcoda"):
        assert word in said


def test_what_installs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on no index: what pip has not installed is installed out of its checkout."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name in ("alcoda.serving", "alcoda.serve.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(alcoda, "serving", raising=False)

    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    for found, says in ((lambda name: None, "pip install 'alcoda[serve]'"), (none, f"pip install -e '{ROOT}[serve]'")):
        monkeypatch.setattr(metadata, "distribution", found)
        assert says in str(refused("mini"))


def test_everybody_elsewhere_is_a_warning() -> None:
    result = CliRunner().invoke(app, ["serve", "no/such/run", "--host", "0.0.0.0", "--port", "0"])
    assert "anybody who reaches" in result.stderr
    result = CliRunner().invoke(app, ["serve", "no/such/run", "--host", "0.0.0.0", "--port", "0", "--api-key", "k"])
    assert "anybody who reaches" not in result.stderr
