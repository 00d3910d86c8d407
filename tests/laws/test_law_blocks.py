"""Law 4, block by block: each choice inside a block is its equation, written out by hand from raw weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import textbook as tb
import torch
from space import house
from torch import Tensor

from alcoda.laws.law import close
from alcoda.laws.subject import make, tokens
from alcoda.model.lm import RecurrentLM

EXACT = 1e-10
B, T, R = 2, 11, 2

LLAMA = tb.Kind(tb.rmsnorm, tb.swiglu_mlp, tb.rope, n_heads=4, n_kv_heads=4)


class Row(NamedTuple):
    """One choice, its textbook, and a textbook that is wrong.

    Attributes:
        fields: of the model's config.
        kind: what the textbook computes.
        windows: of layers 0 .. 3: one of the prelude, two of the core, one of the coda.
        wrong, wrong_windows, dropped: what must not pass for it: another textbook, or this one without some weights.
    """

    fields: dict[str, Any]
    kind: tb.Kind = LLAMA
    windows: Sequence[int | None] | None = None
    wrong: tb.Kind | None = None
    wrong_windows: Sequence[int | None] | None = None
    dropped: str = ""


def attention(kind: str = "mha", **fields: Any) -> dict[str, Any]:
    return {"block": {"attention": {"kind": kind, **fields}}}


BARE_LAYERNORM = LLAMA._replace(norm=tb.bare_layernorm)
BARE_RMSNORM = LLAMA._replace(norm=tb.bare_rmsnorm)
BEFORE, AFTER = LLAMA._replace(qk_norm="before_rope"), LLAMA._replace(qk_norm="after_rope")
SSSL = {"block": {"window": {"kind": "pattern", "tokens": 3}}}
LS = {"block": {"window": {"kind": "pattern", "pattern": "LS", "tokens": 1}}}

ROWS = {
    "rmsnorm-bare": Row({"block": {"norm": {"kind": "rmsnorm", "weight": False}}}, BARE_RMSNORM, wrong=BARE_LAYERNORM),
    "layernorm-bare": Row(
        {"block": {"norm": {"kind": "layernorm", "weight": False}}}, BARE_LAYERNORM, wrong=BARE_RMSNORM
    ),
    "layernorm-bare-bias": Row(
        {"block": {"norm": {"kind": "layernorm", "weight": False}, "bias": True}}, BARE_LAYERNORM, wrong=BARE_RMSNORM
    ),
    "relu2": Row({"block": {"mlp": "relu2"}}, LLAMA._replace(mlp=tb.relu2_mlp), wrong=LLAMA._replace(mlp=tb.gelu_mlp)),
    "relu2-bias": Row(
        {"block": {"mlp": "relu2", "bias": True}},
        LLAMA._replace(mlp=tb.relu2_mlp),
        wrong=LLAMA._replace(mlp=tb.gelu_mlp),
    ),
    "on_branch": Row(
        {"block": {"sandwich": "on_branch"}},
        LLAMA._replace(sandwich="on_branch"),
        wrong=LLAMA._replace(sandwich="after_add"),
    ),
    "after_add": Row(
        {"block": {"sandwich": "after_add"}},
        LLAMA._replace(sandwich="after_add"),
        wrong=LLAMA._replace(sandwich="on_branch"),
    ),
    "qk_norm-before": Row(attention(qk_norm="before_rope"), BEFORE, wrong=LLAMA),
    "qk_norm-after": Row(attention(qk_norm="after_rope"), AFTER, wrong=LLAMA),
    "qk_norm-gqa": Row(
        attention("gqa", n_kv_heads=2, qk_norm="before_rope"),
        BEFORE._replace(n_kv_heads=2),
        wrong=LLAMA._replace(n_kv_heads=2),
    ),
    "qk_bias": Row(attention(qk_bias=True), dropped="keys.k.bias"),
    "qk_bias-normed": Row(attention(qk_bias=True, qk_norm="before_rope"), BEFORE, dropped="attention.q.bias"),
    "qkv_bias": Row(attention(qk_bias=True, v_bias=True), dropped="keys.v.bias"),
    "mla": Row(attention("mla"), wrong=AFTER),
    "mla-narrow": Row(attention("mla", latent=3, qk_norm="after_rope", qk_bias=True), AFTER, wrong=LLAMA),
    "interleaved": Row(
        {"position": {"kind": "rope", "pairs": "interleaved"}},
        LLAMA._replace(rotation=tb.interleaved_rope),
        wrong=LLAMA,
    ),
    "window-SSSL": Row(SSSL, windows=(3, 3, 3, None), wrong_windows=(3, 3, 3, 3)),
    "window-everywhere": Row(
        {"block": {"window": {"kind": "everywhere", "tokens": 3}}}, windows=(3, 3, 3, 3), wrong_windows=(3, 3, 3, None)
    ),
    "window-LS": Row(LS, windows=(None, 1, None, None), wrong_windows=(None, 2, None, None)),
    "window-longer-than-the-text": Row(
        {"block": {"window": {"kind": "pattern", "tokens": T + 1}}}, wrong_windows=(T - 1, None, None, None)
    ),
    "values": Row({"block": {"value_embed": {"kind": "table", "gate_channels": 5}}}, dropped="values.gate.weight"),
    "values-everywhere": Row(
        {"block": {"value_embed": {"kind": "table", "every": 1, "gate": False}, "attention": "mla"}},
        dropped="values.table.weight",
    ),
    "values-gqa": Row(
        {"block": {"value_embed": "table", "attention": {"kind": "gqa", "n_kv_heads": 2}}},
        LLAMA._replace(n_kv_heads=2),
        wrong=LLAMA._replace(n_kv_heads=1),
    ),
    "parcae-like": Row(
        {
            "block": {
                "mlp": "relu2",
                "attention": {"kind": "gqa", "n_kv_heads": 2, "qk_norm": "after_rope"},
                "value_embed": {"kind": "table", "gate_channels": 7},
                "window": {"kind": "pattern", "pattern": "SL", "tokens": 4},
            }
        },
        LLAMA._replace(n_kv_heads=2, mlp=tb.relu2_mlp, qk_norm="after_rope"),
        (4, None, 4, None),
        wrong_windows=(4, None, None, None),
    ),
}

over_rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def weights_of(model: RecurrentLM) -> tb.Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def reference(w: tb.Weights, ids_BT: Tensor, kind: tb.Kind, windows: Sequence[int | None] | None) -> Tensor:
    """A transformer whose layers are the prelude's, the core's ``R`` times, and the coda's."""
    x_BTD = tb.embed(w, ids_BT)
    layers = windows or [None] * 4
    for name, of_stack in [("prelude", layers[:1]), *[("core.stack", layers[1:3])] * R, ("coda", layers[3:])]:
        x_BTD = tb.stack(w, name, x_BTD, kind, ids_BT, of_stack)
    return tb.read_out(w, kind.norm(w, "final_norm", x_BTD))


def check(model: RecurrentLM, row: Row, w: tb.Weights | None = None) -> None:
    ids_BT = tokens(B, T)
    expected = reference(weights_of(model) if w is None else w, ids_BT, row.kind, row.windows)
    with torch.no_grad():
        close(model(ids_BT, R), expected, EXACT, "inference")
    # Training takes other kernels of attention and norms.
    close(model.train()(ids_BT, R).detach(), expected, EXACT, "training")


@over_rows
def test_a_choice_is_its_equation(row: Row) -> None:
    check(make(house(**row.fields)), row)


@over_rows
def test_control_another_equation_is_noticed(row: Row) -> None:
    model = make(house(**row.fields))
    wrong = row._replace(kind=row.wrong or row.kind, windows=row.wrong_windows or row.windows)
    w = {name: p for name, p in weights_of(model).items() if not row.dropped or not name.endswith(row.dropped)}
    assert wrong != row or len(w) < len(weights_of(model)), "the control controls nothing"
    with pytest.raises(AssertionError, match="inference"):
        check(model, wrong, w)


@pytest.mark.parametrize(
    ("row", "weight"),
    [
        ("qk_norm-before", "core.stack.layers.1.attention.q_norm.weight"),
        ("qk_norm-before", "core.stack.layers.1.attention.keys.k_norm.weight"),
        ("qk_bias", "core.stack.layers.0.attention.q.bias"),
        ("qk_bias", "core.stack.layers.0.attention.keys.k.bias"),
        ("qkv_bias", "core.stack.layers.0.attention.keys.v.bias"),
        ("mla", "coda.layers.0.attention.keys.latent.weight"),
        ("on_branch", "core.stack.layers.0.attention_post.weight"),
        ("on_branch", "core.stack.layers.0.mlp_post.weight"),
        ("values", "core.stack.layers.0.attention.keys.values.table.weight"),
        ("values", "coda.layers.0.attention.keys.values.gate.weight"),
    ],
)
def test_control_a_changed_weight_is_noticed(row: str, weight: str) -> None:
    model = make(house(**ROWS[row].fields))
    w = weights_of(model)
    w[weight] += 1e-3
    with pytest.raises(AssertionError, match="inference"):
        check(model, ROWS[row], w)


def test_which_parameters_there_are() -> None:
    """What has no bias, no weight or no table has none: the textbook takes what it is given."""

    def names(**fields: Any) -> set[str]:
        prefix = "core.stack.layers.0."
        every = make(house(**fields)).state_dict()
        return {name.removeprefix(prefix) for name in every if name.startswith(prefix)}

    plain = names()
    assert names(**attention(qk_bias=True)) - plain == {"attention.q.bias", "attention.keys.k.bias"}
    assert names(**attention(v_bias=True)) - plain == {"attention.keys.v.bias"}
    assert names(**attention("mla")) - plain == {"attention.keys.latent.weight"}
    assert names(**attention(qk_norm="after_rope")) == plain
    assert names(**attention(qk_norm="before_rope")) - plain == {
        "attention.q_norm.weight",
        "attention.keys.k_norm.weight",
    }
    norms = {"attention_norm.weight", "mlp_norm.weight"}
    for kind in ("rmsnorm", "layernorm"):
        assert names(block={"norm": {"kind": kind, "weight": False}}) == plain - norms
    bias = {
        name for name in names(block={"norm": {"kind": "layernorm", "weight": False}, "bias": True}) if "norm" in name
    }
    assert bias == set()
    assert names(block={"sandwich": "on_branch"}) - plain == {"attention_post.weight", "mlp_post.weight"}


def test_tables_are_on_alternating_layers_counted_from_the_last() -> None:
    def layers(**fields: Any) -> list[str]:
        every = make(house(n_prelude=2, n_core=2, n_coda=1, **fields)).state_dict()
        return [name.split(".attention")[0] for name in every if name.endswith("values.table.weight")]

    assert layers(block={"value_embed": "table"}) == ["prelude.layers.0", "core.stack.layers.0", "coda.layers.0"]
    assert layers(block={"value_embed": {"kind": "table", "every": 3}}) == ["prelude.layers.1", "coda.layers.0"]
    assert len(layers(block={"value_embed": {"kind": "table", "every": 1}})) == 5
    assert layers() == []


def test_a_fresh_models_gates_of_value_tables_are_one() -> None:
    model = RecurrentLM(house(block={"value_embed": "table"})).init(0)
    values = model.coda.layers[0].attention.keys.values
    ids_BT = tokens(B, T)
    own = values(torch.randn(B, T, 32), ids_BT)
    assert torch.equal(own.transpose(1, 2).flatten(2), values.table(ids_BT))
    assert 0.1 < values.table.weight.std() < 0.3  # init_std=0.2, as every embedding
