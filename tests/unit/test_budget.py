"""A budget is the number of steps that it pays for, at the depths that this seed draws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from alcoda.config import validate
from alcoda.depth.sample import LoopPlan
from alcoda.errors import UsageError
from alcoda.model.cost import TrainingDepth, ledger
from alcoda.training.budget import StepFlops
from alcoda.training.objective import NextToken
from alcoda.training.recipe import Recipe, load_recipe

DEPTHS: dict[str, Any] = {
    "fixed": "fixed",
    "uniform": {"kind": "uniform", "last_k": 2},
    "per sequence": {"kind": "poisson", "per": "sequence"},
    "curriculum": {"kind": "curriculum", "inner": "lognormal", "steps": 60},
    "long curriculum": {"kind": "curriculum", "inner": "uniform", "steps": 10**8},
}
TOKENS = 4 * 16
"""Of a step."""

over_depths = pytest.mark.parametrize("depth", DEPTHS.values(), ids=list(DEPTHS))


def recipe(depth: Any = "fixed", seed: int = 0, **train: Any) -> Recipe:
    model = {"vocab_size": 64, "seq_len": 16, "d_model": 16, "n_heads": 2, "n_loops": 6, "inject": "add"}
    return validate(Recipe, {"model": model, "depth": depth, "train": {"batch_size": 4, "seed": seed, **train}})


def executed_flops(made: Recipe, n_steps: int) -> float:
    """Written out: a row costs the blocks around the loop three times, and its loops by whether they have gradients."""
    terms = ledger(made.model, 1).terms
    looped = sum(t.forward_flops for t in terms if t.name.startswith(("core", "inject", "update", "loop_norm")))
    around = 3 * sum(t.forward_flops for t in terms) - 3 * looped
    depth, spent = made.depth.resolve(6, n_steps), 0
    for step in range(n_steps):
        plan = depth.draw(made.train.seed, step, 4)
        for n in plan.rows or [plan.n_loops] * 4:
            n_grad = min(n, depth.last_k or n)
            spent += 16 * (around + looped * (n + 2 * n_grad))
    return spent


@over_depths
@pytest.mark.parametrize("seed", [0, 1])
def test_flops_are_spent_to_the_nearest_step(depth: Any, seed: int) -> None:
    for budget in (3e9, 1e8):
        made = recipe(depth, seed, budget={"flops": budget}).resolved()
        n = made.n_steps
        assert made.train.steps == n > 1
        off = [abs(executed_flops(made, n + i) - budget) for i in (-1, 0, 1)]
        assert off[1] == min(off)


def test_equal_flops_are_more_steps_of_a_shallower_sampler() -> None:
    steps = {name: recipe(depth, budget={"flops": 3e9}).n_steps for name, depth in DEPTHS.items()}
    assert steps["fixed"] < steps["uniform"] < steps["long curriculum"]
    assert steps["uniform"] != recipe(DEPTHS["uniform"], 1, budget={"flops": 3e9}).n_steps  # this seed's draws


@over_depths
def test_tokens(depth: Any) -> None:
    assert recipe(depth, budget={"tokens": 10 * TOKENS}).n_steps == 10
    assert recipe(depth, budget={"tokens": 10 * TOKENS + 1}).n_steps == 11
    assert recipe(depth, budget={"tokens": 1}).n_steps == 1
    params = ledger(recipe(depth).model).params
    made = recipe(depth, budget={"tokens_per_param": 2.5})
    assert made.n_steps == math.ceil(2.5 * params / TOKENS)


@over_depths
@pytest.mark.parametrize("budget", [{"flops": 1e9}, {"tokens": 12345}, {"tokens_per_param": 1}])
def test_what_a_run_folder_keeps_is_read_back(depth: Any, budget: Any, tmp_path: Path) -> None:
    kept = recipe(depth, budget=budget).resolved()
    assert kept.train.steps is not None and kept.train.budget is not None and kept.resolved() == kept
    (tmp_path / "recipe.yaml").write_text(kept.to_yaml())
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again == kept and again.resolved() == kept and again.ledger() == kept.ledger()
    with pytest.raises(UsageError, match=rf"train\.steps={kept.n_steps + 1} and train\.budget .* disagree"):
        load_recipe(tmp_path / "recipe.yaml", [f"train.steps={kept.n_steps + 1}"]).resolved()
    other = load_recipe(tmp_path / "recipe.yaml", ["train.steps=null", "train.budget={tokens: 640}"])
    assert other.resolved().train.steps == 10


def test_steps_without_a_budget() -> None:
    assert recipe().n_steps == 1000 and recipe().resolved().train.steps == 1000
    assert recipe(steps=7).n_steps == 7 and recipe(steps=10**12).n_steps == 10**12


def test_the_ledger_takes_its_mean_over_the_run() -> None:
    long, short = (recipe(DEPTHS["curriculum"], steps=n).ledger().training_loops for n in (10_000, 10))
    assert short < 2 < 5.5 < long
    assert recipe(DEPTHS["curriculum"], budget={"tokens": 10 * TOKENS}).ledger().training_loops == short


def test_a_budget_of_less_than_a_step_says_what_one_costs() -> None:
    made = recipe()
    one = executed_flops(made, 1)
    with pytest.raises(UsageError, match=rf"first one costs {one:.4g} FLOPs".replace("+", r"\+")):
        recipe(budget={"flops": one * 0.999}).resolved()
    assert recipe(budget={"flops": one}).n_steps == recipe(budget={"flops": one * 1.4}).n_steps == 1


def test_a_step_costs_the_mean_of_its_rows() -> None:
    model = recipe().model
    cost = StepFlops(model, NextToken(), True)
    rows = [(5, 3), (2, 2), (7, 3), (2, 2)]
    each = [ledger(model, None, TrainingDepth(n, k, True)).training_flops_per_token for n, k in rows]
    assert cost(LoopPlan.of([n for n, _ in rows], 3), 0) == pytest.approx(sum(each) / 4, rel=1e-12)
    assert cost(LoopPlan(4, 3), 0) == each[2]
    assert cost(LoopPlan(4, 3), 0) > StepFlops(model, NextToken(), False)(LoopPlan(4, 3), 0)
