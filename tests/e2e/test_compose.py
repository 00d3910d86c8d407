"""Plugins, overlays, recipes by name, and a start from another run, through the command line."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import Cli, metrics, spawn, untouched, write_recipe

from alcoda import plugins
from alcoda.config import Choice
from alcoda.training import checkpoint
from alcoda.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
TWICE = """
from typing import Literal
from alcoda.model.recurrence.inject import Add

class Twice(Add):
    '''From outside.'''

    kind: Literal["twice"] = "twice"
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command loads stays in the process: take it out again."""
    kept = [(axis.choices, dict(axis.choices)) for axis in Choice.__subclasses__()]
    modules = set(sys.modules)
    monkeypatch.setattr(plugins, "_LOADED", {})
    yield
    forget(kept)
    for name in set(sys.modules) - modules:
        if name.startswith("alcoda_plugin"):
            del sys.modules[name]


def forget(kept: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for choices, before in kept:
        choices.clear()
        choices.update(before)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "twice.py").write_text(TWICE)
    return tmp_path / "twice.py"


@pytest.fixture
def no_inject(tmp_path: Path) -> Path:
    path = tmp_path / "no_inject.yaml"
    path.write_text("description: nothing is injected\nmodel: {inject: none}\n")
    return path


def test_a_plugin_in_every_command(plugin: Path, corpus: Path, tmp_path: Path, run_cli: Cli) -> None:
    file, run = write_recipe(tmp_path / "mine.yaml", corpus, model__inject="twice"), tmp_path / "run"
    with_it = ("--plugin", plugin)
    message = run_cli.refused(
        "train", file, "--out", run, says=("model.inject: unknown inject 'twice'", "--plugin FILE")
    )
    assert "Allowed: add," in message and not run.exists()
    run_cli.ok("train", file, "--out", run, *with_it)
    used = json.loads((run / "run.json").read_text())["plugins"]
    assert [(one["name"], one["registered"]) for one in used] == [("twice.py", ["inject: twice"])]
    assert len(used[0]["sha256"]) == 64 and str(tmp_path) not in json.dumps(used)
    commands: list[tuple[Any, ...]] = [
        ("eval", run, "--loops", "1,2"),
        ("generate", run, "--prompt", "one", "--max-tokens", "3"),
        ("cost", file),
        ("cost", run),
        ("report", run, "--out", tmp_path / "r.html"),
        ("recipes", tmp_path),
        ("entries", "model.inject"),
        ("train", file, "--out", run, "--resume"),
    ]
    for command in commands:
        done = run_cli.ok(*command, *with_it, *with_it)
        assert "unknown" not in done.err, command
        if command[0] == "entries":
            assert "model.inject: twice" in done.out and "From outside." in done.out
        if command[0] == "recipes":
            assert "mine" in done.out
    assert "Plugin: twice.py" in (tmp_path / "r.html").read_text()


def test_another_process_needs_it_again(plugin: Path, corpus: Path, tmp_path: Path, run_cli: Cli) -> None:
    file = write_recipe(tmp_path / "mine.yaml", corpus, model__inject="twice")
    assert run_cli.ok("cost", file, "--json", "--plugin", plugin).json["params"] > 0
    process = spawn("cost", file)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and "--plugin FILE" in err and "Traceback" not in err


def test_a_plugin_that_is_another_now(
    plugin: Path, corpus: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = write_recipe(tmp_path / "mine.yaml", corpus, model__inject="twice"), tmp_path / "run"
    run_cli.ok("train", file, "--out", run, "--plugin", plugin)
    done = run_cli.ok("train", file, "--out", run, "--plugin", plugin, "--resume")
    assert "the plugin" not in done.err
    plugin.write_text(TWICE + "\n# a note\n")
    done = run_cli.ok("train", file, "--out", run, "--plugin", plugin, "--resume")
    assert "the plugin twice.py is not the one that the run was begun with" in done.err


@pytest.mark.parametrize("command", ["train", "cost", "eval", "generate", "report", "recipes", "entries"])
def test_a_plugin_that_fails(command: str, tmp_path: Path, tiny: Path, run_cli: Cli) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\nnope\n")
    what = {"recipes": (), "entries": (), "generate": (tiny, "--prompt", "x")}.get(command, (tiny,))
    run_cli.refused(
        command, *what, "--plugin", bad, says=(f"the plugin {bad} failed in line 2: NameError: name 'nope'",)
    )
    run_cli.refused(command, *what, "--plugin", tmp_path / "gone.py", says=("cannot read it: No such file",))


def test_debug_shows_where_a_plugin_failed(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "bad.py").write_text("def deep():\n    nope\n\ndeep()\n")
    process = spawn("--debug", "cost", tiny, "--plugin", tmp_path / "bad.py")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" in err and "in deep" in err


def test_overlays(tiny: Path, no_inject: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gate = tmp_path / "gate.yaml"
    gate.write_text("model: {update: gate}\ntrain: {steps: 4}\n")
    done = run_cli.ok("train", tiny, "--with", no_inject, "--with", gate, "--set", "train.steps=2")
    run = Path("runs/tiny+no_inject+gate")
    assert done.json["run"] == str(run) and done.json["train_step"] == 2
    made = load_recipe(run / "recipe.yaml")
    assert made.model.inject.kind == "none" and made.model.update.kind == "gate"
    assert made.description == "nothing is injected"
    plain, without = (run_cli.ok("cost", tiny, *more, "--json").json for more in ((), ("--with", gate)))
    assert without["params"] > plain["params"]
    no_inject.write_text("model: {injekt: none}\n")
    run_cli.refused("cost", tiny, "--with", no_inject, says=("--with no_inject: model: unknown key 'injekt'",))
    run_cli.refused("train", tiny, "--with", "no_such", says=("cannot read the recipe no_such",))


def test_recipes_by_name_from_anywhere(tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_path = run_cli.ok("cost", ROOT / "recipes/mini/grt.yaml", "--json").json
    for name in ("mini/grt", "mini/grt.yaml"):
        assert run_cli.ok("cost", name, "--json").json == by_path | {"recipe": name, "what": name}
    run_cli.refused("cost", "mini/gtr", says=("cannot read the recipe mini/gtr", "near it: mini/grt", "alcoda recipes"))
    Path("mini/grt").mkdir(parents=True)  # what is here comes first
    run_cli.refused("train", "mini/grt", says=("mini/grt is a folder",))


def test_the_list_of_recipes(tmp_path: Path, run_cli: Cli, corpus: Path, no_inject: Path) -> None:
    found = run_cli.ok("recipes", "--json").json
    files = sorted(p for p in (ROOT / "recipes").rglob("*.yaml") if "ablations" not in p.parts)
    assert [one["name"] for one in found["recipes"]] == sorted(
        p.relative_to(ROOT / "recipes").with_suffix("").as_posix() for p in files
    )
    assert found["broken"] == {}
    grt = next(one for one in found["recipes"] if one["name"] == "mini/grt")
    ledger = run_cli.ok("cost", "mini/grt", "--json").json
    for name in ("params", "effective_params", "forward_flops_per_token", "training_flops_per_token"):
        assert grt[name] == ledger[name]
    mine = tmp_path / "mine"
    (mine / "ablations").mkdir(parents=True)
    write_recipe(mine / "a.yaml", corpus, source="somewhere, section 3")
    no_inject.rename(mine / "ablations/no_inject.yaml")
    (mine / "b.yaml").write_text("modle: {}\n")
    done = run_cli.ok("recipes", mine)
    assert "somewhere, section 3" in done.out and "nothing is injected" in done.out
    assert "b: " in done.err and "unknown key 'modle'" in done.err
    run_cli.refused("recipes", tmp_path / "gone", says=("is no folder",))


def test_every_recipe_is_in_the_wheel() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["force-include"] == {"recipes": "alcoda/recipes"}


def test_a_run_from_another_ones_weights(trained: Path, tiny: Path, tmp_path: Path, run_cli: Cli) -> None:
    settings = ("--set", "model.update=gate", "--set", "trainable=[update, inject]")
    run = tmp_path / "run"
    with untouched(trained):
        done = run_cli.ok("train", tiny, "--init", trained, *settings, "--out", run)
    assert "update start fresh, the run has none" in done.err and "parameters learn (update, inject)" in done.err
    said = json.loads((run / "run.json").read_text())["init_from"]
    old = checkpoint.read_weights(trained / "checkpoints" / said["checkpoint"])
    new = checkpoint.read_weights(checkpoint.listed(run / "checkpoints")[-1])
    assert all(bool((new[name] == tensor).all()) for name, tensor in old.items())
    assert yaml.safe_load((run / "recipe.yaml").read_text())["init_from"] == {"run": str(trained), "checkpoint": "best"}
    assert any(line["type"] == "diagnostics" and "update.gate.mean" in line for line in metrics(run))
    # The run goes on from its own recipe, by itself.
    assert run_cli.ok("train", run / "recipe.yaml", "--out", run, "--resume").json["train_step"] == 8
    run_cli.ok("report", run, "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "Started from" in page and "Inside the loop" in page and said["sha256"] in page


def test_a_start_that_cannot_be(tiny: Path, trained: Path, tmp_path: Path, run_cli: Cli) -> None:
    run = tmp_path / "run"
    for more, says in (
        (("--init", tmp_path / "gone"), ("there is no run at",)),
        (("--init", trained, "--set", "model.d_model=32"), ("embed.weight is (257, 16) there and (257, 32) here",)),
        (("--set", "trainable=[updat]"), ("trainable: this model has no part 'updat'; did you mean 'update'",)),
        (("--set", "trainable=[update]"), ("leaves nothing to train",)),
        (("--set", "init_from=3"), ("init_from",)),
    ):
        run_cli.refused("train", tiny, *more, "--out", run, says=says)
        assert not run.exists()
