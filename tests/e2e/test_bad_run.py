"""Damaged, foreign, busy and missing runs and checkpoints: one message with the way out, and nothing lost."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import NEWEST, OLDER, Cli, metrics, untouched, write_corpus, write_recipe
from safetensors.torch import load_file, save_file

from alcoda import api
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import Bpe
from alcoda.files import sha256
from alcoda.training.loop import Trainer
from alcoda.training.objective import NextToken


def cut(path: Path) -> None:
    """Half of the file."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit, in the middle."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def disguise(folder: Path, name: str) -> None:
    """Make the manifest agree with a file that was put in the place of another."""
    manifest = json.loads((folder / "checkpoint.json").read_text())
    path = folder / name
    manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["embed.weight"] = torch.zeros(300, 16)
    weights["extra"] = torch.zeros(1)
    del weights["final_norm.weight"]
    save_file(weights, folder / "model.safetensors")
    disguise(folder, "model.safetensors")


def not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not ours at all")
    disguise(folder, "model.safetensors")


def write(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text)


DAMAGES = {
    "weights_cut": (
        lambda folder: cut(folder / "model.safetensors"),
        ("is damaged: model.safetensors has", "bytes of"),
    ),
    "state_cut": (lambda folder: cut(folder / "train_state.pt"), ("is damaged: train_state.pt has", "bytes of")),
    "weights_missing": (lambda folder: (folder / "model.safetensors").unlink(), ("model.safetensors is missing",)),
    "weights_flipped": (
        lambda folder: flip(folder / "model.safetensors"),
        ("is damaged: model.safetensors", "its bytes"),
    ),
    "manifest_missing": (lambda folder: (folder / "checkpoint.json").unlink(), ("it has no checkpoint.json",)),
    "manifest_cut": (lambda folder: cut(folder / "checkpoint.json"), ("checkpoint.json cannot be read",)),
    "manifest_foreign": (write("checkpoint.json", '{"a": 1}'), ("is not a checkpoint of this project",)),
    "manifest_list": (write("checkpoint.json", "[1]"), ("is not a checkpoint of this project",)),
    "manifest_hollow": (write("checkpoint.json", '{"format": "alcoda-checkpoint-1"}'), ("checkpoint.json",)),
    "other_shapes": (
        other_shapes,
        (
            "does not fit the run's recipe",
            "missing final_norm.weight",
            "unknown extra",
            "embed.weight is (300, 16), not (257, 16)",
        ),
    ),
    "not_safetensors": (not_safetensors, ("is damaged: model.safetensors cannot be read",)),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_checkpoint(case: str, trained: Path, corpus: Path, tmp_path: Path, run_cli: Cli) -> None:
    damage, says = DAMAGES[case]
    file = write_recipe(tmp_path / "tiny.yaml", corpus)
    damage(trained / "checkpoints" / NEWEST)
    where = str(trained / "checkpoints" / NEWEST)
    with untouched(trained):
        for command in (
            ("train", file, "--out", trained, "--resume"),
            ("eval", trained),
            ("generate", trained, "--prompt", "x"),
            ("report", trained, "--out", tmp_path / "report.html"),
        ):
            message = run_cli.refused(*command, code=1, says=(where, *says))
            assert f"go on from {OLDER}" in message and len(message.splitlines()) == 1
        assert not (tmp_path / "report.html").exists()
        # An older one can be used as it is.
        assert run_cli.ok("eval", trained, "--checkpoint", OLDER, "--json").json["train_step"] == 4
    shutil.rmtree(where)
    assert run_cli.ok("train", file, "--out", trained, "--resume").json["train_step"] == 8


def test_a_bit_of_the_train_state(trained: Path, tiny: Path, run_cli: Cli) -> None:
    flip(trained / "checkpoints" / NEWEST / "train_state.pt")
    with untouched(trained):
        says = ("is damaged: train_state.pt", OLDER)
        run_cli.refused("train", tiny, "--out", trained, "--resume", code=1, says=says)


def test_no_other_whole_checkpoint(trained: Path, run_cli: Cli) -> None:
    for name in (NEWEST, OLDER):
        cut(trained / "checkpoints" / name / "model.safetensors")
    with untouched(trained):
        run_cli.refused("eval", trained, code=1, says=("There is no other whole checkpoint beside it: train again",))


def test_names_of_checkpoints(trained: Path, run_cli: Cli) -> None:
    says = ("has no checkpoint 'step_9'", "give best, last, or one of step_00000004, step_00000008")
    run_cli.refused("eval", trained, "--checkpoint", "step_9", says=says)
    for which, train_step in ((OLDER, 4), (NEWEST, 8), ("last", 8), ("best", 8)):
        assert run_cli.ok("eval", trained, "--checkpoint", which, "--json").json["train_step"] == train_step


def test_another_tokenizer(trained: Path, tiny: Path, tmp_path: Path, run_cli: Cli) -> None:
    other = Bpe(vocab_size=300).build(["one two three four five six " * 9])
    other.save(trained / "tokenizer.json")
    says = (
        f"{trained}/tokenizer.json is not the tokenizer that {NEWEST} was trained with",
        "put back the one of the run",
    )
    with untouched(trained):
        run_cli.refused("eval", trained, code=1, says=says)
        run_cli.refused("generate", trained, "--prompt", "x", code=1, says=says)
        run_cli.refused("train", tiny, "--out", trained, "--resume", code=1, says=says)
    (trained / "tokenizer.json").write_text("{}")
    with untouched(trained):
        run_cli.refused("eval", trained, says=("tokenizer.json is no tokenizer.json",))
    (trained / "tokenizer.json").unlink()
    run_cli.refused("eval", trained, says=("there is no file", "tokenizer.json"))


def test_another_corpus(trained: Path, tmp_path: Path, run_cli: Cli) -> None:
    other = write_recipe(tmp_path / "tiny.yaml", write_corpus(tmp_path / "words.txt", seed=5))
    saved = trained / "recipe.yaml"
    text = saved.read_text()
    corpus = next(line for line in text.splitlines() if "corpus: text:" in line).split("text:")[1]
    saved.write_text(text.replace(corpus, str(tmp_path / "words.txt")))
    with untouched(trained):
        says = (f"the corpus text:{tmp_path}/words.txt has changed", "put the old text back", "another --out")
        run_cli.refused("train", other, "--out", trained, "--resume", says=says)


def test_another_config(trained: Path, tiny: Path, run_cli: Cli) -> None:
    settings = ("--set", "train.steps=9", "--set", "model.d_model=32", "--set", "depth={kind: fixed, loops: 2}")
    with untouched(trained):
        message = run_cli.refused("train", tiny, "--out", trained, "--resume", *settings)
    for line in (
        "train.steps: 8 in the run, 9 now",
        "model.d_model: 16 in the run, 32 now",
        "depth.kind: 'uniform' in the run, 'fixed' now",
        "depth.max: 3 in the run, None now",
    ):
        assert line in message
    assert "another --out" in message and "train.checkpoint_every" in message and "schedule" not in message


def test_a_run_is_there_already(trained: Path, tiny: Path, run_cli: Cli) -> None:
    with untouched(trained):
        says = (f"{trained} holds a run already", "add --resume", "another --out")
        run_cli.refused("train", tiny, "--out", trained, says=says)


def test_a_run_in_use(trained: Path, tiny: Path, run_cli: Cli) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, os, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); f.truncate(); "
            "f.write(str(os.getpid())); f.flush(); print('held', flush=True); sys.stdin.read()",
            str(trained / ".lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with untouched(trained):
            says = (f"{trained} is in use by another alcoda (process {holder.pid})", "wait for it")
            run_cli.refused("train", tiny, "--out", trained, "--resume", says=says)
            run_cli.refused("quickstart", "--fresh", "--out", trained, says=says)
            run_cli.ok("eval", trained, "--json")  # reading is free
    finally:
        holder.kill()
        holder.communicate()
    run_cli.ok("train", tiny, "--out", trained, "--resume")


def test_folders_that_are_no_run(tmp_path: Path, trained: Path, tiny: Path, run_cli: Cli) -> None:
    (tmp_path / "folder").mkdir()
    cases = {
        tmp_path / "gone": "there is no run at",
        tmp_path / "folder": "is not a run: it has no recipe.yaml",
        tiny: "is not a run: it has no recipe.yaml",
    }
    with untouched(tmp_path):
        for path, says in cases.items():
            for command in (
                ("eval", path),
                ("generate", path, "--prompt", "x"),
                ("report", path, "--out", tmp_path / "report.html"),
                ("report", trained, path, "--out", tmp_path / "report.html"),
            ):
                run_cli.refused(*command, says=(str(path), says, "alcoda train wrote (--out)"))


def test_damaged_records(trained: Path, tiny: Path, run_cli: Cli, tmp_path: Path) -> None:
    (trained / "run.json").write_text('{"status": ')
    run_cli.refused("train", tiny, "--out", trained, "--resume", code=1, says=("run.json cannot be read",))
    run_cli.refused("report", trained, "--out", tmp_path / "report.html", code=1, says=("run.json",))
    (trained / "recipe.yaml").write_text("model: [")
    run_cli.refused("eval", trained, says=("recipe.yaml is not valid YAML",))


def test_arguments_of_eval(trained: Path, tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    (tmp_path / "two.txt").write_text("a")
    for arguments, says in (
        (("--loops", "abc"), ("--loops abc", "whole numbers with commas", "1,2,4,8")),
        (("--loops", "1,,2"), ("--loops 1,,2",)),
        (("--loops", "1.5"), ("--loops 1.5",)),
        (("--loops", "-1"), ("loops=-1: at least 1 loop",)),
        (("--data", "text:/gone.txt"), ("there is no file or folder /gone.txt",)),
        (("--data", "txt:/gone.txt"), ("unknown form 'txt'", "did you mean 'text'")),
        (("--data", "vaild"), ("data 'vaild'", "did you mean 'valid'", "probe", "text:vaild")),
        (("--data", "pystdlibb"), ("did you mean 'pystdlib'",)),
        (("--data", corpus), ("say what the path holds", f"'text:{corpus}'")),
        (("--data", f"text:{tmp_path}/two.txt"), ("1 of its tokens", "at least 2")),
        (("--max-tokens", "2"), ("1 of its tokens", "at least 2")),
    ):
        with untouched(trained):
            run_cli.refused("eval", trained, *arguments, says=says)


def test_arguments_of_generate(trained: Path, run_cli: Cli) -> None:
    for arguments, says in (
        (("x" * 15,), ("the prompt has 16 tokens", "the context holds 16", "shorten it by 1 or more")),
        (("x" * 40,), ("the prompt has 41 tokens", "shorten it by 26 or more")),
        (("x", "--max-tokens", "0"), ("max_tokens=0: at least 1",)),
        (("x", "--temperature", "-1"), ("temperature: a number, 0 (the likeliest token) or more (got -1.0)",)),
        (("x", "--temperature", "nan"), ("temperature: ", "(got nan)")),
        (("x", "--top-k", "0"), ("top_k: a whole number of at least 1 (got 0)",)),
        (("x", "--top-p", "0"), ("top_p: a number above 0, at most 1 (got 0.0)",)),
        (("x", "--min-p", "1"), ("min_p: a number from 0, below 1 (got 1.0)",)),
        (("x", "--repetition-penalty", "0"), ("repetition_penalty: a number above 0 (got 0.0)",)),
        (("x", "--seed", "-1"), ("seed: a whole number from 0 to 2^63 - 1 (got -1)",)),
        (("x", "--seed", str(10**20)), ("seed: ", "(got 100000000000000000000)")),
        (("x", "--stop", ""), ("stop: an empty string", "leave it out")),
        (("x", *("--stop", "y") * 5), ("stop: 5 strings; at most 4",)),
        (("\udcff",), ("half of a surrogate pair",)),
    ):
        run_cli.refused("generate", trained, "--prompt", *arguments, says=says)
        run_cli.refused("generate", trained, "--json", "--prompt", *arguments, says=says)
    assert run_cli.ok("generate", trained, "--prompt", "x" * 14).out.startswith("x" * 14)
    assert run_cli.ok("generate", trained, "--prompt", "", "--max-tokens", "2", "--json").json["prompt"] == ""


def test_arguments_of_the_api(trained: Path) -> None:
    for arguments, says in (
        ({"device": "gpu"}, "unknown device 'gpu'. Allowed: auto, cpu, cuda"),
        ({"dtype": "float16"}, "unknown dtype 'float16'. Allowed: auto, bfloat16, float32"),
        ({"checkpoint": "first"}, "give best, last, or one of"),
    ):
        with pytest.raises(ValueError, match=says):
            api.load(trained, **arguments)
    with pytest.raises(ValueError, match="at least one run"):
        api.write_report([], trained / "report.html")


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_number_that_is_none(
    what: str, tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = NextToken.loss_sum, []

    def loss_sum(self: NextToken, model: Any, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        loss = real(self, model, *arguments)
        if len(calls) < 6:
            return loss
        if what == "loss":
            return loss * math.inf
        loss.register_hook(lambda gradient: gradient * math.nan)
        return loss

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(NextToken, "loss_sum", loss_sum)
        message = run_cli.refused("train", tiny, "--out", run, code=1, says=(f"the {what} is", "at train step 6 ("))
    assert "batch: words[" in message and "Nothing was saved of that step" in message
    assert f"The last good checkpoint is {run}/checkpoints/{OLDER}" in message
    assert "train.optimizer.lr" in message and "train.clip" in message
    assert metrics(run)[-1]["train_step"] == 5
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "failed" and record["result"]["train_step"] == 5
    assert run_cli.ok("train", tiny, "--out", run, "--resume").json["train_step"] == 8


def test_a_learning_rate_that_explodes(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    file = write_recipe(
        tmp_path / "hot.yaml",
        corpus,
        train__optimizer={"kind": "adamw", "lr": 1e30},
        train__clip=None,
        train__schedule={"warmup_steps": 0},
    )
    says = ("is nan at train step", "There is no checkpoint yet")
    run_cli.refused("train", file, "--out", tmp_path / "run", code=1, says=says)


def test_ctrl_c_while_the_data_are_prepared(
    tmp_path: Path, corpus: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_recipe(tmp_path / "bpe.yaml", corpus, data__tokenizer={"kind": "bpe", "vocab_size": 300})
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))  # another test may have prepared the same text
    real = Tokenizer.encode_batch
    for number in (signal.SIGINT, signal.SIGTERM):

        def interrupt(self: Tokenizer, texts: Any, number: signal.Signals = number) -> Any:
            signal.raise_signal(number)
            return real(self, texts)

        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "encode_batch", interrupt)
            done = run_cli("train", file, "--set", "model.vocab_size=300", "--out", tmp_path / "run")
        assert done.code == 130 and done.out == "" and "Traceback" not in done.err
        assert done.err.splitlines()[-1].startswith("interrupted")
        assert not (tmp_path / "run").exists()
    cache = Path(os.environ["ALCODA_CACHE"]) / "tokens"
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]
    run_cli.ok("train", file, "--set", "model.vocab_size=300", "--out", tmp_path / "run")


def test_an_unexpected_error_is_one_line_and_debug_shows_it(
    tiny: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(*arguments: Any) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(Trainer, "_step", boom)
    done = run_cli("train", tiny, "--out", tmp_path / "run")
    assert done.code == 1 and "error: ZeroDivisionError: boom" in done.err and "alcoda --debug" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setattr(sys, "argv", ["alcoda", "--debug", "train", str(tiny), "--out", str(tmp_path / "other")])
    from alcoda import cli

    with pytest.raises(ZeroDivisionError):
        cli.main()
