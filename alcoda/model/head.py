"""The end of the model: the norm before the head, the head, and the cap on its logits."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.config import Choice, PositiveFloat
from alcoda.model.norms import Norm
from alcoda.model.precision import at_least_fp32
from alcoda.model.recurrence.loop_norm import LoopNormModule
from alcoda.model.shape import Cost, Kept, Shape


class FinalNorm(Choice, axis="final_norm"):
    """The norm between the coda and the head, of the block's kind."""

    needs_loop_norm: ClassVar[bool] = False

    def build(self, norm: Norm, shape: Shape, loop_norm: LoopNormModule) -> nn.Module:
        """A module on ``y_BTD``; ``loop_norm`` is the module of the axis of that name."""
        return nn.Identity()

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        return Cost()

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that one read-out keeps for its backward pass."""
        return kept.normed(shape.d_model)


class OwnNorm(FinalNorm):
    """One of its own (GPT-2 and most others)."""

    kind: Literal["own"] = "own"

    def build(self, norm: Norm, shape: Shape, loop_norm: LoopNormModule) -> nn.Module:
        return norm.build(shape)

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        return norm.cost(shape)


class SharedNorm(FinalNorm):
    """The loop norm's weight again (Huginn's ln_f, papers.md 5.4)."""

    kind: Literal["shared"] = "shared"
    needs_loop_norm: ClassVar[bool] = True

    def build(self, norm: Norm, shape: Shape, loop_norm: LoopNormModule) -> nn.Module:
        return SharedNormModule(loop_norm)


class NoFinalNorm(FinalNorm):
    """None: the state is normed already (Ouro)."""

    kind: Literal["none"] = "none"

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        return 0


class SharedNormModule(nn.Module):
    def __init__(self, loop_norm: LoopNormModule) -> None:
        super().__init__()
        self._of = (loop_norm,)  # in a tuple: its weight belongs to the loop norm, and is stored once

    def forward(self, y_BTD: Tensor) -> Tensor:
        return self._of[0].norm(y_BTD)


class Head(Choice, axis="head"):
    """What turns the last vector into logits."""

    def build(self, shape: Shape) -> TiedHead | UntiedHead:
        """A module with ``weight_VD(embed)``."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Once a read-out."""
        raise NotImplementedError


class Tied(Head):
    """The embedding's table."""

    kind: Literal["tied"] = "tied"

    def build(self, shape: Shape) -> TiedHead:
        return TiedHead()

    def cost(self, shape: Shape) -> Cost:
        return Cost(flops=2 * shape.vocab_size * shape.d_model)


class Untied(Head):
    """A matrix of its own."""

    kind: Literal["untied"] = "untied"

    def build(self, shape: Shape) -> UntiedHead:
        return UntiedHead(shape.d_model, shape.vocab_size, bias=False)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.vocab_size * shape.d_model, flops=2 * shape.vocab_size * shape.d_model)


class TiedHead(nn.Module):
    def weight_VD(self, embed: nn.Embedding) -> Tensor:
        return embed.weight

    def logits(self, y_BTD: Tensor, embed: nn.Embedding) -> Tensor:
        """``[B, T, V]``, before the cap."""
        return F.linear(y_BTD, self.weight_VD(embed))


class UntiedHead(nn.Linear):
    def weight_VD(self, embed: nn.Embedding) -> Tensor:
        return self.weight

    def logits(self, y_BTD: Tensor, embed: nn.Embedding) -> Tensor:
        """As `TiedHead.logits`."""
        return F.linear(y_BTD, self.weight)


class SoftCap(Choice, axis="soft_cap"):
    """A bound on the logits."""

    kept_logits: ClassVar[int] = 1
    """Rows of fp32 logits that the loss of one token keeps for its backward pass."""

    def build(self) -> SoftCapModule:
        raise NotImplementedError


class NoCap(SoftCap):
    """Logits as they are."""

    kind: Literal["none"] = "none"

    def build(self) -> SoftCapModule:
        return SoftCapModule()


class TanhCap(SoftCap):
    """``z = cap tanh(z / cap)`` (nanochat: 15; papers.md 4.1)."""

    kind: Literal["tanh"] = "tanh"
    kept_logits: ClassVar[int] = 2
    cap: PositiveFloat = 15.0

    def build(self) -> SoftCapModule:
        return TanhCapModule(self.cap)


class SoftCapModule(nn.Module):
    """No bound."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits

    def nats(self, y_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """Cross-entropy in nats of what the head reads: by target, [N] (reduction ``none``), or their ``sum``."""
        return F.linear_cross_entropy(y_ND, weight_VD, target_N, reduction=reduction, ignore_index=ignore_index)


class TanhCapModule(SoftCapModule):
    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        return self.cap * torch.tanh(at_least_fp32(logits) / self.cap)

    def nats(self, y_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int, reduction: str) -> Tensor:
        logits_NV = self(F.linear(y_ND, weight_VD))
        return F.cross_entropy(logits_NV, target_N, reduction=reduction, ignore_index=ignore_index)
