"""Update: how the core's proposal becomes the next state."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from alcoda.config import Choice, Float, NonNegativeFloat, PositiveFloat
from alcoda.model.init import InitSpecial
from alcoda.model.noise import noisy
from alcoda.model.shape import Cost, Kept, Shape, linear


class Update(Choice, axis="update"):
    """``h = update(h, x, y, e)``: x what the core read, y what it made of it."""

    reads_anchor: ClassVar[bool] = False
    """Whether the prelude's output enters every update."""
    needs_branches: ClassVar[bool] = False
    """Whether y - x must be the core's branches, so that a norm of the sum (sandwich after_add) is refused."""

    keeps_dtype: ClassVar[bool] = False
    """Whether the new state has the type of the old one, not that of what the core gives."""

    def build(self, shape: Shape) -> nn.Module:
        """A module on ``(h_BTD, x_BTD, y_BTD, e_BTD)``."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """Once a loop."""
        return Cost()

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Bytes a token that one loop keeps for its backward pass, beside what the core keeps of x."""
        return 0


class Overwrite(Update):
    """``h = y``."""

    kind: Literal["overwrite"] = "overwrite"

    def build(self, shape: Shape) -> nn.Module:
        return OverwriteModule()


class Gate(Update):
    """GRT's elementwise gate (papers.md 1.1):

        g = sigmoid(f([LN h, LN e]) / tau + eps)        f: 2d -> d -> d, SiLU between, biases in both
        h = g * h + (1 - g) * y

    ``eps ~ N(0, noise^2)`` for each scalar, in training only. The last bias starts at +4, so g starts near 0.98: copy.
    """

    kind: Literal["gate"] = "gate"
    reads_anchor: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = True
    tau: PositiveFloat = 1.0
    bias: Float = 4.0
    """Where the last bias starts."""
    noise: NonNegativeFloat = 0.1

    def build(self, shape: Shape) -> nn.Module:
        return GateModule(self, shape.d_model)

    def cost(self, shape: Shape) -> Cost:
        d = shape.d_model
        first, second = linear(2 * d, d, True), linear(d, d, True)
        return Cost(first.params + second.params + 2 * d, first.flops + second.flops)

    def kept_bytes(self, shape: Shape, kept: Kept) -> int:
        # Both norms' output, the hidden layer and its silu, 1 - g; the state, y, and 1 - g in the state's type.
        return shape.d_model * (5 * kept.product + 2 * 4 + (4 if kept.product != 4 else 0))


class Lti(Update):
    """``h = sigmoid(a) x + y``, a in R^d (CART as published, papers.md 2.1).

    y contains x already (the core's residual stream), so the loop's linear gain is 1 + sigmoid(a), not sigmoid(a).
    """

    kind: Literal["lti"] = "lti"
    start: Annotated[Float, Field(gt=0, lt=1)] = 0.9
    """sigmoid(a) at the start."""

    def build(self, shape: Shape) -> nn.Module:
        return LtiModule(self.start, shape.d_model)

    def cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.d_model)


class LtiDelta(Lti):
    """``h = sigmoid(a) x + (y - x)``: the core contributes its branches only, and the linear gain is sigmoid(a) < 1
    (papers.md 2.1: what CART's text says of its loop)."""

    kind: Literal["lti_delta"] = "lti_delta"  # pyrefly: ignore
    needs_branches: ClassVar[bool] = True

    def build(self, shape: Shape) -> nn.Module:
        return LtiDeltaModule(self.start, shape.d_model)


class OverwriteModule(nn.Module):
    def forward(self, h_BTD: Tensor, x_BTD: Tensor, y_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        return y_BTD


class GateModule(InitSpecial):
    def __init__(self, config: Gate, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.state_norm = nn.LayerNorm(d_model, bias=False)
        self.anchor_norm = nn.LayerNorm(d_model, bias=False)
        self.hidden = nn.Linear(2 * d_model, d_model)
        self.logit = nn.Linear(d_model, d_model)

    def init_special(self) -> None:
        """What the table of `alcoda.model.init` does not say: the gate starts near copy."""
        self.logit.bias.fill_(self.config.bias)

    def gate(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        """g, the share of the old state that each dimension of each token keeps, in [0, 1]."""
        return 1 - self._written(h_BTD, e_BTD)

    def _written(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        """1 - g, of which bf16 keeps 8 bits where g, close to 1, would be 1."""
        read_BTE = torch.cat([self.state_norm(h_BTD), self.anchor_norm(e_BTD)], -1)
        logit_BTD = self.logit(F.silu(self.hidden(read_BTE)))
        if self.config.tau != 1:
            logit_BTD = logit_BTD / self.config.tau
        if self.training:
            logit_BTD = noisy(logit_BTD, self.config.noise)
        return torch.sigmoid(-logit_BTD)

    def forward(self, h_BTD: Tensor, x_BTD: Tensor, y_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        written_BTD = self._written(h_BTD, e_BTD).to(h_BTD.dtype)
        return torch.lerp(h_BTD, y_BTD.to(h_BTD.dtype), written_BTD)

    def describe(self, args: tuple[Tensor, ...], out: Tensor) -> dict[str, Tensor]:
        """The gate's values."""
        return {"gate": self.gate(args[0], args[3])}


class LtiModule(InitSpecial):
    def __init__(self, start: float, d_model: int) -> None:
        super().__init__()
        self.start = start
        self.a = nn.Parameter(torch.empty(d_model))

    def init_special(self) -> None:
        self.a.fill_(math.log(self.start / (1 - self.start)))

    def forward(self, h_BTD: Tensor, x_BTD: Tensor, y_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        return torch.addcmul(y_BTD, torch.sigmoid(self.a).to(y_BTD.dtype), x_BTD.to(y_BTD.dtype))

    def describe(self, args: tuple[Tensor, ...], out: Tensor) -> dict[str, Tensor]:
        """sigmoid(a), by dimension."""
        return {"sigma_a": torch.sigmoid(self.a)}


class LtiDeltaModule(LtiModule):
    def forward(self, h_BTD: Tensor, x_BTD: Tensor, y_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        # sigmoid(a) x + (y - x) = y - sigmoid(-a) x, in one pass over memory.
        return torch.addcmul(y_BTD, torch.sigmoid(-self.a).to(y_BTD.dtype), x_BTD.to(y_BTD.dtype), value=-1)
