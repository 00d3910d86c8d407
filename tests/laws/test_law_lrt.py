"""Law 4: the latent recurrent transformer computes its equations (papers.md 4.1), written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import textbook as tb
import torch
from space import house
from torch import Tensor

from alcoda.laws.law import close
from alcoda.laws.subject import EXACT, make_plain, tokens
from alcoda.model.config import ModelConfig
from alcoda.model.prefill import Reader

B, T = 2, 6
BLOCK = {"norm": {"kind": "rmsnorm", "weight": False}, "attention": {"kind": "mha", "qk_norm": "after_rope"}}
LRT: dict[str, Any] = {
    "n_prelude": 2,
    "n_core": 0,
    "n_coda": 0,
    "n_loops": 1,
    "head": "untied",
    "block": {**BLOCK, "mlp": "relu2", "value_embed": {"kind": "table", "every": 1, "gate_channels": 32}},
}
N_LAYERS = 2
FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "shared": ({"beta": 0.1}, 0),
    "per_layer": ({"beta": 0.1, "share": "per_layer", "source": "prelude.1"}, 1),
    "ungated": ({"gates": False, "source": "prelude.1"}, 1),
    "keys_only_of_two": ({"residual": False, "mean_of": 2, "source": "prelude.1"}, 1),
    "residual_only_lag_2": ({"kv": False, "lag": 2}, 0),
    "final": ({"source": "final"}, 2),
}
"""The memory's fields, and the layer after which a token is remembered; 2: what the head reads."""


def config_of(form: str) -> ModelConfig:
    return house(**LRT, memory={"kind": "prev_token", **FORMS[form][0]})


def turned(x_K: Tensor, position: int) -> Tensor:
    """One head of one token."""
    rows_TK = torch.cat([torch.zeros(position, len(x_K), dtype=x_K.dtype), x_K[None]])
    return tb.bare_rmsnorm({}, "", tb.rope(rows_TK)[-1])


def lrt(w: tb.Weights, ids: list[int], form: str, n_heads: int) -> Tensor:
    """Logits of one text: each token through all layers before the next one begins."""
    fields, source = FORMS[form]
    lag, mean_of = fields.get("lag", 1), fields.get("mean_of", 1)
    keys: list[list[list[Tensor]]] = [[[] for _ in range(n_heads)] for _ in range(N_LAYERS)]
    values: list[list[list[Tensor]]] = [[[] for _ in range(n_heads)] for _ in range(N_LAYERS)]
    remembered: list[Tensor] = []
    logits = []
    for t, token in enumerate(ids):
        x0 = x = w["embed.weight"][token]
        width = len(x) // n_heads
        zero = torch.zeros_like(x)
        before = [remembered[t - lag - i] if t - lag - i >= 0 else zero for i in range(mean_of)]
        m = sum(before[1:], before[0]) / mean_of
        states = []
        for layer in range(N_LAYERS):
            at = f"prelude.layers.{layer}"
            if fields.get("residual", True):
                x = w[f"{at}.memory.alpha"] * x + w[f"{at}.memory.gamma"] * m
                x = x + w[f"{at}.memory.beta"] * x0 if "beta" in fields else x
            x_hat = tb.bare_rmsnorm({}, "", x)
            name = f"{at}.attention"
            q, k, v = (tb.linear(w, f"{name}.{one}", x_hat) for one in ("q", "keys.k", "keys.v"))
            uses_kv, uses_gates = fields.get("kv", True), fields.get("gates", True)
            maps = f"{name}.keys.recall" if fields.get("share") == "per_layer" else "memory"
            heads = []
            for h in range(n_heads):
                of = slice(h * width, (h + 1) * width)
                k_h, v_h = k[of], v[of]
                if uses_kv:
                    g_loc = g_fb = torch.ones((), dtype=x.dtype)
                    if uses_gates:
                        w_g = w[f"{name}.keys.recall.gate.weight"]
                        g_loc, g_fb = 2 * tb.sigmoid(w_g[h] @ x_hat), 2 * tb.sigmoid(w_g[n_heads + h] @ x_hat)
                    k_h = g_loc * k_h + g_fb * (w[f"{maps}.k.weight"] @ m)[of]
                    v_h = g_loc * v_h + g_fb * (w[f"{maps}.v.weight"] @ m)[of]
                g_ve = 2 * tb.sigmoid(w[f"{name}.keys.values.gate.weight"][h] @ x_hat)
                v_h = v_h + g_ve * w[f"{name}.keys.values.table.weight"][token][of]
                keys[layer][h].append(turned(k_h, t))
                values[layer][h].append(v_h)
                scores = torch.stack(keys[layer][h]) @ turned(q[of], t) / math.sqrt(width)
                weights = torch.exp(scores)
                heads.append(weights @ torch.stack(values[layer][h]) / weights.sum())
            x = x + tb.linear(w, f"{name}.out", torch.cat(heads))
            x = x + tb.relu2_mlp(w, f"{at}.mlp", tb.bare_rmsnorm({}, "", x))
            states.append(x)
        states.append(tb.bare_rmsnorm({}, "", x))
        remembered.append(tb.bare_rmsnorm({}, "", states[source]))
        logits.append(tb.read_out(w, states[-1]))
    return torch.stack(logits)


@torch.no_grad()
def check_lrt(form: str, book: str | None = None) -> None:
    """Against the equations of ``book`` (the same form)."""
    config, ids_BT = config_of(form), tokens(B, T)
    model = make_plain(config)
    w = dict(model.state_dict())
    actual = model.logits(Reader(model, 1).read(ids_BT))
    expected = torch.stack([lrt(w, ids.tolist(), book or form, config.n_heads) for ids in ids_BT])
    close(actual, expected, EXACT, "the latent recurrent transformer")


@pytest.mark.parametrize("form", FORMS)
def test_the_latent_recurrent_transformer(form: str) -> None:
    check_lrt(form)


def test_control_another_equation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in ({"lag": 2}, {"mean_of": 2}, {"gates": False}, {"residual": False}):
        monkeypatch.setitem(FORMS, "other", ({"beta": 0.1, **changed}, 0))
        with pytest.raises(AssertionError, match="the latent recurrent transformer: off by"):
            check_lrt("shared", "other")
    for source in (1, 2):
        monkeypatch.setitem(FORMS, "other", ({"beta": 0.1}, source))
        with pytest.raises(AssertionError, match="the latent recurrent transformer: off by"):
            check_lrt("shared", "other")


def test_control_a_norm_before_the_rotation_is_the_same_and_a_norm_of_all_heads_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RoPE turns and does not stretch, so that a norm without weight may stand on either side of it."""

    def norm_first(x_K: Tensor, position: int) -> Tensor:
        rows_TK = torch.cat([torch.zeros(position, len(x_K), dtype=x_K.dtype), tb.bare_rmsnorm({}, "", x_K)[None]])
        return tb.rope(rows_TK)[-1]

    monkeypatch.setitem(globals(), "turned", norm_first)
    check_lrt("shared")
    monkeypatch.setitem(globals(), "turned", lambda x_K, position: norm_first(x_K, position) * (x_K.norm() + 1))
    with pytest.raises(AssertionError, match="off by"):
        check_lrt("shared")
