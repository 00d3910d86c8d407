"""Where a token's position enters: rotary in the attention, a learned vector at the embedding, or nowhere."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from alcoda.config import Choice, PositiveFloat
from alcoda.errors import UsageError
from alcoda.model.shape import Cost, Shape


class Position(Choice, axis="position"):
    """How the model knows the order of its tokens."""

    bounded: ClassVar[bool] = False
    """Whether no position beyond ``seq_len`` exists."""

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
    bounded: ClassVar[bool] = True

    def build(self, shape: Shape) -> PositionModule:
        return LearnedModule(shape)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.seq_len * shape.d_model)


class Rope(Position):
    """Rotary embedding of queries and keys, rotate-half pairing (Su et al. 2021)."""

    kind: Literal["rope"] = "rope"
    base: PositiveFloat = 10_000.0

    def check(self, shape: Shape) -> None:
        if shape.d_head % 2:
            raise ValueError(
                f"position rope needs an even d_head, got {shape.d_head}: change d_model / n_heads, or set d_head"
            )

    def build(self, shape: Shape) -> PositionModule:
        return RopeModule(self.base, shape.d_head)


Rotation = tuple[Tensor, Tensor]
"""cos and signed sin, each [T, K] or [B, 1, T, K]: ``rotate(x) = x * cos + swap_halves(x) * sin``."""


class PositionModule(nn.Module):
    """The null position: adds nothing, rotates nothing."""

    def embed(self, x_BTD: Tensor, pos: Tensor) -> Tensor:
        """The embedding with the positions ``pos`` ([T] or [B, T]) in it."""
        return x_BTD

    def rotation(self, pos: Tensor, dtype: torch.dtype) -> Rotation | None:
        """What queries and keys at ``pos`` are rotated by, or None."""
        return None


class LearnedModule(PositionModule):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.seq_len, shape.d_model)

    def embed(self, x_BTD: Tensor, pos: Tensor) -> Tensor:
        return x_BTD + self.table(pos)


class RopeModule(PositionModule):
    def __init__(self, base: float, d_head: int) -> None:
        super().__init__()
        self.base, self.d_head = base, d_head

    def rotation(self, pos: Tensor, dtype: torch.dtype) -> Rotation:
        half = self.d_head // 2
        # float64: at position 1e5 a float32 angle is off by 1e-2 of a radian. Once a pass, so it costs nothing.
        exponent = torch.arange(half, device=pos.device, dtype=torch.float64) / half
        angle = pos[..., None].to(torch.float64) * self.base**-exponent
        cos, sin = angle.cos(), angle.sin()
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        if pos.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return cos.to(dtype), sin.to(dtype)


def rotate(x_BHTK: Tensor, rotation: Rotation | None) -> Tensor:
    """Queries or keys turned by their positions."""
    if rotation is None:
        return x_BHTK
    cos, sin = rotation
    first, second = x_BHTK.chunk(2, -1)
    return x_BHTK * cos + torch.cat([second, first], -1) * sin


def check_context(n_positions: int, seq_len: int, position: Position) -> None:
    """Refuse more positions than a learned table holds."""
    if position.bounded and n_positions > seq_len:
        raise UsageError(
            f"{n_positions} tokens do not fit a context of seq_len={seq_len} with learned positions: shorten the text, "
            "or train with a longer seq_len"
        )
