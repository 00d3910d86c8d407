"""Embedding: what is done to a token's vector before the prelude reads it."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from alcoda.config import Choice, PositiveFloat
from alcoda.model.norms import Norm
from alcoda.model.shape import Cost, Kept, Shape


class Embedding(Choice, axis="embedding"):
    """``x = f(E[token])``, before learned positions are added."""

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        """A module on ``x_BTD``; ``norm`` is the blocks'."""
        return nn.Identity()

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        return Cost()

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that it keeps for its backward pass."""
        return 0


class AsItIs(Embedding):
    """The row of the table (GPT-2, Llama, Ouro)."""

    kind: Literal["none"] = "none"


class Scaled(Embedding):
    """Times a constant (Huginn: sqrt(d_model), papers.md 5.4). A tied head reads the table unscaled."""

    kind: Literal["scale"] = "scale"
    factor: PositiveFloat | None = None
    """sqrt(d_model) where not set."""

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        return ScaledModule(self.factor or shape.d_model**0.5)


class Normed(Embedding):
    """Through a norm of the block's kind (nanochat, LRT: papers.md 4.1)."""

    kind: Literal["norm"] = "norm"

    def build(self, norm: Norm, shape: Shape) -> nn.Module:
        return norm.build(shape)

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        return norm.cost(shape)

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        return kept.normed(shape.d_model)


class ScaledModule(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.factor
