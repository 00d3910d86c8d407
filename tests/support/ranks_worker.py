"""Run by torchrun: trains the jobs of a file, in order; see ranks.py. A job may ask for a fault, or for a count."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import alcoda
from alcoda import launch
from alcoda.config import validate
from alcoda.depth.plan import Depth
from alcoda.training import optim
from alcoda.training.loop import Trainer
from alcoda.training.parallel import Replicated
from alcoda.training.recipe import Recipe

RANK, N = launch.place()[:2]


def faults() -> dict[str, list[Any]]:
    """Ways to do it wrong, which the comparison with one process has to see."""
    draw = Depth.draw

    change = optim._orthogonal_change

    def of_parts(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return torch.cat([change(part, group) for part in update.chunk(N)])

    return {
        "muon_of_parts": [patch.object(optim, "_orthogonal_change", of_parts)],
        "depth_of_rank": [patch.object(Depth, "draw", lambda self, seed, *rest: draw(self, seed + RANK, *rest))],
        "unsynced": [patch.object(Replicated, "micro_batch", lambda self, is_last: self.ddp.no_sync())],
    }


class Collectives(TorchDispatchMode):
    """Bytes that a process of a ring sends, by kind, from the tensors that are given to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.n: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_")
            whole = {"allgather_base": args[:1], "reduce_scatter_base": args[1:2], "allreduce": args[0]}.get(name, ())
            n_bytes = sum(t.numel() * t.element_size() for t in whole if isinstance(t, torch.Tensor))
            if n_bytes > 100:  # losses, signals and norms are not counted
                self.n[name] += 1
                self.sent[name] += n_bytes * (N - 1) / N * (2 if name == "allreduce" else 1)
        return func(*args, **(kwargs or {}))


def counting(path: Path) -> Any:
    """Writes what each train step sent."""
    step = Trainer._step

    def counted(self: Trainer, *args: Any) -> Any:
        with Collectives() as seen:
            out = step(self, *args)
        if RANK == 0:
            with path.open("a") as file:
                file.write(json.dumps({"n": seen.n, "sent": seen.sent}) + "\n")
        return out

    return patch.object(Trainer, "_step", counted)


def resaving() -> Any:
    """Writes what was restored once more, beside the run's checkpoints: RUN/resaved."""
    restore = Trainer.restore

    def restored(self: Trainer, path: Path) -> None:
        restore(self, path)
        saved, self.saved_step, checkpoints = self.saved_step, None, self.run.checkpoints
        self.run.checkpoints = self.run.path / "resaved"
        self._save()
        self.saved_step, self.run.checkpoints = saved, checkpoints

    return patch.object(Trainer, "restore", restored)


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        with ExitStack() as held:
            for one in faults().get(job.get("fault", ""), ()):
                held.enter_context(one)
            held.enter_context(counting(Path(job["count"])) if "count" in job else nullcontext())
            held.enter_context(resaving() if job.get("resave") else nullcontext())
            alcoda.train(validate(Recipe, job["recipe"]), job["out"], job.get("resume", False))


main()
