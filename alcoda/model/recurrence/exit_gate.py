"""Exit gate: whether the model says at each loop how likely it is done."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.config import Choice
from alcoda.model.precision import Fp32Linear, in_fp32
from alcoda.model.shape import Cost, Shape, linear


class ExitGate(Choice, axis="exit_gate"):
    """``lambda_t``, the probability of leaving after loop t given that it was reached."""

    has_gate: ClassVar[bool] = True

    def build(self, shape: Shape) -> nn.Module:
        """A module on ``h_BTD`` that gives the logit of lambda, ``[B, T]``, in fp32 or better."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Once for each loop at which it is asked: by an objective over all loops, or by an exit rule."""
        return Cost()


class NoExitGate(ExitGate):
    """The model has no opinion."""

    kind: Literal["none"] = "none"
    has_gate: ClassVar[bool] = False

    def build(self, shape: Shape) -> nn.Module:
        return NoExitGateModule()


class LinearExitGate(ExitGate):
    """``sigmoid(w . h_t + b)`` of the state after the loop and its norm (Ouro, papers.md 5.4)."""

    kind: Literal["linear"] = "linear"

    def build(self, shape: Shape) -> nn.Module:
        return LinearExitGateModule(shape.d_model)

    def cost(self, shape: Shape) -> Cost:
        return linear(shape.d_model, 1, bias=True)


class NoExitGateModule(nn.Module):
    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD.new_zeros(h_BTD.shape[:2])


class LinearExitGateModule(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.proj = Fp32Linear(d_model, 1)

    def forward(self, h_BTD: Tensor) -> Tensor:
        # In bf16 a gate that is sure would be 1, without a gradient to change its mind.
        return in_fp32(self.proj, h_BTD)[..., 0]


def log_exit_prior(logits: list[Tensor]) -> Tensor:
    """``log p_t`` of ``p_t = lambda_t prod_{j<t} (1 - lambda_j)``, the last loop taking the rest: [R, ...], p sums to 1
    over R. ``logits`` are those of lambda at loops 1 .. R."""
    stays, shares = torch.zeros_like(logits[0]), []
    for logit in logits[:-1]:
        shares.append(F.logsigmoid(logit) + stays)
        stays = stays + F.logsigmoid(-logit)
    return torch.stack([*shares, stays])
