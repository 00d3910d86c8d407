"""A transformer block and a stack of them: prelude, core and coda are stacks of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from alcoda.config import Bool, Config
from alcoda.model.attention import Attention, KeyProjection, MultiHead
from alcoda.model.keys import Context
from alcoda.model.memory import Memory, Source
from alcoda.model.mlp import Mlp, SwiGlu
from alcoda.model.norms import Norm, RMSNorm
from alcoda.model.shape import Cost, Kept, Place, Shape, total
from alcoda.model.value_embed import NoValueEmbed, ValueEmbed
from alcoda.model.window import NoWindow, Window


class BlockConfig(Config):
    """What every block of the model is made of."""

    norm: Norm = RMSNorm()
    """The norm of every block, of the loop norm, and of the final norm."""
    sandwich: Literal["none", "after_add", "on_branch"] = "none"
    """A second norm around each half (papers.md 5.4): none, after the residual add (Huginn: ``x = N2(x + f(N1 x))``),
    or on the branch (Ouro: ``x = x + N2(f(N1 x))``)."""
    attention: Attention = MultiHead()
    window: Window = NoWindow()
    value_embed: ValueEmbed = NoValueEmbed()
    mlp: Mlp = SwiGlu()
    bias: Bool = False
    """Biases in the linear maps of the blocks and in LayerNorm."""

    def check(self, shape: Shape) -> None:
        """Raise ValueError where a choice does not fit the shape."""
        self.attention.check(shape)
        self.value_embed.check(shape)

    def windows(self) -> tuple[int, ...]:
        """The windows that some layer may look through, in tokens: `open_context` makes a view of each."""
        return self.window.sizes()

    def build_keys(self, shape: Shape, place: Place, memory: Memory) -> KeyProjection:
        """What makes the keys and values that the layer at ``place`` reads: its own, or frozen ones."""
        n_kv_heads = self.attention.kv_heads(shape.n_heads)
        values, recall = self.value_embed.build(shape, n_kv_heads, place), memory.build_recall(shape, self.d_kv(shape))
        return self.attention.build_keys(shape, values, recall)

    def d_kv(self, shape: Shape) -> int:
        """Width of all heads of keys."""
        return self.attention.kv_heads(shape.n_heads) * shape.d_head

    def key_cost(self, shape: Shape, place: Place, memory: Memory) -> Cost:
        """Of `build_keys`."""
        return total(self.attention.key_cost(shape), self._value_cost(shape, place), self._recall_cost(shape, memory))

    def cost(self, shape: Shape, place: Place, memory: Memory) -> dict[str, Cost]:
        """One block, by term. With keys of its own, they are among the attention's projections."""
        n_norms = 2 if self.sandwich == "none" else 4
        return {
            **{f"attention.{name}": cost for name, cost in self.attention.cost(shape, place).items()},
            "value_embed": self._value_cost(shape, place) if place.own_keys else Cost(),
            "memory": total(memory.residual_cost(), self._recall_cost(shape, memory) if place.own_keys else Cost()),
            "mlp": self.mlp.cost(shape),
            "norms": Cost(params=n_norms * self.norm.cost(shape).params),
        }

    def kept_bytes(self, shape: Shape, place: Place, memory: Memory, kept: Kept) -> float:
        """Bytes a token that one pass through a block keeps for its backward pass."""
        entered = memory.residual_kept_bytes(shape, kept)
        norms = 2 * kept.normed(shape.d_model)
        if self.sandwich != "none":
            norms += 2 * kept.normed(shape.d_model, kept.stream if self.sandwich == "after_add" else kept.product)
        added = self._added_kept_bytes(shape, place, memory, kept) if place.own_keys else 0
        parts = self.attention.kept_bytes(shape, place, kept) + self.mlp.kept_bytes(shape, kept)
        return entered + norms + added + parts

    def key_kept_bytes(self, shape: Shape, place: Place, memory: Memory, kept: Kept) -> float:
        """Of `build_keys`, without what it reads; but what the memory's maps read is included."""
        return self.attention.key_kept_bytes(shape, kept) + self._added_kept_bytes(shape, place, memory, kept)

    def _added_kept_bytes(self, shape: Shape, place: Place, memory: Memory, kept: Kept) -> int:
        """Of the layer's table of values, and of the memory in its keys."""
        n_kv_heads = self.attention.kv_heads(shape.n_heads)
        values = self.value_embed.kept_bytes(shape, n_kv_heads, place, kept)
        return values + memory.key_kept_bytes(shape, self.d_kv(shape), kept)

    def _value_cost(self, shape: Shape, place: Place) -> Cost:
        return self.value_embed.cost(shape, self.attention.kv_heads(shape.n_heads), place)

    def _recall_cost(self, shape: Shape, memory: Memory) -> Cost:
        latent = self.attention.key_cost(shape).latent
        whole = Cost(latent=2 * self.d_kv(shape) - latent if memory.mixes_keys else 0)
        return total(memory.key_cost(shape, self.d_kv(shape)), whole)


class Block(nn.Module):
    """The memory, then pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: BlockConfig, shape: Shape, place: Place, memory: Memory) -> None:
        super().__init__()
        keys = config.build_keys(shape, place, memory) if place.own_keys else None
        self.on_branch = config.sandwich == "on_branch"
        self.memory = memory.build_residual()
        self.attention_norm = config.norm.build(shape)
        self.attention = config.attention.build(shape, keys, config.window.at(place))
        self.attention_post = nn.Identity() if config.sandwich == "none" else config.norm.build(shape)
        self.mlp_norm = config.norm.build(shape)
        self.mlp = config.mlp.build(shape)
        self.mlp_post = nn.Identity() if config.sandwich == "none" else config.norm.build(shape)

    def forward(self, x_BTD: Tensor, context: Context, stage: str, layer: int) -> Tensor:
        x_BTD = self.memory(x_BTD, context.recall)
        x_BTD = self._add(x_BTD, self.attention(self.attention_norm(x_BTD), context, stage, layer), self.attention_post)
        return self._add(x_BTD, self.mlp(self.mlp_norm(x_BTD)), self.mlp_post)

    def _add(self, x_BTD: Tensor, y_BTD: Tensor, post: nn.Module) -> Tensor:
        return x_BTD + post(y_BTD) if self.on_branch else post(x_BTD + y_BTD)


class Stack(nn.Module):
    """Blocks in a row.

    Args:
        stage: names their slots in the key store.
        source: of the model's memory (`alcoda.model.memory`), which may be one of these blocks.
    """

    def __init__(
        self,
        stage: str,
        places: Sequence[Place],
        config: BlockConfig,
        shape: Shape,
        memory: Memory,
        source: Source | None = None,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.layers = nn.ModuleList(Block(config, shape, place, memory) for place in places)
        self.source_layer = source[1] if source is not None and source[0] == stage else len(places) - 1

    def forward(self, x_BTD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The output of the last block, and that of the one which is the memory's source (else the same again)."""
        source_BTD = x_BTD
        for layer, block in enumerate(self.layers):
            x_BTD = block(x_BTD, context, self.stage, layer)
            source_BTD = x_BTD if layer == self.source_layer else source_BTD
        return x_BTD, source_BTD
