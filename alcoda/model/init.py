"""Initial weights, in one place.

| parameter | start |
|---|---|
| linear and embedding weights | N(0, init_std) |
| maps back into the residual stream (RESIDUAL) | N(0, init_std / sqrt(2 L)), L = blocks that run at n_loops |
| biases | 0 |
| norm weights | 1 |
| the gate's last bias, an identity adapter or read-out map, gates of value tables, lti, hyper-connections, the |
| diagonal, low-rank terms: whatever is an `InitSpecial` | as their choice says (``init_special``) |

(GPT-2 and nanoGPT; L counts each loop, as in Huginn, because the residual stream adds up every pass.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class InitSpecial(nn.Module):
    """A module that starts otherwise than the table says."""

    def init_special(self) -> None:
        """Called after the table, without gradients."""
        raise NotImplementedError


class EmbeddingTable(nn.Embedding):
    """``[rows, width]``. On the meta device nothing is drawn: there is nothing to fill, and torch imports its compiler
    (a second and more of the time that it takes to load a model) to find that out."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


RESIDUAL = ("attention.out", "mlp.down")
"""Ends of the names of maps that write into the residual stream."""


@torch.no_grad()
def init_weights(model: nn.Module, std: float, n_blocks_run: int) -> None:
    """Fill every parameter of ``model``, in the order of its modules, from torch's global generator.

    Raises:
        TypeError: a parameter that neither the table nor an `InitSpecial` fills: it would hold what the memory held.
    """
    filled: set[Tensor] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            residual = name.endswith(RESIDUAL)
            nn.init.normal_(module.weight, std=std / (2 * n_blocks_run) ** 0.5 if residual else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            filled |= {module.weight, *([] if module.bias is None else [module.bias])}
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            filled.add(module.weight)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
            filled |= set(module.parameters(recurse=False))
    for module in model.modules():
        if isinstance(module, InitSpecial):
            module.init_special()
            filled |= set(module.parameters(recurse=False))
    for name, parameter in model.named_parameters():
        if parameter not in filled:
            part = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise TypeError(
                f"nothing fills the parameter {name}: let {part} be an alcoda.model.init.InitSpecial whose "
                "init_special() does"
            )
