"""Token value embeddings: what a token is, added to the values that attention reads, past all norms and maps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from alcoda.config import Bool, Choice, PositiveInt
from alcoda.model.init import EmbeddingTable, InitSpecial
from alcoda.model.shape import Cost, Kept, Place, Shape, linear, total


class ValueEmbed(Choice, axis="value_embed"):
    """What each token adds to its own value, whatever stands before it."""

    def check(self, shape: Shape) -> None:
        """Raise ValueError where the choice does not fit the shape."""

    def build(self, shape: Shape, n_kv_heads: int, place: Place) -> ValueTable | None:
        """The table of the layer at ``place``, or None where it has none."""
        return None

    def cost(self, shape: Shape, n_kv_heads: int, place: Place) -> Cost:
        """Of `build`."""
        return Cost()

    def kept_bytes(self, shape: Shape, n_kv_heads: int, place: Place, kept: Kept) -> int:
        """Bytes a token that one pass keeps for its backward pass, beside the values."""
        return 0


class NoValueEmbed(ValueEmbed):
    """Values are what the layer projects."""

    kind: Literal["none"] = "none"


class Table(ValueEmbed):
    """``v = v + g VE[token]``, ``g = 2 sigmoid(W_g x[:c])`` for each head of keys (nanochat, papers.md 4.1).

    VE is a table of ``V x (G K)`` in each layer that has one. W_g starts at zero, so that g starts at 1. Parcae and
    nanochat have tables on alternating layers, LRT on all. A cache of latents (``latent`` of `Cost`) finds VE by the
    token's id but must keep g, G numbers, which the ledger does not count.
    """

    kind: Literal["table"] = "table"
    every: PositiveInt = 2
    """One layer in so many has a table, counted back from the model's last layer, which has one."""
    gate: Bool = True
    """Whether g is learned; without it, 1."""
    gate_channels: PositiveInt = 32
    """c, the channels of the layer's input that the gate reads."""

    def has_table(self, place: Place) -> bool:
        return (place.n_layers - 1 - place.layer) % self.every == 0

    def check(self, shape: Shape) -> None:
        if self.gate and self.gate_channels > shape.d_model:
            raise ValueError(
                f"value_embed.gate_channels={self.gate_channels} is more than d_model={shape.d_model}: the gate reads "
                f"channels of the layer's input; set it to {shape.d_model} or less, or gate to false"
            )

    def build(self, shape: Shape, n_kv_heads: int, place: Place) -> ValueTable | None:
        return ValueTable(self, shape, n_kv_heads) if self.has_table(place) else None

    def cost(self, shape: Shape, n_kv_heads: int, place: Place) -> Cost:
        if not self.has_table(place):
            return Cost()
        gate = linear(self.gate_channels, n_kv_heads) if self.gate else Cost()
        return total(Cost(params=shape.vocab_size * n_kv_heads * shape.d_head), gate)

    def kept_bytes(self, shape: Shape, n_kv_heads: int, place: Place, kept: Kept) -> int:
        if not self.gate or not self.has_table(place):
            return 0
        return 4 * n_kv_heads * shape.d_head + self.gate_channels * kept.product  # rows of the table, in fp32


class ValueTable(InitSpecial):
    """One layer's table, and its gate."""

    def __init__(self, config: Table, shape: Shape, n_kv_heads: int) -> None:
        super().__init__()
        self.n_kv_heads = n_kv_heads
        self.table = EmbeddingTable(shape.vocab_size, n_kv_heads * shape.d_head)
        self.gate = nn.Linear(config.gate_channels, n_kv_heads, bias=False) if config.gate else None

    def init_special(self) -> None:
        """What the table of `alcoda.model.init` does not say: every gate starts at 1."""
        if self.gate is not None:
            self.gate.weight.zero_()

    def forward(self, x_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """What is added to the values of tokens ``ids_BT``, ``[B, G, T, K]``."""
        v_BGTK = self.table(ids_BT).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
        if self.gate is None:
            return v_BGTK
        logit_BGT = self.gate(x_BTD[..., : self.gate.in_features]).transpose(1, 2)
        return 2 * torch.sigmoid(logit_BGT)[..., None] * v_BGTK
