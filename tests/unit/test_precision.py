"""A model held in bf16: what autocast makes of it, to the bit, and of use without autocast too."""

from __future__ import annotations

import copy

import torch
from torch import nn

from alcoda.config import validate
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in

SIZES = {"vocab_size": 61, "seq_len": 16, "d_model": 32, "n_heads": 4, "n_loops": 3, "inject": "concat"}


def made() -> tuple[RecurrentLM, RecurrentLM]:
    """A model, and the same held in bf16."""
    model = RecurrentLM(validate(ModelConfig, {**SIZES, "exit_gate": "linear", "memory": "prev_token"})).init(0).eval()
    held = copy.deepcopy(model)
    hold_in(held, torch.bfloat16)
    return model, held


@torch.no_grad()
def test_held_is_what_autocast_multiplies() -> None:
    model, held = made()
    ids = torch.arange(12)[None]
    memory = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(held(ids, memory_BTD=memory), model(ids, memory_BTD=memory))
    assert held.core.stack.layers[0].mlp.up.weight.dtype == torch.bfloat16
    assert held.exit_gate.proj.weight.dtype == torch.float32  # a decision is not rounded


@torch.no_grad()
def test_without_autocast_it_multiplies_in_the_type_of_its_input() -> None:
    model, held = made()
    ids = torch.arange(12)[None]
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if type(module) is nn.Linear:
            module.weight.copy_(module.weight.bfloat16())
    assert torch.equal(held(ids), rounded(ids))
    assert not torch.equal(held(ids), model(ids))  # the control: weights are rounded
