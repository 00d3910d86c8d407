"""Two processes train what one does: losses, gradient norms, validation and weights, on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import KINDS, NOISY, ROUTED_KINDS, logged, recipe, work, write_lines

from alcoda import api
from alcoda.config import validate
from alcoda.training import checkpoint
from alcoda.training.footprint import footprint
from alcoda.training.recipe import Recipe, load_recipe

TOLERANCE = 1e-5
"""Of losses in nats, and of weights, in fp32: sums are taken in another order."""
SHARES = ("ddp", "fsdp")
QUICK = ("dense", "grt", "elastic_rows", "cart", "untied", "micro", "lrt")
COUNTED = {"elastic_rows": 4, "micro": 4, "lrt": 0}
"""Kinds of which every collective is counted, and how often a micro-batch gathers a block: one of prelude and one of
coda for each direction; none of a model with a memory."""
WRONG = {"elastic": ("depth_of_rank", "fsdp"), "dense": ("unsynced", "ddp")}
"""Faults that the comparison has to see: depths drawn by rank, gradients that are not exchanged."""


def train_both(folder: Path, kinds: tuple[str, ...]) -> Path:
    """FOLDER/SHARE/KIND of two processes, and FOLDER/one/KIND of one."""
    text = write_lines(folder / "lines.txt")
    jobs: list[dict[str, Any]] = []
    for kind in kinds:
        api.train(validate(Recipe, recipe(text, kind)), folder / "one" / kind)
        both = recipe(text, kind, **({"micro_batches": 1} if kind in ROUTED_KINDS else {}))
        for share in SHARES:
            jobs.append({"recipe": {**both, "parallel": share}, "out": str(folder / share / kind)})
            if kind in COUNTED:
                jobs[-1]["count"] = str(folder / share / f"{kind}.jsonl")
        if kind in WRONG:
            fault, share = WRONG[kind]
            wrong = {"recipe": {**both, "parallel": share}, "out": str(folder / fault / kind), "fault": fault}
            jobs.append(wrong)
    work(jobs, folder)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_both(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_both(tmp_path_factory.mktemp("others"), (*(kind for kind in KINDS if kind not in QUICK), *NOISY))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_weights(checkpoint.listed(run / "checkpoints")[-1])


def assert_equal(two: Path, one: Path) -> None:
    for key in ("loss", "grad_norm", "loops", "tokens", "executed_flops"):
        ours, theirs = ([line[key] for line in logged(run)] for run in (two, one))
        assert len(ours) == 4 and ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE), key
    valid = [[(line["loops"], line["bits_per_byte"]) for line in logged(run, "eval")] for run in (two, one)]
    for (loops, ours), (at, theirs) in zip(*valid, strict=True):
        assert loops == at and ours == pytest.approx(theirs, abs=1e-6)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", QUICK)
def test_two_processes_are_one(quick: Path, kind: str, share: str) -> None:
    assert_equal(quick / share / kind, quick / "one" / kind)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in QUICK])
def test_two_processes_are_one_in_every_other_design(others: Path, kind: str, share: str) -> None:
    assert_equal(others / share / kind, others / "one" / kind)


def test_gradients_that_are_not_exchanged_are_seen(quick: Path) -> None:
    with pytest.raises(AssertionError):
        assert_equal(quick / "unsynced" / "dense", quick / "one" / "dense")


@pytest.mark.slow
def test_depths_drawn_by_rank_are_seen(others: Path) -> None:
    with pytest.raises(AssertionError):
        assert_equal(others / "depth_of_rank" / "elastic", others / "one" / "elastic")


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_noise_is_that_of_a_rank(others: Path, share: str) -> None:
    with pytest.raises(AssertionError):
        assert_equal(others / share / "grt_noise", others / "one" / "grt_noise")


@pytest.mark.parametrize("kind", COUNTED)
def test_communication_is_what_the_collectives_carry(quick: Path, kind: str) -> None:
    """The core is gathered once a micro-batch, whatever the loops; gradients are exchanged once a step. The estimate of
    `alcoda cost` says the same."""
    names = {"allgather_base": "all_gather", "reduce_scatter_base": "reduce_scatter", "allreduce": "all_reduce"}
    n_micro = KINDS[kind].get("train", {}).get("micro_batches", 1)
    for share in SHARES:
        said = json.loads((quick / share / kind / "run.json").read_text())["parallel"]
        assert (said["kind"], said["processes"], said["backend"]) == (share, 2, "gloo")
        assert len(said["peak_memory_bytes"]) == 2 and min(said["peak_memory_bytes"]) > 1 << 20
        steps = [json.loads(line) for line in (quick / share / f"{kind}.jsonl").read_text().splitlines()]
        assert len(steps) == 4
        for step in steps:
            sent = {f"{names[name]}_bytes_per_step": n_bytes for name, n_bytes in step["sent"].items()}
            assert sent == {name: value for name, value in said.items() if name.endswith("per_step")}
        expected = footprint(load_recipe(quick / share / kind / "recipe.yaml"), 2)
        assert expected.parallel == share and len(expected.traffic) == (1 if share == "ddp" else 2)
        for one in expected.traffic:
            assert one.bytes == pytest.approx(said[f"{one.name}_bytes_per_step"], abs=1)
        if share == "fsdp":
            assert {step["n"]["allgather_base"] for step in steps} == {n_micro * (1 + COUNTED[kind])}
            assert {step["n"]["reduce_scatter_base"] for step in steps} == {1 + COUNTED[kind] // 2}
