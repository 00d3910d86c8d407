"""Law 4: the model computes its equations, written out by hand (`textbook`, papers.md 1.1 and 5.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import textbook as tb
import torch
from space import GRT, cases, house
from torch import Tensor

from alcoda.laws.law import close
from alcoda.laws.subject import make, reminded, tokens
from alcoda.model.attention import GroupedQuery
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.recurrence.update import GateModule

EXACT = 1e-10
B, T = 2, 11

GPT2: dict[str, Any] = {"block": {"norm": "layernorm", "mlp": "gelu", "bias": True}, "position": "learned"}
LLAMA: dict[str, Any] = {"block": {"attention": {"kind": "gqa", "n_kv_heads": 2}}, "head": "untied"}


def kind_of(config: ModelConfig) -> tb.Kind:
    """The textbook's parts that a config names."""
    attention = config.block.attention
    return tb.Kind(
        norm={"layernorm": tb.layernorm, "rmsnorm": tb.rmsnorm}[config.block.norm.kind],
        mlp={"gelu": tb.gelu_mlp, "swiglu": tb.swiglu_mlp}[config.block.mlp.kind],
        rotation=tb.rope if config.position.kind == "rope" else tb.no_rotation,
        n_heads=config.n_heads,
        n_kv_heads=attention.n_kv_heads if isinstance(attention, GroupedQuery) else config.n_heads,
        sandwich=config.block.sandwich,
    )


def check_against(reference: Callable[..., Tensor], model: RecurrentLM, n_loops: int, what: str) -> None:
    """The model's logits are the reference's, with the same draws of noise."""
    ids_BT = tokens(B, T)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        torch.manual_seed(5)
        actual = model(ids_BT, n_loops)
        torch.manual_seed(5)
        close(actual, reference(weights, ids_BT, n_loops, model.config), EXACT, what)


# -- a plain loop is a GPT --------------------------------------------------------------------------------------------


def gpt(w: tb.Weights, ids_BT: Tensor, n_loops: int, config: ModelConfig) -> Tensor:
    """A transformer whose layers are the prelude's, the core's ``n_loops`` times, and the coda's."""
    kind = kind_of(config)
    x_BTD = tb.embed(w, ids_BT)
    for name in ["prelude", *["core.stack"] * n_loops, "coda"]:
        x_BTD = tb.stack(w, name, x_BTD, kind)
    return tb.read_out(w, kind.norm(w, "final_norm", x_BTD))


@pytest.mark.parametrize("n_loops", [1, 3])
@pytest.mark.parametrize("fields", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_plain_loop_is_a_textbook_gpt(fields: dict[str, Any], n_loops: int) -> None:
    check_against(gpt, make(house(**fields)), n_loops, "a GPT")


@pytest.mark.parametrize("fields", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_dense_model_is_a_textbook_gpt(fields: dict[str, Any]) -> None:
    check_against(gpt, make(house(**fields, n_prelude=3, n_core=0, n_coda=0, n_loops=1)), 1, "a GPT")


@pytest.mark.parametrize("fields", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("part", ["attention.keys.k", "attention.out", "mlp.down", "mlp_norm"])
def test_control_a_changed_weight_is_noticed(fields: dict[str, Any], part: str) -> None:
    model = make(house(**fields))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights[f"core.stack.layers.1.{part}.weight"].view(-1)[0] += 1e-3
    with pytest.raises(AssertionError, match="a GPT"):
        check_against(lambda w, *rest: gpt(weights, *rest), model, 1, "a GPT")


def test_control_one_loop_too_many_is_noticed() -> None:
    with pytest.raises(AssertionError, match="a GPT"):
        check_against(lambda w, ids, r, c: gpt(w, ids, r + 1, c), make(house(**LLAMA)), 2, "a GPT")


# -- GRT --------------------------------------------------------------------------------------------------------------


def grt(w: tb.Weights, ids_BT: Tensor, n_loops: int, config: ModelConfig, noise: float = 0.1) -> Tensor:
    """papers.md 1.1, with the noise drawn in the order of the equations."""
    kind, tau = kind_of(config), config.update.tau
    anchor = tb.stack(w, "prelude", tb.embed(w, ids_BT), kind)
    h = anchor
    for _ in range(n_loops):
        eps_x = noise * torch.randn_like(h)
        h_tilde = tb.linear(w, "inject.proj", torch.cat([h + eps_x, anchor], -1))
        o = tb.stack(w, "core.stack", h_tilde, kind)
        read = torch.cat([tb.layernorm(w, "update.state_norm", h), tb.layernorm(w, "update.anchor_norm", anchor)], -1)
        f_g = tb.linear(w, "update.logit", tb.silu(tb.linear(w, "update.hidden", read)))
        g = tb.sigmoid(f_g / tau + noise * torch.randn_like(h))
        h = g * h + (1 - g) * o
    return tb.read_out(w, kind.norm(w, "final_norm", tb.stack(w, "coda", h, kind)))


@pytest.mark.parametrize("n_loops", [1, 3])
@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
@pytest.mark.parametrize("fields", [{**GPT2, "block": {**GPT2["block"], "bias": False}}, LLAMA], ids=["gpt2", "llama"])
def test_grt_is_its_equations(fields: dict[str, Any], trains: bool, n_loops: int) -> None:
    model = make(house(**fields, **GRT)).train(trains)
    noise = 0.1 if trains else 0.0
    check_against(lambda *args: grt(*args, noise=noise), model, n_loops, "GRT")


def test_control_evaluation_has_no_noise() -> None:
    with pytest.raises(AssertionError, match="GRT"):
        check_against(grt, make(house(**LLAMA, **GRT)), 3, "GRT")


def test_control_a_gate_the_wrong_way_round_is_noticed() -> None:
    model = make(house(**LLAMA, **GRT))
    model.update.forward = lambda h, x, y, e: torch.lerp(h, y, model.update.gate(h, e))
    with pytest.raises(AssertionError, match="GRT"):
        check_against(lambda *args: grt(*args, noise=0.0), model, 3, "GRT")


def force_copy(model: RecurrentLM) -> None:
    assert isinstance(model.update, GateModule)
    with torch.no_grad():
        model.update.logit.weight.zero_()
        model.update.logit.bias.fill_(1e4)


IN_LOOP = ("carry", "loop_index", "inject", "keys", "sharing", "route", "update")


def without_core(model: RecurrentLM) -> RecurrentLM:
    """The same prelude, coda, norm and head, with nothing between them. (Layers keep their numbers, which windows and
    value tables go by.)"""
    dropped = {axis: ModelConfig.model_fields[axis].default for axis in IN_LOOP}
    empty = RecurrentLM(model.config.model_copy(update=dropped)).double()
    empty.core.stack.layers = torch.nn.ModuleList()
    state = {k: v for k, v in model.state_dict().items() if k.split(".")[0] not in (*IN_LOOP, "core")}
    empty.load_state_dict(state)
    return reminded(empty.eval())


def gated(config: ModelConfig) -> ModelConfig:
    """The design with a gated update, and a state that starts as the anchor and is changed by nothing else."""
    final_norm = "own" if config.final_norm.needs_loop_norm else config.final_norm
    fixed = {"state_init": "anchor", "update": "gate", "loop_norm": "none", "route": "none", "final_norm": final_norm}
    return config.model_copy(update=fixed)


GATED = sorted({gated(case.config) for case in cases()[::2]}, key=str)


@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
@pytest.mark.parametrize("config", GATED, ids=range(len(GATED)))
def test_a_gate_at_one_leaves_prelude_and_coda(config: ModelConfig, trains: bool) -> None:
    model = make(config)
    force_copy(model)
    ids_BT = tokens(B, T)
    expected = without_core(model)(ids_BT)
    model.train(trains)  # noise in the adapter and in the gate's logit cannot move a gate at 1
    for n_loops in (1, 2, 7 if config.max_loops is None else config.max_loops):
        assert torch.equal(model(ids_BT, n_loops), expected), f"a gate at 1 changes the state in {n_loops} loops"


def test_control_a_gate_below_one_lets_the_core_in() -> None:
    model = make(house(**GRT))
    ids_BT = tokens(B, T)
    assert (model(ids_BT, 1) - without_core(model)(ids_BT)).abs().max() > 1e-3


# -- Huginn and Ouro --------------------------------------------------------------------------------------------------

HUGINN: dict[str, Any] = {
    "block": {"sandwich": "after_add"},
    "state_init": {"kind": "noise", "std": 0.5},
    "inject": "concat",
    "loop_norm": "before_coda",
    "final_norm": "shared",
}


def huginn(w: tb.Weights, ids_BT: Tensor, n_loops: int, config: ModelConfig) -> Tensor:
    """papers.md 5.4: x = W [h ; e]; h = core(x); ln_f, coda, the same ln_f, head."""
    kind = kind_of(config)
    e = tb.stack(w, "prelude", tb.embed(w, ids_BT), kind)
    h = torch.nn.init.trunc_normal_(torch.empty_like(e), std=0.5, a=-1.5, b=1.5)
    for _ in range(n_loops):
        h = tb.stack(w, "core.stack", tb.linear(w, "inject.proj", torch.cat([h, e], -1)), kind)
    y = tb.stack(w, "coda", kind.norm(w, "loop_norm.norm", h), kind)
    return tb.read_out(w, kind.norm(w, "loop_norm.norm", y))


@pytest.mark.parametrize("n_loops", [1, 3])
def test_a_huginn_like_model_is_its_equations(n_loops: int) -> None:
    check_against(huginn, make(house(**HUGINN)).train(), n_loops, "Huginn")


def test_control_a_final_norm_of_its_own_is_noticed() -> None:
    model = make(house(**{**HUGINN, "final_norm": "own"})).train()
    with pytest.raises(AssertionError, match="Huginn"):
        check_against(huginn, model, 3, "Huginn")


OURO: dict[str, Any] = {
    "n_prelude": 0,
    "n_coda": 0,
    "loop_norm": "every_loop",
    "final_norm": "none",
    "head": "untied",
}


def ouro(w: tb.Weights, ids_BT: Tensor, n_loops: int, config: ModelConfig) -> Tensor:
    """papers.md 5.4, with pre-norm blocks: the norm's output is the read-out and what the next loop reads."""
    kind, x = kind_of(config), tb.embed(w, ids_BT)
    for _ in range(n_loops):
        x = kind.norm(w, "loop_norm.norm", tb.stack(w, "core.stack", x, kind))
    return tb.read_out(w, x)


@pytest.mark.parametrize("n_loops", [1, 3])
def test_an_ouro_like_model_is_its_equations(n_loops: int) -> None:
    check_against(ouro, make(house(**OURO)), n_loops, "Ouro")


def test_control_a_norm_after_the_last_loop_only_is_noticed() -> None:
    model = make(house(**{**OURO, "loop_norm": "before_coda"}))
    check_against(ouro, model, 1, "Ouro")
    with pytest.raises(AssertionError, match="Ouro"):
        check_against(ouro, model, 3, "Ouro")


def test_the_other_choices_are_their_equations() -> None:
    """zeros, add: x = h + e from h = 0."""
    model = make(house(state_init="zeros", inject="add"))

    def reference(w: tb.Weights, ids_BT: Tensor, n_loops: int, config: ModelConfig) -> Tensor:
        kind = kind_of(config)
        e = tb.stack(w, "prelude", tb.embed(w, ids_BT), kind)
        h = 0 * e
        for _ in range(n_loops):
            h = tb.stack(w, "core.stack", h + e, kind)
        return tb.read_out(w, kind.norm(w, "final_norm", tb.stack(w, "coda", h, kind)))

    check_against(reference, model, 3, "zeros and add")
