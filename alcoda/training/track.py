"""Where metrics go: always metrics.jsonl in the run folder, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from alcoda.errors import RunError, UsageError
from alcoda.files import disk, write_text
from alcoda.training.diagnose import QUANTILES
from alcoda.training.recipe import Recipe, TrackConfig
from alcoda.training.run import RunFolder


class Tracker(Protocol):
    """Takes one record a time: ``{"type": "train" | "eval" | "diagnostics", "train_step": ..., name: number, ...}``."""

    def log(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A line a record. Resuming from ``train_step`` drops the lines after it: they are about to be written again."""

    def __init__(self, path: Path, train_step: int) -> None:
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                break  # the line that a crash cut short
            if isinstance(record, dict) and record.get("train_step", 0) <= train_step:
                kept.append(line + "\n")
        write_text(path, "".join(kept))
        # Unbuffered: what a full disk did not take is not tried again when the file is closed.
        self.file = path.open("ab", buffering=0)

    def log(self, record: dict[str, Any]) -> None:
        self.file.write(f"{json.dumps(record)}\n".encode())

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Scalars under ``train/``, ``eval/SOURCE/loops_N/`` and ``diagnostics/loop_N/``."""

    def __init__(self, folder: Path, train_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=train_step + 1)

    def log(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["train_step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """The same scalars in Weights & Biases; offline runs are kept in the run folder for ``wandb sync``."""

    def __init__(self, recipe: Recipe, folder: Path, mode: str) -> None:
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            self.run = wandb.init(
                project=recipe.track.project,
                name=recipe.name,
                dir=str(folder),
                mode="online" if mode == "online" else "offline",
                config=recipe.model_dump(mode="json"),
            )
        except wandb.Error as error:
            raise RunError(f"Weights & Biases did not start: {error}. Set track.wandb to offline or off") from None

    def log(self, record: dict[str, Any]) -> None:
        found = scalars(record)
        if found:
            self.run.log({**found, "train_step": record["train_step"]})

    def close(self) -> None:
        self.run.finish()


class Trackers:
    """All of the above that the recipe asks for; nothing but in the process that ``writes``."""

    def __init__(self, recipe: Recipe, run: RunFolder, train_step: int, writes: bool = True) -> None:
        self.path = run.path
        self.all: list[Tracker] = []
        if not writes:
            return
        if recipe.track.tensorboard:
            self.all.append(TensorBoard(run.path / "tensorboard", train_step))
        if recipe.track.wandb != "off":
            self.all.append(WandB(recipe, run.path, recipe.track.wandb))
        self.all.append(JsonLines(run.metrics, train_step))

    def log(self, record: dict[str, Any]) -> None:
        with disk(self.path):
            for tracker in self.all:
                tracker.log(record)

    def close(self) -> None:
        with disk(self.path):
            for tracker in self.all:
                tracker.close()


def check_trackers(config: TrackConfig) -> None:
    """Refuse what is asked for and not installed."""
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb != "off")):
        if wanted and find_spec(package) is None:
            raise UsageError(f"track.{package} needs the package {package}: pip install {package}")


_NOT_MEASURED = ("type", "train_step", "source", "loops", "loop")


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record, named for a dashboard. Of diagnostics it gets the means, at a few loops."""
    prefix = record["type"]
    if prefix == "train":
        return {f"train/{name}": value for name, value in record.items() if name not in ("type", "train_step")}
    measured = {name: value for name, value in record.items() if name not in _NOT_MEASURED}
    if prefix == "eval":
        return {f"eval/{record['source']}/loops_{record['loops']}/{name}": value for name, value in measured.items()}
    loop = record["loop"]
    if loop & (loop - 1) and loop != record["loops"]:  # powers of two, and the last
        return {}
    quantiles = tuple(f".{name}" for name in QUANTILES)
    return {
        f"{prefix}/loop_{loop}/{name.removesuffix('.mean')}": value
        for name, value in measured.items()
        if not name.endswith(quantiles)
    }
