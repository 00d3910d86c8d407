"""Gates on keys and values, and on what is added to them (`alcoda.model.memory`): one number a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gated_sum(
    g_BTG1: Tensor, more_BTG1: Tensor | None, k_BTGK: Tensor, v_BTGK: Tensor, *more: Tensor
) -> tuple[Tensor, Tensor]:
    """``g k + g' k'`` and ``g v + g' v'``, a gate a head; ``g k`` and ``g v`` where there is no more
    (LRT, papers.md 4.1). Gates ``[B, T, G, 1]``; keys, values and ``more``, what the memory adds, ``[B, T, G, K]``.
    """
    k_sum, v_sum = g_BTG1 * k_BTGK, g_BTG1 * v_BTGK
    if more_BTG1 is None:
        return k_sum, v_sum
    return k_sum.addcmul_(more_BTG1, more[0]), v_sum.addcmul_(more_BTG1, more[1])


class GatedSum(torch.autograd.Function):
    """`gated_sum`, with its backward pass in as few passes over memory as plain torch allows."""

    @staticmethod
    def forward(
        ctx: Any, g_BTG1: Tensor, more_BTG1: Tensor | None, k_BTGK: Tensor, v_BTGK: Tensor, *more: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(g_BTG1, more_BTG1, k_BTGK, v_BTGK, *more)
        return gated_sum(g_BTG1, more_BTG1, k_BTGK, v_BTGK, *more)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g_BTG1, more_BTG1, *parts), (dk, dv) = ctx.saved_tensors, grads

        def of_gate(k: Tensor, v: Tensor) -> Tensor:
            return torch.addcmul(dk * k, dv, v).sum(-1, keepdim=True)

        own = of_gate(*parts[:2]), dk * g_BTG1, dv * g_BTG1
        if more_BTG1 is None:
            return own[0], None, *own[1:]
        return own[0], of_gate(*parts[2:]), *own[1:], dk * more_BTG1, dv * more_BTG1
