"""Depths of rows and budgets, through whole runs: what is logged, what is spent, and that a run can be resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import Cli, metrics, write_recipe

from alcoda.depth.sample import LoopPlan
from alcoda.training import checkpoint, loop
from alcoda.training.budget import StepFlops
from alcoda.training.loop import Trainer
from alcoda.training.recipe import load_recipe

PER_ROW = {"kind": "poisson", "mean": 3, "max": 6, "per": "sequence", "last_k": 2}
DEPTHS: dict[str, Any] = {
    "fixed": {"kind": "fixed", "loops": 3},
    "uniform": {"kind": "uniform", "max": 3},
    "poisson": PER_ROW,
    "curriculum": {"kind": "curriculum", "inner": {"kind": "uniform", "max": 4}, "steps": 10},
}
BUDGET_FLOPS = 6e7


def train(run_cli: Cli, tmp_path: Path, corpus: Path, name: str, **changes: Any) -> Path:
    file = write_recipe(tmp_path / f"{name}.yaml", corpus, eval__every=1000, **changes)
    run_cli.ok("train", file, "--out", tmp_path / name)
    return tmp_path / name


def test_equal_flops_with_different_samplers(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    steps = {}
    for name, depth in DEPTHS.items():
        run = train(
            run_cli, tmp_path, corpus, name, depth=depth, train__steps=None, train__budget={"flops": BUDGET_FLOPS}
        )
        lines = [line for line in metrics(run) if line["type"] == "train"]
        last_step = lines[-1]["executed_flops"] - lines[-2]["executed_flops"]
        assert abs(lines[-1]["executed_flops"] - BUDGET_FLOPS) <= last_step
        kept = yaml.safe_load((run / "recipe.yaml").read_text())["train"]
        assert kept["steps"] == lines[-1]["train_step"] and kept["budget"]["flops"] == BUDGET_FLOPS
        steps[name] = kept["steps"]
    assert len(set(steps.values())) > 2 and steps["fixed"] < steps["uniform"], steps


def test_a_tokens_budget_ends_the_run(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    run = train(run_cli, tmp_path, corpus, "tokens", train__steps=None, train__budget={"tokens": 100})
    assert json.loads((run / "run.json").read_text())["result"]["tokens"] == 128  # 4 steps of 2 x 16
    run_cli.ok("train", tmp_path / "tokens.yaml", "--out", run, "--resume")  # the same recipe: nothing is left to do
    run_cli.refused(
        "train",
        tmp_path / "tokens.yaml",
        "--out",
        run,
        "--resume",
        "--set",
        "train.budget.tokens=640",
        says=("train.budget.tokens: 100.0 in the run, 640.0 now", "train.steps: 4 in the run, 20 now"),
    )


def test_rows_of_a_step(tmp_path: Path, corpus: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[LoopPlan] = []
    real = loop.step_loss

    def step_loss(*arguments: Any) -> Any:
        inputs_BT, plan = arguments[3], arguments[6]
        parts.append(plan)
        assert plan.rows is None or len(plan.rows) == len(inputs_BT)
        return real(*arguments)

    monkeypatch.setattr(loop, "step_loss", step_loss)
    run = train(run_cli, tmp_path, corpus, "rows", depth=PER_ROW, train__batch_size=4, train__micro_batches=2)
    config = load_recipe(run / "recipe.yaml")
    cost, spent, expected = StepFlops(config.model, config.objective, False), 0.0, []
    for line in (line for line in metrics(run) if line["type"] == "train"):
        plan = config.depth.draw(0, line["train_step"] - 1, 4)
        assert (line["loops"], line["mean_loops"]) == (plan.n_loops, plan.mean_loops)
        expected += [LoopPlan.of(plan.depths[i : i + 2] if plan.rows else plan.depths, 2, plan.draw) for i in (0, 2)]
        spent += sum(cost(LoopPlan.of([n], 2), 0) * 16 for n in plan.rows or [plan.n_loops] * 4)
        assert line["executed_flops"] == pytest.approx(spent, rel=1e-12)
    assert parts == expected and any(plan.rows for plan in parts)


@pytest.mark.parametrize("depth", [PER_ROW, DEPTHS["curriculum"]], ids=["per row", "curriculum"])
def test_a_resumed_run_draws_what_the_whole_one_draws(
    depth: Any, tmp_path: Path, corpus: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"depth": depth, "train__steps": None, "train__budget": {"flops": BUDGET_FLOPS}, "train__log_every": 4}
    whole, real = train(run_cli, tmp_path, corpus, "whole", **changes), Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == 5:
            signal.raise_signal(signal.SIGINT)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        halved = train(run_cli, tmp_path, corpus, "halved", **changes)
    run_cli.ok("train", halved / "recipe.yaml", "--out", halved, "--resume")
    assert metrics(halved) == metrics(whole)
    weights = [checkpoint.listed(run / "checkpoints")[-1] / "model.safetensors" for run in (whole, halved)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
