"""A planted fault: attention goes by positions alone, and sees padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from alcoda.model.attention import AttentionModule, KeyProjection, MultiHead
from alcoda.model.keys import Context, View
from alcoda.model.shape import Shape


class IgnoredPadding(MultiHead):
    kind: Literal["ignored_padding"] = "ignored_padding"

    def build(self, shape: Shape, keys: KeyProjection | None, window: int | None) -> AttentionModule:
        return SeesPadding(self, shape, keys, window)


def without_live(view: View) -> View:
    """The same view with every key live."""
    return view if view.key_live is None and view.pos.dim() == 1 else View.tagged(view.pos, view.key_pos, None)


class SeesPadding(AttentionModule):
    def forward(self, x_BTD: Tensor, context: Context, stage: str, layer: int) -> Tensor:
        context = replace(context, views={w: without_live(view) for w, view in context.views.items()})
        return super().forward(x_BTD, context, stage, layer)
