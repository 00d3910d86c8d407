"""Every mini recipe learns: after 200 small steps its loss is below what counting tokens would give."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import metrics

from alcoda import api
from alcoda.data.prepare import prepare
from alcoda.data.splits import TRAIN
from alcoda.training.folders import project_recipes
from alcoda.training.recipe import Recipe, load_recipe

MINI = sorted(file.stem for file in (project_recipes() / "mini").glob("*.yaml"))
N_STEPS = 200
"""Of one row, 51,200 tokens: all the mini recipes in a quarter of an hour."""
LAST = 20
"""Steps at the end whose mean loss counts: one step sees a single row."""
SETTINGS = (
    f"train.steps={N_STEPS}",
    "train.optimizer.lr=0.001",  # with a row a step, more is too much
    "train.schedule.warmup_steps=20",
    "train.log_every=1",
    "train.checkpoint_every=100000",
    "eval.every=100000",
    "eval.tokens=300",
    "eval.loops=[]",
)

ROWS = {"elastic_isoparam": 2}
"""Rows of a step where one is too little to get anywhere in 200: 18 blocks behind a noise start."""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def _all_cores() -> Iterator[None]:
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def entropy_nats() -> float:
    """Of one training token, where nothing but the shares of the tokens is known."""
    (stream,) = prepare(load_recipe("mini/dense").data).split(TRAIN).values()
    counts_V = np.bincount(stream.read(0, stream.n_tokens))
    share_V = counts_V[counts_V > 0] / stream.n_tokens
    return float(-(share_V * np.log(share_V)).sum())


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest, entropy_nats: float) -> Iterator[list[str]]:
    """Lines of the table, printed when the last recipe is done."""
    head = f"{'recipe':<26}{'params':>11}{'MFLOPs a token':>16}{'loss':>8}{'unigram':>9}{'s':>7}"
    lines = [head]
    yield lines
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


def most_bonus(recipe: Recipe) -> float:
    """Nats by which the objective may lie below a cross-entropy: the prior's entropy, at most that of a uniform one."""
    return getattr(recipe.objective, "beta", 0.0) * math.log(recipe.model.n_loops)


@pytest.mark.parametrize("name", MINI)
def test_a_mini_recipe_learns(name: str, tmp_path: Path, table: list[str], entropy_nats: float) -> None:
    settings = (*SETTINGS, f"train.batch_size={ROWS.get(name, 1)}")
    recipe, run = load_recipe(f"mini/{name}", settings), tmp_path / "run"
    start_s = time.perf_counter()
    api.train(recipe, run)
    spent_s = time.perf_counter() - start_s
    losses = [line["loss"] for line in metrics(run) if line["type"] == "train"]
    shutil.rmtree(run)  # a checkpoint each: more than a gigabyte for all of them
    assert len(losses) == N_STEPS
    loss, ledger = sum(losses[-LAST:]) / LAST, recipe.ledger()
    table.append(
        f"{name:<26}{ledger.params:>11,}{ledger.training_flops_per_token / 1e6:>16.1f}"
        f"{loss:>8.3f}{entropy_nats:>9.3f}{spent_s:>7.1f}"
    )
    assert loss + most_bonus(recipe) < entropy_nats
    assert sum(losses[:3]) / 3 > entropy_nats  # it had something to learn: the start knows less
