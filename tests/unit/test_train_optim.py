"""The learning rate by hand, and optimizers that own every parameter once."""

from __future__ import annotations

import math

import pytest
import torch

from alcoda.config import validate
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.training.optim import AdamW, Muon, Schedule

SIZES = {"vocab_size": 40, "seq_len": 8, "d_model": 8, "n_heads": 2, "n_prelude": 1, "n_core": 1, "n_coda": 1}
MODELS = {
    "plain": {"inject": "add"},
    "untied": {"inject": "add", "head": "untied"},
    "gate_bias": {"inject": {"kind": "concat", "bias": True}, "update": "gate", "block": {"bias": True}},
    "learned": {"inject": "add", "position": "learned", "block": {"norm": "layernorm", "mlp": "gelu"}},
}


def model(name: str) -> RecurrentLM:
    return RecurrentLM(validate(ModelConfig, SIZES | MODELS[name])).init(0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", [AdamW(), Muon()], ids=["adamw", "muon"])
def test_every_parameter_has_one_owner(name: str, optimizer: AdamW | Muon) -> None:
    net = model(name)
    names = {id(p): n for n, p in net.named_parameters()}
    groups = [group for one in optimizer.build(net) for group in one.param_groups]
    owned = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(owned) == sorted(names.values())
    for group in groups:
        for p in group["params"]:
            if p.dim() < 2:
                assert group["weight_decay"] == 0, names[id(p)]


@pytest.mark.parametrize("name", MODELS)
def test_muon_takes_the_matrices_of_the_blocks_only(name: str) -> None:
    net = model(name)
    names = {id(p): n for n, p in net.named_parameters()}
    muon, adamw = Muon(weight_decay=0.3, adamw=AdamW(lr=0.5)).build(net)
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert {"core.blocks.0.attention.out.weight"} <= matrices or any("attention" in one for one in matrices)
    assert all(net.get_parameter(one).dim() == 2 for one in matrices)
    assert not {one for one in matrices if one.startswith(("embed", "head", "position"))}
    assert "embed.weight" in rest and ("head.weight" in rest) == (MODELS[name].get("head") == "untied")
    assert {group["lr"] for group in adamw.param_groups} == {0.5} and muon.param_groups[0]["weight_decay"] == 0.3


def test_weight_decay_pulls_matrices_only() -> None:
    net = model("gate_bias")
    (optimizer,) = AdamW(lr=0.1, weight_decay=0.5).build(net)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in net.named_parameters():
        factor = 1 - 0.1 * 0.5 if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, msg=name)


def test_cosine() -> None:
    schedule = Schedule(warmup_steps=4, final=0.1)
    got = [schedule.factor(n, 12) for n in range(12)]
    assert got[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    for n in range(4, 12):
        assert got[n] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (n - 4) / 8)) / 2)
    assert got[8] == pytest.approx(0.55) and got[4:] == sorted(got[4:], reverse=True)
    assert schedule.factor(12, 12) == pytest.approx(0.1)


def test_linear_over_the_last_part() -> None:
    schedule = Schedule(warmup_steps=2, decay="linear", decay_fraction=0.5, final=0.0)
    got = [schedule.factor(n, 10) for n in range(10)]
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("n_steps", [1, 3, 5, 100])
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_any_schedule_is_positive_and_at_most_one(n_steps: int, decay: str, warmup_steps: int) -> None:
    schedule = validate(Schedule, {"warmup_steps": warmup_steps, "decay": decay, "final": 0.0})
    got = [schedule.factor(n, n_steps) for n in range(n_steps)]
    assert all(0 < factor <= 1 for factor in got)
    if decay == "constant":
        assert set(got[warmup_steps:]) <= {1.0}
