"""Overlays, names of recipes, and the list of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alcoda.depth.sample import Uniform
from alcoda.errors import UsageError
from alcoda.model.recurrence.inject import Concat, NoInject
from alcoda.model.recurrence.update import Gate, Overwrite
from alcoda.training import folders
from alcoda.training.catalogue import catalogue
from alcoda.training.folders import find_recipe, project_recipes
from alcoda.training.optim import AdamW, Muon
from alcoda.training.overlay import merge
from alcoda.training.recipe import Recipe, load_recipe

BASE = {
    "description": "the base",
    "model": {
        "d_model": 32,
        "n_heads": 4,
        "n_loops": 3,
        "inject": {"kind": "concat", "noise": 0.1},
        "update": {"kind": "gate", "noise": 0.2, "tau": 2.0},
    },
    "depth": {"kind": "uniform", "min": 1},
    "train": {"steps": 5, "optimizer": {"kind": "muon", "lr": 0.01}},
    "eval": {"loops": [1, 8]},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", BASE)


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


def put(base: Path, *parts: Any, settings: tuple[str, ...] = ()) -> Recipe:
    files = [write(base.parent / f"part{i}.yaml", part) for i, part in enumerate(parts)]
    return load_recipe(base, settings, files)


def test_mappings_merge_deeply(base: Path) -> None:
    plain, changed = load_recipe(base), put(base, {"model": {"block": {"bias": True}}, "train": {"clip": None}})
    assert changed.model == plain.model.model_copy(
        update={"block": plain.model.block.model_copy(update={"bias": True})}
    )
    assert changed.train == plain.train.model_copy(update={"clip": None}) and changed.eval == plain.eval


@pytest.mark.parametrize("written", ["overwrite", {"kind": "overwrite"}])
def test_a_choice_of_another_kind_replaces_the_old_one_with_its_fields(base: Path, written: Any) -> None:
    assert put(base, {"model": {"update": written}}).model.update == Overwrite()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("gate", Gate(noise=0.2, tau=2.0)),
        ({"kind": "gate"}, Gate(noise=0.2, tau=2.0)),
        ({"kind": "gate", "noise": 0.0}, Gate(noise=0.0, tau=2.0)),
        ({"tau": 1.0}, Gate(noise=0.2, tau=1.0)),
    ],
)
def test_the_same_kind_keeps_the_fields_that_are_not_named(base: Path, written: Any, expected: Gate) -> None:
    assert put(base, {"model": {"update": written}}).model.update == expected


def test_a_field_below_a_default_or_a_choice_inside_a_choice(base: Path) -> None:
    muon = put(base, {"train": {"optimizer": {"adamw": {"lr": 0.5}}}}).train.optimizer
    assert isinstance(muon, Muon) and muon.lr == 0.01 and muon.adamw == AdamW(lr=0.5)
    assert put(base, {"model": {"position": {"base": 500.0}}}).model.position.model_dump()["base"] == 500.0


def test_lists_and_single_values_replace(base: Path) -> None:
    changed = put(base, {"eval": {"loops": [2]}, "train": {"steps": 9}})
    assert changed.eval.loops == (2,) and changed.train.steps == 9


def test_overlays_in_order_then_settings(base: Path) -> None:
    first, second = {"train": {"steps": 6, "seed": 6}}, {"train": {"steps": 7}, "model": {"update": "overwrite"}}
    changed = put(base, first, second, settings=("train.seed=8",))
    assert (changed.train.steps, changed.train.seed, changed.model.update) == (7, 8, Overwrite())
    assert put(base, second, first).train.steps == 6


def test_only_the_end_has_to_be_a_recipe(base: Path) -> None:
    halfway, rest = {"model": {"n_core": 0}}, {"model": {"n_loops": 1, "inject": "none", "update": "overwrite"}}
    depth = {"depth": "fixed", "eval": {"loops": []}}
    assert not put(base, halfway, rest, depth).model.is_recurrent
    with pytest.raises(UsageError, match=r"--with part0: model: n_core=0 has nothing to loop"):
        put(base, halfway)
    with pytest.raises(UsageError, match=r"--with part0, part1: "):
        put(base, halfway, {"model": {"n_loops": 1}})


def test_an_overlay_mends_what_the_one_before_it_broke(base: Path) -> None:
    broken = {"model": {"state_init": "noise", "inject": "none"}}
    with pytest.raises(UsageError, match="--with part0: model: state_init 'noise' with inject 'none'"):
        put(base, broken)
    assert put(base, broken, {"model": {"inject": {"kind": "concat", "bias": True}}}).model.inject == Concat(bias=True)


def test_name_and_description(base: Path) -> None:
    assert put(base, {}).name == "base+part0" and put(base, {}).description == "the base"
    changed = put(base, {"description": "no gate"}, {"description": "no noise"})
    assert (changed.name, changed.description) == ("base+part0+part1", "the base; no gate; no noise")
    assert put(base, {"name": "mine"}, {}).name == "mine+part1"
    write(base, "model: {}")
    assert put(base, {"description": "alone"}).description == "alone"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"model": {"injekt": "none"}}, r"--with part0: model: unknown key 'injekt'; did you mean 'inject'"),
        ({"model": {"update": {"taw": 1}}}, r"--with part0: model\.update: unknown key 'taw'; did you mean 'tau'"),
        ({"model": {"inject": "nonne"}}, r"--with part0: model\.inject: unknown inject 'nonne'"),
        ({"train": {"steps": -1}}, r"--with part0: train\.steps: .*got -1"),
        ({"description": 3}, r"--with part0: description: .*got 3"),
        ("- a\n", r"part0\.yaml holds no recipe"),
        ("", r"part0\.yaml holds no recipe"),
        ("a: [", r"part0\.yaml is not valid YAML: line 1"),
    ],
)
def test_errors_name_the_overlay_and_the_entry(base: Path, part: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        put(base, {}, settings=())
        put(base, part)


def test_an_overlay_that_is_not_there(base: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the recipe gone\.yaml"):
        load_recipe(base, (), ["gone.yaml"])


def test_merge_changes_neither() -> None:
    old, new = {"a": {"kind": "x", "b": 1}, "c": [1]}, {"a": {"b": 2}, "c": [2]}
    assert merge(old, new) == {"a": {"kind": "x", "b": 2}, "c": [2]}
    assert old == {"a": {"kind": "x", "b": 1}, "c": [1]} and new == {"a": {"b": 2}, "c": [2]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path) -> Path:
    """Stands for the project's recipes; the current directory is another one."""
    root = tmp_path / "project"
    write(root / "mini/one.yaml", {**BASE, "source": "arXiv 1, section 2"})
    write(root / "papers/v1.5.yaml", BASE)
    write(root / "ablations/no_gate.yaml", {"description": "h = y", "model": {"update": "overwrite"}})
    monkeypatch.setattr(folders, "project_recipes", lambda: root)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return root


def test_a_recipe_is_found_by_its_name(folder: Path) -> None:
    for name in ("mini/one", "mini/one.yaml"):
        assert find_recipe(name) == folder / "mini/one.yaml" and load_recipe(name).name == "one"
    assert find_recipe("papers/v1.5") == folder / "papers/v1.5.yaml"
    both = load_recipe("mini/one", (), ["ablations/no_gate"])
    assert (both.name, both.model.update) == ("one+no_gate", Overwrite())
    assert both.source == "arXiv 1, section 2"
    here = write(Path("mini/one"), "name: local\nmodel: {inject: none}")
    assert find_recipe("mini/one") == here and load_recipe("mini/one").model.inject == NoInject()


@pytest.mark.parametrize("name", ["mini/ome", "mini/on"])
def test_a_name_that_is_near(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match=rf"cannot read the recipe {name}: No such file.*near it: mini/one"):
        load_recipe(name)


@pytest.mark.parametrize("name", ["../base", "../base.yaml/x", "/nowhere/mini/one", "zzzzzz"])
def test_a_name_is_below_the_folder(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read the recipe"):
        find_recipe(name)


def test_the_list(folder: Path) -> None:
    found = catalogue(folder)
    assert [one.name for one in found.recipes] == ["mini/one", "papers/v1.5"]
    one, ledger = found.recipes[0], load_recipe(folder / "mini/one.yaml").ledger()
    assert (one.params, one.effective_params) == (ledger.params, ledger.effective_params)
    assert one.forward_flops_per_token == ledger.forward_flops_per_token and one.n_loops == 3
    # The depths of training: uniform on 1..3 has the mean 2, where the forward pass runs 3.
    assert one.training_flops_per_token == ledger.training_flops_per_token < 3 * one.forward_flops_per_token
    assert isinstance(load_recipe(folder / "mini/one.yaml").depth, Uniform)
    assert one.source == "arXiv 1, section 2"
    assert [(part.name, part.description) for part in found.overlays] == [("ablations/no_gate", "h = y")]
    assert [part.name for part in catalogue(folder / "ablations").overlays] == ["no_gate"]
    assert found.broken == {}


def test_a_broken_one_does_not_hide_the_others(folder: Path) -> None:
    write(folder / "mini/bad.yaml", "model: {d_modl: 3}")
    found = catalogue(folder)
    assert len(found.recipes) == 2 and "did you mean 'd_model'" in found.broken["mini/bad"]


def test_nothing_to_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        catalogue(tmp_path / "gone")
    with pytest.raises(UsageError, match="no file below it ends in"):
        catalogue(tmp_path)


def test_the_projects_own_recipes_are_found() -> None:
    assert (project_recipes() / "mini/grt.yaml").is_file()
    assert load_recipe("mini/grt").name == "grt"
