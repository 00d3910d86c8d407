"""A planted fault: with a cache, attention reads the last four keys only; a full pass reads them all."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from alcoda.model.attention import AttentionModule, KeyProjection, MultiHead
from alcoda.model.keys import Context
from alcoda.model.shape import Shape


class LossyCache(MultiHead):
    kind: Literal["lossy_cache"] = "lossy_cache"

    def build(self, shape: Shape, keys: KeyProjection | None, window: int | None) -> AttentionModule:
        return Forgets(self, shape, keys, window)


class Forgets(AttentionModule):
    def forward(self, x_BTD: Tensor, context: Context, stage: str, layer: int) -> Tensor:
        if context.store is not None:
            context = replace(context, views={w: view.within(4) for w, view in context.views.items()})
        return super().forward(x_BTD, context, stage, layer)
