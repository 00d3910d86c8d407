"""A tiny recipe, and the command line called as a user calls it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from alcoda import cli

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "über", "漢字", "and", "or", "not"]
TIMING = {"tokens_per_s", "elapsed_s"}
NEWEST, OLDER = "step_00000008", "step_00000004"
"""The checkpoints of the run that tests share."""


def write_corpus(path: Path, n_documents: int = 40, n_words: int = 40, seed: int = 0) -> Path:
    """Documents of words in a random order, with characters of two and three bytes."""
    rng = random.Random(seed)
    documents = [" ".join(rng.choices(WORDS, k=n_words)) + "\n" for _ in range(n_documents)]
    path.write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


def recipe(corpus: Path | str, **changes: Any) -> dict[str, Any]:
    """A recipe that trains in a second; ``changes`` are ``a__b=value``."""
    data: dict[str, Any] = {
        "model": {
            "vocab_size": 257,
            "seq_len": 16,
            "d_model": 16,
            "n_heads": 2,
            "n_prelude": 1,
            "n_core": 1,
            "n_coda": 1,
            "n_loops": 2,
            "inject": "add",
        },
        "depth": {"kind": "uniform", "min": 1, "max": 3},
        "data": {"corpus": f"text:{corpus}", "tokenizer": "byte"},
        "train": {
            "steps": 8,
            "batch_size": 2,
            "dtype": "float32",
            "device": "cpu",
            "optimizer": {"kind": "adamw", "lr": 0.01},
            "schedule": {"warmup_steps": 2},
            "checkpoint_every": 4,
            "log_every": 1,
        },
        "eval": {"every": 8, "tokens": 200, "loops": [1, 2, 3]},
    }
    for name, value in changes.items():
        here = data
        *above, last = name.split("__")
        for key in above:
            here = here.setdefault(key, {})
        here[last] = value
    return data


def write_recipe(path: Path, corpus: Path | str, **changes: Any) -> Path:
    """`recipe` as a YAML file."""
    path.write_text(yaml.safe_dump(recipe(corpus, **changes), sort_keys=False), encoding="utf-8")
    return path


class Done(NamedTuple):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


class Cli:
    """Runs ``alcoda ARGUMENTS`` in this process, through the real `main`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: Any) -> Done:
        self.monkeypatch.setattr(sys, "argv", ["alcoda", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = self.capsys.readouterr()
        code = end.value.code
        return Done(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    def ok(self, *arguments: Any) -> Done:
        """The same, of a command that must work."""
        done = self(*arguments)
        assert done.code == 0, done.err
        return done

    def refused(self, *arguments: Any, code: int = 2, says: tuple[str, ...] = ()) -> str:
        """The message of a command that must fail: one error, no traceback, nothing on stdout."""
        done = self(*arguments)
        assert done.code == code, (done.code, done.out, done.err)
        lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in done.err and "unexpected" not in done.err, done.err
        assert done.out == "", done.out
        for text in says:
            assert text in done.err, f"{text!r} is not in: {done.err}"
        return done.err


def spawn(*arguments: Any, **kwargs: Any) -> subprocess.Popen[str]:
    """``alcoda ARGUMENTS`` as a process of its own, with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "alcoda", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **kwargs,
    )


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder with its time of change and its bytes; the lock file aside."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMING} for line in lines]


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """What is in ``folder`` stays as it is, to the byte and the time of change; no ``folder`` stays none."""
    before = snapshot(folder) if folder.exists() else None
    yield
    assert (snapshot(folder) if folder.exists() else None) == before
