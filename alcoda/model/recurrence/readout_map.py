"""Read-out map: what the coda reads of the state."""

from __future__ import annotations

from typing import Literal

from torch import nn

from alcoda.config import Choice
from alcoda.model.init import InitSpecial
from alcoda.model.shape import Cost, Kept, Shape, linear


class ReadoutMap(Choice, axis="readout_map"):
    """A map between the loop (after its norm) and the coda."""

    def build(self, shape: Shape) -> nn.Module:
        """A module on ``h_BTD``."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Once a read-out."""
        return Cost()

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that one read-out keeps for its backward pass."""
        return 0


class NoReadoutMap(ReadoutMap):
    """The state itself."""

    kind: Literal["none"] = "none"

    def build(self, shape: Shape) -> nn.Module:
        return nn.Identity()


class LinearReadout(ReadoutMap):
    """``C h`` (Parcae, papers.md 5.2), C starting at the identity (ours: the paper's start is not known)."""

    kind: Literal["linear"] = "linear"

    def build(self, shape: Shape) -> nn.Module:
        return LinearReadoutModule(shape.d_model, shape.d_model, bias=False)

    def cost(self, shape: Shape) -> Cost:
        return linear(shape.d_model, shape.d_model)

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        return shape.d_model * kept.product


class LinearReadoutModule(nn.Linear, InitSpecial):
    def init_special(self) -> None:
        nn.init.eye_(self.weight)
