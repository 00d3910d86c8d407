"""A transformer block and a stack of them: prelude, core and coda are stacks of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from alcoda.config import Bool, Config
from alcoda.model.attention import Attention, MultiHead
from alcoda.model.keys import Context
from alcoda.model.mlp import Mlp, SwiGlu
from alcoda.model.norms import Norm, RMSNorm
from alcoda.model.shape import Cost, Place, Shape


class BlockConfig(Config):
    """What every block of the model is made of."""

    norm: Norm = RMSNorm()
    """The norm of every block, of the loop norm, and of the final norm."""
    sandwich: Literal["none", "after_add"] = "none"
    """A second norm around each half: none, or after the residual add (Huginn: ``x = N2(x + f(N1 x))``)."""
    attention: Attention = MultiHead()
    mlp: Mlp = SwiGlu()
    bias: Bool = False
    """Biases in the linear maps of the blocks and in LayerNorm."""

    def cost(self, shape: Shape, place: Place) -> dict[str, Cost]:
        """One block, by term."""
        n_norms = 4 if self.sandwich == "after_add" else 2
        return {
            **{f"attention.{name}": cost for name, cost in self.attention.cost(shape, place).items()},
            "mlp": self.mlp.cost(shape),
            "norms": Cost(params=n_norms * self.norm.cost(shape).params),
        }


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: BlockConfig, shape: Shape, place: Place) -> None:
        super().__init__()
        sandwich = config.sandwich == "after_add"
        self.attention_norm = config.norm.build(shape)
        self.attention = config.attention.build(shape, place)
        self.attention_post = config.norm.build(shape) if sandwich else nn.Identity()
        self.mlp_norm = config.norm.build(shape)
        self.mlp = config.mlp.build(shape)
        self.mlp_post = config.norm.build(shape) if sandwich else nn.Identity()

    def forward(self, x_BTD: Tensor, context: Context, stage: str, layer: int) -> Tensor:
        x_BTD = self.attention_post(x_BTD + self.attention(self.attention_norm(x_BTD), context, stage, layer))
        return self.mlp_post(x_BTD + self.mlp(self.mlp_norm(x_BTD)))


class Stack(nn.Module):
    """Blocks in a row. ``stage`` names their slots in the key store."""

    def __init__(self, stage: str, places: Sequence[Place], config: BlockConfig, shape: Shape) -> None:
        super().__init__()
        self.stage = stage
        self.layers = nn.ModuleList(Block(config, shape, place) for place in places)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        for layer, block in enumerate(self.layers):
            x_BTD = block(x_BTD, context, self.stage, layer)
        return x_BTD
