"""Checkpoints of one process and of two are read by either, to the bit; and a run goes on from its own as if it had not
stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import logged, recipe, work, write_lines
from same import assert_same

from alcoda import api
from alcoda.config import validate
from alcoda.errors import RunError
from alcoda.training import checkpoint
from alcoda.training.recipe import Recipe

OPTIMIZERS = {"adamw": {"kind": "adamw", "lr": 0.003}, "muon": {"kind": "muon", "lr": 0.01}}
SHARES = ("ddp", "fsdp")
STEPS = 8
MUON = 1e-4
"""How far, in nats, the losses of 8 steps may be from those of one process: Muon multiplies in bf16, and what sums in
another order leave can round to the next number there, 2^-8 away. (Measured: 1e-5.)"""


def content(path: Path) -> dict[str, Any]:
    """All of a checkpoint but the time it took, read by one process."""
    state = checkpoint.load_train_state(path)
    del state["wall_s"]
    return {"weights": checkpoint.read_weights(path), "state": state}


def step(run: Path, n: int) -> Path:
    return run / f"checkpoints/step_{n:08d}"


def back_to(run: Path, n: int, to: Path) -> Path:
    """A copy of a finished run as it was at step ``n``."""
    shutil.copytree(run, to)
    for path in checkpoint.listed(to / "checkpoints"):
        if checkpoint.step_of(path) > n:
            shutil.rmtree(path)
    return to


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs of 8 steps with a checkpoint at 4: ddp, fsdp (with noise), one, muon_...; and what went on from
    copies of them at step 4: NAME_again by the same number of processes, NAME_to_OTHER by another."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_lines(folder / "lines.txt")

    def of(kind: str = "grt_noise", optimizer: str = "adamw", **more: Any) -> dict[str, Any]:
        made = recipe(text, kind, steps=STEPS, keep_checkpoints=9, optimizer=OPTIMIZERS[optimizer])
        return {**made, "eval": {"every": STEPS, "tokens": 300}, **more}

    recipes = {
        "ddp": of(parallel="ddp"),
        "fsdp": of(parallel="fsdp"),
        "muon_fsdp": of("untied", "muon", parallel="fsdp"),
    }
    one = of("untied", "muon")
    api.train(validate(Recipe, one), folder / "one")
    jobs = [{"recipe": made, "out": str(folder / name)} for name, made in recipes.items()]
    jobs.append({"recipe": of("untied", "muon", parallel="ddp"), "out": str(folder / "muon_ddp")})
    jobs.append({"recipe": recipes["muon_fsdp"], "out": str(folder / "muon_of_parts"), "fault": "muon_of_parts"})
    work(jobs, folder)
    again = [(name, made, f"{name}_again") for name, made in recipes.items()]
    again.append(("one", {**one, "parallel": "fsdp"}, "one_to_fsdp"))
    jobs = []
    for name, made, to in again:
        back_to(folder / name, 4, folder / to)
        jobs.append({"recipe": made, "out": str(folder / to), "resume": True, "resave": to == "one_to_fsdp"})
    work(jobs, folder)
    back_to(folder / "muon_fsdp", 4, folder / "fsdp_to_one")
    api.train(validate(Recipe, one), folder / "fsdp_to_one", resume=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "muon_fsdp"])
def test_resumed_is_uninterrupted(runs: Path, name: str) -> None:
    assert_same(content(step(runs / f"{name}_again", STEPS)), content(step(runs / name, STEPS)), in_order=False)
    timing = {"tokens_per_s", "elapsed_s"}
    ours, theirs = (
        [{k: v for k, v in line.items() if k not in timing} for line in logged(runs / run)]
        for run in (f"{name}_again", name)
    )
    assert ours == theirs


@pytest.mark.slow
def test_ranks_draw_noise_of_their_own(runs: Path) -> None:
    state = checkpoint.load_train_state(step(runs / "ddp", 4))
    (other,) = state["other_ranks"]
    assert not torch.equal(other["rng"], state["rng"])


@pytest.mark.slow
def test_one_process_to_two_shards_is_bit_for_bit(runs: Path) -> None:
    """A checkpoint of one process, read by two as shards and written by them again."""
    assert json.loads((step(runs / "one", 4) / checkpoint.MANIFEST).read_text())["format"] == checkpoint.FORMAT
    written = runs / "one_to_fsdp/resaved/step_00000004"
    assert checkpoint.check(written)["format"] == checkpoint.SHARDED
    ours, theirs = content(written), content(step(runs / "one", 4))
    for one in (ours, theirs):  # the noise of other numbers of processes is drawn anew
        del one["state"]["rng"], one["state"]["other_ranks"]
    assert_same(ours, theirs, in_order=False)


@pytest.mark.slow
@pytest.mark.parametrize(("went_on", "straight"), [("fsdp_to_one", "muon_fsdp"), ("one_to_fsdp", "one")])
def test_another_number_of_processes_goes_on(runs: Path, went_on: str, straight: str) -> None:
    """Without noise it is the same run, within the bound of Muon."""
    losses = [[line["loss"] for line in logged(runs / run)] for run in (went_on, straight)]
    assert losses[0][:4] == losses[1][:4]
    assert losses[0] == pytest.approx(losses[1], abs=MUON)


@pytest.mark.slow
def test_sharded_runs_are_measured_and_begun_from(runs: Path, tmp_path: Path) -> None:
    lm = api.load(runs / "fsdp")
    ours = checkpoint.read_weights(step(runs / "fsdp", STEPS))
    assert_same(dict(lm.model.state_dict()), ours, in_order=False)
    assert len(lm.generate("line ", max_tokens=4)) > 0
    begun = recipe(runs / "lines.txt", "grt_noise", steps=1)
    api.train(validate(Recipe, {**begun, "init_from": str(runs / "fsdp")}), tmp_path / "new")
    said = json.loads((tmp_path / "new/run.json").read_text())["init_from"]
    assert said["fresh"] == said["left"] == [] and len(said["sha256"]) == 64


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cut", "flipped", "gone"])
def test_a_damaged_shard_is_known(runs: Path, tmp_path: Path, harm: str) -> None:
    shutil.copytree(runs / "fsdp", tmp_path / "run")
    path = step(tmp_path / "run", STEPS)
    file = sorted(path.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    else:
        data[-3] ^= 1
        file.write_bytes(data if harm == "flipped" else data[:-3])
    with pytest.raises(RunError, match=f"is damaged: {file.name}.*step_00000004"):
        checkpoint.read_weights(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon_fsdp", "muon_ddp"])
def test_muon_of_two_processes_is_muon(runs: Path, name: str) -> None:
    losses = [[line["loss"] for line in logged(runs / run)] for run in (name, "one")]
    assert losses[0] == pytest.approx(losses[1], abs=MUON)


@pytest.mark.slow
def test_parts_of_matrices_that_are_orthogonalised_are_seen(runs: Path) -> None:
    losses = [[line["loss"] for line in logged(runs / run)] for run in ("muon_of_parts", "one")]
    assert losses[0] != pytest.approx(losses[1], abs=10 * MUON)
