"""Causal self-attention, as a choice. Queries read position-tagged keys (`alcoda.model.keys`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.config import Bool, Choice, PositiveInt
from alcoda.model.keys import Context, RowsView, View
from alcoda.model.norms import RMSNormModule
from alcoda.model.positions import Rotation, rotate
from alcoda.model.shape import Cost, Kept, Place, Shape, linear, total
from alcoda.model.value_embed import ValueTable

QK_NORM_EPS = 1e-6


class Attention(Choice, axis="attention"):
    """How a token reads earlier tokens."""

    qk_norm: Literal["none", "before_rope", "after_rope"] = "none"
    """RMSNorm of each head's query and key: with a weight, before they are turned by position (Qwen3), or without one,
    after (nanochat, LRT: papers.md 4.1). Scores are still divided by sqrt(K)."""
    qk_bias: Bool = False
    """A learned bias on queries and keys, before they are turned, where ``block.bias`` gives none (Huginn, papers.md
    5.4)."""
    v_bias: Bool = False
    """A learned bias on values, where ``block.bias`` gives none (Qwen2, beside ``qk_bias``)."""

    def kv_heads(self, n_heads: int) -> int:
        """G, the heads of keys and values."""
        return n_heads

    def latent_width(self, d_model: int) -> int | None:
        """Width of the latent that keys and values are made of; None: they are made of the layer's input."""
        return None

    def check(self, shape: Shape) -> None:
        """Raise ValueError where the choice does not fit the shape."""
        for name in ("qk_bias", "v_bias"):
            if getattr(self, name) and shape.bias:
                raise ValueError(
                    f"attention.{name} is already there with block.bias=true, which puts a bias in every linear map: "
                    f"remove {name}, or set block.bias to false"
                )

    def build_keys(self, shape: Shape, values: ValueTable | None, recall: nn.Module) -> KeyProjection:
        """What makes keys and values of what a token is: in each layer, or once of the prelude's output."""
        return KeyProjection(self, shape, values, recall)

    def build(self, shape: Shape, keys: KeyProjection | None, window: int | None) -> AttentionModule:
        """Arguments as `AttentionModule`."""
        return AttentionModule(self, shape, keys, window)

    def key_cost(self, shape: Shape) -> Cost:
        """Of `build_keys`, without the value table and the memory."""
        d_kv = self.kv_heads(shape.n_heads) * shape.d_head
        width = self.latent_width(shape.d_model)
        down = Cost() if width is None else linear(shape.d_model, width, shape.bias)
        d_in = shape.d_model if width is None else width
        maps = [down, linear(d_in, d_kv, shape.bias or self.qk_bias), linear(d_in, d_kv, shape.bias or self.v_bias)]
        return total(*maps, self._norm_cost(shape), Cost(kv=2 * d_kv, latent=2 * d_kv if width is None else width))

    def cost(self, shape: Shape, place: Place) -> dict[str, Cost]:
        """By term: projections, and scores (queries times keys, weights times values, over ``seq_len`` keys)."""
        d_q = shape.n_heads * shape.d_head
        maps = [linear(shape.d_model, d_q, shape.bias or self.qk_bias), linear(d_q, shape.d_model, shape.bias)]
        keys = self.key_cost(shape) if place.own_keys else Cost()
        return {
            "projections": total(*maps, self._norm_cost(shape), keys),
            "scores": Cost(flops=4 * shape.seq_len * d_q),
        }

    def key_kept_bytes(self, shape: Shape, kept: Kept) -> float:
        """Bytes a token that `build_keys` keeps for its backward pass, without what it reads; the keys and values that
        the queries read included."""
        d_kv = self.kv_heads(shape.n_heads) * shape.d_head
        return ((2 * kept.keys + self._has_norm) * d_kv + (self.latent_width(shape.d_model) or 0)) * kept.product

    def n_key_maps(self, d_model: int) -> int:
        """How many linear maps of `build_keys` read the layer's input."""
        return 2 if self.latent_width(d_model) is None else 1

    def kept_bytes(self, shape: Shape, place: Place, kept: Kept) -> float:
        """Bytes a token that one pass keeps for its backward pass; what the first maps read included."""
        d_q, n_maps, keys = shape.n_heads * shape.d_head, 1, 0.0
        if place.own_keys:
            n_maps += self.n_key_maps(shape.d_model)
            keys = self.key_kept_bytes(shape, kept)
        queries = (2 + self._has_norm) * d_q * kept.product  # and what the last map reads
        scores = 4 * shape.n_heads  # fused: the log of each row's sum
        if not kept.fused_attention:
            # The softmax; and keys and values, copied for queries that share them, and at each loop if they are frozen.
            n_copied = d_q - (self.kv_heads(shape.n_heads) * shape.d_head if place.own_keys else 0)
            scores = (shape.n_heads * shape.seq_len * kept.reach + 2 * n_copied * kept.keys) * kept.product
        return kept.read(shape.d_model, n_maps) + keys + queries + scores

    @property
    def _has_norm(self) -> bool:
        return self.qk_norm != "none"

    def _norm_cost(self, shape: Shape) -> Cost:
        return Cost(params=shape.d_head if self.qk_norm == "before_rope" else 0)


class MultiHead(Attention):
    """Multi-head attention (Vaswani et al. 2017): as many heads of keys as of queries."""

    kind: Literal["mha"] = "mha"


class GroupedQuery(Attention):
    """Grouped-query attention (Ainslie et al. 2023): ``n_kv_heads`` heads of keys, each read by several queries."""

    kind: Literal["gqa"] = "gqa"
    n_kv_heads: PositiveInt

    def kv_heads(self, n_heads: int) -> int:
        return self.n_kv_heads

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.n_heads % self.n_kv_heads:
            fits = [n for n in range(1, shape.n_heads + 1) if shape.n_heads % n == 0]
            raise ValueError(
                f"attention.n_kv_heads={self.n_kv_heads} must divide n_heads={shape.n_heads}: one of {fits}"
            )


class Latent(Attention):
    """Multi-head latent attention in CART's form (papers.md 2.1): ``c = W_down x``, ``k = W_uk c``, ``v = W_uv c``.

    Queries have full rank, and as many heads as keys. Keys are turned by position on the whole head, not on a part set
    aside (DeepSeek-V2), so a cache of latents expands them when it reads them.
    """

    kind: Literal["mla"] = "mla"
    latent: PositiveInt | None = None
    """Width of c; d_model / 4 where not set."""

    def latent_width(self, d_model: int) -> int:
        return self.latent or max(d_model // 4, 1)


def split_heads(x_BTE: Tensor, d_head: int) -> Tensor:
    """``[B, T, H K]`` as ``[B, H, T, K]``."""
    return x_BTE.unflatten(-1, (-1, d_head)).transpose(1, 2)


def build_head_norm(config: Attention, d_head: int) -> nn.Module:
    """The norm of queries or keys, on ``x_BHTK``."""
    if config.qk_norm == "none":
        return nn.Identity()
    return RMSNormModule(d_head, QK_NORM_EPS, weight=config.qk_norm == "before_rope")


def turn(config: Attention, x_BHTK: Tensor, norm: nn.Module, rotation: Rotation | None) -> Tensor:
    """Queries or keys as the scores take them: normed, and rotated by position."""
    # The type stays under autocast too: the cache holds one for keys and values.
    if config.qk_norm == "after_rope":
        return norm(rotate(x_BHTK, rotation)).to(x_BHTK.dtype)
    return rotate(norm(x_BHTK).to(x_BHTK.dtype), rotation)


class KeyProjection(nn.Module):
    """``k = W_k c, v = W_v c``, c is x or a latent of it; and what the memory and the token itself add to them."""

    def __init__(self, config: Attention, shape: Shape, values: ValueTable | None, recall: nn.Module) -> None:
        super().__init__()
        self.config, self.d_head = config, shape.d_head
        d_kv = config.kv_heads(shape.n_heads) * shape.d_head
        width = config.latent_width(shape.d_model)
        d_in = shape.d_model if width is None else width
        self.latent = nn.Identity() if width is None else nn.Linear(shape.d_model, width, bias=shape.bias)
        self.k = nn.Linear(d_in, d_kv, bias=shape.bias or config.qk_bias)
        self.v = nn.Linear(d_in, d_kv, bias=shape.bias or config.v_bias)
        self.k_norm = build_head_norm(config, shape.d_head)
        self.values = values
        self.recall = recall

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, context: Context) -> tuple[Tensor, Tensor]:
        """``k_BGTK`` (normed and turned by its position) and ``v_BGTK`` of the tokens of ``context``."""
        c_BTD = self.latent(x_BTD)
        kv_BTE = self.recall(self.k(c_BTD), self.v(c_BTD), x_BTD, context.recall)
        k_BGTK, v_BGTK = (split_heads(y_BTE, self.d_head) for y_BTE in kv_BTE)
        if self.values is not None:
            v_BGTK = v_BGTK + self.values(x_BTD, context.ids_BT).to(v_BGTK.dtype)
        return turn(self.config, k_BGTK, self.k_norm, rotation), v_BGTK


class AttentionModule(nn.Module):
    """``out(softmax(q k^T / sqrt(K)) v)`` over the visible keys.

    Args:
        keys: projects the layer's own keys; None: it reads the context's frozen ones.
        window: how many of the last positions it sees; None: all.
    """

    def __init__(self, config: Attention, shape: Shape, keys: KeyProjection | None, window: int | None) -> None:
        super().__init__()
        self.config, self.d_head, self.window = config, shape.d_head, window
        d_q = shape.n_heads * shape.d_head
        self.q = nn.Linear(shape.d_model, d_q, bias=shape.bias or config.qk_bias)
        self.q_norm = build_head_norm(config, shape.d_head)
        self.keys = keys
        self.out = nn.Linear(d_q, shape.d_model, bias=shape.bias)

    def forward(self, x_BTD: Tensor, context: Context, stage: str, layer: int) -> Tensor:
        q_BHTK = turn(self.config, split_heads(self.q(x_BTD), self.d_head), self.q_norm, context.rotation)
        if self.keys is None:
            assert context.frozen is not None
            keys = context.frozen[layer]
        else:
            keys = context.keys(stage, layer, *self.keys(x_BTD, context.rotation, context))
        y_BHTK = attend(q_BHTK, *keys, context.views[self.window])
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


EXPLICIT_MAX_TOKENS = 512
"""On a CPU, the backward pass of torch's fused attention is 1.2 (fp32) to 2.4 (bf16) times slower than plain matrix
products up to about this many tokens (benchmarks/train.py); beyond it the T x T scores cost too much memory."""

QUERY_BLOCK_TOKENS = 128
"""Queries that are attended at once where a mask in one for all rows hides keys: those of a pass over some tokens."""


def attend(
    q_BHTK: Tensor, k_BGSK: Tensor | Sequence[Tensor], v_BGSK: Tensor | Sequence[Tensor], view: View | RowsView
) -> Tensor:
    """Attention over the visible keys, by the fastest exact kernel for the case; `attend_naive` is its reference."""
    if isinstance(view, RowsView):
        return _attend_rows(q_BHTK, k_BGSK, v_BGSK, view)
    assert isinstance(k_BGSK, Tensor) and isinstance(v_BGSK, Tensor)
    trains = torch.is_grad_enabled() and q_BHTK.requires_grad
    # A mask in one for all rows: then each query sees at least its own key, and no row of scores is empty.
    plain = view.is_causal or (view.mask is not None and view.mask.dim() == 2)
    if trains and plain and q_BHTK.device.type == "cpu" and k_BGSK.size(2) <= EXPLICIT_MAX_TOKENS:
        return _attend_explicit(q_BHTK, k_BGSK, v_BGSK, view)
    if plain and not view.is_causal and q_BHTK.device.type == "cpu" and q_BHTK.size(2) > QUERY_BLOCK_TOKENS:
        return _attend_in_blocks(q_BHTK, k_BGSK, v_BGSK, view)
    return _attend_fused(q_BHTK, k_BGSK, v_BGSK, view.mask, view.is_causal)


def _attend_rows(
    q_WH1K: Tensor, k_W1GSK: Tensor | Sequence[Tensor], v_W1GSK: Tensor | Sequence[Tensor], view: RowsView
) -> Tensor:
    """Row by row on views of the cache: gathering keys of several lengths into one tensor costs more than it saves on a
    CPU, and a row's result would depend on the longest. A GPU, which a call a row would keep waiting, gathers them
    where it has no kernel for it."""
    if view.kernel is not None:
        return view.kernel(q_WH1K, k_W1GSK, v_W1GSK, view.window)
    k_rows, v_rows = list(k_W1GSK), list(v_W1GSK)
    if view.window is not None:
        k_rows, v_rows = ([x_1GSK[:, :, -view.window :] for x_1GSK in rows] for rows in (k_rows, v_rows))
    if q_WH1K.device.type != "cpu":
        return attend_padded(q_WH1K, k_rows, v_rows)
    rows = [_attend_fused(q, k, v, None) for q, k, v in zip(q_WH1K.split(1), k_rows, v_rows, strict=True)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def attend_padded(q_WH1K: Tensor, k_W1GSK: Sequence[Tensor], v_W1GSK: Sequence[Tensor]) -> Tensor:
    """One query a row over keys of several lengths, in one call."""
    lengths_W = torch.tensor([k.size(2) for k in k_W1GSK], device=q_WH1K.device)
    longest = max(k.size(2) for k in k_W1GSK)
    k_WGSK, v_WGSK = (
        torch.cat([F.pad(x_1GSK, (0, 0, 0, longest - x_1GSK.size(2))) for x_1GSK in rows])
        for rows in (k_W1GSK, v_W1GSK)
    )
    mask_WS = torch.arange(longest, device=q_WH1K.device) < lengths_W[:, None]
    return _attend_fused(q_WH1K, k_WGSK, v_WGSK, mask_WS[:, None, None])


def _attend_fused(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, is_causal: bool = False
) -> Tensor:
    return F.scaled_dot_product_attention(
        q_BHTK,
        k_BGSK,
        v_BGSK,
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=q_BHTK.size(1) != k_BGSK.size(1),
    )


def _attend_in_blocks(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, view: View) -> Tensor:
    """Some queries at a time, of the keys up to the last of them: a mask alone would not spare those behind. A mask in
    one for all rows is of keys at positions 0 .. S - 1, and queries in order."""
    assert view.mask is not None
    parts = []
    for first in range(0, q_BHTK.size(2), QUERY_BLOCK_TOKENS):
        here = slice(first, first + QUERY_BLOCK_TOKENS)
        seen = slice(0, int(view.pos[here][-1]) + 1)
        parts.append(_attend_fused(q_BHTK[:, :, here], k_BGSK[:, :, seen], v_BGSK[:, :, seen], view.mask[here, seen]))
    return torch.cat(parts, 2)


def _attend_explicit(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, view: View) -> Tensor:
    n_tokens = q_BHTK.size(2)
    # Queries that share a head of keys stand together, so that keys are broadcast and never copied.
    q_BGNTK = q_BHTK.unflatten(1, (k_BGSK.size(1), -1)) * q_BHTK.size(-1) ** -0.5
    scores_BGNTS = q_BGNTK @ k_BGSK[:, :, None].transpose(-1, -2)
    hidden_TS = torch.full((n_tokens, k_BGSK.size(2)), float("-inf"), dtype=scores_BGNTS.dtype)
    hidden_TS = hidden_TS.triu(1) if view.mask is None else hidden_TS.masked_fill(view.mask, 0.0)
    return (torch.softmax(scores_BGNTS + hidden_TS, -1).to(v_BGSK.dtype) @ v_BGSK[:, :, None]).flatten(1, 2)


def attend_naive(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, view: View) -> Tensor:
    """The obvious way, for tests. Rows that see no key are zero."""
    group = q_BHTK.size(1) // k_BGSK.size(1)
    k_BHSK, v_BHSK = k_BGSK.repeat_interleave(group, 1), v_BGSK.repeat_interleave(group, 1)
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-1, -2) / q_BHTK.size(-1) ** 0.5
    visible = view.mask
    if view.is_causal:
        visible = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q_BHTK.device).tril()
    if visible is not None:
        scores_BHTS = scores_BHTS.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores_BHTS, -1).nan_to_num(0.0) @ v_BHSK
