"""Norms, as a choice: LayerNorm (GPT-2, GRT) and RMSNorm (everything later)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from alcoda.config import Choice, PositiveFloat
from alcoda.model.shape import Cost, Shape


class Norm(Choice, axis="norm"):
    """How a D-vector is brought to unit scale."""

    def build(self, shape: Shape) -> nn.Module:
        """A module on ``x_BTD``."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Parameters only: norms are not counted in FLOPs."""
        raise NotImplementedError


class LayerNorm(Norm):
    """``(x - mean) / std * weight (+ bias)``; the bias follows the block's ``bias`` (GPT-2; nanoGPT without)."""

    kind: Literal["layernorm"] = "layernorm"
    eps: PositiveFloat = 1e-5

    def build(self, shape: Shape) -> nn.Module:
        return nn.LayerNorm(shape.d_model, eps=self.eps, bias=shape.bias)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.d_model * (2 if shape.bias else 1))


class RMSNorm(Norm):
    """``x / rms(x) * weight`` (Zhang and Sennrich 2019)."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: PositiveFloat = 1e-6

    def build(self, shape: Shape) -> nn.Module:
        return RMSNormModule(shape.d_model, self.eps)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.d_model)


class RMSNormModule(nn.RMSNorm):
    """`torch.nn.RMSNorm`, with the weight cast to the input's type so that bf16 activations stay bf16."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__(d_model, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
