"""Training depth: how many loops one training step runs, and how many of them carry gradients.

A depth is a pure function of (seed, train_step), never of the rank: ranks that loop a different number of times would
wait for each other forever. Every sampler knows its exact distribution, from which the ledger takes its means.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from alcoda.config import Choice, PositiveFloat, PositiveInt
from alcoda.errors import UsageError

Number = TypeVar("Number", int, float)
Sampler = TypeVar("Sampler", bound="Depth")

MOST_LOOPS = 10_000
"""No step is deeper: a distribution is a list of its depths, and a typing error is not to fill the memory."""

Loops = Annotated[PositiveInt, Field(le=MOST_LOOPS)]
Mean = Annotated[PositiveFloat, Field(le=MOST_LOOPS)]
Sigma = Annotated[PositiveFloat, Field(le=1.5)]
"""Above it the mean comes from steps too rare for a run to meet."""

_STREAM = 0xD0D0
"""Keeps the draws of depth apart from other draws that start from the same seed."""


class LoopPlan(NamedTuple):
    """Loops of one training step: the first ``n_free`` without gradients, then ``n_grad`` with them."""

    n_free: int
    n_grad: int

    @property
    def n_loops(self) -> int:
        return self.n_free + self.n_grad


class Depth(Choice, axis="depth"):
    """A distribution of training depths.

    Names left out are taken from the model's nominal depth ``n_loops`` by `resolve`.
    """

    last_k: PositiveInt | None = None
    """Truncated backpropagation in depth: only the last k loops carry gradients (Huginn: 8). None: all of them."""

    def resolve(self, n_loops: int) -> Self:
        """The sampler with every number filled in, for a model of nominal depth ``n_loops``."""
        raise NotImplementedError

    def pmf(self) -> dict[int, float]:
        """Probability of each depth (of a resolved sampler)."""
        raise NotImplementedError

    def _draw(self, generator: np.random.Generator) -> int:
        raise NotImplementedError

    def draw(self, seed: int, train_step: int) -> LoopPlan:
        """The depth of one training step (of a resolved sampler)."""
        n_loops = self._draw(np.random.default_rng([_STREAM, seed, train_step]))
        n_grad = n_loops if self.last_k is None else min(n_loops, self.last_k)
        return LoopPlan(n_loops - n_grad, n_grad)

    @property
    def mean_loops(self) -> float:
        return sum(n * p for n, p in self.pmf().items())

    @property
    def mean_grad_loops(self) -> float:
        """Mean of the loops that carry gradients."""
        return sum(min(n, self.last_k or n) * p for n, p in self.pmf().items())

    @property
    def max_loops(self) -> int:
        """The deepest step that occurs (for an unbounded sampler: but for one in 10^12)."""
        return max(self.pmf())


class Fixed(Depth):
    """Always ``loops`` loops (CART, Ouro, a dense model); the model's ``n_loops`` where not set."""

    kind: Literal["fixed"] = "fixed"
    loops: Loops | None = None

    def resolve(self, n_loops: int) -> Self:
        return self.model_copy(update={"loops": self.loops or n_loops})

    def pmf(self) -> dict[int, float]:
        return {_set(self.loops): 1.0}

    def _draw(self, generator: np.random.Generator) -> int:
        return _set(self.loops)


class Uniform(Depth):
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

    def resolve(self, n_loops: int) -> Self:
        top = self.max or n_loops
        if top < self.min:
            raise UsageError(
                f"depth.min={self.min} is above the model's n_loops={n_loops}: lower min, or set depth.max"
            )
        return self.model_copy(update={"max": top})

    def pmf(self) -> dict[int, float]:
        depths = range(self.min, _set(self.max) + 1)
        return {n: 1 / len(depths) for n in depths}

    def _draw(self, generator: np.random.Generator) -> int:
        return int(generator.integers(self.min, _set(self.max), endpoint=True))


class LogNormal(Depth):
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
        return _check_bounds(self, self.mean, self.min, self.max)

    def resolve(self, n_loops: int) -> Self:
        mean = self.mean or float(n_loops)
        top = self.max or max(self.min, min(math.ceil(4 * mean), MOST_LOOPS))
        return _check_bounds(self.model_copy(update={"mean": mean, "max": top}), mean, self.min, top)

    def _mu(self) -> float:
        return math.log(_set(self.mean)) - self.sigma**2 / 2

    def pmf(self) -> dict[int, float]:
        low, high, mu = self.min, _set(self.max), self._mu()

        def below(x: float) -> float:
            return 0.5 * math.erfc(-(math.log(x) - mu) / (self.sigma * math.sqrt(2)))

        edges = [0.0, *(below(n + 0.5) for n in range(low, high)), 1.0]
        return {n: edges[i + 1] - edges[i] for i, n in enumerate(range(low, high + 1))}

    def _draw(self, generator: np.random.Generator) -> int:
        x = math.exp(generator.normal(self._mu(), self.sigma))
        return int(min(max(math.floor(x + 0.5), self.min), _set(self.max)))


class LogNormalPoisson(Depth):
    """Huginn's sampler (papers.md 5.1): ``rate ~ LogNormal(ln mean - sigma^2 / 2, sigma)``, ``n = Poisson(rate) + 1``.

    The mean of n is ``mean + 1``, less what ``max`` cuts. With ``last_k: 8`` the last 8 loops carry gradients, as in
    Huginn's training. Huginn's has no bound; here ``max`` is 10,000 where not set, which no step of Huginn's reaches.
    """

    kind: Literal["lognormal_poisson"] = "lognormal_poisson"
    mean: Mean | None = None
    sigma: Sigma = 0.5
    max: Loops | None = None

    def resolve(self, n_loops: int) -> Self:
        return self.model_copy(update={"mean": self.mean or float(n_loops)})

    def pmf(self) -> dict[int, float]:
        mean, sigma = _set(self.mean), self.sigma
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

    def _draw(self, generator: np.random.Generator) -> int:
        rate = math.exp(generator.normal(math.log(_set(self.mean)) - self.sigma**2 / 2, self.sigma))
        n = int(generator.poisson(rate)) + 1
        return min(n, self.max or MOST_LOOPS)


def _set(value: Number | None) -> Number:
    """``value``, of a resolved sampler."""
    if value is None:
        raise ValueError("resolve the sampler with the model's n_loops first")
    return value


def _check_bounds(sampler: Sampler, mean: float | None, low: int, high: int | None) -> Sampler:
    if high is not None and high < low:
        raise UsageError(f"depth needs min <= max, got min={low}, max={high}: swap them or raise max")
    if mean is not None and high is not None and not low <= mean <= high:
        raise UsageError(f"depth.mean={mean:g} lies outside min={low} .. max={high}: move it between them")
    return sampler
