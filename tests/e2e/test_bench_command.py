"""``alcoda bench engine`` and ``alcoda capacity``, as a user calls them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import Cli, recipe, untouched, write_corpus

import alcoda
from alcoda import api
from alcoda.config import validate
from alcoda.data.config import DataConfig
from alcoda.depth.record import Trace
from alcoda.engine import bench as bench_module
from alcoda.engine.bench import BenchResult
from alcoda.engine.workload import spread_depths
from alcoda.errors import UsageError
from alcoda.measure.prompts import prompts_of, shares
from alcoda.measure.text import streams_of
from alcoda.training.recipe import Recipe

MODES = ["fixed", "masked", "no_refill", "refill", "wavefront", "refill_wavefront"]
QUICK = ("--concurrency", "2", "--rounds", "1", "--width", "8")
SHAPE = (
    "--set",
    "model.d_model=16",
    "--set",
    "model.n_heads=2",
    "--set",
    "model.n_core=1",
    "--set",
    "model.seq_len=16",
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sources, one of them named, with tiers."""
    place = tmp_path_factory.mktemp("mixed")
    few, many = (write_corpus(place / f"{name}.txt", 60, seed=seed) for seed, name in enumerate(("few", "many")))
    mix = [{"corpus": f"text:{few}", "weight": 1}, {"corpus": f"text:{many}", "weight": 3, "name": "much"}]
    splits = {"valid": 0.2, "calib": 0.2, "probe": 0.1}
    longer = {"train__steps": 40, "train__checkpoint_every": 40, "model__init_std": 0.3, "model__head": "untied"}
    data = recipe(few, data__splits=splits, data__mix=mix, model__n_loops=3, model__n_coda=0, **longer)
    del data["data"]["corpus"]
    api.train(validate(Recipe, data), place / "run")
    api.calibrate(place / "run", tolerances={"balanced": 0.3})
    return place / "run"


def test_a_run_by_its_tier(mixed: Path, run_cli: Cli) -> None:
    with untouched(mixed):
        done = run_cli.ok("bench", "engine", mixed, *QUICK, "--deterministic")
    found = done.json
    assert [one["mode"] for one in found["scores"]][:6] == MODES
    assert {"wavefront", "drafts right", "overhead"} <= set(
        done.out.replace("│", "┃").split("┃")
    ) or "wavefront" in done.out
    assert (found["loops"], found["prompt_tokens"], found["tokens"]) == (3, 8, 8)
    assert found["depths"] == "of exit balanced" and not found["simulated"] and found["acceptance"] is None
    same = {one["mode"]: one["tokens_identical"] for one in found["scores"]}
    assert same["wavefront"] and same["refill_wavefront"] and same["no_refill"] and same["fixed"] is None
    tier = api.RunFolder(mixed).exits_json.read_text()
    others = [one["mode"] for one in found["scores"]][6:]
    assert others[:2] == ["rule", "rule_wavefront"] and same["rule_wavefront"]
    assert others[2:] == ([] if '"uniform_loops": 3' in tier else ["uniform"])
    mean = next(one for one in found["scores"] if one["mode"] == "refill")["mean_loops"]
    assert 1 <= mean <= 3 and found["mean_depth"] == pytest.approx(mean, abs=1)


def test_a_run_by_other_depths(mixed: Path, run_cli: Cli, tmp_path: Path) -> None:
    by_rule = run_cli.ok("bench", "engine", mixed, *QUICK, "--exit", "fixed:2", "--json")
    assert len(by_rule.out.splitlines()) == 1
    assert by_rule.json["mean_depth"] == 2 and by_rule.json["depths"] == "of exit fixed:2"
    assert by_rule.json["scores"][3]["mean_loops"] == 2
    file = tmp_path / "depths.safetensors"
    spread_depths(2, 20, 3, 1.0).save(file)
    assert Trace.load(file).n_loops == 3
    replayed = run_cli.ok("bench", "engine", mixed, *QUICK, "--trace", file, "--uniform", 2, "--json").json
    assert replayed["mean_depth"] == 1 and replayed["scores"][-1]["mode"] == "uniform"
    assert replayed["scores"][-1]["bound"] > 1 and replayed["depths"] == "of depths.safetensors"
    drawn = run_cli.ok("bench", "engine", mixed, *QUICK, "--mean-depth", 2.5, "--tokens", 4, "--json").json
    assert drawn["tokens"] == 4 and drawn["depths"] == "drawn, of mean 2.5"


def test_a_shape_from_the_command_line(run_cli: Cli) -> None:
    done = run_cli.ok("bench", "engine", *SHAPE, *QUICK, "--tokens", 4, "--acceptance", 0.5)
    settings = " ".join(f"--set {one}" for one in SHAPE[1::2])
    assert done.json["what"] == f"d512 {settings}" and done.json["what"] in " ".join(done.out.split())
    assert f"computed in {done.json['machine']['dtype']}" in " ".join(done.out.split())
    assert f"{done.json['held_bytes'] / 1e6:,.1f} MB with what the engine lays out" in done.out
    assert done.json["simulated"] and done.json["acceptance"] == 0.5
    assert "0.5, is simulated" in done.out and "4.9" in done.out
    named = run_cli.ok("bench", "engine", "--shape", "mini/grt", *SHAPE, *QUICK, "--mean-depth", 2, "--json").json
    assert named["what"] == f"grt {settings}" and named["loops"] == 4


def test_what_cannot_be_timed_is_refused(mixed: Path, trained: Path, run_cli: Cli) -> None:
    with untouched(mixed):
        for arguments, says in (
            (
                (trained,),
                ("calibrated tier 'balanced'", "has none: alcoda calibrate", "--exit state:0.1", "--mean-depth 4"),
            ),
            ((mixed, "--exit", "fast"), ("unknown exit 'fast'", "balanced")),
            ((mixed, "--loops", "2"), ("calibrated at 3 loops",)),
            ((mixed, "--shape", "d512"), ("name one of them",)),
            ((mixed, "--acceptance", "0.5"), ("right or not by themselves",)),
            ((mixed, "--tokens", "20"), ("the context holds 16",)),
            ((mixed, "--concurrency", "1,x"), ("--concurrency 1,x: write whole numbers",)),
            ((mixed, "--trace", mixed / "recipe.yaml"), ("trace of depths",)),
            (("nowhere",), ("there is no run at nowhere",)),
            (("--shape", "mini/mor"), ("cannot serve this model",)),
        ):
            done = run_cli("bench", "engine", *QUICK, *arguments)
            assert done.code in (1, 2) and done.out == "" and "Traceback" not in done.err, (arguments, done)
            assert all(text in done.err for text in says), (arguments, done.err)


def test_tokens_that_differ_are_an_error(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BenchResult, "tokens_differ", property(lambda self: ["wavefront and fixed at concurrency 2"]))
    done = run_cli("bench", "engine", *SHAPE, *QUICK, "--tokens", 4, "--json")
    assert done.code == 1 and "tokens differ that had to be equal: wavefront and fixed" in done.err


def test_an_interrupted_benchmark_says_so(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "timed", interrupted)
    assert run_cli("bench", "engine", *SHAPE, *QUICK, "--tokens", 4).code == 130


def test_prompts_are_of_the_mixture(mixed: Path, tmp_path: Path) -> None:
    loaded = alcoda.load(mixed).loaded
    streams = streams_of(loaded, "valid")
    assert shares(loaded.recipe.data, list(streams)) == {"few": 1.0, "much": 3.0}
    prompts = prompts_of(loaded, "valid", 40, 8)
    heads = {
        name: {tuple(stream.read(at, at + 8).tolist()) for at in range(0, stream.n_tokens - 7, 16)}
        for name, stream in streams.items()
    }
    of_much = [prompt in heads["much"] for prompt in prompts]
    assert all(len(prompt) == 8 and (prompt in heads["few"] or prompt in heads["much"]) for prompt in prompts)
    assert sum(of_much) == 30 and sum(of_much[:8]) == 6
    assert prompts == prompts_of(loaded, "valid", 40, 8) != prompts_of(loaded, "valid", 40, 8, seed=1)
    # Where a source has too few rows they come again.
    n_rows = sum(map(len, heads.values()))
    assert len(set(prompts_of(loaded, "valid", 4 * n_rows, 8))) <= n_rows
    with pytest.raises(UsageError, match="a prompt takes 1000000"):
        prompts_of(loaded, "valid", 1, 1_000_000)
    # The same of a packed run, whose corpora are not there.
    shutil.copytree(mixed, tmp_path / "copy")
    packed = api.pack(tmp_path / "copy", tmp_path / "packed", keep={"valid": 500}).path
    assert np.array_equal(sorted(shares(alcoda.load(packed).loaded.recipe.data, ["few", "much"]).values()), [1.0, 3.0])
    assert len(prompts_of(alcoda.load(packed).loaded, "valid", 8, 8)) == 8


def test_shares_of_stages_and_of_a_text_of_its_own() -> None:
    mix = [
        {"corpus": "text:a", "weight": 0.6, "name": "stories"},
        {"corpus": "hops:nodes=9", "stages": ["hops:nodes=10", "hops:nodes=11"], "weight": 0.4, "name": "hops"},
    ]
    staged = validate(DataConfig, {"mix": mix})
    assert shares(staged, ["stories", "hops-3"]) == {"stories": 0.6, "hops-3": 0.4}
    assert shares(validate(DataConfig, {"corpus": "text:a"}), ["a"]) == {"a": 1.0}
    assert shares(validate(DataConfig, {"mix": mix[:1], "valid": "text:b"}), ["b"]) == {"b": 1.0}


def test_capacity_from_the_command_line(mixed: Path, run_cli: Cli) -> None:
    done = run_cli.ok("capacity", mixed, "--memory", "1MB", "--tokens", "16,8", "--dtype", "float32")
    assert "requests of 8" in done.out and "requests of 16" in done.out and "at 3 loops" in done.out
    found = run_cli.ok("capacity", mixed, "--memory", "1MB", "--tokens", "16,8", "--dtype", "float32", "--json").json
    assert found == api.capacity(mixed, 10**6, lengths=[8, 16], dtype="float32").to_json() | {
        "rooms": [
            dict(one, requests={"8": one["requests"]["8"], "16": one["requests"]["16"]}) for one in found["rooms"]
        ]
    }
    assert "every cache is the same" in run_cli.ok("capacity", "mini/cart", "--memory", "1GB").out
    for arguments, says in (
        ((mixed, "--memory", "24"), "--memory 24: a size with its unit"),
        ((mixed, "--memory", "1kB"), "the weights alone take"),
        ((mixed, "--memory", "1MB", "--tokens", "17"), "tokens=17"),
        ((mixed, "--memory", "1MB", "--tokens", "few"), "--tokens few: write whole numbers"),
        (("nothing", "--memory", "1MB"), "nothing is neither a run"),
    ):
        run_cli.refused("capacity", *arguments, says=(says,))
