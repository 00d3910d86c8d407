"""Objective: what a training step minimises."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.config import Choice
from alcoda.data.batches import NOT_SCORED
from alcoda.depth.sample import LoopPlan
from alcoda.model.lm import RecurrentLM

LOSS_ROWS = 1024
"""Tokens whose logits are made at one time."""


class Objective(Choice, axis="objective"):
    """A loss over the read-outs of one pass."""

    def loss_sum(
        self, model: RecurrentLM, inputs_BT: Tensor, targets_BT: Tensor, plan: LoopPlan, recompute: bool
    ) -> Tensor:
        """The loss in nats, summed over the targets that are scored."""
        raise NotImplementedError


class NextToken(Objective):
    """Cross-entropy of the next token after the last loop."""

    kind: Literal["next_token"] = "next_token"

    def loss_sum(
        self, model: RecurrentLM, inputs_BT: Tensor, targets_BT: Tensor, plan: LoopPlan, recompute: bool
    ) -> Tensor:
        y_BTD = next(model.readouts(inputs_BT, [plan.n_loops], n_free=plan.n_free, recompute=recompute))
        # In parts: logits of a whole batch are the largest tensor of a step by far, and fall out of every cache.
        parts = zip(y_BTD.flatten(0, 1).split(LOSS_ROWS), targets_BT.flatten().split(LOSS_ROWS), strict=True)
        losses = [
            F.linear_cross_entropy(y_ND, model.head_weight_VD, target_N, reduction="sum", ignore_index=NOT_SCORED)
            for y_ND, target_N in parts
        ]
        return torch.stack(losses).sum()
