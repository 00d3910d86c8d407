"""Weights that are no numbers are refused by the name of their tensor, wherever they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import dense_folders
import numpy as np
import pytest
import torch
from foreign import HUGINN, OURO, huginn_weights, ouro_weights, write_folder
from torch import Tensor

import alcoda
from alcoda import api
from alcoda.errors import RunError
from alcoda.interop.foreign import check_finite

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_number_is_enough(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {name: x.to(dtype) for name, x in ouro_weights().items()}
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = value
    folder = write_folder(tmp_path / "ouro", OURO, weights)
    n_nan, n_large = (1, 0) if value != value else (0, 1)
    message = rf"1,536 numbers of model\.layers\.1\.mlp\.up_proj\.weight {n_nan} are NaN and {n_large} infinite"
    with pytest.raises(RunError, match=message):
        api.import_model(folder, tmp_path / "out")
    with pytest.raises(RunError, match=message):
        alcoda.load(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["ouro"]


def of_a_map_that_is_fused(weights: dict[str, Tensor]) -> str:
    weights["transformer.core_block.1.attn.Wqkv.weight"][40, 3] = NAN
    return r"core_block\.1\.attn\.Wqkv"


def of_the_tied_head(weights: dict[str, Tensor]) -> str:
    weights["lm_head.weight"][0, 0] = NAN
    return r"lm_head\.weight"


def of_both(weights: dict[str, Tensor]) -> str:
    weights["lm_head.weight"][0, 0] = weights["transformer.wte.weight"][0, 0] = INF
    return r"transformer\.wte\.weight"


@pytest.mark.parametrize("spoil", [of_a_map_that_is_fused, of_the_tied_head, of_both])
def test_wherever_it_is(spoil: Callable[[dict[str, Tensor]], str], tmp_path: Path) -> None:
    weights = huginn_weights()
    name = spoil(weights)
    folder = write_folder(tmp_path / "huginn", HUGINN, weights)
    with pytest.raises(RunError, match=rf"numbers of \S*{name}"):
        api.import_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_of_a_retrofit_and_a_file(tmp_path: Path) -> None:
    weights = dense_folders.weights(dense_folders.config("llama"))
    weights["model.norm.weight"][3] = NAN
    folder = dense_folders.write(tmp_path / "llama", "llama", weights)
    with pytest.raises(RunError, match=r"numbers of model\.norm\.weight 1 are NaN"):
        alcoda.load(folder)
    file = tmp_path / "model.bin"
    dense_folders.llama2c(file)
    numbers = np.fromfile(file, "<f4")
    numbers[7 + 5] = NAN
    numbers.tofile(file)
    with pytest.raises(RunError, match="numbers of tok_embeddings 1 are NaN"):
        alcoda.load(file)


def test_what_can_be_said_is_taken(tmp_path: Path) -> None:
    largest = torch.finfo(torch.bfloat16).max
    check_finite(tmp_path, "x", torch.tensor([-largest, largest, 0.0]))
    check_finite(tmp_path, "x", torch.tensor(0.0))
    for value in (2.0 * largest, NAN):  # the former is no number of fp32
        with pytest.raises(RunError, match="numbers of x"):
            check_finite(tmp_path, "x", torch.tensor([0.0, value], dtype=torch.float64))
    # Control: the folder as it is.
    folder = write_folder(tmp_path / "ouro", OURO, ouro_weights())
    assert json.loads((api.import_model(folder, tmp_path / "out").path / "run.json").read_text())["imported"]
