"""Passes of a training step: how a model learns to use a memory that only reading token by token would tell exactly
(papers.md 4.2). Each pass is scored by the recipe's objective, and all of them are trained in one backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator
from torch import Tensor

from alcoda.config import Bool, Choice, NonNegativeFloat, PositiveInt
from alcoda.depth.plan import LoopPlan
from alcoda.model.lm import RecurrentLM
from alcoda.model.passes import Pass, run_passes
from alcoda.model.prefill import SUBSETS
from alcoda.training.objective import Objective


class Passes(Choice, axis="passes"):
    """The passes that a step makes over its rows."""

    fills_memory: ClassVar[bool] = True
    """Whether a pass reads memories that an earlier one has made."""

    def resolve(self, has_memory: bool) -> Passes:
        """The choice itself, or what it stands for."""
        return self

    def check(self, seq_len: int) -> None:
        """Raise ValueError where rows of ``seq_len`` tokens cannot be run so."""

    def of(self, n_tokens: int) -> tuple[Pass, ...]:
        """The passes over rows of ``n_tokens``, in order."""
        raise NotImplementedError

    def cost(self) -> float:
        """How many times a token is run: what a step costs, over one plain pass."""
        return 1.0

    def remembered(self, n_tokens: int) -> float:
        """In how many of these runs a token of ``n_tokens`` has a memory: in all passes but the first."""
        return sum(len(one.tokens) for one in self.of(n_tokens)[1:]) / n_tokens

    def prefill_subsets(self) -> int:
        """The strides in which interleaved prefill reads as this trains."""
        return SUBSETS

    @property
    def detaches(self) -> bool:
        """Whether memories carry no gradients."""
        return False


class AutoPasses(Passes):
    """``one``, or ``interleaved`` where the model has a memory."""

    kind: Literal["auto"] = "auto"

    def resolve(self, has_memory: bool) -> Passes:
        return Interleaved() if has_memory else OnePass()


class OnePass(Passes):
    """One, for models without memory."""

    kind: Literal["one"] = "one"
    fills_memory: ClassVar[bool] = False

    def of(self, n_tokens: int) -> tuple[Pass, ...]:
        every = range(n_tokens)
        return (Pass(every, 1.0, every),)


class Interleaved(Passes):
    """Interleaved parallel training (LRT, papers.md 4.2): a pass over all tokens with zero memories, which leaves keys,
    values and states with their gradients; then the tokens of each of S strides in turn, with the newest memories and
    keys, and theirs replace the old ones. The loss is the mean over the S + 1 passes.

    With as many subsets as tokens the last state of each is that of reading token by token.
    """

    kind: Literal["interleaved"] = "interleaved"
    subsets: PositiveInt = SUBSETS
    """S."""

    def check(self, seq_len: int) -> None:
        if self.subsets > seq_len:
            raise ValueError(
                f"passes.subsets={self.subsets} is more than model.seq_len={seq_len}: a subset is of at least one "
                f"token; set it to {seq_len} or less (LRT: 2)"
            )

    def of(self, n_tokens: int) -> tuple[Pass, ...]:
        every, share = range(n_tokens), 1 / (self.subsets + 1)
        strides = (every[first :: self.subsets] for first in range(self.subsets))
        return (Pass(every, share, every), *(Pass(tokens, share, tokens) for tokens in strides if tokens))

    def cost(self) -> float:
        return 2.0

    def prefill_subsets(self) -> int:
        return self.subsets


class Refined(Passes):
    """Multi-refinement (papers.md 4.2): a pass with zero memories, then ``passes`` whole ones, each with the memories
    of the one before."""

    kind: Literal["refined"] = "refined"
    passes: PositiveInt = 3
    """K."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """Of the K + 1 losses, brought to a sum of 1; null: equal."""
    detach: Bool = False
    """Whether memories carry no gradients from a pass into the one before it."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if self.weights is None:
            return self
        if len(self.weights) != self.passes + 1 or not math.isfinite(sum(self.weights)):
            raise ValueError(
                f"passes.weights={list(self.weights)}: {self.passes + 1} numbers are needed, one for the first pass "
                f"and one for each of the {self.passes} after it, with a finite sum"
            )
        if not any(self.weights[1:]):
            raise ValueError(
                f"passes.weights={list(self.weights)}: only the first pass, in which every memory is zero, would count "
                "(if any): a memory learns from those after it; give one of them a weight above 0"
            )
        return self

    def check(self, seq_len: int) -> None:
        if self.passes > seq_len:
            raise ValueError(
                f"passes.passes={self.passes} is more than model.seq_len={seq_len}: after as many passes as tokens "
                f"the memories are exact; set it to {seq_len} or less"
            )

    def of(self, n_tokens: int) -> tuple[Pass, ...]:
        every, weights = range(n_tokens), self.weights or (1.0,) * (self.passes + 1)
        return tuple(Pass(every, weight / sum(weights), every) for weight in weights)

    def cost(self) -> float:
        return 1.0 + self.passes

    @property
    def detaches(self) -> bool:
        return self.detach


class Chunked(Passes):
    """Chunk after chunk, all tokens of a chunk at once: a memory passes only where one chunk ends and the next begins,
    and is zero for the others (the weak baseline of papers.md 4.3)."""

    kind: Literal["chunked"] = "chunked"
    tokens: PositiveInt = 64
    """Length of a chunk."""

    def check(self, seq_len: int) -> None:
        if self.tokens >= seq_len:
            raise ValueError(
                f"passes.tokens={self.tokens} with model.seq_len={seq_len}: a row would be one chunk, and no memory "
                f"would ever pass; set it to less than {seq_len}"
            )

    def of(self, n_tokens: int) -> tuple[Pass, ...]:
        every = range(n_tokens)
        return tuple(Pass(every[first : first + self.tokens], 1.0, every) for first in every[:: self.tokens])


class Sequential(Passes):
    """Token by token, with gradients: exact, and as slow as it sounds. The oracle for tests and small runs."""

    kind: Literal["sequential"] = "sequential"

    def of(self, n_tokens: int) -> tuple[Pass, ...]:
        every = range(n_tokens)
        return tuple(Pass(every[t : t + 1], 1.0, every) for t in every)


def step_loss(
    objective: Objective,
    passes: Passes,
    model: RecurrentLM,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    scored_T: Sequence[int],
    plan: LoopPlan,
    recompute: bool,
) -> Tensor:
    """The loss of some rows of a batch, in nats: their share of the batch's.

    Args:
        scored_T: how many targets the whole batch scores at each position.
    """
    losses = []
    how = {"n_free": plan.n_free, "recompute": recompute, "rows": plan.rows}
    todo = passes.of(inputs_BT.size(1))
    for one, readouts in run_passes(model, inputs_BT, todo, objective.loops(plan), passes.detaches, **how):
        n_scored = max(sum(scored_T[one.over.start : one.over.stop : one.over.step]), 1)
        losses.append(one.weight * (objective.loss_sum(model, readouts, one.of(targets_BT)) / n_scored))
    return sum(losses[1:], start=losses[0])
