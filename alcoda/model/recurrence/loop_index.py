"""Loop index: whether a loop knows its number."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from alcoda.config import Choice, Int, PositiveFloat
from alcoda.model.shape import Cost, Shape


class LoopIndex(Choice, axis="loop_index"):
    """``x = x + f(r)``, r the loop, 0-based; before the injection, after the carry-in."""

    def build(self, shape: Shape) -> nn.Module:
        """A module on ``(x_BTD, loop)``, loop a number or, where rows are at different loops, [B]."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Parameters; the embedding is made once a loop, not once a token, and adding it is elementwise."""
        return Cost()


class NoLoopIndex(LoopIndex):
    """All loops are alike (GRT, Huginn, Ouro)."""

    kind: Literal["none"] = "none"

    def build(self, shape: Shape) -> nn.Module:
        return NoLoopIndexModule()


class Sinusoidal(LoopIndex):
    """``x + W PE(r)``: sines and cosines in ``dims`` dimensions, projected to d (CART: 32, base 10,000; papers.md 2.1).

    CART tabulates 16 loops; here any r has an embedding, those 16 the same ones.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    dims: Annotated[Int, Field(ge=2, multiple_of=2)] = 32
    base: PositiveFloat = 10_000.0

    def build(self, shape: Shape) -> nn.Module:
        return SinusoidalModule(self, shape.d_model)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=self.dims * shape.d_model)


class NoLoopIndexModule(nn.Module):
    def forward(self, x_BTD: Tensor, loop: int | Tensor) -> Tensor:
        return x_BTD


class SinusoidalModule(nn.Module):
    def __init__(self, config: Sinusoidal, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.proj = nn.Linear(config.dims, d_model, bias=False)

    def forward(self, x_BTD: Tensor, loop: int | Tensor) -> Tensor:
        weight = self.proj.weight
        half = self.config.dims // 2
        exponent = torch.arange(half, device=weight.device, dtype=torch.float64) / half
        loop_B = loop if isinstance(loop, Tensor) else torch.full((1,), loop, device=weight.device)
        angle = loop_B[:, None] * self.config.base**-exponent
        pe_BE = torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(weight.dtype)
        # Elementwise, not a product of matrices: it has one row a loop, and nothing to gain.
        return x_BTD + (weight * pe_BE[:, None]).sum(-1)[:, None].to(x_BTD.dtype)
