"""A planted fault: the core reads the anchors without the causal rule, as CART's first code did (papers.md 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from alcoda.model.blocks import BlockConfig
from alcoda.model.keys import Context
from alcoda.model.memory import Memory
from alcoda.model.recurrence.keys import AnchorKeys, AnchorKeysModule
from alcoda.model.shape import Place, Shape


class FutureLeak(AnchorKeys):
    kind: Literal["future_leak"] = "future_leak"

    def build(self, block: BlockConfig, shape: Shape, places: list[Place], memory: Memory) -> nn.Module:
        return SeesAll(self, block, shape, places, memory)


class SeesAll(AnchorKeysModule):
    def forward(self, e_BTD: Tensor, context: Context) -> Context:
        context = super().forward(e_BTD, context)
        views = {window: view._replace(mask=None, is_causal=False) for window, view in context.views.items()}
        return replace(context, views=views)
