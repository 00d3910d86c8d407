"""The Python API: every exported name works whatever was imported before, and takes only what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import alcoda
from alcoda.errors import UsageError
from alcoda.training.entries import describe_entries
from alcoda.training.recipe import Recipe, load_recipe

QUICKSTART = Path(alcoda.__file__).with_name("quickstart.yaml")


@pytest.mark.parametrize("before", ["", "import alcoda.training.loop, alcoda.report.page, alcoda.measure.evaluate"])
def test_exported_names_are_what_they_say_each_time(before: str) -> None:
    # A submodule of the same name would take a function's place once it is imported.
    wrong = "[name for name in alcoda.__all__ if not callable(getattr(alcoda, name))]"
    code = f"{before}\nimport alcoda\nfor _ in range(2): print({wrong})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n[]\n", done.stderr


def test_copies_of_configs_are_checked() -> None:
    recipe = load_recipe(QUICKSTART)
    changed = recipe.model_copy(update={"train": {"steps": 5}, "model": {"n_heads": 4}})
    assert changed.train.steps == 5 and changed.train.batch_size == 8 and isinstance(changed, Recipe)
    with pytest.raises(UsageError, match="n_heads=3 must divide d_model"):
        recipe.model_copy(update={"model": recipe.model.model_dump() | {"n_heads": 3}})
    with pytest.raises(UsageError, match="did you mean 'train'"):
        recipe.model_copy(update={"trian": {}})


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train takes a Recipe"):
        alcoda.train(str(QUICKSTART), tmp_path / "run")  # pyrefly: ignore
    with pytest.raises(UsageError, match="cost takes a Recipe"):
        alcoda.cost(str(QUICKSTART))  # pyrefly: ignore
    assert not (tmp_path / "run").exists()


def test_entries_name_everything_that_can_be_set() -> None:
    names = {entry.name: entry for entry in describe_entries()}
    assert (
        names["train.steps"].default == "null"
        and "1000" in names["train.steps"].meaning
        and "seed" in names["train.seed"].meaning
    )
    assert names["model.update"].default == "overwrite" and "gate" in names["model.update"].meaning
    choices = [entry.name for entry in describe_entries("model.update")]
    assert {"model.update: gate", "model.update: gate.tau", "model.update: overwrite"} <= set(choices)
    assert {entry.name.split(".")[0] for entry in describe_entries("data")} == {"data"}
    with pytest.raises(UsageError, match=r"did you mean 'train\.steps'"):
        describe_entries("train.stpes")
    settable = [f"{e.name}={e.default}" for e in describe_entries("train") if e.default and ": " not in e.name]
    assert load_recipe(QUICKSTART, [s for s in settable if not s.startswith("train.optimizer")]).n_steps == 1000
