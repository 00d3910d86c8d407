"""Causal self-attention, as a choice. Queries read position-tagged keys (`alcoda.model.keys`)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.config import Choice, PositiveInt
from alcoda.model.keys import Context, View
from alcoda.model.positions import Rotation, rotate
from alcoda.model.shape import Cost, Place, Shape, linear, total


class Attention(Choice, axis="attention"):
    """How a token reads earlier tokens."""

    def kv_heads(self, n_heads: int) -> int:
        """G, the heads of keys and values."""
        return n_heads

    def check(self, shape: Shape) -> None:
        """Raise ValueError where the choice does not fit the shape."""

    def build_keys(self, shape: Shape) -> KeyProjection:
        """What makes keys and values of what a token is: in each layer, or once of the prelude's output."""
        return KeyProjection(shape, self.kv_heads(shape.n_heads))

    def build(self, shape: Shape, place: Place) -> AttentionModule:
        return AttentionModule(shape, self.build_keys(shape) if place.own_keys else None)

    def key_cost(self, shape: Shape) -> Cost:
        """Of `build_keys`."""
        d_kv = self.kv_heads(shape.n_heads) * shape.d_head
        return linear(shape.d_model, d_kv, shape.bias).times(2)._replace(kv=2 * d_kv, latent=2 * d_kv)

    def cost(self, shape: Shape, place: Place) -> dict[str, Cost]:
        """By term: projections, and scores (queries times keys, weights times values, over ``seq_len`` keys)."""
        d_q = shape.n_heads * shape.d_head
        maps = [linear(shape.d_model, d_q, shape.bias), linear(d_q, shape.d_model, shape.bias)]
        keys = self.key_cost(shape) if place.own_keys else Cost()
        return {"projections": total(*maps, keys), "scores": Cost(flops=4 * shape.seq_len * d_q)}


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
        if shape.n_heads % self.n_kv_heads:
            fits = [n for n in range(1, shape.n_heads + 1) if shape.n_heads % n == 0]
            raise ValueError(
                f"attention.n_kv_heads={self.n_kv_heads} must divide n_heads={shape.n_heads}: one of {fits}"
            )


def split_heads(x_BTE: Tensor, d_head: int) -> Tensor:
    """``[B, T, H K]`` as ``[B, H, T, K]``."""
    return x_BTE.unflatten(-1, (-1, d_head)).transpose(1, 2)


class KeyProjection(nn.Module):
    """``k = W_k x, v = W_v x``."""

    def __init__(self, shape: Shape, n_kv_heads: int) -> None:
        super().__init__()
        self.d_head = shape.d_head
        d_kv = n_kv_heads * shape.d_head
        self.k = nn.Linear(shape.d_model, d_kv, bias=shape.bias)
        self.v = nn.Linear(shape.d_model, d_kv, bias=shape.bias)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """``k_BGTK`` (turned by its position) and ``v_BGTK`` of tokens ``ids_BT``."""
        return rotate(split_heads(self.k(x_BTD), self.d_head), rotation), split_heads(self.v(x_BTD), self.d_head)


class AttentionModule(nn.Module):
    """``out(softmax(q k^T / sqrt(K)) v)`` over the visible keys.

    Args:
        keys: projects the layer's own keys; None: it reads the context's frozen ones.
    """

    def __init__(self, shape: Shape, keys: KeyProjection | None) -> None:
        super().__init__()
        self.d_head = shape.d_head
        d_q = shape.n_heads * shape.d_head
        self.q = nn.Linear(shape.d_model, d_q, bias=shape.bias)
        self.keys = keys
        self.out = nn.Linear(d_q, shape.d_model, bias=shape.bias)

    def forward(self, x_BTD: Tensor, context: Context, stage: str, layer: int) -> Tensor:
        q_BHTK = rotate(split_heads(self.q(x_BTD), self.d_head), context.rotation)
        if self.keys is None:
            assert context.frozen is not None
            k_BGSK, v_BGSK = context.frozen[layer]
        else:
            k_BGTK, v_BGTK = self.keys(x_BTD, context.rotation, context.ids_BT)
            k_BGSK, v_BGSK = context.keys(stage, layer, k_BGTK, v_BGTK)
        y_BHTK = attend(q_BHTK, k_BGSK, v_BGSK, context.views[None])
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


EXPLICIT_MAX_TOKENS = 512
"""On a CPU, the backward pass of torch's fused attention is 1.2 (fp32) to 2.4 (bf16) times slower than plain matrix
products up to about this many tokens (benchmarks/train.py); beyond it the T x T scores cost too much memory."""


def attend(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, view: View) -> Tensor:
    """Attention over the visible keys, by the fastest exact kernel for the case; `attend_naive` is its reference."""
    trains = torch.is_grad_enabled() and q_BHTK.requires_grad
    if trains and view.is_causal and q_BHTK.device.type == "cpu" and q_BHTK.size(2) <= EXPLICIT_MAX_TOKENS:
        return _attend_explicit(q_BHTK, k_BGSK, v_BGSK)
    return F.scaled_dot_product_attention(
        q_BHTK,
        k_BGSK,
        v_BGSK,
        attn_mask=view.mask,
        is_causal=view.is_causal,
        enable_gqa=q_BHTK.size(1) != k_BGSK.size(1),
    )


def _attend_explicit(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    n_tokens = q_BHTK.size(2)
    # Queries that share a head of keys stand together, so that keys are broadcast and never copied.
    q_BGNTK = q_BHTK.unflatten(1, (k_BGTK.size(1), -1)) * q_BHTK.size(-1) ** -0.5
    scores_BGNTS = q_BGNTK @ k_BGTK[:, :, None].transpose(-1, -2)
    future_TS = torch.full((n_tokens, n_tokens), float("-inf"), dtype=scores_BGNTS.dtype).triu(1)
    return (torch.softmax(scores_BGNTS + future_TS, -1).to(v_BGTK.dtype) @ v_BGTK[:, :, None]).flatten(1, 2)


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
