"""Metrics in TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import Cli, metrics

from alcoda.training.loop import Trainer


def test_tensorboard(tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, real = tmp_path / "run", Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == 6:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        assert run_cli("train", tiny, "--out", run, "--set", "track.tensorboard=true").code == 130
    run_cli.ok("train", tiny, "--out", run, "--set", "track.tensorboard=true", "--resume")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    lines = metrics(run)
    loss = {event.step: event.value for event in events.Scalars("train/loss")}
    # Resumed from step 4: what came after it is dropped and written again.
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))
    assert loss == pytest.approx(
        {line["train_step"]: line["loss"] for line in lines if line["type"] == "train"}, rel=1e-6
    )
    for loops in (1, 2, 3):
        (event,) = events.Scalars(f"eval/words/loops_{loops}/bits_per_byte")
        (line,) = (line for line in lines if line["type"] == "eval" and line["loops"] == loops)
        assert event.step == 8 and event.value == pytest.approx(line["bits_per_byte"], rel=1e-6)


class FakeWandb(ModuleType):
    """What we use of wandb, kept in lists."""

    Error = RuntimeError

    def __init__(self, refuses: str = "") -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished, self.refuses = 0, refuses

    def init(self, **kwargs: Any) -> FakeWandb:
        if self.refuses:
            raise self.Error(self.refuses)
        self.started.append(kwargs)
        return self

    def log(self, record: dict[str, Any]) -> None:
        self.logged.append(record)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_the_same_numbers(tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("alcoda.training.track.find_spec", lambda name: fake)
    run = tmp_path / "run"
    run_cli.ok("train", tiny, "--out", run, "--set", "track.wandb=online", "--set", "track.project=mine")
    (started,) = fake.started
    assert started["project"] == "mine" and started["name"] == "tiny" and started["mode"] == "online"
    assert started["dir"] == str(run) and started["config"]["train"]["steps"] == 8 and fake.finished == 1
    lines = metrics(run)
    assert [record["train_step"] for record in fake.logged] == [line["train_step"] for line in lines]
    assert fake.logged[0]["train/loss"] == lines[0]["loss"]
    assert fake.logged[-1]["eval/words/loops_3/bits_per_byte"] == lines[-1]["bits_per_byte"]


def test_wandb_that_does_not_start(tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("no API key"))
    monkeypatch.setattr("alcoda.training.track.find_spec", lambda name: True)
    run = tmp_path / "run"
    says = ("Weights & Biases did not start: no API key", "track.wandb to offline or off")
    run_cli.refused("train", tiny, "--out", run, "--set", "track.wandb=online", code=1, says=says)
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert run_cli.ok("train", tiny, "--out", run, "--resume").json["status"] == "finished"


def test_wandb_offline(tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))
    run = tmp_path / "run"
    done = run_cli("train", tiny, "--out", run, "--set", "track.wandb=offline")
    assert done.code == 0, done.err
    assert done.json["status"] == "finished" and len(metrics(run)) == 13
    (kept,) = run.glob("wandb/offline-run-*/*.wandb")
    assert kept.stat().st_size > 1000
