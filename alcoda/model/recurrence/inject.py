"""Inject: how the prelude's output e enters each loop beside the state h."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from alcoda.config import Bool, Choice, NonNegativeFloat
from alcoda.model.init import InitSpecial
from alcoda.model.shape import Cost, Shape, linear


class Inject(Choice, axis="inject"):
    """``x = inject(h, e)``: what the core reads at each loop."""

    carries_anchor: ClassVar[bool] = True
    """Whether the prelude's output reaches every loop through this choice."""

    def build(self, shape: Shape) -> nn.Module:
        """A module on ``(h_BTD, e_BTD)``."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Once a loop."""
        return Cost()


class NoInject(Inject):
    """``x = h`` (a plain weight-tied loop)."""

    kind: Literal["none"] = "none"
    carries_anchor: ClassVar[bool] = False

    def build(self, shape: Shape) -> nn.Module:
        return NoInjectModule()


class Add(Inject):
    """``x = h + e``."""

    kind: Literal["add"] = "add"

    def build(self, shape: Shape) -> nn.Module:
        return AddModule()


class Concat(Inject):
    """``x = W [h + eps ; e]``, W: 2d -> d, state first (Huginn's adapter, GRT's W_proj).

    ``eps ~ N(0, noise^2)``, new at every loop, in training only (GRT: noise 0.1, papers.md 1.1).
    """

    kind: Literal["concat"] = "concat"
    noise: NonNegativeFloat = 0.0
    bias: Bool = False
    start: Literal["normal", "identity"] = "normal"
    """How W is initialised: like any linear map, or as [I | 0], which passes the state on unchanged."""

    def build(self, shape: Shape) -> nn.Module:
        return ConcatModule(self, shape.d_model)

    def cost(self, shape: Shape) -> Cost:
        return linear(2 * shape.d_model, shape.d_model, self.bias)


class NoInjectModule(nn.Module):
    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        return h_BTD


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
        if self.training and self.config.noise:
            h_BTD = torch.add(h_BTD, torch.randn_like(h_BTD), alpha=self.config.noise)
        return self.proj(torch.cat([h_BTD, e_BTD], -1))
