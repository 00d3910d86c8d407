"""Norms, as a choice: LayerNorm (GPT-2, GRT) and RMSNorm (everything later)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from alcoda.config import Bool, Choice, PositiveFloat
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
    weight: Bool = True
    """Whether it has a learned weight; without one it has no bias either."""

    def build(self, shape: Shape) -> nn.Module:
        return nn.LayerNorm(shape.d_model, eps=self.eps, elementwise_affine=self.weight, bias=shape.bias)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.d_model * (self.weight + (self.weight and shape.bias)))


class RMSNorm(Norm):
    """``x / rms(x) * weight`` (Zhang and Sennrich 2019)."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: PositiveFloat = 1e-6
    weight: Bool = True
    """Whether it has a learned weight (nanochat and LRT have none, papers.md 4.1)."""

    def build(self, shape: Shape) -> nn.Module:
        return RMSNormModule(shape.d_model, self.eps, self.weight)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.d_model if self.weight else 0)


class RMSNormModule(nn.RMSNorm):
    """`torch.nn.RMSNorm`, with the weight cast to the input's type so that bf16 activations stay bf16.

    Training on a CPU takes `FusedRMSNorm`, which is the same function: torch has no kernel of its own there, and its
    composite backward pass is 2.5 times slower (docs/LOG.md).
    """

    def __init__(self, width: int, eps: float, weight: bool = True) -> None:
        super().__init__(width, eps=eps, elementwise_affine=weight)

    def forward(self, x: Tensor) -> Tensor:
        weight_D = None if self.weight is None else self.weight.to(x.dtype)
        trains = torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling()
        if trains and x.device.type == "cpu":
            return FusedRMSNorm.apply(x, weight_D, self.eps)
        return torch.rms_norm(x, self.normalized_shape, weight_D, self.eps)


class FusedRMSNorm(torch.autograd.Function):
    """``y = x r w``, ``r = 1 / sqrt(mean(x^2) + eps)``, in as few passes over memory as plain torch allows.

    With ``n = x r`` and ``t = g n``: ``dw = sum t`` over rows, ``dx = r (g w - n mean(t w))``. No weight is ``w = 1``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
        r = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight_D, r)
        ctx.eps = eps
        return x * r if weight_D is None else (x * r).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight_D, r = ctx.saved_tensors
        (g,) = grads
        if torch.is_grad_enabled():  # a second derivative must see how r depends on x
            r = _inverse_rms(x, ctx.eps)
        n = x * r
        t = g * n
        if weight_D is None:
            return torch.addcmul(g, n, t.mean(-1, keepdim=True), value=-1).mul_(r), None, None
        with torch.autocast(x.device.type, enabled=False):  # where backward() is called inside one
            mean = (t @ weight_D)[..., None] / -x.size(-1)
        return torch.addcmul(g * weight_D, n, mean).mul_(r), t.flatten(0, -2).sum(0), None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)) ** 2
    return (square / x.size(-1) + eps).rsqrt().to(x.dtype)
