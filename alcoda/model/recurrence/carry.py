"""Carry-in: which earlier states a loop starts from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from alcoda.config import Choice, Float, Int
from alcoda.model.init import InitSpecial
from alcoda.model.shape import Cost, Kept, Shape


class Carry(Choice, axis="carry"):
    """``x = carry(h, earlier states)``, before the injection."""

    carries_anchor: ClassVar[bool] = False
    """Whether the prelude's output reaches the loop through the states that it starts with."""

    def build(self, shape: Shape) -> CarryModule:
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Once a loop."""
        return Cost()

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that one loop keeps for its backward pass."""
        return 0


class LastState(Carry):
    """``x = h``."""

    kind: Literal["none"] = "none"

    def build(self, shape: Shape) -> CarryModule:
        return CarryModule()


class HyperConnections(Carry):
    """``x = sum_i softmax(w)_i h^(r-i)`` over the last ``states`` states (CART, papers.md 2.1).

    States from before the first loop are the anchor e. w starts as ``[first_logit, 0, ...]``: CART's 1 mixes in 0.42 of
    the older states from the start; 8 starts as a plain residual (0.999 of the newest).
    """

    kind: Literal["hyper"] = "hyper"
    carries_anchor: ClassVar[bool] = True
    states: Annotated[Int, Field(ge=2)] = 3
    first_logit: Float = 1.0

    def build(self, shape: Shape) -> CarryModule:
        return HyperModule(self)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=self.states)

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        return shape.d_model * kept.stream  # the newest state; the older ones are kept by the loops before


class CarryModule(nn.Module):
    """Keeps nothing."""

    def start(self, e_BTD: Tensor) -> tuple[Tensor, ...]:
        """What is kept before the first loop."""
        return ()

    def forward(self, h_BTD: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the injection reads, and what the next loop is handed beside the new state."""
        return h_BTD, kept


class HyperModule(CarryModule, InitSpecial):
    def __init__(self, config: HyperConnections) -> None:
        super().__init__()
        self.config = config
        self.logits = nn.Parameter(torch.empty(config.states))

    def init_special(self) -> None:
        self.logits.zero_()
        self.logits[0] = self.config.first_logit

    def start(self, e_BTD: Tensor) -> tuple[Tensor, ...]:
        return (e_BTD,) * (self.config.states - 1)

    def forward(self, h_BTD: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        newest, *older = self.logits.softmax(-1).to(h_BTD.dtype).unbind()
        x_BTD = h_BTD * newest
        for weight, state_BTD in zip(older, kept, strict=True):
            x_BTD = torch.addcmul(x_BTD, state_BTD.to(h_BTD.dtype), weight)
        return x_BTD, (h_BTD, *kept[:-1])

    def describe(self, args: tuple[object, ...], out: object) -> dict[str, Tensor]:
        """The share of each state in the mix."""
        return {f"mix_{i}": share for i, share in enumerate(self.logits.softmax(-1))}
