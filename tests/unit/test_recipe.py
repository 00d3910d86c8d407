"""Recipes: read, changed, written, read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from alcoda.config import validate
from alcoda.depth.sample import Fixed, LogNormal, Uniform
from alcoda.errors import UsageError
from alcoda.training.optim import Muon
from alcoda.training.recipe import Recipe, load_recipe, parse_yaml
from alcoda.training.run import MAY_CHANGE, flatten

TEXT = """
description: "größer"
model: {d_model: 32, n_heads: 4, n_loops: 3, inject: concat, update: {kind: gate, noise: 0.2}}
depth: {kind: uniform}
train: {steps: 5, optimizer: {kind: muon, lr: 1e-2}}
eval: {loops: [8, 1]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fancy name.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_name_is_that_of_the_file(file: Path) -> None:
    assert load_recipe(file).name == "fancy name"
    file.write_text("name: given\n")
    assert load_recipe(file).name == "given"
    assert load_recipe(file, ["name=other"]).name == "other"


def test_yaml_round_trip(file: Path, tmp_path: Path) -> None:
    for recipe in (load_recipe(file), load_recipe(file).resolved(), Recipe(), Recipe().resolved()):
        (tmp_path / "copy.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        assert load_recipe(tmp_path / "copy.yaml") == recipe
        assert load_recipe(tmp_path / "copy.yaml", ["train.seed=0"]) == recipe
    assert "größer" in load_recipe(file).to_yaml()


def test_resolved_fills_in_the_depths(file: Path) -> None:
    recipe = load_recipe(file).resolved()
    assert isinstance(recipe.depth, Uniform) and recipe.depth.max == 3 and recipe.eval.loops == (1, 3, 8)
    assert recipe.resolved() == recipe
    assert Recipe().resolved().depth == Fixed(loops=8)


def test_settings(file: Path) -> None:
    recipe = load_recipe(
        file,
        [
            "train.steps=7",
            "train.optimizer.adamw.lr=3e-4",
            "model.update.tau=2",
            "model.inject.noise=0.5",
            "depth={kind: lognormal, mean: 4}",
            "eval.loops=[1, 2]",
            "train.clip=null",
        ],
    )
    assert recipe.train.steps == 7 and recipe.train.clip is None and recipe.eval.loops == (1, 2)
    assert isinstance(recipe.train.optimizer, Muon) and recipe.train.optimizer.adamw.lr == 3e-4
    assert recipe.train.optimizer.lr == 0.01  # YAML's 1e-2 is a string
    assert recipe.model.update.model_dump() == {"kind": "gate", "tau": 2.0, "bias": 4.0, "noise": 0.2}
    assert recipe.model.inject.model_dump()["noise"] == 0.5 and recipe.depth == LogNormal(mean=4)
    assert load_recipe(file, ["description=a=b"]).description == "a=b"


def test_another_kind_takes_its_own_defaults(file: Path) -> None:
    recipe = load_recipe(file, ["model.update.kind=overwrite", "train.optimizer.kind=adamw", "train.optimizer.lr=0.5"])
    assert recipe.model.update.model_dump() == {"kind": "overwrite"}
    assert recipe.train.optimizer.model_dump()["lr"] == 0.5
    assert load_recipe(file, ["model.update=overwrite"]).model.update == recipe.model.update
    assert load_recipe(file, ["depth.kind=fixed", "depth.loops=2"]).depth == Fixed(loops=2)


def test_later_settings_win(file: Path) -> None:
    assert load_recipe(file, ["train.steps=1", "train.steps=2"]).train.steps == 2


def test_merge_keys_may_be_overridden() -> None:
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\n"
    assert parse_yaml(text, "x")["more"] == {"a": 1, "b": 3}
    with pytest.raises(UsageError, match="x is not valid YAML: line 2, column 25: the key 'b' is given twice"):
        parse_yaml("base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3, b: 4}\n", "x")


@pytest.mark.parametrize("text", ["{{a}}: 1", "? [1, 2]\n: 3", "{[1]: 2}"])
def test_keys_are_names(text: str) -> None:
    with pytest.raises(UsageError, match="a name is needed before the colon"):
        parse_yaml(text, "x")


def test_yaml_that_runs_code_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid YAML"):
        parse_yaml("!!python/object/apply:os.getcwd []", "x")


def test_what_may_change_are_entries_of_the_recipe() -> None:
    data = {"tokenizer": {"kind": "file", "path": "tokenizer.json"}}
    known = flatten(validate(Recipe, {"data": data}).model_dump(mode="json"))
    for name in MAY_CHANGE:
        assert any(key == name or key.startswith(f"{name}.") for key in known), name


def test_the_ledger_is_that_of_the_depths(file: Path) -> None:
    ledger = load_recipe(file).ledger()
    assert ledger.loops == 3 and ledger.training_loops == pytest.approx(2.0)
    assert load_recipe(file).ledger(6).loops == 6


def test_defaults_are_valid_yaml() -> None:
    assert validate(Recipe, yaml.safe_load(Recipe().to_yaml())) == Recipe()
