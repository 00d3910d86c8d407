"""Inject: how the prelude's output e enters each loop beside the state h."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from alcoda.config import Bool, Choice, Float, NonNegativeFloat
from alcoda.model.init import InitSpecial
from alcoda.model.noise import noisy
from alcoda.model.norms import Norm
from alcoda.model.shape import Cost, Kept, Shape, linear, total


class Inject(Choice, axis="inject"):
    """``x = inject(h, e)``: what the core reads at each loop."""

    carries_anchor: ClassVar[bool] = True
    """Whether the prelude's output reaches every loop through this choice."""

    gives_product: ClassVar[bool] = False
    """Whether it ends in a matrix product, so that autocast hands the core a stream in bf16."""

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        """A module on ``(h_BTD, e_BTD)``; ``norm`` is the blocks'."""
        raise NotImplementedError

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        """Once a loop."""
        return Cost()

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that one loop keeps for its backward pass."""
        return 0


class NoInject(Inject):
    """``x = h + eps`` (a plain weight-tied loop, where ``noise`` is 0).

    ``eps ~ N(0, noise^2)``, new at every loop, in training only: the state noise of GRT before it has an injection
    (papers.md 1.5).
    """

    kind: Literal["none"] = "none"
    carries_anchor: ClassVar[bool] = False
    noise: NonNegativeFloat = 0.0

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        return NoInjectModule(self.noise)


class Add(Inject):
    """``x = h + e``."""

    kind: Literal["add"] = "add"

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        return AddModule()


class Concat(Inject):
    """``x = W [h + eps ; e]``, W: 2d -> d, state first (Huginn's adapter, GRT's W_proj).

    ``eps ~ N(0, noise^2)``, new at every loop, in training only (GRT: noise 0.1, papers.md 1.1).
    """

    kind: Literal["concat"] = "concat"
    gives_product: ClassVar[bool] = True
    noise: NonNegativeFloat = 0.0
    bias: Bool = False
    start: Literal["normal", "identity"] = "normal"
    """How W is initialised: like any linear map, or as [I | 0], which passes the state on unchanged."""

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        return ConcatModule(self, shape.d_model)

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        return linear(2 * shape.d_model, shape.d_model, self.bias)

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        return 2 * shape.d_model * kept.product


class Diagonal(Inject):
    """``x = A h + D (B norm(e))`` (Parcae, papers.md 5.2): the state decays, the anchor comes in.

        D = softplus(delta)      A = exp(-D exp(log_a)), by dimension, at most 1 - 2^-10 whatever the parameters

    With update overwrite and pre-norm blocks, h = A h + D B norm(e) + the core's branches. Ours, where the paper is
    silent: A starts at ``start``, D at 1, B at the identity.
    """

    kind: Literal["diagonal"] = "diagonal"
    start: Annotated[Float, Field(gt=0, lt=1)] = 0.9
    b: Literal["matrix", "diagonal"] = "matrix"

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        return DiagonalModule(self, norm.build(shape), shape.d_model)

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        d = shape.d_model
        b = linear(d, d) if self.b == "matrix" else Cost(params=d)
        return total(Cost(params=2 * d), b, norm.cost(shape))

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        # What B reads and gives, and the state; the norm's input, e, is the same in every loop.
        width = kept.product if self.b == "matrix" else 4
        return shape.d_model * (2 * width + kept.stream)


class NoInjectModule(nn.Module):
    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        return noisy(h_BTD, self.noise) if self.training else h_BTD


class AddModule(nn.Module):
    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        return h_BTD + e_BTD


class ConcatModule(InitSpecial):
    def __init__(self, config: Concat, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.proj = nn.Linear(2 * d_model, d_model, bias=config.bias)

    def init_special(self) -> None:
        """What the table of `alcoda.model.init` does not say: the identity start."""
        if self.config.start == "identity":
            d_model = self.proj.out_features
            self.proj.weight.zero_()
            self.proj.weight[:, :d_model].fill_diagonal_(1.0)

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        if self.training:
            h_BTD = noisy(h_BTD, self.config.noise)
        return self.proj(torch.cat([h_BTD, e_BTD], -1))


MOST_A = 1 - 2**-10
"""No entry of the diagonal is above it."""


class DiagonalModule(InitSpecial):
    def __init__(self, config: Diagonal, norm: nn.Module, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.norm = norm
        self.delta = nn.Parameter(torch.empty(d_model))
        self.log_a = nn.Parameter(torch.empty(d_model))
        self.b = nn.Linear(d_model, d_model, bias=False) if config.b == "matrix" else Scale(d_model)

    def init_special(self) -> None:
        self.delta.fill_(math.log(math.e - 1))
        self.log_a.fill_(math.log(-math.log(self.config.start)))
        if isinstance(self.b, nn.Linear):
            nn.init.eye_(self.b.weight)

    def a(self) -> Tensor:
        """The diagonal, [D]."""
        # By logarithms: softplus(delta) exp(log_a) is 0 times infinity for some parameters.
        low = -30.0  # below it log softplus(x) is x, but for one part in 10^13
        log_d = torch.where(self.delta < low, self.delta, F.softplus(self.delta.clamp(min=low)).log())
        high = 20.0  # exp(-exp(20)) is 0; beyond, its gradient would be 0 times infinity
        return torch.exp(-torch.exp((log_d + self.log_a).clamp(max=high))).clamp(max=MOST_A)

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        drive_BTD = self.b(self.norm(e_BTD)) * F.softplus(self.delta)
        # Not in bf16, where A would be 1.
        return torch.addcmul(drive_BTD, self.a(), h_BTD.to(drive_BTD.dtype))

    def describe(self, args: tuple[Tensor, ...], out: Tensor) -> dict[str, Tensor]:
        """A, by dimension."""
        return {"diagonal": self.a()}


class Scale(InitSpecial):
    """``w x``, elementwise."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))

    def init_special(self) -> None:
        self.weight.fill_(1.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.weight.to(x_BTD.dtype)
