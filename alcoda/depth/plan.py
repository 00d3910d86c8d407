"""Training depth: how many loops one training step runs, and how many of them carry gradients.

A depth is a pure function of (seed, train_step), never of the rank: ranks that loop a different number of times would
wait for each other forever. Every sampler knows its exact distribution, from which the ledger takes its means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import Field

from alcoda.config import Choice, PositiveFloat, PositiveInt

Number = TypeVar("Number", int, float)

MOST_LOOPS = 10_000
"""No step is deeper: a distribution is a list of its depths, and a typing error is not to fill the memory."""

Loops = Annotated[PositiveInt, Field(le=MOST_LOOPS)]
Mean = Annotated[PositiveFloat, Field(le=MOST_LOOPS)]

_STREAM = 0xD0D0
"""Keeps the draws of depth apart from other draws that start from the same seed."""


class LoopPlan(NamedTuple):
    """Loops of one training step: the first ``n_free`` without gradients, then ``n_grad`` with them.

    Attributes:
        n_free, n_grad: of the deepest row.
        rows: loops of each row of the batch; None where every row runs all of them. A row of fewer loops idles at the
            start (Parcae, papers.md 5.2), so that the loops with gradients are those of every row.
        draw: uniform in [0, 1): what else an objective draws of the step's depths, the same for every rank.
    """

    n_free: int
    n_grad: int
    rows: tuple[int, ...] | None = None
    draw: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[int], last_k: int | None, draw: float = 0.0) -> LoopPlan:
        """The plan of rows of these depths, of which the last ``last_k`` loops carry gradients (None: all)."""
        n_loops = max(rows)
        n_grad = n_loops if last_k is None else min(n_loops, last_k)
        return cls(n_loops - n_grad, n_grad, None if min(rows) == n_loops else tuple(rows), draw)

    @property
    def n_loops(self) -> int:
        """Loops of the deepest row."""
        return self.n_free + self.n_grad

    @property
    def depths(self) -> tuple[int, ...]:
        """Loops of each row, or of all of them."""
        return self.rows or (self.n_loops,)

    @property
    def mean_loops(self) -> float:
        """Mean over the rows."""
        return sum(self.depths) / len(self.depths)

    def part(self, i: int, n: int) -> LoopPlan:
        """The plan of the i-th (0-based) of ``n`` equal micro-batches, which need not wait for rows of the others."""
        if self.rows is None:
            return self
        size, rest = divmod(len(self.rows), n)
        if rest or not 0 <= i < n:
            raise ValueError(f"part {i} of {n}: {len(self.rows)} rows do not split so")
        return LoopPlan.of(self.rows[i * size : (i + 1) * size], self.n_grad, self.draw)


class Depth(Choice, axis="depth"):
    """A distribution of training depths.

    Names left out are taken from the model's nominal depth ``n_loops`` by `resolve`.
    """

    last_k: PositiveInt | None = None
    """Truncated backpropagation in depth: only the last k loops carry gradients (Huginn: 8). None: all of them."""

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        """The sampler with every number filled in, for a model of nominal depth ``n_loops`` and a run of ``n_steps``.

        Draws do not depend on ``n_steps``, only means over the run may.
        """
        raise NotImplementedError

    def pmf(self) -> dict[int, float]:
        """Probability of each depth of a row, averaged over the steps of the run (of a resolved sampler)."""
        raise NotImplementedError

    @property
    def per_row(self) -> bool:
        """Whether rows of a batch have depths of their own."""
        return False

    def rows(self, generator: np.random.Generator, train_step: int, n_rows: int) -> list[int]:
        """The depth of each row at ``train_step``; a list of one where all rows share it."""
        raise NotImplementedError

    def draw(self, seed: int, train_step: int, n_rows: int) -> LoopPlan:
        """The depths of one training step on a global batch of ``n_rows`` (of a resolved sampler)."""
        generator = np.random.default_rng([_STREAM, seed, train_step])
        rows = self.rows(generator, train_step, n_rows)
        return LoopPlan.of(rows, self.last_k, float(generator.random()))

    @property
    def mean_loops(self) -> float:
        """Mean over rows and steps."""
        return sum(n * p for n, p in self.pmf().items())

    @property
    def mean_grad_loops(self) -> float:
        """Mean of the loops that carry gradients."""
        return sum(min(n, self.last_k or n) * p for n, p in self.pmf().items())

    @property
    def max_loops(self) -> int:
        """The deepest row that occurs (for an unbounded sampler: but for one in 10^12)."""
        return max(self.pmf())


class RandomDepth(Depth):
    """What samplers share that draw a number each time."""

    per: Literal["batch", "sequence"] = "batch"
    """One draw for the whole batch (GRT, Huginn), or one for each of its rows (Parcae): shallow rows idle at first."""

    @property
    def per_row(self) -> bool:
        return self.per == "sequence"

    def sample(self, generator: np.random.Generator, n: int) -> list[int]:
        """``n`` independent depths."""
        raise NotImplementedError

    def rows(self, generator: np.random.Generator, train_step: int, n_rows: int) -> list[int]:
        return self.sample(generator, n_rows if self.per == "sequence" else 1)


def resolved(value: Number | None) -> Number:
    """``value``, of a resolved sampler."""
    if value is None:
        raise ValueError("resolve the sampler with the model's n_loops first")
    return value
