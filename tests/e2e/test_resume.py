"""A run that was interrupted and resumed is the run that was not: weights, optimizer, metrics, to the bit."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import Cli, metrics, recipe, snapshot, spawn, untouched, write_corpus, write_recipe
from same import assert_same

from alcoda import api
from alcoda.config import validate
from alcoda.training import checkpoint
from alcoda.training.loop import Trainer
from alcoda.training.recipe import Recipe, load_recipe

STEPS = 120
GRT = {
    "model__inject": {"kind": "concat", "noise": 0.1, "bias": True},
    "model__update": {"kind": "gate", "noise": 0.1},
    "depth": {"kind": "lognormal", "mean": 2, "max": 6},
}
ELASTIC = {
    "model__inject": "concat",
    "model__state_init": "noise",
    "model__block": {"sandwich": "after_add"},
    "depth": {"kind": "lognormal_poisson", "mean": 2, "max": 6, "last_k": 2},
    "train__optimizer": {"kind": "muon", "lr": 0.02},
}
KINDS = {"grt_adamw": GRT, "elastic_muon": ELASTIC}


def assert_same_end(resumed: Path, straight: Path, same_checkpoints: bool = True) -> None:
    """Two finished runs are one."""
    last, reference = (checkpoint.listed(run / "checkpoints")[-1] for run in (resumed, straight))
    assert last.name == reference.name
    assert (last / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    states = [checkpoint.load_train_state(path) for path in (last, reference)]
    assert all(state.pop("wall_s") > 0 for state in states)
    assert_same(*states)
    assert metrics(resumed) == metrics(straight)
    if same_checkpoints:
        assert sorted(snapshot(resumed / "checkpoints")) == sorted(snapshot(straight / "checkpoints"))
    records = [json.loads((run / "run.json").read_text()) for run in (resumed, straight)]
    assert [record["status"] for record in records] == ["finished", "finished"]
    for record in records:
        del record["result"]["wall_s"]
    assert records[0]["result"] == records[1]["result"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus whose epochs end in the middle of a batch, every 30 steps or so."""
    return write_corpus(tmp_path_factory.mktemp("small") / "small.txt", n_documents=33, n_words=9)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Any:
    """The uninterrupted run of a kind, and its recipe file; trained once."""
    done: dict[str, tuple[Path, Path]] = {}

    def of(kind: str) -> tuple[Path, Path]:
        if kind not in done:
            folder = tmp_path_factory.mktemp(kind)
            file = write_recipe(folder / "resume.yaml", small, **resume_changes(kind))
            api.train(load_recipe(file), folder / "straight")
            done[kind] = file, folder / "straight"
        return done[kind]

    return of


def resume_changes(kind: str) -> dict[str, Any]:
    return {
        "train__steps": STEPS,
        "train__batch_size": 3,
        "train__checkpoint_every": 10,
        "train__log_every": 3,
        "eval__every": 40,
        "eval__tokens": 100,
        **KINDS[kind],
    }


def wait_until(process: Any, ready: Any, timeout_s: float = 120.0) -> None:
    """Until ``ready()``, while the process lives."""
    end = time.monotonic() + timeout_s
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.002)


def steps_logged(run: Path) -> int:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    steps = [json.loads(line)["train_step"] for line in lines if line.endswith("}")]
    return max(steps, default=0)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_is_uninterrupted(kind: str, straight: Any, tmp_path: Path, run_cli: Cli) -> None:
    file, reference = straight(kind)
    run = tmp_path / "run"
    process = spawn("train", file, "--out", run)
    # Logged past a checkpoint: those lines are to be dropped on resume, and written again.
    wait_until(process, lambda: (run / "checkpoints/step_00000020").exists() and steps_logged(run) % 10 >= 4)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert steps_logged(run) < STEPS, "the kill came too late to say anything"
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    done = run_cli.ok("train", file, "--out", run, "--resume")
    assert done.json["status"] == "finished" and done.json["train_step"] == STEPS
    assert_same_end(run, reference)
    state = checkpoint.load_train_state(run / f"checkpoints/step_{STEPS:08d}")
    assert state["batches"]["sources"][0]["epoch"] >= 3
    assert len(json.loads((run / "run.json").read_text())["sessions"]) == 1


@pytest.mark.parametrize(("kind", "number"), [("grt_adamw", signal.SIGINT), ("elastic_muon", signal.SIGTERM)])
def test_a_signal_saves_the_very_step(
    kind: str, number: signal.Signals, straight: Any, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reference = straight(kind)
    run = tmp_path / "run"
    real = Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == 46:  # in the middle of step 47
            signal.raise_signal(number)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        done = run_cli("train", file, "--out", run)
    assert done.code == 0 and done.json["status"] == "stopped" and done.json["train_step"] == 47
    assert "stopped at step 47" in done.err
    assert checkpoint.listed(run / "checkpoints")[-1].name == "step_00000047"
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"
    # The command that the message names works, whatever --set the run was begun with.
    command = done.err.splitlines()[-1].split("go on with: alcoda ")[1].split()
    assert run_cli.ok(*command).json["status"] == "finished"
    assert_same_end(run, reference)


def test_a_signal_to_a_process(tmp_path: Path, corpus: Path) -> None:
    """Of one kind; of both in `test_a_signal_saves_the_very_step`."""
    file = write_recipe(tmp_path / "long.yaml", corpus, train__steps=100_000, train__checkpoint_every=50_000)
    run = tmp_path / "run"
    process = spawn("train", file, "--out", run)
    wait_until(process, lambda: steps_logged(run) > 2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["status"] == "stopped"
    newest = checkpoint.listed(run / "checkpoints")[-1]
    assert checkpoint.step_of(newest) == result["train_step"] == metrics(run)[-1]["train_step"]
    assert "stopping after this step" in err and "--resume" in err and "Traceback" not in err


def test_nobody_reads_what_is_said(tmp_path: Path, corpus: Path) -> None:
    """Whoever reads our output ends (a pager, tee): the run, which is in files, goes on."""
    file, run = write_recipe(tmp_path / "short.yaml", corpus), tmp_path / "run"
    with spawn("train", file, "--out", run) as process:
        assert process.stderr is not None and process.stdout is not None
        process.stderr.close()  # before the first note, on how little text there is to validate on
        out = process.stdout.read()
    assert process.returncode == 0 and json.loads(out)["status"] == "finished"
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert checkpoint.listed(run / "checkpoints")[-1].name == "step_00000008"


def test_a_second_signal_acts_at_once(
    tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Trainer._step, []

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == 5:
            calls.append(signal.raise_signal(signal.SIGINT))
            calls.append(signal.raise_signal(signal.SIGINT))
            raise AssertionError("not reached")
        return real(self, *arguments)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        done = run_cli("train", tiny, "--out", run)
    assert done.code == 130 and len(calls) == 1
    assert "interrupted" in done.err and "Traceback" not in done.err and done.out == ""
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"
    assert run_cli.ok("train", tiny, "--out", run, "--resume").json["train_step"] == 8


class Crash(Exception):
    """Stands for a crash of the process at a step."""


def crash_at(monkeypatch: pytest.MonkeyPatch, train_step: int, data: dict[str, Any], run: Path) -> None:
    """Train until ``train_step`` steps are done and logged, and no further."""
    real = Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == train_step:
            raise Crash
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        with pytest.raises(Crash):
            api.train(validate(Recipe, data), run)


@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("mix_unit", ["row", "document"])
def test_crashed_at_any_step(
    at: int, mix_unit: str, tmp_path: Path, small: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = recipe(
        corpus,
        train__steps=12,
        train__checkpoint_every=3,
        train__log_every=5,
        eval__every=4,
        data__corpus=None,
        data__mix=[{"corpus": f"text:{corpus}", "weight": 2}, {"corpus": f"text:{small}"}],
        data__mix_unit=mix_unit,
        **{key: value for key, value in GRT.items() if key != "depth"},
    )
    straight, run = tmp_path / "straight", tmp_path / "run"
    api.train(validate(Recipe, data), straight)
    crash_at(monkeypatch, at, data, run)
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    api.train(validate(Recipe, data), run, resume=True)
    assert_same_end(run, straight)


def test_what_a_killed_process_left_is_ignored_and_removed(
    tmp_path: Path, corpus: Path, straight_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = tmp_path / "run", recipe(corpus, name="tiny")
    crash_at(monkeypatch, 6, data, run)
    for name in (".step_00000006.999.tmp", ".step_00000004.12345.tmp"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    (run / ".run.json.999.tmp").write_text("{")
    (run / "checkpoints/notes.txt").write_text("mine")
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + '{"type": "train", "train_st')
    assert api.load(run).loaded.train_step == 4
    api.train(validate(Recipe, data), run, resume=True)
    assert (run / "checkpoints/notes.txt").read_text() == "mine"
    (run / "checkpoints/notes.txt").unlink()
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]
    assert_same_end(run, straight_tiny)


@pytest.fixture(scope="module")
def straight_tiny(trained_once: Path) -> Path:
    return trained_once


def test_killed_before_the_first_checkpoint(
    tmp_path: Path, corpus: Path, straight_tiny: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli
) -> None:
    run, data = tmp_path / "run", recipe(corpus, name="tiny")
    crash_at(monkeypatch, 2, data, run)
    assert not (run / "checkpoints").exists()
    with untouched(run):
        run_cli.refused("eval", run, says=("no checkpoint yet", "--resume"))
        run_cli.refused("generate", run, "--prompt", "x", says=("no checkpoint yet",))
    run_cli.ok("report", run, "--out", tmp_path / "report.html")
    (run / "checkpoints/.step_00000004.7.tmp").mkdir(parents=True)
    run_cli.ok("report", run, "--out", tmp_path / "report.html")
    api.train(validate(Recipe, data), run, resume=True)
    assert_same_end(run, straight_tiny)


def test_resuming_a_finished_run_changes_no_weights(trained: Path, tiny: Path, run_cli: Cli) -> None:
    before = snapshot(trained / "checkpoints")
    lines = metrics(trained)
    done = run_cli.ok("train", tiny, "--out", trained, "--resume", "--set", "name=tiny")
    assert done.json["status"] == "finished" and done.json["train_step"] == 8
    assert snapshot(trained / "checkpoints") == before and metrics(trained) == lines


def test_what_may_change_on_resume(
    tmp_path: Path, corpus: Path, straight_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    crash_at(monkeypatch, 6, recipe(corpus, name="tiny"), run)
    changed = recipe(
        corpus,
        name="tiny",
        description="resumed",
        train__checkpoint_every=1,
        train__keep_checkpoints=9,
        train__log_every=2,
        eval__batch_size=3,
        track__project="other",
    )
    result = api.train(validate(Recipe, changed), run, resume=True)
    assert result.status == "finished"
    assert [path.name[-1] for path in checkpoint.listed(run / "checkpoints")] == ["4", "5", "6", "7", "8"]
    assert load_recipe(run / "recipe.yaml").description == "resumed"
    ours, theirs = ((r / "checkpoints/step_00000008/model.safetensors").read_bytes() for r in (run, straight_tiny))
    assert ours == theirs


def test_a_run_resumes_under_another_path(trained: Path, tmp_path: Path, corpus: Path) -> None:
    shutil.move(trained, tmp_path / "elsewhere")
    result = api.train(validate(Recipe, recipe(corpus, name="tiny")), tmp_path / "elsewhere", resume=True)
    assert result.status == "finished" and result.run == tmp_path / "elsewhere"
