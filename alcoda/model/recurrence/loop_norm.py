"""Loop norm: whether the state is brought to unit scale, and where."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn

from alcoda.config import Choice
from alcoda.model.norms import Norm
from alcoda.model.shape import Cost, Kept, Shape


class LoopNorm(Choice, axis="loop_norm"):
    """A norm of the state, of the block's norm kind."""

    has_norm: ClassVar[bool] = True
    every_loop: ClassVar[bool] = False
    """Whether it acts once a loop, not once a read-out."""

    def build(self, norm: Norm, shape: Shape) -> LoopNormModule:
        return LoopNormModule(norm.build(shape) if self.has_norm else nn.Identity())

    def cost(self, norm: Norm, shape: Shape) -> Cost:
        return norm.cost(shape) if self.has_norm else Cost()

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that it keeps for its backward pass each time."""
        return kept.normed(shape.d_model) if self.has_norm else 0


class NoLoopNorm(LoopNorm):
    """The state is left as it is."""

    kind: Literal["none"] = "none"
    has_norm: ClassVar[bool] = False


class EveryLoop(LoopNorm):
    """After every loop: the normed state is what the next loop and the coda read (Ouro, papers.md 5.4)."""

    kind: Literal["every_loop"] = "every_loop"
    every_loop: ClassVar[bool] = True

    def build(self, norm: Norm, shape: Shape) -> LoopNormModule:
        return EveryLoopModule(norm.build(shape))


class BeforeCoda(LoopNorm):
    """Once, between the last loop and the coda (Huginn's ln_f, papers.md 5.4)."""

    kind: Literal["before_coda"] = "before_coda"


class LoopNormModule(nn.Module):
    """Norms before the coda."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def after_loop(self, h_BTD: Tensor) -> Tensor:
        return h_BTD

    def before_coda(self, h_BTD: Tensor) -> Tensor:
        return self.norm(h_BTD)


class EveryLoopModule(LoopNormModule):
    def after_loop(self, h_BTD: Tensor) -> Tensor:
        return self.norm(h_BTD)

    def before_coda(self, h_BTD: Tensor) -> Tensor:
        return h_BTD
