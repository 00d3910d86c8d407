"""Objective: what a training step minimises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.config import Choice, NonNegativeFloat, PositiveFloat
from alcoda.data.batches import NOT_SCORED
from alcoda.depth.plan import LoopPlan
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import at_least_fp32
from alcoda.model.recurrence.exit_gate import log_exit_prior
from alcoda.model.state import Readout

LOSS_ROWS = 1024
"""Tokens whose logits are made at one time: those of a whole batch are the largest tensor of a step by far, and fall
out of every cache."""


class Objective(Choice, axis="objective"):
    """A loss over the read-outs of one pass."""

    needs_exit_gate: ClassVar[bool] = False
    """Whether it trains the model's exit gate, which learns from nothing else."""
    reads_inner_loops: ClassVar[bool] = False
    """Whether it reads depths before the last, which rows of their own depth do not share."""

    def n_readouts(self, n_loops: int) -> float:
        """Mean number of depths that go through coda and head in a pass of ``n_loops``."""
        return 1.0

    def n_more_heads(self, n_loops: int) -> float:
        """Mean number of times beside them that the head runs, without gradients."""
        return 0.0

    def n_kept_logits(self, n_loops: int) -> float:
        """Mean number of rows of logits a token that a pass of ``n_loops`` keeps for its backward pass."""
        return self.n_readouts(n_loops) + self.n_more_heads(n_loops)

    def loops(self, plan: LoopPlan) -> Sequence[int]:
        """The depths that a pass is read out at, increasing; the last is the plan's."""
        return [plan.n_loops]

    def loss_sum(self, model: RecurrentLM, readouts: Sequence[Readout], targets_BT: Tensor) -> Tensor:
        """The loss of one pass in nats, summed over the targets that are scored.

        Args:
            readouts: at the depths `loops`.
        """
        raise NotImplementedError


class NextToken(Objective):
    """Cross-entropy of the next token after the last loop."""

    kind: Literal["next_token"] = "next_token"

    def loss_sum(self, model: RecurrentLM, readouts: Sequence[Readout], targets_BT: Tensor) -> Tensor:
        (last,) = readouts
        return _nats_sum(model, last, targets_BT) + _auxiliary(last, targets_BT)


class PerLoop(Objective):
    """Cross-entropy after every loop, weighed by a learned exit prior that is kept from collapsing (Ouro, papers.md
    5.4): ``sum_t p_t CE_t - beta H(p)``, p from the model's exit gate, for each token.
    """

    kind: Literal["per_loop"] = "per_loop"
    needs_exit_gate: ClassVar[bool] = True
    reads_inner_loops: ClassVar[bool] = True
    beta: NonNegativeFloat = 0.1
    """Weight of the prior's entropy: a pull towards the uniform one."""

    def n_readouts(self, n_loops: int) -> float:
        return n_loops

    def loops(self, plan: LoopPlan) -> Sequence[int]:
        return range(1, plan.n_loops + 1)

    def loss_sum(self, model: RecurrentLM, readouts: Sequence[Readout], targets_BT: Tensor) -> Tensor:
        gates = [model.exit_gate(readout.state.h_BTD).flatten() for readout in readouts]
        nats = [torch.cat(_nats(model, readout, targets_BT, "none")) for readout in readouts]
        log_prior_RN = log_exit_prior(gates)
        prior_RN = log_prior_RN.exp()
        loss_N = (prior_RN * (torch.stack(nats) + self.beta * log_prior_RN)).sum(0)
        loss_N = loss_N + 0 * gates[-1]  # which decides nothing: after one loop, all that the gate has
        return (loss_N * _is_scored(targets_BT)).sum() + _auxiliary(readouts[-1], targets_BT)


class SelfDistill(Objective):
    """Next token after the last loop, and a shallower one taught by it: ``CE_R + weight KL(p_R || p_s)``, s uniform in
    1 .. R - 1, new at every train step, the teacher without gradient.
    """

    kind: Literal["self_distill"] = "self_distill"
    reads_inner_loops: ClassVar[bool] = True
    weight: PositiveFloat = 0.5

    def n_readouts(self, n_loops: int) -> float:
        return min(n_loops, 2)

    def n_more_heads(self, n_loops: int) -> float:
        return 1.0 if n_loops > 1 else 0.0  # the teacher's

    def loops(self, plan: LoopPlan) -> Sequence[int]:
        shallow = [1 + int(plan.draw * (plan.n_loops - 1))] if plan.n_loops > 1 else []
        return [*shallow, plan.n_loops]

    def loss_sum(self, model: RecurrentLM, readouts: Sequence[Readout], targets_BT: Tensor) -> Tensor:
        *shallow, last = readouts
        loss = _nats_sum(model, last, targets_BT) + _auxiliary(last, targets_BT)
        for student in shallow:
            loss = loss + self.weight * self._kl_sum(model, last, student, targets_BT)
        return loss

    def _kl_sum(self, model: RecurrentLM, teacher: Readout, student: Readout, targets_BT: Tensor) -> Tensor:
        parts = zip(_parts(teacher.y_BTD), _parts(student.y_BTD), _is_scored(targets_BT).split(LOSS_ROWS), strict=True)
        sums = []
        for teacher_ND, student_ND, scored_N in parts:
            with torch.no_grad():
                log_p_NV = torch.log_softmax(at_least_fp32(model.logits(teacher_ND)), -1)
            log_q_NV = torch.log_softmax(at_least_fp32(model.logits(student_ND)), -1)
            kl_N = F.kl_div(log_q_NV, log_p_NV, reduction="none", log_target=True).sum(-1)
            sums.append((kl_N * scored_N).sum())
        return torch.stack(sums).sum()


def _parts(x_BTD: Tensor) -> tuple[Tensor, ...]:
    return x_BTD.flatten(0, 1).split(LOSS_ROWS)


def _is_scored(targets_BT: Tensor) -> Tensor:
    return targets_BT.flatten() != NOT_SCORED


def _nats_sum(model: RecurrentLM, readout: Readout, targets_BT: Tensor) -> Tensor:
    return torch.stack(_nats(model, readout, targets_BT, "sum")).sum()


def _nats(model: RecurrentLM, readout: Readout, targets_BT: Tensor, reduction: str) -> list[Tensor]:
    """Cross-entropy of the targets that are scored, in parts."""
    head_VD = model.head_weight_VD
    parts = zip(_parts(readout.y_BTD), targets_BT.flatten().split(LOSS_ROWS), strict=True)
    return [model.soft_cap.nats(y_ND, head_VD, target_N, NOT_SCORED, reduction) for y_ND, target_N in parts]


def _auxiliary(readout: Readout, targets_BT: Tensor) -> Tensor | float:
    aux_BT = readout.state.aux_BT
    return 0.0 if aux_BT is None else (aux_BT.flatten() * _is_scored(targets_BT)).sum()
