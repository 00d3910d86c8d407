"""What must not be rounded to bf16: decisions, and shares close to 0 or 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32, or as it is where it is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_fp32(linear: nn.Linear, x: Tensor, rows: slice = slice(None)) -> Tensor:
    """``linear(x)``, or some rows of its output, in fp32 or better, whatever autocast says."""
    with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
        bias = None if linear.bias is None else linear.bias[rows]
        return F.linear(at_least_fp32(x), linear.weight[rows], bias)
