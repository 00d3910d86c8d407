"""Checkpoints of other projects, spelled as axes: our model with their weights gives their own code's logits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from alcoda.interop.huginn import Huginn
from alcoda.interop.layout import Layout
from alcoda.interop.ouro import Ouro
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


def ours(layout: Layout, recipe: str, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights by our names."""
    takes = layout.takes(load_recipe(recipe).model, {})
    return {
        name: theirs[take.name] if take.change is None else take.change(theirs[take.name])
        for name, take in takes.items()
    }


def huginn(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    return ours(Huginn(), "oracles/huginn_tiny", theirs)


def ouro(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    return ours(Ouro(), "oracles/ouro_tiny", theirs)


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
    found = logits(build("oracles/huginn_tiny", huginn(theirs)), expected["input_ids"].long(), [1, 2, 4, 9])
    for n_loops, one in found.items():
        torch.testing.assert_close(one, expected[f"logits_r{n_loops}"], rtol=0, atol=TOLERANCE)


def test_ouro() -> None:
    theirs, expected = oracle("ouro_tiny")
    found = logits(build("oracles/ouro_tiny", ouro(theirs)), expected["input_ids"].long(), [1, 2, 3, 4])
    assert torch.equal(expected["logits_full"], expected["logits_exit3"])
    for n_loops, one in found.items():
        torch.testing.assert_close(one, expected[f"logits_exit{n_loops - 1}"], rtol=0, atol=TOLERANCE)


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
