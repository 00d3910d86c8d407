"""A planted fault: a stack for each loop, in a model that says that its loops are tied."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor, nn

from alcoda.model.blocks import Stack
from alcoda.model.recurrence.sharing import TiedLoops, TiedModule, UntiedModule


class Untied(TiedLoops):
    kind: Literal["claims_tied"] = "claims_tied"
    is_tied: ClassVar[bool] = True

    def build(self, make_stack: Callable[[], Stack], n_loops: int) -> TiedModule | UntiedModule:
        return InTurn([make_stack() for _ in range(n_loops)])


class InTurn(UntiedModule):
    def at(self, loop: int | Tensor) -> nn.Module:
        return self.stacks[int(loop) % len(self.stacks)]
