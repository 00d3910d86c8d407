"""A recipe or a setting that cannot be: one message, exit code 2, and no run folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers import Cli, untouched, write_recipe

FILES = {
    "misspelt": ("modle: {d_model: 16}", ("unknown key 'modle'", "did you mean 'model'", "Allowed: data, depth,")),
    "misspelt_below": ("model: {d_modle: 16}", ("model: unknown key 'd_modle'", "did you mean 'd_model'", "Allowed:")),
    "misspelt_deep": (
        "model: {block: {norm: {kind: rmsnrom}}}",
        ("model.block.norm", "rmsnrom", "did you mean 'rmsnorm'"),
    ),
    "wrong_kind": ("model: {inject: concta}", ("model.inject", "unknown inject 'concta'", "did you mean 'concat'")),
    "field_of_another_kind": (
        "depth: {kind: fixed, mean: 3}",
        ("depth: unknown key 'mean'", "Allowed: kind, last_k, loops"),
    ),
    "heads": ("model: {d_model: 16, n_heads: 3}", ("model: n_heads=3 must divide d_model=16", "n_heads=2", "d_head")),
    "no_loops": ("model: {n_loops: 0}", ("model.n_loops", "greater than or equal to 1", "(got 0)")),
    "dense_loops": ("model: {n_core: 0, n_loops: 2}", ("n_core=0 has nothing to loop", "set n_loops to 1 (got 2)")),
    "dense_depth": (
        "model: {n_core: 0, n_loops: 1}\ndepth: {kind: fixed, loops: 2}",
        ("depth 'fixed' with n_core=0", "set depth to fixed"),
    ),
    "dense_eval": (
        "model: {n_core: 0, n_loops: 1}\neval: {loops: [1, 2]}",
        ("eval.loops=2", "this model is dense", "eval.loops=1 is its only depth"),
    ),
    "eval_loops": ("eval: {loops: [0]}", ("eval.loops.0", "(got 0)")),
    "uniform": ("depth: {kind: uniform, min: 5, max: 2}", ("depth: ", "min=5, max=2", "swap them or raise max")),
    "uniform_above": ("depth: {kind: uniform, min: 9}", ("depth.min=9", "n_loops=8", "lower min, or set depth.max")),
    "mean_outside": ("depth: {kind: lognormal, mean: 9, max: 4}", ("depth.mean=9", "min=1 .. max=4")),
    "yes_is_no_number": ("train: {steps: yes}", ("train.steps", "valid integer (got True)")),
    "not_divisible": (
        "train: {batch_size: 4, micro_batches: 3}",
        ("micro_batches=3", "batch_size=4", "one of [1, 2, 4]"),
    ),
    "device": ("train: {device: gpu}", ("train.device", "'auto', 'cpu' or 'cuda'", "(got 'gpu')")),
    "huge_seed": ("train: {seed: 99999999999999999999}", ("train.seed", "less than 9223372036854775808")),
    "corpus_and_mix": ("data: {corpus: pystdlib, mix: [pystdlib]}", ("data: ", "exclude each other")),
    "two_budgets": (
        "train: {budget: {flops: 1e12, tokens: 1e6}}",
        ("train.budget: a budget is exactly one of flops, tokens, tokens_per_param; got flops and tokens",),
    ),
    "no_budget": ("train: {budget: {}}", ("exactly one of flops, tokens, tokens_per_param; got none",)),
    "negative_budget": ("train: {budget: {flops: -1}}", ("train.budget.flops", "greater than 0 (got -1)")),
    "steps_and_budget": (
        "train: {steps: 3, batch_size: 2, budget: {tokens: 1e4}}\nmodel: {seq_len: 100}",
        ("train.steps=3 and train.budget (tokens: 10000, which is 50 steps) disagree: set one of them to null",),
    ),
    "small_budget": (
        "train: {budget: {flops: 1000}}",
        ("train.budget.flops=1000 is less than one train step, and the first one costs", "raise it"),
    ),
    "endless_budget": ("train: {budget: {flops: 1e30}}", ("train steps, and a budget may be 1,000,000: lower it",)),
    "endless_tokens": ("train: {budget: {tokens_per_param: 1e307}}", ("is about inf train steps",)),
    "curriculum_of_a_curriculum": (
        "depth: {kind: curriculum, steps: 5, inner: {kind: curriculum, steps: 5, inner: uniform}}",
        ("depth.inner: a curriculum of a curriculum",),
    ),
    "curriculum_that_falls": (
        "depth: {kind: curriculum, steps: 5, start: 9, inner: uniform}",
        ("depth.start=9 is above 4.5, the mean of depth.inner",),
    ),
    "per_token": ("depth: {kind: poisson, per: token}", ("depth.per", "'batch' or 'sequence' (got 'token')")),
    "two_errors": ("model: {n_loops: 0}\ntrain: {steps: -1}", ("has 2 errors", "model.n_loops: ", "train.steps: ")),
    "syntax": ("model: [1\ntrain: 2", ("is not valid YAML: line 2, column 6",)),
    "tab": ("train:\n\tsteps: 3", ("is not valid YAML: line 2, column 1",)),
    "twice": ("train: {steps: 3}\nmodel: {}\ntrain: {}", ("line 3, column 1", "the key 'train' is given twice")),
    "twice_below": ("train:\n  steps: 3\n  steps: 4", ("line 3, column 3", "the key 'steps' is given twice")),
    "template": ("train: {{steps}}", ("is not valid YAML: line 1, column 9", "a name is needed before the colon")),
    "list": ("- model", ("holds no recipe", "a mapping with name,")),
    "empty": ("", ("holds no recipe",)),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, tmp_path: Path, run_cli: Cli) -> None:
    text, says = FILES[case]
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    run_cli.refused("train", file, "--out", tmp_path / "run", says=says)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("raw", [b"\x80\x81\x82", b"abc\0def"])
def test_binary_file(raw: bytes, tmp_path: Path, run_cli: Cli) -> None:
    (tmp_path / "bad.yaml").write_bytes(raw)
    message = run_cli.refused("train", tmp_path / "bad.yaml", "--out", tmp_path / "run", says=("bad.yaml is not",))
    assert len(message.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_no_file(tmp_path: Path, run_cli: Cli) -> None:
    gone = tmp_path / "gone.yaml"
    for command in ("train", "cost"):
        run_cli.refused(command, gone, says=(f"cannot read the recipe {gone}", "No such file"))
    run_cli.refused("train", tmp_path, says=(f"{tmp_path} is a folder", f"{tmp_path}/recipe.yaml"))
    run_cli.refused("cost", tmp_path, says=("recipe.yaml", "No such file"))


SETTINGS = {
    "train.stepz=3": ("train: unknown key 'stepz'", "did you mean 'steps'"),
    "trian.steps=3": ("--set trian.steps=3", "did you mean 'train'"),
    "train.schedul.final=1": ("train.schedul has nothing below it", "did you mean 'schedule'"),
    "train.steps.x=3": ("train.steps has nothing below it", "Allowed: optimizer, schedule"),
    "stepz=3": ("unknown key 'stepz'", "Allowed: data, depth,"),
    "train.steps": ("--set train.steps: write it as name.name=value", "train.steps=500"),
    "=3": ("write it as name.name=value",),
    "train..steps=3": ("write it as name.name=value",),
    "train.steps=abc": ("train.steps", "valid integer (got 'abc')"),
    "train.steps=1.5": ("train.steps", "(got 1.5)"),
    "train.batch_size=": ("train.batch_size", "(got None)"),
    "train.steps=[1": ("the value of --set train.steps is not valid YAML",),
    "train.optimizer.lr=yes": ("train.optimizer.lr: a number is needed", "(got True)"),
    "train.optimizer.lr=-1": ("train.optimizer.lr", "greater than 0 (got -1)"),
    "train.optimizer.kind=sgd": ("train.optimizer: unknown optimizer 'sgd'", "adamw, muon"),
    "model.update=gat": ("model.update: unknown update 'gat'", "did you mean 'gate'"),
    "model=7": ("model: ", "(got 7)"),
    "train.device=cuda": ("device=cuda, but torch sees no GPU", "set device to auto or cpu"),
    "data.corpus=textt:x": ("unknown form 'textt'", "did you mean 'text'"),
    "model.vocab_size=100": ("257 tokens", "model.vocab_size is 100", "raise model.vocab_size to 257"),
    "train.batch_size=5000": ("less than one batch of batch_size 5000 x seq_len 16 = 80,000", "longer corpus"),
    "data.splits.valid=2": ("leaves nothing to train on",),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting: str, tiny: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run_cli.refused("train", tiny, "--set", setting, "--out", tmp_path / "run", says=SETTINGS[setting])
    assert not (tmp_path / "run").exists()


CORPORA = {
    "missing": (None, ("there is no file or folder",)),
    "empty": (b"", ("the file is empty",)),
    "blank": (b" \n\n", ("no document with any text",)),
    "binary": (b"text\xff\xfe\x00", ("is not a text file", "byte offset 4", "Convert it to UTF-8")),
    "short": (b"hello there.", ("too few to split into train, valid, calib, probe", "give a longer one")),
}


@pytest.mark.parametrize("case", CORPORA)
def test_corpora(case: str, tiny: Path, tmp_path: Path, run_cli: Cli) -> None:
    raw, says = CORPORA[case]
    path, run = tmp_path / "corpus.txt", tmp_path / "run"
    if raw is not None:
        path.write_bytes(raw)
    run_cli.refused("train", tiny, "--set", f"data.corpus=text:{path}", "--out", run, says=("corpus", *says))
    assert not run.exists()
    run.mkdir()  # the user's own folder stays
    run_cli.refused("train", tiny, "--set", f"data.corpus=text:{path}", "--out", run)
    assert list(run.iterdir()) == []


def test_a_tracker_that_is_not_installed(
    tiny: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alcoda.training.track.find_spec", lambda name: None)
    for setting, package in (("track.tensorboard=true", "tensorboard"), ("track.wandb=offline", "wandb")):
        says = (f"track.{package} needs the package {package}", f"pip install {package}")
        run_cli.refused("train", tiny, "--set", setting, "--out", tmp_path / "run", says=says)
        assert not (tmp_path / "run").exists()


def test_out_that_cannot_be_a_run(tiny: Path, tmp_path: Path, run_cli: Cli) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with untouched(mine):
        run_cli.refused("train", tiny, "--out", mine, says=(f"{mine} is not empty and holds no run", "another --out"))
        run_cli.refused("train", tiny, "--out", mine, "--resume", says=(f"there is no run at {mine} to resume",))
        run_cli.refused("quickstart", "--out", mine, says=("is not empty and holds no run",))
        run_cli.refused(
            "quickstart", "--fresh", "--out", mine, says=("which is not a run and nothing else: it holds thesis.tex",)
        )
    for out in (tiny, tiny / "below"):
        run_cli.refused("train", tiny, "--out", out, says=(f"--out {out}", f"{tiny} is a file", "another --out"))
    gone = tmp_path / "gone"
    run_cli.refused("train", tiny, "--out", gone, "--resume", says=(f"no run at {gone}", "leave --resume out"))
    assert not gone.exists() and not (mine / ".lock").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_out_that_may_not_be_written(tiny: Path, tmp_path: Path, run_cli: Cli) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    run_cli.refused("train", tiny, "--out", closed / "run", code=1, says=("no permission to write", "another folder"))


def test_permission_is_explained_to_root_too(
    tiny: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    says = ("no permission to write", "choose another folder, or change its rights")
    run_cli.refused("train", tiny, "--out", tmp_path / "run", code=1, says=says)


def test_the_default_run_folder(tiny: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_cli.ok("train", tiny, "--set", "train.steps=1")
    assert done.json["run"] == "runs/tiny" and (tmp_path / "runs/tiny/recipe.yaml").exists()
    run_cli.refused("train", tiny, says=("runs/tiny holds a run already", "--resume", "another --out"))


def test_usage_of_the_command_line(run_cli: Cli, tiny: Path) -> None:
    for arguments in (("frobnicate",), ("train",), ("train", tiny, "--foo"), ("eval", "x", "--batch-size", "0")):
        done = run_cli(*arguments)
        assert done.code == 2 and "Traceback" not in done.err and done.out == ""


def test_dense_and_recurrent_depths(tmp_path: Path, corpus: Path, run_cli: Cli, trained: Path) -> None:
    dense = write_recipe(
        tmp_path / "dense.yaml",
        corpus,
        model__n_core=0,
        model__n_loops=1,
        model__inject="none",
        depth="fixed",
        eval__loops=[],
        train__steps=1,
    )
    run = tmp_path / "dense"
    run_cli.ok("train", dense, "--out", run)
    says = ("loops=2", "this model is dense (n_core=0)", "loops=1 is its only depth")
    run_cli.refused("eval", run, "--loops", "1,2", says=says)
    run_cli.refused("generate", run, "--prompt", "x", "--loops", "2", says=says)
    run_cli.refused("cost", dense, "--loops", "2", says=says)
    for command in (("eval", trained), ("generate", trained, "--prompt", "x"), ("cost", trained)):
        run_cli.refused(*command, "--loops", "0", says=("loops=0: at least 1 loop",))
    assert run_cli.ok("eval", run, "--json").json["bits_per_byte"].keys() == {"1"}
