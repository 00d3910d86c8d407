"""Checkpoints of other projects, spelled as axes: our model with their weights gives their own code's logits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from alcoda.model.lm import RecurrentLM
from alcoda.training.recipe import load_recipe

DATA = os.environ.get("ALCODA_DATA")
ORACLES = Path(DATA or ".") / "oracles"
TOLERANCE = 1e-5
"""In fp32: what their code and ours may differ by."""

pytestmark = pytest.mark.skipif(
    not DATA or not ORACLES.is_dir(), reason="ALCODA_DATA names no folder with oracles/ in it"
)


def oracle(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Their weights, and what their code returns with them."""
    return load_file(ORACLES / name / "model.safetensors"), load_file(ORACLES / name / "expected.safetensors")


def huginn(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Huginn's weights by our names: fused q, k, v and fused gate, up taken apart."""
    ours = {
        "embed.weight": theirs["transformer.wte.weight"],
        "inject.proj.weight": theirs["transformer.adapter.weight"],
        "loop_norm.norm.weight": theirs["transformer.ln_f.weight"],
    }
    for stage, block, n_layers in (("prelude", "prelude", 1), ("core.stack", "core_block", 3), ("coda", "coda", 2)):
        for layer in range(n_layers):
            at, to = f"transformer.{block}.{layer}", f"{stage}.layers.{layer}"
            q, k, v = theirs[f"{at}.attn.Wqkv.weight"].chunk(3)
            gate, up = theirs[f"{at}.mlp.fc.weight"].chunk(2)
            q_bias, k_bias = theirs[f"{at}.attn.qk_bias"].flatten(1)
            ours |= {
                f"{to}.attention.q.weight": q,
                f"{to}.attention.q.bias": q_bias,
                f"{to}.attention.keys.k.weight": k,
                f"{to}.attention.keys.k.bias": k_bias,
                f"{to}.attention.keys.v.weight": v,
                f"{to}.attention.out.weight": theirs[f"{at}.attn.proj.weight"],
                f"{to}.mlp.gate.weight": gate,
                f"{to}.mlp.up.weight": up,
                f"{to}.mlp.down.weight": theirs[f"{at}.mlp.proj.weight"],
                f"{to}.attention_norm.weight": theirs[f"{at}.norm_1.weight"],
                f"{to}.attention_post.weight": theirs[f"{at}.norm_2.weight"],
                f"{to}.mlp_norm.weight": theirs[f"{at}.norm_3.weight"],
                f"{to}.mlp_post.weight": theirs[f"{at}.norm_4.weight"],
            }
    return ours


def ouro(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ouro's weights by our names."""
    ours = {
        "embed.weight": theirs["model.embed_tokens.weight"],
        "head.weight": theirs["lm_head.weight"],
        "loop_norm.norm.weight": theirs["model.norm.weight"],
        "exit_gate.proj.weight": theirs["model.early_exit_gate.weight"],
        "exit_gate.proj.bias": theirs["model.early_exit_gate.bias"],
    }
    names = {
        "attention.q": "self_attn.q_proj",
        "attention.keys.k": "self_attn.k_proj",
        "attention.keys.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "attention_post": "input_layernorm_2",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post": "post_attention_layernorm_2",
    }
    for layer in range(2):
        for to, at in names.items():
            ours[f"core.stack.layers.{layer}.{to}.weight"] = theirs[f"model.layers.{layer}.{at}.weight"]
    return ours


def build(recipe: str, weights: dict[str, Tensor], settings: tuple[str, ...] = ()) -> RecurrentLM:
    model = RecurrentLM(load_recipe(recipe, settings).model)
    model.load_state_dict(weights, strict=True)  # every parameter of ours, and nothing besides
    return model.eval()


def logits(model: RecurrentLM, ids_BT: Tensor, loops: list[int]) -> dict[int, Tensor]:
    with torch.inference_mode():
        return {n: model.logits(one.y_BTD) for n, one in zip(loops, model.readouts(ids_BT, loops), strict=True)}


def test_huginn() -> None:
    theirs, expected = oracle("huginn_tiny")
    assert torch.equal(theirs["lm_head.weight"], theirs["transformer.wte.weight"])
    used = {"lm_head.weight", "freqs_cis"}  # the tied head, and a buffer of angles
    assert len(theirs.keys() - used) == 3 + 6 * 9
    ours = logits(build("oracles/huginn_tiny", huginn(theirs)), expected["input_ids"].long(), [1, 2, 4, 9])
    for n_loops, found in ours.items():
        torch.testing.assert_close(found, expected[f"logits_r{n_loops}"], rtol=0, atol=TOLERANCE)


def test_ouro() -> None:
    theirs, expected = oracle("ouro_tiny")
    ours = logits(build("oracles/ouro_tiny", ouro(theirs)), expected["input_ids"].long(), [1, 2, 3, 4])
    assert torch.equal(expected["logits_full"], expected["logits_exit3"])
    for n_loops, found in ours.items():
        torch.testing.assert_close(found, expected[f"logits_exit{n_loops - 1}"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "setting",
    ["model.position.pairs=half", "model.block.sandwich=on_branch", "model.embedding=none", "model.final_norm=own"],
)
def test_huginn_otherwise(setting: str) -> None:
    """The comparison sees an axis that is set otherwise."""
    theirs, expected = oracle("huginn_tiny")
    weights = huginn(theirs) | ({"final_norm.weight": torch.ones(48)} if "final_norm" in setting else {})
    found = logits(build("oracles/huginn_tiny", weights, (setting,)), expected["input_ids"].long(), [4])[4]
    assert (found - expected["logits_r4"]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    "setting",
    ["model.position.pairs=interleaved", "model.block.sandwich=after_add", "model.loop_norm=before_coda"],
)
def test_ouro_otherwise(setting: str) -> None:
    theirs, expected = oracle("ouro_tiny")
    found = logits(build("oracles/ouro_tiny", ouro(theirs), (setting,)), expected["input_ids"].long(), [4])[4]
    assert (found - expected["logits_full"]).abs().max() > 100 * TOLERANCE
