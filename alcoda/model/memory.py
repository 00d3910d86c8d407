"""Memory: what a token is told of what the tokens before it have become (LRT, papers.md section 4).

A layer reads a token's memory, the normed state of an earlier token at some layer, beside the token itself. In one pass
over a text that state is not there yet: `alcoda.model.passes` trains it in several, `alcoda.model.prefill` reads a
prompt, and decoding carries it from token to token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from alcoda.config import Bool, Choice, NonNegativeFloat, PositiveInt
from alcoda.errors import did_you_mean
from alcoda.model.gated_sum import GatedSum, gated_sum
from alcoda.model.init import InitSpecial
from alcoda.model.keys import Context, Recall
from alcoda.model.norms import RMSNormModule
from alcoda.model.shape import Cost, Kept, Shape, linear, total

Source = tuple[str, int]
"""(stage, layer): ``core`` is the state after the last loop, ``final`` what the head reads; their layer is 0."""

UPPER_MIDDLE = 0.6
"""The default source: the block at this share of those that a token passes (12 of 20, papers.md 4.1)."""

MEMORY_EPS = 1e-6


class Memory(Choice, axis="memory"):
    """What each layer of prelude, core (at each loop) and coda is told of earlier tokens."""

    carries: ClassVar[bool] = False
    """Whether a token reads what an earlier one has become, so that only one token at a time is exact."""

    @property
    def mixes_keys(self) -> bool:
        """Whether keys and values are of more than a linear map of the layer's input: no latent stands for them."""
        return False

    @property
    def gates_keys(self) -> bool:
        """Whether a layer's own keys and values are gated."""
        return False

    def check(self, n_prelude: int, n_core: int, n_coda: int, seq_len: int) -> None:
        """Raise ValueError where the choice does not fit the model's layers."""

    def source_of(self, n_prelude: int, n_core: int, n_coda: int, n_loops: int) -> Source | None:
        """Where the memory comes from; None where there is none."""
        return None

    def build(self, shape: Shape, d_kv: int, source: Source | None) -> MemoryModule:
        """What the layers share, and what makes memories of ``source``; ``d_kv`` is the width of all heads of keys."""
        return MemoryModule()

    def build_residual(self) -> nn.Module:
        """A block's module on ``(x_BTD, recall)``: its input, with the memory in it."""
        return AsItIs()

    def build_recall(self, shape: Shape, d_kv: int) -> nn.Module:
        """A block's module on ``(k_BTE, v_BTE, x_BTD, recall)``: its keys and values before norm and rotation."""
        return OwnKeys()

    def cost(self, shape: Shape, d_kv: int) -> Cost:
        """Of `build`, once a pass."""
        return Cost()

    def residual_cost(self) -> Cost:
        """Of `build_residual`: elementwise, so parameters only."""
        return Cost()

    def key_cost(self, shape: Shape, d_kv: int) -> Cost:
        """Of `build_recall`."""
        return Cost()

    def kept_bytes(self, shape: Shape, d_kv: int, source: Source | None, kept: Kept) -> float:
        """Bytes a token that `build` keeps for the backward pass, once a pass: memories, what the shared maps read and
        give, and what the norm at ``source`` reads, where nothing else keeps it."""
        return 0

    def residual_kept_bytes(self, shape: Shape, kept: Kept) -> int:
        """Of `build_residual`: what it reads, where nothing else keeps it."""
        return 0

    def key_kept_bytes(self, shape: Shape, d_kv: int, kept: Kept) -> int:
        """Of `build_recall`, beside what keys and values keep without it."""
        return 0


class NoMemory(Memory):
    """A token knows of earlier ones by their keys and values only."""

    kind: Literal["none"] = "none"


class Gated(Memory):
    """No memory, but its gates: ``k = g W_k x, v = g W_v x``, ``g = 2 sigmoid(W_g x)`` for each head of keys, W_g zero
    at the start. The control for what the gates alone are worth (papers.md 4.3: marginal)."""

    kind: Literal["gated"] = "gated"

    @property
    def mixes_keys(self) -> bool:
        return True

    @property
    def gates_keys(self) -> bool:
        return True

    def build_recall(self, shape: Shape, d_kv: int) -> nn.Module:
        return RecallModule(shape, d_kv, n_gates=1, own=False)

    def key_cost(self, shape: Shape, d_kv: int) -> Cost:
        return linear(shape.d_model, d_kv // shape.d_head)

    def key_kept_bytes(self, shape: Shape, d_kv: int, kept: Kept) -> int:
        return _gated_bytes(shape, d_kv, 1, kept)


class PrevToken(Memory):
    """The latent recurrent transformer's memory (papers.md 4.1). ``m``, the normed state of the token before at
    ``source``, enters each layer twice, and is zero at position 0:

        x = alpha x + gamma m (+ beta x0)                                    (residual; x0: the token's embedding)
        k = g_loc W_k x^ + g_fb U_k m,   v = g_loc W_v x^ + g_fb U_v m       (kv; x^: the attention's input)
        (g_loc, g_fb) = 2 sigmoid(W_g x^), for each head of keys, W_g zero at the start

    On a recurrent backbone the core does so at each loop, with the same weights.
    """

    kind: Literal["prev_token"] = "prev_token"
    carries: ClassVar[bool] = True
    source: str | None = None
    """``prelude.I`` or ``coda.I``: after that block (from 0); ``core``: the state after the last loop; ``final``: what
    the head reads. Null: the block at 0.6 of those that a token passes, and ``core`` where that is in the loop."""
    lag: PositiveInt = 1
    """The memory of token t is of token t - lag."""
    mean_of: PositiveInt = 1
    """Or the mean of so many, back from there; those before the text are zero."""
    residual: Bool = True
    """Whether it is added to each layer's input."""
    gamma: NonNegativeFloat = 0.1
    """Where gamma starts, the memory's weight there (a number a layer, as alpha, which starts at 1)."""
    beta: NonNegativeFloat | None = None
    """Where beta starts, the embedding's weight there; null: no such term (nanochat and LRT: 0.1)."""
    kv: Bool = True
    """Whether it is projected into each layer's keys and values."""
    share: Literal["shared", "per_layer"] = "shared"
    """One pair of projections U for all layers, or one for each."""
    gates: Bool = True
    """Whether the sum in keys and values is gated."""

    @property
    def mixes_keys(self) -> bool:
        return self.kv

    @property
    def gates_keys(self) -> bool:
        return self.kv and self.gates

    def check(self, n_prelude: int, n_core: int, n_coda: int, seq_len: int) -> None:
        if not self.residual and not self.kv:
            raise ValueError("memory.residual=false and memory.kv=false: the memory enters nowhere; set one to true")
        if not self.kv and (self.share, self.gates) != ("shared", True):
            field = "share='per_layer'" if self.share != "shared" else "gates=false"
            raise ValueError(
                f"memory.{field} is of the projections into keys and values, and memory.kv=false has none: leave it "
                "out, or set kv to true"
            )
        if self.beta is not None and not self.residual:
            raise ValueError("memory.beta is a term of the residual injection: set residual to true, or beta to null")
        if not self.residual and self.gamma != type(self).model_fields["gamma"].default:
            raise ValueError("memory.gamma is a weight of the residual injection: set residual to true, or remove it")
        if self.source is not None and self.source not in (allowed := _sources(n_prelude, n_core, n_coda)):
            raise ValueError(f"memory.source {self.source!r}{did_you_mean(self.source, allowed)}")
        if self.lag + self.mean_of > seq_len:
            raise ValueError(
                f"memory.lag={self.lag} with mean_of={self.mean_of} reaches back {self.lag + self.mean_of - 1} tokens, "
                f"and the last of seq_len={seq_len} has {seq_len - 1} before it: lower them, or raise seq_len"
            )

    def source_of(self, n_prelude: int, n_core: int, n_coda: int, n_loops: int) -> Source:
        if self.source is not None:
            stage, _, layer = self.source.partition(".")
            return stage, int(layer or 0)
        core_ends = n_prelude + n_core * n_loops
        nth = max(round(UPPER_MIDDLE * (core_ends + n_coda)), 1)
        if nth <= n_prelude:
            return "prelude", nth - 1
        return ("core", 0) if nth <= core_ends else ("coda", nth - core_ends - 1)

    def build(self, shape: Shape, d_kv: int, source: Source | None) -> MemoryModule:
        assert source is not None
        return PrevTokenModule(self, shape, d_kv, source)

    def build_residual(self) -> nn.Module:
        return ResidualModule(self.gamma, self.beta) if self.residual else AsItIs()

    def build_recall(self, shape: Shape, d_kv: int) -> nn.Module:
        if not self.kv:
            return OwnKeys()
        return RecallModule(shape, d_kv, n_gates=2 if self.gates else 0, own=self.share == "per_layer")

    def cost(self, shape: Shape, d_kv: int) -> Cost:
        return linear(shape.d_model, d_kv).times(2 if self.kv and self.share == "shared" else 0).of_memory()

    def residual_cost(self) -> Cost:
        return Cost(params=(2 + (self.beta is not None)) if self.residual else 0)

    def key_cost(self, shape: Shape, d_kv: int) -> Cost:
        if not self.kv:
            return Cost()
        own = linear(shape.d_model, d_kv).times(2 if self.share == "per_layer" else 0).of_memory()
        return total(own, linear(shape.d_model, 2 * d_kv // shape.d_head) if self.gates else Cost())

    def kept_bytes(self, shape: Shape, d_kv: int, source: Source | None, kept: Kept) -> float:
        d = shape.d_model
        m = 4 * d * kept.memories if self.residual else 0
        maps = self._mapped_bytes(shape, d_kv, kept) if self.kv and self.share == "shared" else 0
        normed = kept.normed(d) - d * kept.stream
        if source is not None and source[0] == "final" and kept.product != 4:
            normed = kept.normed(d)  # the head reads a copy in bf16
        return m + maps + normed

    def residual_kept_bytes(self, shape: Shape, kept: Kept) -> int:
        if not self.residual:
            return 0
        others = (kept.memories > 0) + (self.beta is not None)
        n_read = 1 if kept.stream == 4 else 1 + others  # memory and embedding are fp32, and copied
        return n_read * shape.d_model * kept.stream

    def key_kept_bytes(self, shape: Shape, d_kv: int, kept: Kept) -> int:
        if not self.kv:
            return 0
        own = self._mapped_bytes(shape, d_kv, kept) if self.share == "per_layer" else 0
        return own + (_gated_bytes(shape, d_kv, 2, kept) if self.gates else 0)

    def _mapped_bytes(self, shape: Shape, d_kv: int, kept: Kept) -> int:
        """What U_k and U_v read, and what they give where gates weigh it; nothing in a pass without memories."""
        return (2 * shape.d_model + (2 * d_kv if self.gates else 0)) * kept.product if kept.memories else 0


def _gated_bytes(shape: Shape, d_kv: int, n_gates: int, kept: Kept) -> int:
    """What gates on keys and values keep: what they read, they themselves (twice: the sigmoid), and what they weigh of
    the layer's own."""
    return kept.read_again(shape.d_model) + (2 * n_gates * (d_kv // shape.d_head) + 2 * d_kv) * kept.product


def _sources(n_prelude: int, n_core: int, n_coda: int) -> list[str]:
    core = ["core"] if n_core else []
    return [
        *(f"prelude.{layer}" for layer in range(n_prelude)),
        *core,
        *(f"coda.{layer}" for layer in range(n_coda)),
        "final",
    ]


class AsItIs(nn.Module):
    def forward(self, x_BTD: Tensor, recall: Recall | None) -> Tensor:
        return x_BTD


class OwnKeys(nn.Module):
    def forward(self, k_BTE: Tensor, v_BTE: Tensor, x_BTD: Tensor, recall: Recall | None) -> tuple[Tensor, Tensor]:
        return k_BTE, v_BTE


class ResidualModule(InitSpecial):
    """``alpha x + gamma m (+ beta x0)``, a number each."""

    def __init__(self, gamma: float, beta: float | None) -> None:
        super().__init__()
        self.start = (gamma, beta or 0.0)
        # Of one entry, not of none: FSDP shards no scalars.
        self.alpha = nn.Parameter(torch.empty(1))
        self.gamma = nn.Parameter(torch.empty(1))
        self.beta = None if beta is None else nn.Parameter(torch.empty(1))

    def init_special(self) -> None:
        self.alpha.fill_(1.0)
        self.gamma.fill_(self.start[0])
        if self.beta is not None:
            self.beta.fill_(self.start[1])

    def forward(self, x_BTD: Tensor, recall: Recall) -> Tensor:
        # As numbers without a dimension they leave the stream in its type.
        y_BTD = x_BTD * self.alpha[0]
        if recall.m_BTD is not None:
            y_BTD = torch.addcmul(y_BTD, self.gamma[0], recall.m_BTD.to(x_BTD.dtype))
        return y_BTD if self.beta is None else torch.addcmul(y_BTD, self.beta[0], recall.x0_BTD.to(x_BTD.dtype))


class RecallModule(InitSpecial):
    """Gates on a layer's own keys and values, and on what the memory adds to them.

    Args:
        n_gates: 0; 1: of its own; 2: and of the memory's.
        own: whether the layer projects the memory itself.
    """

    def __init__(self, shape: Shape, d_kv: int, n_gates: int, own: bool) -> None:
        super().__init__()
        self.n_gates, self.d_head = n_gates, shape.d_head
        self.gate = nn.Linear(shape.d_model, n_gates * (d_kv // shape.d_head), bias=False) if n_gates else None
        self.k = nn.Linear(shape.d_model, d_kv, bias=False) if own else None
        self.v = nn.Linear(shape.d_model, d_kv, bias=False) if own else None

    def init_special(self) -> None:
        """Every gate starts at 1."""
        if self.gate is not None:
            self.gate.weight.zero_()

    def forward(self, k_BTE: Tensor, v_BTE: Tensor, x_BTD: Tensor, recall: Recall | None) -> tuple[Tensor, Tensor]:
        added = self._of_memory(recall)
        if self.gate is None:
            return (k_BTE + added[0].to(k_BTE.dtype), v_BTE + added[1].to(v_BTE.dtype)) if added else (k_BTE, v_BTE)
        heads = (-1, self.d_head)
        # One number a head, for all of its width.
        gates = (2 * torch.sigmoid(self.gate(x_BTD))).unflatten(-1, (self.n_gates, -1, 1)).unbind(-3)
        parts = [y_BTE.to(k_BTE.dtype).unflatten(-1, heads) for y_BTE in (k_BTE, v_BTE, *added)]
        trains = torch.is_grad_enabled() and k_BTE.requires_grad and not torch.compiler.is_compiling()
        gated = GatedSum.apply if trains else gated_sum
        k_BTGK, v_BTGK = gated(gates[0], gates[-1] if added else None, *parts)
        return k_BTGK.flatten(-2), v_BTGK.flatten(-2)

    def _of_memory(self, recall: Recall | None) -> Sequence[Tensor]:
        """What the memory adds to keys and to values; nothing where there is none."""
        if recall is None or recall.m_BTD is None:
            return ()
        if self.k is None or self.v is None:
            return recall.shared
        return self.k(recall.m_BTD), self.v(recall.m_BTD)


class MemoryModule(nn.Module):
    """No memory."""

    n_carried = 0
    """States that a sequence carries from token to token."""

    def enter(self, context: Context, x0_BTD: Tensor, memory_BTD: Tensor | None) -> Context:
        """The context of a pass whose tokens have these memories; None: zero."""
        return context

    def source(self, prelude_BTD: Tensor, h_BTD: Tensor, coda_BTD: Tensor, y_BTD: Tensor) -> Tensor | None:
        """What later tokens remember of each of these, ``[B, T, D]``; None where nothing is remembered.

        Args:
            prelude_BTD, coda_BTD: at the block of the stage that is the source.
            h_BTD: after the last loop.
            y_BTD: what the head reads.
        """
        return None

    def recall(self, sources_BTD: Tensor) -> Tensor:
        """The memories of T tokens, ``[B, T, D]``.

        Args:
            sources_BTD: what the ``n_carried`` tokens before them and they themselves have become (`source`), in order,
                ``[B, n_carried + T, D]``; of the last nothing is read.
        """
        raise NotImplementedError


class PrevTokenModule(MemoryModule):
    def __init__(self, config: PrevToken, shape: Shape, d_kv: int, source: Source) -> None:
        super().__init__()
        self.config, self.stage = config, source[0]
        self.n_carried = config.lag + config.mean_of - 1
        self.norm = RMSNormModule(shape.d_model, MEMORY_EPS, weight=False)
        shared = config.kv and config.share == "shared"
        self.k = nn.Linear(shape.d_model, d_kv, bias=False) if shared else None
        self.v = nn.Linear(shape.d_model, d_kv, bias=False) if shared else None

    def enter(self, context: Context, x0_BTD: Tensor, memory_BTD: Tensor | None) -> Context:
        # Zero is a memory like another: what adds to it (alpha, the gates) acts all the same.
        m_BTD = memory_BTD
        if m_BTD is None or self.k is None or self.v is None:
            return replace(context, recall=Recall(m_BTD, x0_BTD))
        return replace(context, recall=Recall(m_BTD, x0_BTD, (self.k(m_BTD), self.v(m_BTD))))

    def source(self, prelude_BTD: Tensor, h_BTD: Tensor, coda_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        at = {"prelude": prelude_BTD, "core": h_BTD, "coda": coda_BTD, "final": y_BTD}
        return self.norm(at[self.stage])

    def recall(self, sources_BTD: Tensor) -> Tensor:
        n_tokens, last = sources_BTD.size(1) - self.n_carried, self.config.mean_of - 1
        found = [sources_BTD[:, last - i : last - i + n_tokens] for i in range(self.config.mean_of)]
        return found[0] if len(found) == 1 else torch.stack(found).mean(0)
