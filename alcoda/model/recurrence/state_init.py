"""State init: what the first loop starts from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from alcoda.config import Choice, NonNegativeInt, PositiveFloat
from alcoda.model.shape import Shape

_BLOCK_POSITIONS = 64


class StateInit(Choice, axis="state_init"):
    """What the state h is before the first loop."""

    carries_anchor: ClassVar[bool] = False
    """Whether the prelude's output reaches the loop through the initial state."""

    def build(self, shape: Shape) -> StateInitModule:
        raise NotImplementedError


class FromAnchor(StateInit):
    """``h0 = e``: the prelude's output (GRT, CART)."""

    kind: Literal["anchor"] = "anchor"
    carries_anchor: ClassVar[bool] = True

    def build(self, shape: Shape) -> StateInitModule:
        return StateInitModule()


class Zeros(StateInit):
    """``h0 = 0``."""

    kind: Literal["zeros"] = "zeros"

    def build(self, shape: Shape) -> StateInitModule:
        return ZerosModule()


class Noise(StateInit):
    """``h0 ~ truncated normal`` (cut at 3 std), new at every training pass (Huginn, papers.md 5.1).

    The default std, sqrt(2/5), is Huginn's: its init std sqrt(2 / 5d) times its embedding scale sqrt(d).
    """

    kind: Literal["noise"] = "noise"
    std: PositiveFloat = 0.4**0.5
    at_eval: Literal["zeros", "by_position"] = "zeros"
    """At evaluation: zeros, or noise that is a pure function of (seed, position), so that cached decoding agrees."""
    seed: Annotated[NonNegativeInt, Field(lt=1 << 32)] = 0

    def build(self, shape: Shape) -> StateInitModule:
        return NoiseModule(self)


class StateInitModule(nn.Module):
    """Starts from the anchor."""

    def forward(self, e_BTD: Tensor, pos: Tensor) -> Tensor:
        """h0 for tokens at ``pos`` ([T] or [B, T]) whose prelude output is ``e_BTD``."""
        return e_BTD


class ZerosModule(StateInitModule):
    def forward(self, e_BTD: Tensor, pos: Tensor) -> Tensor:
        return torch.zeros_like(e_BTD)


class NoiseModule(StateInitModule):
    def __init__(self, config: Noise) -> None:
        super().__init__()
        self.config = config

    def forward(self, e_BTD: Tensor, pos: Tensor) -> Tensor:
        if self.training:
            h_BTD = torch.empty_like(e_BTD)
            with torch.no_grad():
                nn.init.trunc_normal_(h_BTD, std=self.config.std, a=-3 * self.config.std, b=3 * self.config.std)
            return h_BTD
        if self.config.at_eval == "zeros":
            return torch.zeros_like(e_BTD)
        return self._by_position(pos, e_BTD).expand_as(e_BTD)

    def _by_position(self, pos: Tensor, like: Tensor) -> Tensor:
        # Blocks of positions, each from a generator of its own: any position costs the same, wherever it lies.
        blocks, which = torch.unique(pos // _BLOCK_POSITIONS, return_inverse=True)
        noise_NPD = torch.stack([self._block(block, like.size(-1)) for block in blocks.tolist()]).to(like)
        return noise_NPD[which, pos % _BLOCK_POSITIONS]

    def _block(self, block: int, d_model: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + block)
        std = self.config.std
        noise_PD = torch.empty(_BLOCK_POSITIONS, d_model)
        return nn.init.trunc_normal_(noise_PD, std=std, a=-3 * std, b=3 * std, generator=generator)
