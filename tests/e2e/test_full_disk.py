"""A disk that is full, from the start or in the middle of a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import NEWEST, OLDER, Cli, metrics, recipe, snapshot, write_recipe

from alcoda import api
from alcoda.config import validate
from alcoda.errors import RunError
from alcoda.training import checkpoint
from alcoda.training.loop import Trainer
from alcoda.training.recipe import Recipe


class FullDisk:
    """A disk of a few hundred kB, in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, leave_bytes: int) -> None:
        """Take all of the room but this much."""
        stats = os.statvfs(self.folder)
        size = stats.f_bavail * stats.f_frsize - leave_bytes
        (self.folder / "ballast").write_bytes(b"\0" * max(size, 0))

    def make_room(self) -> None:
        (self.folder / "ballast").unlink()


@pytest.fixture
def full_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield FullDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# A checkpoint of this model takes about 220 kB; what is left lets the metrics, the weights or nothing through.
@pytest.mark.parametrize("leave_bytes", [0, 40_000, 100_000, 180_000])
def test_the_disk_is_full_in_the_middle(
    leave_bytes: int,
    full_disk: FullDisk,
    corpus: Path,
    trained_once: Path,
    run_cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_recipe(tmp_path / "tiny.yaml", corpus, name="tiny")
    run = full_disk.folder / "run"
    real = Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == 6:
            full_disk.fill(leave_bytes)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        message = run_cli.refused("train", file, "--out", run, code=1, says=("the disk is full", str(run), "make room"))
    assert len(message.splitlines()) == 1
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [OLDER]
    checkpoint.check(run / "checkpoints" / OLDER)
    json.loads((run / "run.json").read_text())
    full_disk.make_room()
    assert run_cli.ok("train", file, "--out", run, "--resume").json["status"] == "finished"
    a, b = (snapshot(r / "checkpoints")[f"{NEWEST}/model.safetensors"][1] for r in (run, trained_once))
    assert a == b and metrics(run) == metrics(trained_once)


def test_the_disk_is_full_from_the_start(full_disk: FullDisk, tiny: Path, run_cli: Cli) -> None:
    full_disk.fill(0)
    run = full_disk.folder / "run"
    run_cli.refused("train", tiny, "--out", run, code=1, says=("the disk is full", "make room"))
    assert not run.exists() or not (run / "recipe.yaml").exists()
    full_disk.make_room()
    run_cli.ok("train", tiny, "--out", run)


def test_the_disk_of_the_cache_is_full(
    full_disk: FullDisk, tiny: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(full_disk.folder / "cache"))
    full_disk.fill(4096)
    run_cli.refused("train", tiny, "--out", tmp_path / "run", code=1, says=("no space left", "ALCODA_CACHE"))
    assert not (tmp_path / "run").exists()


def test_a_full_disk_by_name(trained: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no small disk can be mounted: what the libraries say of a full one is understood."""

    def refuse(*arguments: Any, **kwargs: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc] . file write failed: No space left on device")

    monkeypatch.setattr(torch, "save", refuse)
    shutil.rmtree(trained / "checkpoints" / NEWEST)
    with pytest.raises(RunError, match="the disk is full"):
        api.train(validate(Recipe, recipe(corpus, name="tiny")), trained, resume=True)
    assert [path.name for path in (trained / "checkpoints").iterdir()] == [OLDER]
