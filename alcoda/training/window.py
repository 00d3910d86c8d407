"""What is logged of the steps since the last line of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from alcoda.depth.plan import LoopPlan

if TYPE_CHECKING:
    from alcoda.training.loop import Trainer


class Window:
    """What happened since the last logged step."""

    def __init__(self, wall_s: float, tokens: int, plans: Iterable[LoopPlan]) -> None:
        self.wall_s, self.tokens = wall_s, tokens
        self.loops = [plan.mean_loops for plan in plans]

    def add(self, plan: LoopPlan) -> None:
        self.loops.append(plan.mean_loops)

    def mean_loops(self) -> float:
        """Over the steps and their rows."""
        return sum(self.loops) / len(self.loops) if self.loops else 0.0

    def tokens_per_s(self, trainer: Trainer) -> float:
        return (trainer.tokens - self.tokens) / max(trainer.wall_s - self.wall_s, 1e-9)

    def record(self, trainer: Trainer, loss: float, grad_norm: float, lr: float, plan: LoopPlan) -> dict[str, Any]:
        return {
            "type": "train",
            "train_step": trainer.train_step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "loops": plan.n_loops,
            "mean_loops": self.mean_loops(),
            "tokens": trainer.tokens,
            "tokens_per_s": self.tokens_per_s(trainer),
            "executed_flops": trainer.executed_flops,
            "elapsed_s": trainer.wall_s,
        }
