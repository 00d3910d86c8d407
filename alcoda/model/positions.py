"""Where a token's position enters: rotary in the attention, a learned vector at the embedding, or nowhere."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alcoda.config import Choice, PositiveFloat
from alcoda.errors import UsageError
from alcoda.model.init import EmbeddingTable
from alcoda.model.shape import Cost, Shape


class Position(Choice, axis="position"):
    """How the model knows the order of its tokens."""

    rotates: ClassVar[bool] = False
    """Whether queries and keys are turned."""

    def check(self, shape: Shape) -> None:
        """Raise ValueError where the choice does not fit the shape."""

    def build(self, shape: Shape) -> PositionModule:
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        return Cost()


class NoPosition(Position):
    """Order is known from the causal mask alone (NoPE, Kazemnejad et al. 2023)."""

    kind: Literal["none"] = "none"

    def build(self, shape: Shape) -> PositionModule:
        return PositionModule()


class Learned(Position):
    """A learned vector per position, added to the embedding (GPT-2). No position beyond ``seq_len`` exists."""

    kind: Literal["learned"] = "learned"

    def build(self, shape: Shape) -> PositionModule:
        return LearnedModule(shape)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.seq_len * shape.d_model)


class Rope(Position):
    """Rotary embedding of queries and keys (Su et al. 2021)."""

    kind: Literal["rope"] = "rope"
    rotates: ClassVar[bool] = True
    base: PositiveFloat = 10_000.0
    pairs: Literal["half", "interleaved"] = "half"
    """Which dimensions turn together: i and i + K/2 (rotate-half: GPT-NeoX, Llama, Ouro), or 2i and 2i + 1 (Huginn)."""

    def check(self, shape: Shape) -> None:
        if shape.d_head % 2:
            raise ValueError(
                f"position rope needs an even d_head, got {shape.d_head}: change d_model / n_heads, or set d_head"
            )

    def build(self, shape: Shape) -> PositionModule:
        return RopeModule(self, shape.d_head)


class Rotation(NamedTuple):
    """What queries and keys are turned by: ``x * cos + swap(x) * sin``, ``swap`` exchanging the two of each pair.

    Attributes:
        cos, sin: [T, K] or [B, 1, T, K]; sin with the sign of its dimension.
        interleaved: pairs are (2i, 2i + 1), not (i, i + K/2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def at(self, index_BN: Tensor) -> Rotation:
        """Of some of the tokens only."""
        cos, sin = (_rows(x, index_BN) for x in (self.cos, self.sin))
        return Rotation(cos, sin, self.interleaved)


def _rows(x: Tensor, index_BN: Tensor) -> Tensor:
    if x.dim() == 2:
        return x[index_BN][:, None]
    return x.gather(2, index_BN[:, None, :, None].expand(-1, 1, -1, x.size(-1)))


class PositionModule(nn.Module):
    """The null position: adds nothing, rotates nothing."""

    def embed(self, x_BTD: Tensor, pos: Tensor) -> Tensor:
        """The embedding with the positions ``pos`` ([T] or [B, T]) in it."""
        return x_BTD

    def rotation(self, pos: Tensor, dtype: torch.dtype) -> Rotation | None:
        """What queries and keys at ``pos`` are rotated by, or None."""
        return None

    def check(self, n_positions: int) -> None:
        """Refuse more positions than there are."""


class LearnedModule(PositionModule):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = EmbeddingTable(shape.seq_len, shape.d_model)

    def embed(self, x_BTD: Tensor, pos: Tensor) -> Tensor:
        return x_BTD + self.table(pos)

    def check(self, n_positions: int) -> None:
        if n_positions > self.table.num_embeddings:
            raise UsageError(
                f"{n_positions} tokens do not fit a context of seq_len={self.table.num_embeddings} with learned "
                "positions: shorten the text, or train with a longer seq_len"
            )


class RopeModule(PositionModule):
    def __init__(self, config: Rope, d_head: int) -> None:
        super().__init__()
        self.base, self.interleaved, self.d_head = config.base, config.pairs == "interleaved", d_head

    def rotation(self, pos: Tensor, dtype: torch.dtype) -> Rotation:
        half = self.d_head // 2
        # float64: at position 1e5 a float32 angle is off by 1e-2 of a radian. Once a pass, so it costs nothing.
        exponent = torch.arange(half, device=pos.device, dtype=torch.float64) / half
        angle = pos[..., None].to(torch.float64) * self.base**-exponent
        cos, sin = angle.cos(), angle.sin()
        if self.interleaved:
            cos, sin = torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
        else:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        if pos.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return Rotation(cos.to(dtype), sin.to(dtype), self.interleaved)


def rotate(x_BHTK: Tensor, rotation: Rotation | None) -> Tensor:
    """Queries or keys turned by their positions."""
    if rotation is None:
        return x_BHTK
    if rotation.interleaved:
        swapped = x_BHTK.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        first, second = x_BHTK.chunk(2, -1)
        swapped = torch.cat([second, first], -1)
    return torch.addcmul(x_BHTK * rotation.cos, swapped, rotation.sin)
