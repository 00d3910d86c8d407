"""Noise on what a loop reads."""

from __future__ import annotations

import torch
from torch import Tensor


def noisy(x_BTD: Tensor, noise: float) -> Tensor:
    """``x + eps``, ``eps ~ N(0, noise^2)``; nothing is drawn where ``noise`` is 0."""
    return torch.add(x_BTD, torch.randn_like(x_BTD), alpha=noise) if noise else x_BTD
