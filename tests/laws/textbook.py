"""Transformers written out from raw weights, with no module of alcoda or of `torch.nn`: what the model must compute.

Weights are a dictionary from names (those of the model's ``state_dict``) to tensors. Everything is as in a textbook:
one sequence at a time, one head at a time, rotary embedding by complex numbers, softmax by its definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layernorm(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred**2).sum(-1, keepdim=True) / x.shape[-1]
    y = centred / (variance + 1e-5) ** 0.5 * w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rmsnorm(w: Weights, name: str, x: Tensor) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** 0.5 * w[f"{name}.weight"]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.special.erf(x / math.sqrt(2)))


def gelu_mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.down", gelu(linear(w, f"{name}.up", x)))


def swiglu_mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.down", silu(linear(w, f"{name}.gate", x)) * linear(w, f"{name}.up", x))


def no_rotation(x_TK: Tensor) -> Tensor:
    return x_TK


def rope(x_TK: Tensor) -> Tensor:
    """Dimensions i and i + K/2 are one complex number, turned by t * 10000^(-2i/K)."""
    n_tokens, d_head = x_TK.shape
    half = d_head // 2
    z = torch.complex(x_TK[:, :half].contiguous(), x_TK[:, half:].contiguous())
    turns = [[t * 10_000.0 ** (-2 * i / d_head) for i in range(half)] for t in range(n_tokens)]
    z = z * torch.exp(1j * torch.tensor(turns, dtype=torch.float64))
    return torch.cat([z.real, z.imag], -1)


class Kind(NamedTuple):
    """The parts in which GPT-2 and Llama differ."""

    norm: Callable[[Weights, str, Tensor], Tensor]
    mlp: Callable[[Weights, str, Tensor], Tensor]
    rotation: Callable[[Tensor], Tensor]
    n_heads: int
    n_kv_heads: int
    sandwich: bool = False


def attention(w: Weights, name: str, x_TD: Tensor, kind: Kind) -> Tensor:
    n_tokens = len(x_TD)
    q, k, v = (linear(w, f"{name}.{part}", x_TD) for part in ("q", "keys.k", "keys.v"))
    d_head = q.shape[1] // kind.n_heads
    heads = []
    for h in range(kind.n_heads):
        g = h * kind.n_kv_heads // kind.n_heads
        q_TK = kind.rotation(q[:, h * d_head : (h + 1) * d_head])
        k_TK = kind.rotation(k[:, g * d_head : (g + 1) * d_head])
        v_TK = v[:, g * d_head : (g + 1) * d_head]
        rows = []
        for t in range(n_tokens):
            weights = torch.exp(k_TK[: t + 1] @ q_TK[t] / math.sqrt(d_head))
            rows.append(weights @ v_TK[: t + 1] / weights.sum())
        heads.append(torch.stack(rows))
    return linear(w, f"{name}.out", torch.cat(heads, 1))


def block(w: Weights, name: str, x_TD: Tensor, kind: Kind) -> Tensor:
    x_TD = x_TD + attention(w, f"{name}.attention", kind.norm(w, f"{name}.attention_norm", x_TD), kind)
    if kind.sandwich:
        x_TD = kind.norm(w, f"{name}.attention_post", x_TD)
    x_TD = x_TD + kind.mlp(w, f"{name}.mlp", kind.norm(w, f"{name}.mlp_norm", x_TD))
    return kind.norm(w, f"{name}.mlp_post", x_TD) if kind.sandwich else x_TD


def stack(w: Weights, name: str, x_BTD: Tensor, kind: Kind) -> Tensor:
    """All layers of one stack, for each sequence of a batch."""
    n_layers = len({key.split(".")[2] for key in w if key.startswith(f"{name}.layers.")})
    rows = []
    for x_TD in x_BTD:
        for layer in range(n_layers):
            x_TD = block(w, f"{name}.layers.{layer}", x_TD, kind)
        rows.append(x_TD)
    return torch.stack(rows)


def embed(w: Weights, ids_BT: Tensor) -> Tensor:
    x_BTD = w["embed.weight"][ids_BT]
    return x_BTD + w["position.table.weight"][: ids_BT.shape[1]] if "position.table.weight" in w else x_BTD


def read_out(w: Weights, y_BTD: Tensor) -> Tensor:
    return y_BTD @ (w["head.weight"] if "head.weight" in w else w["embed.weight"]).T
