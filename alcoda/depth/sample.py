"""Samplers of training depth. What they share is in `alcoda.depth.plan`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from alcoda.config import PositiveFloat
from alcoda.depth.curriculum import Curriculum
from alcoda.depth.plan import MOST_LOOPS, Depth, LoopPlan, Loops, Mean, RandomDepth, resolved
from alcoda.errors import UsageError

__all__ = [
    "MOST_LOOPS",
    "Curriculum",
    "Depth",
    "Fixed",
    "HeavyTail",
    "LogNormal",
    "LogNormalPoisson",
    "LoopPlan",
    "Poisson",
    "Uniform",
]

Sampler = TypeVar("Sampler", bound=Depth)

Sigma = Annotated[PositiveFloat, Field(le=1.5)]
"""Above it the mean comes from steps too rare for a run to meet."""


class Fixed(Depth):
    """Always ``loops`` loops (CART, Ouro, a dense model); the model's ``n_loops`` where not set."""

    kind: Literal["fixed"] = "fixed"
    loops: Loops | None = None

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        return self.model_copy(update={"loops": self.loops or n_loops})

    def pmf(self) -> dict[int, float]:
        return {resolved(self.loops): 1.0}

    def rows(self, generator: np.random.Generator, train_step: int, n_rows: int) -> list[int]:
        return [resolved(self.loops)]


class Uniform(RandomDepth):
    """Uniform over ``min .. max`` (GRT: 1 .. R, papers.md 1.2); max is the model's ``n_loops`` where not set."""

    kind: Literal["uniform"] = "uniform"
    min: Loops = 1
    max: Loops | None = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(
                f"uniform depth needs min <= max, got min={self.min}, max={self.max}: swap them or raise max"
            )
        return self

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        top = self.max or n_loops
        if top < self.min:
            raise UsageError(
                f"depth.min={self.min} is above the model's n_loops={n_loops}: lower min, or set depth.max"
            )
        return self.model_copy(update={"max": top})

    def pmf(self) -> dict[int, float]:
        depths = range(self.min, resolved(self.max) + 1)
        return {n: 1 / len(depths) for n in depths}

    def sample(self, generator: np.random.Generator, n: int) -> list[int]:
        return generator.integers(self.min, resolved(self.max), n, endpoint=True).tolist()


class LogNormal(RandomDepth):
    """``clip(round(exp N(ln mean - sigma^2 / 2, sigma)), min, max)`` (papers.md 3.2, after Huginn's rate).

    ``mean`` is that of the log-normal before rounding and clipping, the model's ``n_loops`` where not set; ``max`` is
    4 times the mean where not set (and 10,000 at most).
    """

    kind: Literal["lognormal"] = "lognormal"
    mean: Mean | None = None
    sigma: Sigma = 0.5
    min: Loops = 1
    max: Loops | None = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        return _check_bounds(self, "mean", self.mean, self.min, self.max)

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        mean = self.mean or float(n_loops)
        top = self.max or _top(4 * mean, self.min)
        return _check_bounds(self, "mean", mean, self.min, top).model_copy(update={"mean": mean, "max": top})

    def _mu(self) -> float:
        return math.log(resolved(self.mean)) - self.sigma**2 / 2

    def pmf(self) -> dict[int, float]:
        return _clipped_pmf(self._mu(), self.sigma, self.min, resolved(self.max))

    def sample(self, generator: np.random.Generator, n: int) -> list[int]:
        return _clipped_sample(generator, n, self._mu(), self.sigma, self.min, resolved(self.max))


class HeavyTail(RandomDepth):
    """``clip(round(exp N(ln peak + sigma^2, sigma)), min, max)`` (GRT's precursor, papers.md 1.2).

    The log-normal is likeliest at ``peak``, and its mean is a third above: ``peak exp(1.5 sigma^2)``. ``peak`` is the
    model's ``n_loops`` where not set (the precursor's medium run: min 2, peak 22), ``max`` 4 times the peak (and
    10,000 at most).
    """

    kind: Literal["heavy_tail"] = "heavy_tail"
    peak: Mean | None = None
    sigma: Sigma = 0.435
    min: Loops = 1
    max: Loops | None = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        return _check_bounds(self, "peak", self.peak, self.min, self.max)

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        peak = self.peak or float(n_loops)
        top = self.max or _top(4 * peak, self.min)
        return _check_bounds(self, "peak", peak, self.min, top).model_copy(update={"peak": peak, "max": top})

    def _mu(self) -> float:
        return math.log(resolved(self.peak)) + self.sigma**2

    def pmf(self) -> dict[int, float]:
        return _clipped_pmf(self._mu(), self.sigma, self.min, resolved(self.max))

    def sample(self, generator: np.random.Generator, n: int) -> list[int]:
        return _clipped_sample(generator, n, self._mu(), self.sigma, self.min, resolved(self.max))


class Poisson(RandomDepth):
    """Truncated Poisson (Parcae, papers.md 5.2): ``P(n) ~ mean^n / n!`` on ``min <= n <= max``, nothing outside.

    That is Poisson(mean) on condition that it falls in ``min .. max``, as if drawn again until it does. ``mean`` is
    the rate before truncation, the model's ``n_loops`` where not set; ``max`` is twice the mean where not set (and
    10,000 at most), which bounds the memory of a step and of a mean of 8 cuts 4 draws in 1,000. Parcae draws ``per:
    sequence``, with half the mean for ``last_k``.
    """

    kind: Literal["poisson"] = "poisson"
    mean: Mean | None = None
    min: Loops = 1
    max: Loops | None = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        return _check_bounds(self, "mean", self.mean, self.min, self.max)

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        mean = self.mean or float(n_loops)
        top = self.max or _top(2 * mean, self.min)
        return _check_bounds(self, "mean", mean, self.min, top).model_copy(update={"mean": mean, "max": top})

    def pmf(self) -> dict[int, float]:
        shares = _truncated_poisson(resolved(self.mean), self.min, resolved(self.max))
        return dict(enumerate(shares.tolist(), self.min))

    def sample(self, generator: np.random.Generator, n: int) -> list[int]:
        below = _truncated_poisson(resolved(self.mean), self.min, resolved(self.max)).cumsum()
        drawn = self.min + below[:-1].searchsorted(generator.random(n), side="right")  # what is above all is max
        return drawn.tolist()


class LogNormalPoisson(RandomDepth):
    """Huginn's sampler (papers.md 5.1): ``rate ~ LogNormal(ln mean - sigma^2 / 2, sigma)``, ``n = Poisson(rate) + 1``.

    The mean of n is ``mean + 1``, less what ``max`` cuts. With ``last_k: 8`` the last 8 loops carry gradients, as in
    Huginn's training. Huginn's has no bound; here ``max`` is 10,000 where not set, which no step of Huginn's reaches.
    """

    kind: Literal["lognormal_poisson"] = "lognormal_poisson"
    mean: Mean | None = None
    sigma: Sigma = 0.5
    max: Loops | None = None

    def resolve(self, n_loops: int, n_steps: int) -> Self:
        return self.model_copy(update={"mean": self.mean or float(n_loops)})

    def pmf(self) -> dict[int, float]:
        mean, sigma = resolved(self.mean), self.sigma
        # About one rate in 10^13 is above this, and n is not far above the rate.
        rate = mean * math.exp(7.4 * sigma - sigma**2 / 2)
        top = min(MOST_LOOPS, math.ceil(rate + 10 * math.sqrt(rate) + 50))
        # The mixture over the rate by the trapezoidal rule, in steps finer than the likelihood of the largest n is
        # wide: then its error is below that of rounding.
        step = min(0.1, 0.7 / math.sqrt(1 + sigma**2 * top))
        z = np.arange(-9, 9, step)
        share = np.exp(-(z**2) / 2)
        share /= share.sum()
        log_rates = math.log(mean) - sigma**2 / 2 + sigma * z
        rates = np.exp(log_rates)
        bound = self.max or MOST_LOOPS
        pmf, mass = {}, 0.0
        for n in range(1, min(bound, top) + 1):
            p = float(share @ np.exp((n - 1) * log_rates - rates - math.lgamma(n)))
            pmf[n] = 1 - mass if n == bound else p
            mass += p
            if mass >= 1 - 1e-12:
                break
        return pmf

    def sample(self, generator: np.random.Generator, n: int) -> list[int]:
        rates = np.exp(generator.normal(math.log(resolved(self.mean)) - self.sigma**2 / 2, self.sigma, n))
        return np.minimum(generator.poisson(rates) + 1, self.max or MOST_LOOPS).tolist()


def _top(wished: float, low: int) -> int:
    return max(low, min(math.ceil(wished), MOST_LOOPS))


def _check_bounds(sampler: Sampler, name: str, middle: float | None, low: int, high: int | None) -> Sampler:
    if high is not None and high < low:
        raise UsageError(f"depth needs min <= max, got min={low}, max={high}: swap them or raise max")
    if middle is not None and high is not None and not low <= middle <= high:
        raise UsageError(f"depth.{name}={middle:g} lies outside min={low} .. max={high}: move it between them")
    return sampler


def _clipped_pmf(mu: float, sigma: float, low: int, high: int) -> dict[int, float]:
    """Of ``clip(round(exp N(mu, sigma)), low, high)``."""

    def below(x: float) -> float:
        return 0.5 * math.erfc(-(math.log(x) - mu) / (sigma * math.sqrt(2)))

    edges = [0.0, *(below(n + 0.5) for n in range(low, high)), 1.0]
    return {n: edges[i + 1] - edges[i] for i, n in enumerate(range(low, high + 1))}


def _clipped_sample(generator: np.random.Generator, n: int, mu: float, sigma: float, low: int, high: int) -> list[int]:
    x = np.floor(np.exp(generator.normal(mu, sigma, n)) + 0.5)
    return [int(value) for value in np.clip(x, low, high)]


@lru_cache(maxsize=16)
def _truncated_poisson(mean: float, low: int, high: int) -> np.ndarray:
    """Probabilities of ``low .. high``."""
    logs = np.array([n * math.log(mean) - math.lgamma(n + 1) for n in range(low, high + 1)])
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()
