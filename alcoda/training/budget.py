"""Equal spend: how many train steps a budget pays for, and what a step costs at the depths that were drawn."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple, Self

from pydantic import model_validator

from alcoda.config import Config, PositiveFloat
from alcoda.depth.plan import Depth, LoopPlan
from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.cost import TrainingDepth, ledger
from alcoda.training.objective import Objective
from alcoda.training.passes import OnePass, Passes

MOST_STEPS = 1_000_000
"""A budget of more is refused: depths are drawn step by step to add up what they cost."""


class Budget(Config):
    """What a run may spend: exactly one of these. It decides the number of train steps."""

    flops: PositiveFloat | None = None
    """Training FLOPs by the ledger, executed: at the depths that are drawn. The nearest number of steps is taken."""
    tokens: PositiveFloat | None = None
    """Tokens trained on, repeats counted; the last step may go beyond."""
    tokens_per_param: PositiveFloat | None = None
    """Tokens for each stored parameter of the ledger, embeddings included and the core counted once."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"a budget is exactly one of {names}; got {' and '.join(given) or 'none'}")
        return self

    def n_steps(self, step_flops: StepFlops, depth: Depth, batch_size: int, seed: int) -> int:
        """The train steps that it pays for, of ``batch_size`` rows of ``seq_len`` tokens at depths of ``depth``.

        Raises:
            UsageError: FLOPs of less than one step, or more than `MOST_STEPS`. (Tokens are rounded up to whole steps.)
        """
        model = step_flops.model
        if self.flops is not None:
            # Draws do not depend on the length of the run, so that it can be found from them.
            return _flops_steps(self.flops, step_flops, depth.resolve(model.n_loops, MOST_STEPS), batch_size, seed)
        tokens = self.tokens
        if self.tokens_per_param is not None:
            tokens = self.tokens_per_param * ledger(model).params
        assert tokens is not None
        n_steps = tokens / (batch_size * model.seq_len)
        self._check_length(n_steps)
        return math.ceil(n_steps)

    def _check_length(self, n_steps: float) -> None:
        if n_steps > MOST_STEPS:
            raise UsageError(
                f"train.budget ({self}) is about {n_steps:.3g} train steps, and a budget may be {MOST_STEPS:,}: lower "
                "it, or raise train.batch_size"
            )

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value:g}" for name, value in self if value is not None)


class StepFlops(NamedTuple):
    """Training FLOPs a token of one train step, by the ledger: the mean over its rows, at the depth of each."""

    model: ModelConfig
    objective: Objective
    recompute: bool
    passes: Passes = OnePass()

    def __call__(self, plan: LoopPlan, train_step: int) -> float:
        warming = self.model.route.warming(train_step)
        n_rows = Counter(plan.depths)
        flops = sum(k * _row_flops(self, n, min(n, plan.n_grad), warming) for n, k in n_rows.items())
        return flops / len(plan.depths)

    def at(self, n_loops: int, n_grad: int, warming: int | None = None) -> TrainingDepth:
        """A row of ``n_loops`` loops, as the ledger takes it."""
        n_readouts, more_heads = self.objective.n_readouts(n_loops), self.objective.n_more_heads(n_loops)
        passes, remembered = self.passes.cost(), self.passes.remembered(self.model.seq_len)
        return TrainingDepth(n_loops, n_grad, self.recompute, n_readouts, more_heads, warming, passes, remembered)

    def mixture(self, depth: Depth) -> list[tuple[float, TrainingDepth]]:
        """The rows of a run at the depths of a resolved sampler, after any warm-up."""
        return [(share, self.at(n, min(n, depth.last_k or n))) for n, share in depth.pmf().items()]


@lru_cache(maxsize=4096)
def _row_flops(step_flops: StepFlops, n_loops: int, n_grad: int, warming: int | None) -> float:
    return ledger(step_flops.model, None, step_flops.at(n_loops, n_grad, warming)).training_flops_per_token


@lru_cache(maxsize=8)
def _flops_steps(flops: float, step_flops: StepFlops, depth: Depth, batch_size: int, seed: int) -> int:
    model, tokens = step_flops.model, batch_size * step_flops.model.seq_len
    mean = ledger(model, None, step_flops.mixture(depth)).training_flops_per_token
    Budget(flops=flops)._check_length(flops / (tokens * mean))
    spent = before = step_flops(depth.draw(seed, 0, batch_size), 0) * tokens
    if flops < spent:
        raise UsageError(
            f"train.budget.flops={flops:.4g} is less than one train step, and the first one costs {spent:.4g} FLOPs: "
            "raise it, or lower train.batch_size"
        )
    if len(depth.pmf()) == 1 and model.route.warming(0) is None:  # every step costs the same
        return round(flops / spent)
    n_steps = 1
    while spent < flops:
        before = spent
        spent += step_flops(depth.draw(seed, n_steps, batch_size), n_steps) * tokens
        n_steps += 1
    return n_steps if spent - flops <= flops - before else n_steps - 1
