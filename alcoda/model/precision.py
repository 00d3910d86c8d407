"""Which numbers are held and multiplied in which precision. Decisions, and shares close to 0 or 1, are not rounded to
bf16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32, or as it is where it is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Fp32Linear(nn.Linear):
    """A map whose product is always taken by `in_fp32`."""


def in_fp32(linear: Fp32Linear, x: Tensor, rows: slice = slice(None)) -> Tensor:
    """``linear(x)``, or some rows of its output, in fp32 or better, whatever autocast says."""
    with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
        bias = None if linear.bias is None else linear.bias[rows]
        return F.linear(at_least_fp32(x), linear.weight[rows], bias)


class HeldLinear(nn.Linear):
    """A map whose weights are held in the type that autocast multiplies in; where autocast is off, it multiplies in the
    type of its input."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype))


def hold_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the weights of ``model``'s linear maps in ``dtype``, in which autocast multiplies: the same products to the
    bit, without a cast at every use (with gradients off, autocast keeps none of them). Not for training."""
    for module in model.modules():
        if type(module) is nn.Linear:  # not of `Fp32Linear`, nor of a map that rounds in its own way
            module.to(dtype)
            module.__class__ = HeldLinear
