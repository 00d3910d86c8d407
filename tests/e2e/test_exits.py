"""Exits through the command line: a probe is fitted, thresholds are calibrated and used, the frontier is drawn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import Cli, recipe, untouched, write_corpus

import alcoda
from alcoda import api
from alcoda.config import validate
from alcoda.depth.record import ProbeWeights, fingerprint
from alcoda.depth.rules import StateChange
from alcoda.errors import UsageError
from alcoda.training.recipe import Recipe

SPLITS = {"valid": 0.2, "calib": 0.2, "probe": 0.2}
TIERS = ("--tier", "fast=40%", "--tier", "balanced=30%", "--tier", "exact=0")
"""A model of 40 steps: its loops have much to lose."""


@pytest.fixture(scope="module")
def fitted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a probe; nobody writes to it."""
    place = tmp_path_factory.mktemp("exits")
    corpus = write_corpus(place / "words.txt", n_documents=60, seed=3)
    longer = {"train__steps": 40, "train__checkpoint_every": 20, "model__init_std": 0.3, "model__head": "untied"}
    api.train(validate(Recipe, recipe(corpus, data__splits=SPLITS, model__n_loops=3, **longer)), place / "run")
    api.fit_probe(place / "run")
    return place / "run"


@pytest.fixture
def fitted(tmp_path: Path, fitted_once: Path) -> Path:
    shutil.copytree(fitted_once, tmp_path / "run")
    return tmp_path / "run"


def test_the_way_of_a_user(fitted: Path, tmp_path: Path, run_cli: Cli) -> None:
    done = run_cli.ok("calibrate", fitted, "--rule", "state", "--to", "kl", *TIERS)
    kept = json.loads((fitted / "exits.json").read_text())
    assert done.json == kept and [tier["name"] for tier in kept["tiers"]] == ["fast", "balanced", "exact"]
    assert "smallest uniform depth" in done.out and "alcoda generate" in done.err
    for tier in kept["tiers"]:
        assert tier["calib"]["excess"] <= tier["tolerance"]
        assert 1 <= tier["held_out"]["mean_loops"] <= 3
    # What calibration says of the held-out text is what evaluation finds.
    fast, held = kept["tiers"][0], run_cli.ok("eval", fitted, "--exit", "fast").json
    assert held["tier"] == "fast" and held["exit"] == fast["rule"] and held["coda_keys"] == "at_exit"
    full = run_cli.ok("eval", fitted, "--exit", "fast", "--max-tokens", "20000").json
    assert full["excess"] == pytest.approx(fast["held_out"]["excess"])
    assert full["mean_loops"] == pytest.approx(fast["held_out"]["mean_loops"])
    assert full["flops_per_token"] == pytest.approx(fast["held_out"]["flops_per_token"])
    said = run_cli.ok("generate", fitted, "--prompt", "one", "--exit", "fast", "--json", "--max-tokens", "8").json
    assert 1 <= said["mean_loops"] <= 3 and said["exit"] == "fast"
    lm = alcoda.load(fitted)
    assert lm.generate("one", exit="exact", max_tokens=8) == lm.generate("one", max_tokens=8)
    rule = lm.loaded.exit("fast").rule
    assert lm.generate("one", exit="fast", max_tokens=8) == lm.generate("one", exit=rule, max_tokens=8)
    # The other way to the same: the frontier, and its part of the page.
    done = run_cli.ok("frontier", fitted, "--tokens", "1k", "--points", "2")
    assert json.loads((fitted / "frontier.json").read_text()) == done.json
    assert {curve["rule"] for curve in done.json["curves"]} == {"kl", "state", "second_order", "argmax_stable", "probe"}
    assert "without gate: exit 'gate'" in done.err and "readout-only" in done.out
    run_cli.ok("report", fitted, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<section id="exits"' in page and "Bits per byte against executed FLOPs a token" in page


def test_exits_at_one_depth_are_that_depth(fitted_once: Path) -> None:
    lm = alcoda.load(fitted_once)
    uniform = api.evaluate(lm, [1, 2, 3])
    for loops in (1, 2, 3):
        found = api.evaluate_exit(lm, f"fixed:{loops}")
        assert found.bits_per_byte == pytest.approx(uniform.bits_per_byte[loops], rel=1e-6)
        assert found.mean_loops == loops and found.depths[loops] == sum(found.depths.values())
        assert found.n_bytes == uniform.n_bytes and found.n_units == uniform.n_units
        assert found.low == pytest.approx(uniform.by_depth[loops - 1].low, rel=1e-6)
        assert found.gap == pytest.approx(found.bits_per_byte - uniform.bits_per_byte[3], abs=1e-6)
    assert api.evaluate_exit(lm, StateChange()).gap == 0
    early = api.evaluate_exit(lm, "state:1e9")
    assert early.mean_loops == 1 and early.bits_per_byte == pytest.approx(uniform.bits_per_byte[1], rel=1e-6)


def test_a_probe_is_the_models_own(fitted: Path, run_cli: Cli) -> None:
    lm = alcoda.load(fitted)
    weights = ProbeWeights.load(fitted / "probe.safetensors")
    assert weights.model == fingerprint(lm.model) and weights.weight_D.shape == (16,) and weights.bias_R.shape == (3,)
    done = run_cli.ok("probe", fitted, "--label", "loss", "--delta", "0.001", "--tokens", "1k")
    assert done.json["label"] == "loss_falls" and done.json["n_held_out"] >= 390 and 0 <= done.json["auc"] <= 1
    assert "calibration error" in done.out and "--exit probe" in done.err
    assert ProbeWeights.load(fitted / "probe.safetensors").label == "loss_falls"
    assert 1 < run_cli.ok("eval", fitted, "--exit", "probe:0.5", "--max-tokens", "500").json["mean_loops"] <= 3
    elsewhere = fitted / "mine.safetensors"
    run_cli.ok("probe", fitted, "--out", elsewhere, "--tokens", "1k", "--json")
    assert elsewhere.is_file()
    # Of another checkpoint it says nothing.
    says = ("it was fitted to other weights",)
    run_cli.refused("eval", fitted, "--exit", "probe:0.5", "--checkpoint", "step_00000032", says=says)


def test_tiers_are_of_one_checkpoint(fitted: Path, run_cli: Cli) -> None:
    run_cli.ok("calibrate", fitted, "--tier", "balanced=30%", "--json")
    how = ("--prompt", "one", "--exit", "balanced")
    run_cli.ok("generate", fitted, *how)
    run_cli.refused(
        "generate", fitted, *how, "--checkpoint", "step_00000032", says=("weights other than this model's",)
    )
    run_cli.refused("generate", fitted, *how, "--loops", "2", says=("calibrated at 3 loops",))
    run_cli.refused("generate", fitted, "--prompt", "one", "--exit", "fast", says=("unknown exit 'fast'", "balanced"))
    (fitted / "exits.json").write_text("{")
    run_cli.refused("generate", fitted, *how, code=1, says=("exits.json",))


def test_what_cannot_be_is_refused(fitted: Path, trained: Path, run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one two three\n")
    with untouched(fitted):
        for arguments, says in (
            (("generate", "--prompt", "one", "--exit", "balanced"), ("has none: alcoda calibrate",)),
            (("eval", "--exit", "state:0.1", "--loops", "1,2"), ("--exit goes with one depth",)),
            (("eval", "--exit", "state:0.1", "--chunk", "4"), ("--exit goes with one depth",)),
            (("eval", "--exit", "stat:0.1"), ("unknown exit", "did you mean 'state'")),
            (("calibrate", "--tolerance", "half"), ("tolerance 'half': a share of the loss",)),
            (("calibrate", "--tolerance", "5"), ("half a per cent is 0.005 or 0.5%",)),
            (("calibrate", "--tier", "balanced"), ("NAME=TOLERANCE",)),
            (("calibrate", "--tokens", "few"), ("--tokens few: a number",)),
            (("calibrate", "--tokens", "50"), ("49 tokens to score", "at least 500")),
            (("calibrate", "--data", f"text:{tmp_path / 'short.txt'}"), ("tokens to score", "name a longer text")),
            (("calibrate", "--to", "gate"), ("no exit gate to ask",)),
            (("probe", "--label", "future"), ("--label future", "argmax, loss")),
            (("probe", "--delta", "-1"), ("delta=-1",)),
            (("probe", "--loops", "1"), ("loops of 2 or more",)),
            (("probe", "--label", "loss", "--delta", "100"), ("true of no states", "argmax_changes")),
            (("frontier", "--rule", "gate"), ("no exit gate",)),
            (("frontier", "--tolerance", "2"), ("tolerance=2",)),
        ):
            command, *rest = arguments
            run_cli.refused(command, fitted, *rest, says=says)
    # A run whose own calibration text is too short says so.
    run_cli.refused("calibrate", trained, says=("calib: ", "at least 500", "data.splits"))


def test_a_memory_is_calibrated_exactly(tmp_path: Path, fitted_once: Path) -> None:
    corpus = alcoda.load(fitted_once).recipe.data.corpus
    config = recipe("", data__splits=SPLITS, data__corpus=corpus, model__memory="prev_token", train__steps=2)
    api.train(validate(Recipe, config), tmp_path / "memory")
    found = api.calibrate(tmp_path / "memory", tolerances={"loose": 0.5}, max_tokens=600)
    assert found.tiers[0].calib.excess <= 0.5 and alcoda.load(tmp_path / "memory").generate("one", exit="loose")
    with pytest.raises(UsageError, match="a memory is read token by token: choose exit state"):
        api.fit_probe(tmp_path / "memory")
