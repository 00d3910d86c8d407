"""The feed-forward half of a block, as a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.config import Choice
from alcoda.model.shape import Cost, Kept, Shape, linear, total


class Mlp(Choice, axis="mlp"):
    """The feed-forward half of a block."""

    def d_ff(self, d_model: int) -> int:
        """The width where the recipe names none."""
        raise NotImplementedError

    def build(self, shape: Shape) -> nn.Module:
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        raise NotImplementedError

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that one pass keeps for its backward pass; what the first maps read included. Of a gated one:
        the gate, what becomes of it, the other map, and what the last one reads."""
        return kept.read(shape.d_model, 2) + 4 * shape.d_ff * kept.product


class TwoMaps(Mlp):
    """``W_down f(W_up x)``; width 4d by default."""

    def d_ff(self, d_model: int) -> int:
        return 4 * d_model

    def cost(self, shape: Shape) -> Cost:
        up, down = linear(shape.d_model, shape.d_ff, shape.bias), linear(shape.d_ff, shape.d_model, shape.bias)
        return total(up, down)

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        return kept.read(shape.d_model, 1) + 2 * shape.d_ff * kept.product  # up (or its relu), and what down reads


class Gelu(TwoMaps):
    """``W_down gelu(W_up x)`` (GPT-2); width 4d by default."""

    kind: Literal["gelu"] = "gelu"

    def build(self, shape: Shape) -> nn.Module:
        return TwoMapsModule(shape, F.gelu)


class Relu2(TwoMaps):
    """``W_down relu(W_up x)^2`` (So et al. 2021; nanochat, Parcae); width 4d by default."""

    kind: Literal["relu2"] = "relu2"

    def build(self, shape: Shape) -> nn.Module:
        return TwoMapsModule(shape, relu2)


class SwiGlu(Mlp):
    """``W_down (silu(W_gate x) * W_up x)`` (Shazeer 2020); width 8d/3 rounded up to a multiple of 64 by default."""

    kind: Literal["swiglu"] = "swiglu"

    def d_ff(self, d_model: int) -> int:
        return -(-8 * d_model // (3 * 64)) * 64

    def build(self, shape: Shape) -> nn.Module:
        return SwiGluModule(shape)

    def cost(self, shape: Shape) -> Cost:
        up, down = linear(shape.d_model, shape.d_ff, shape.bias), linear(shape.d_ff, shape.d_model, shape.bias)
        return total(up, up, down)


def relu2(x: Tensor) -> Tensor:
    """``max(x, 0)^2``."""
    return F.relu(x).square()


class TwoMapsModule(nn.Module):
    def __init__(self, shape: Shape, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


class SwiGluModule(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
