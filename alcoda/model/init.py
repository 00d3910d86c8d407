"""Initial weights, in one place.

| parameter | start |
|---|---|
| linear and embedding weights | N(0, init_std) |
| maps back into the residual stream (RESIDUAL) | N(0, init_std / sqrt(2 L)), L = blocks that run at n_loops |
| biases | 0 |
| norm weights | 1 |
| the gate's last bias, an identity adapter, the gates of value tables | as their choice says (``init_special``) |

(GPT-2 and nanoGPT; L counts each loop, as in Huginn, because the residual stream adds up every pass.)
"""

from __future__ import annotations

import torch
from torch import nn


class InitSpecial(nn.Module):
    """A module that starts otherwise than the table says."""

    def init_special(self) -> None:
        """Called after the table, without gradients."""
        raise NotImplementedError


RESIDUAL = ("attention.out", "mlp.down")
"""Ends of the names of maps that write into the residual stream."""


@torch.no_grad()
def init_weights(model: nn.Module, std: float, n_blocks_run: int) -> None:
    """Fill every parameter of ``model``, in the order of its modules, from torch's global generator."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            residual = name.endswith(RESIDUAL)
            nn.init.normal_(module.weight, std=std / (2 * n_blocks_run) ** 0.5 if residual else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
    for module in model.modules():
        if isinstance(module, InitSpecial):
            module.init_special()
