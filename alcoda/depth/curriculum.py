"""A sampler of samplers: the depths of another one, scaled up at the beginning of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, field_validator

from alcoda.config import PositiveInt
from alcoda.depth.plan import Depth, Mean, resolved
from alcoda.errors import UsageError


class Curriculum(Depth):
    """The depths of ``inner``, scaled up over the first ``steps`` train steps: ``n = max(1, round(s(t) n_inner))``.

    ``s(t) = s0 + (1 - s0) t / steps`` at step t < steps (0-based), 1 from then on, and ``s0 = start / mean of inner``:
    the mean depth rises in a line from ``start`` to that of ``inner`` (but for rounding), after which draws are those
    of ``inner``. Halves are rounded up. (Retrofitted Recurrence, 2511.07384, raises the mean of its sampler in a line;
    papers.md 6. To scale the draws is ours: it serves any sampler.) Truncation is the curriculum's own ``last_k``.
    """

    kind: Literal["curriculum"] = "curriculum"
    inner: Depth
    steps: Annotated[PositiveInt, Field(le=10**9)]
    """Train steps that the ramp takes, whatever the length of the run."""
    start: Mean = 1.0
    """Mean depth at the first step, in loops; at most the mean of inner."""
    run_steps: PositiveInt | None = None
    """Length of the run, which the mean depth is taken over; always filled in from the recipe's train steps."""

    @field_validator("inner")
    @classmethod
    def _plain(cls, inner: Depth) -> Depth:
        if isinstance(inner, Curriculum):
            raise ValueError("a curriculum of a curriculum: give inner the sampler that the ramp leads to")
        if inner.last_k is not None:
            raise ValueError(f"inner has last_k={inner.last_k}: set last_k of the curriculum (depth.last_k)")
        return inner

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        inner = self.inner.resolve(n_loops, n_steps)
        if self.start > inner.mean_loops:
            raise UsageError(
                f"depth.start={self.start:g} is above {inner.mean_loops:.4g}, the mean of depth.inner: a curriculum "
                "begins shallow; lower start"
            )
        return self.model_copy(update={"inner": inner, "run_steps": n_steps})

    def pmf(self) -> dict[int, float]:
        return dict(_mean_pmf(self))

    def rows(self, generator: np.random.Generator, train_step: int, n_rows: int) -> list[int]:
        resolved(self.run_steps)
        depths = self.inner.rows(generator, train_step, n_rows)
        if train_step >= self.steps:
            return depths
        scale = _Ramp(self).scale(train_step)
        return [1 + int(np.searchsorted(_edges(n), scale, side="right")) for n in depths]


class _Ramp:
    """``s(t)``, and where it reaches a value."""

    def __init__(self, curriculum: Curriculum) -> None:
        self.low, self.steps = _low(curriculum), curriculum.steps

    def scale(self, train_step: int | np.ndarray) -> float | np.ndarray:
        return self.low + (1 - self.low) * (train_step / self.steps)

    def reaches(self, scales: np.ndarray) -> np.ndarray:
        """The first step of the ramp at which ``s`` is at least each of ``scales``; ``steps`` where none is."""
        # Solved for t, then put right by comparing, so that a mean counts what the draws do, to the step.
        rise = max(1 - self.low, np.finfo(float).tiny)
        t = np.ceil(np.clip((scales - self.low) / rise, 0, 1) * self.steps).astype(np.int64)
        t -= (t > 0) & (self.scale(t - 1) >= scales)
        t += (t < self.steps) & (self.scale(t) < scales)
        return t


@lru_cache(maxsize=16)
def _low(curriculum: Curriculum) -> float:
    return curriculum.start / curriculum.inner.mean_loops


def _edges(n: int) -> np.ndarray:
    """The scales from which on n loops are rounded to 2, 3, .. n."""
    return (np.arange(2, n + 1) - 0.5) / n


@lru_cache(maxsize=16)
def _mean_pmf(curriculum: Curriculum) -> dict[int, float]:
    """The distribution of each step, averaged over the run."""
    run_steps, ramp = resolved(curriculum.run_steps), _Ramp(curriculum)
    n_ramped = min(curriculum.steps, run_steps)
    inner = curriculum.inner.pmf()
    pmf = np.zeros(max(inner) + 1)
    for n, p in inner.items():
        pmf[n] += p * ((run_steps - n_ramped) / run_steps)
        starts = np.minimum(ramp.reaches(_edges(n)), n_ramped)
        spent = np.diff(np.concatenate([[0], starts, [n_ramped]]))  # steps at 1, 2, .. n loops
        pmf[1 : n + 1] += p * (spent / run_steps)
    return {int(n): float(pmf[n]) for n in np.flatnonzero(pmf)}
