"""Transformers written out from raw weights, with no module of alcoda or of `torch.nn`: what the model must compute.

Weights are a dictionary from names (those of the model's ``state_dict``) to tensors. Everything is as in a textbook:
one sequence at a time, one head at a time, rotary embedding by complex numbers, softmax by its definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layernorm(w: Weights, name: str, x: Tensor) -> Tensor:
    y = bare_layernorm(w, name, x) * w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def bare_layernorm(w: Weights, name: str, x: Tensor) -> Tensor:
    """Without a weight."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred**2).sum(-1, keepdim=True) / x.shape[-1]
    return centred / (variance + 1e-5) ** 0.5


def rmsnorm(w: Weights, name: str, x: Tensor) -> Tensor:
    return bare_rmsnorm(w, name, x) * w[f"{name}.weight"]


def bare_rmsnorm(w: Weights, name: str, x: Tensor) -> Tensor:
    """Without a weight."""
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** 0.5


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.special.erf(x / math.sqrt(2)))


def gelu_mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.down", gelu(linear(w, f"{name}.up", x)))


def relu2_mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    up = linear(w, f"{name}.up", x)
    return linear(w, f"{name}.down", torch.where(up > 0, up * up, 0.0))


def swiglu_mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.down", silu(linear(w, f"{name}.gate", x)) * linear(w, f"{name}.up", x))


def no_rotation(x_TK: Tensor) -> Tensor:
    return x_TK


def turns(n_tokens: int, d_head: int, base: float) -> Tensor:
    """``e^{i t base^(-2i/K)}``, [T, K/2]."""
    angles = [[t * base ** (-2 * i / d_head) for i in range(d_head // 2)] for t in range(n_tokens)]
    return torch.exp(1j * torch.tensor(angles, dtype=torch.float64))


def rope(x_TK: Tensor) -> Tensor:
    """Dimensions i and i + K/2 are one complex number, turned by t * 10000^(-2i/K)."""
    n_tokens, d_head = x_TK.shape
    half = d_head // 2
    z = torch.complex(x_TK[:, :half].contiguous(), x_TK[:, half:].contiguous())
    z = z * turns(n_tokens, d_head, 10_000.0)
    return torch.cat([z.real, z.imag], -1)


def interleaved_rope(x_TK: Tensor) -> Tensor:
    """Dimensions 2i and 2i + 1 are one complex number (Huginn)."""
    n_tokens, d_head = x_TK.shape
    z = torch.complex(x_TK[:, 0::2].contiguous(), x_TK[:, 1::2].contiguous()) * turns(n_tokens, d_head, 10_000.0)
    return torch.stack([z.real, z.imag], -1).reshape(n_tokens, d_head)


class Kind(NamedTuple):
    """The parts in which models differ. What is told by the weights (latents, value tables) is not said again."""

    norm: Callable[[Weights, str, Tensor], Tensor]
    mlp: Callable[[Weights, str, Tensor], Tensor]
    rotation: Callable[[Tensor], Tensor]
    n_heads: int
    n_kv_heads: int
    sandwich: str = "none"
    qk_norm: str = "none"


def query_or_key(w: Weights, name: str, x_TK: Tensor, kind: Kind) -> Tensor:
    """One head's, turned by position, with the norm before or after."""
    if kind.qk_norm == "before_rope":
        x_TK = rmsnorm(w, name, x_TK)
    x_TK = kind.rotation(x_TK)
    return bare_rmsnorm(w, name, x_TK) if kind.qk_norm == "after_rope" else x_TK


def keys_and_values(w: Weights, name: str, x_TD: Tensor, ids_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """All heads side by side, before positions: of x, or of a latent of it (MLA), plus each token's own value."""
    c = linear(w, f"{name}.latent", x_TD) if f"{name}.latent.weight" in w else x_TD
    k, v = linear(w, f"{name}.k", c), linear(w, f"{name}.v", c)
    if f"{name}.values.table.weight" in w:
        own = w[f"{name}.values.table.weight"][ids_T]
        if f"{name}.values.gate.weight" in w:
            w_g = w[f"{name}.values.gate.weight"]
            n_heads, n_channels = w_g.shape
            g_TG = 2 * sigmoid(x_TD[:, :n_channels] @ w_g.T)
            own = own * g_TG.repeat_interleave(own.shape[1] // n_heads, 1)
        v = v + own
    return k, v


KeysValues = tuple[Tensor, Tensor]


def attention(
    w: Weights,
    name: str,
    x_TD: Tensor,
    kind: Kind,
    ids_T: Tensor | None = None,
    window: int | None = None,
    frozen: KeysValues | None = None,
) -> Tensor:
    """``frozen``: keys and values made elsewhere, in place of the layer's own."""
    n_tokens = len(x_TD)
    q = linear(w, f"{name}.q", x_TD)
    k, v = keys_and_values(w, f"{name}.keys", x_TD, ids_T) if frozen is None else frozen
    d_head = q.shape[1] // kind.n_heads
    heads = []
    for h in range(kind.n_heads):
        g = h * kind.n_kv_heads // kind.n_heads
        q_TK = query_or_key(w, f"{name}.q_norm", q[:, h * d_head : (h + 1) * d_head], kind)
        k_TK = query_or_key(w, f"{name}.keys.k_norm", k[:, g * d_head : (g + 1) * d_head], kind)
        v_TK = v[:, g * d_head : (g + 1) * d_head]
        rows = []
        for t in range(n_tokens):
            first = 0 if window is None else max(0, t + 1 - window)
            weights = torch.exp(k_TK[first : t + 1] @ q_TK[t] / math.sqrt(d_head))
            rows.append(weights @ v_TK[first : t + 1] / weights.sum())
        heads.append(torch.stack(rows))
    return linear(w, f"{name}.out", torch.cat(heads, 1))


def block(
    w: Weights,
    name: str,
    x_TD: Tensor,
    kind: Kind,
    ids_T: Tensor | None = None,
    window: int | None = None,
    frozen: KeysValues | None = None,
) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        x = kind.norm(w, f"{name}.attention_norm", x)
        return attention(w, f"{name}.attention", x, kind, ids_T, window, frozen)

    def feed(x: Tensor) -> Tensor:
        return kind.mlp(w, f"{name}.mlp", kind.norm(w, f"{name}.mlp_norm", x))

    x = x_TD
    if kind.sandwich == "after_add":
        x = kind.norm(w, f"{name}.attention_post", x + attend(x))
        return kind.norm(w, f"{name}.mlp_post", x + feed(x))
    if kind.sandwich == "on_branch":
        x = x + kind.norm(w, f"{name}.attention_post", attend(x))
        return x + kind.norm(w, f"{name}.mlp_post", feed(x))
    x = x + attend(x)
    return x + feed(x)


def stack(
    w: Weights,
    name: str,
    x_BTD: Tensor,
    kind: Kind,
    ids_BT: Tensor | None = None,
    windows: Sequence[int | None] | None = None,
) -> Tensor:
    """All layers of one stack, for each sequence of a batch.

    Args:
        ids_BT: the tokens, where layers have value tables.
        windows: of each layer of the stack; None: every layer sees everything.
    """
    layers = [key.removeprefix(f"{name}.layers.") for key in w if key.startswith(f"{name}.layers.")]
    n_layers = len({key.split(".")[0] for key in layers})
    rows = []
    for row, x_TD in enumerate(x_BTD):
        for layer in range(n_layers):
            ids_T = None if ids_BT is None else ids_BT[row]
            window = None if windows is None else windows[layer]
            x_TD = block(w, f"{name}.layers.{layer}", x_TD, kind, ids_T, window)
        rows.append(x_TD)
    return torch.stack(rows)


def embed(w: Weights, ids_BT: Tensor) -> Tensor:
    x_BTD = w["embed.weight"][ids_BT]
    return x_BTD + w["position.table.weight"][: ids_BT.shape[1]] if "position.table.weight" in w else x_BTD


def read_out(w: Weights, y_BTD: Tensor) -> Tensor:
    return y_BTD @ (w["head.weight"] if "head.weight" in w else w["embed.weight"]).T
