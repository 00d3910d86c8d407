"""A planted fault: read in a pass, a token remembers the one before the one before it; read alone, the one before."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from alcoda.model.memory import MemoryModule, PrevToken, PrevTokenModule, Source
from alcoda.model.shape import Shape


class LateMemory(PrevToken):
    kind: Literal["late_memory"] = "late_memory"

    def build(self, shape: Shape, d_kv: int, source: Source | None) -> MemoryModule:
        assert source is not None
        return Late(self, shape, d_kv, source)


class Late(PrevTokenModule):
    def recall(self, sources_BTD: Tensor) -> Tensor:
        right_BTD = super().recall(sources_BTD)
        return right_BTD if right_BTD.size(1) == 1 else right_BTD.roll(1, 1)
