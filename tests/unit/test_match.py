"""Equal cost: the nearest legal value, by search against trying them all and against the papers' formulas."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import alcoda
from alcoda.config import validate
from alcoda.errors import UsageError
from alcoda.training.match import match
from alcoda.training.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def load(name: str, *settings: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", settings)


WIDE = "model.d_ff=704"
"""As the recipes stand they meet already: with blocks as wide as dense's there is something to solve."""
MINI = load("mini/grt", WIDE), load("mini/dense")
SMALL = load("papers/grt_small_isoflop"), load("papers/gpt2_small")


def recipe(depth: Any = "uniform", train: dict[str, Any] | None = None, **model: Any) -> Recipe:
    sizes = {"vocab_size": 64, "seq_len": 16, "d_model": 16, "n_heads": 2, "n_loops": 6, "inject": "add"}
    return validate(Recipe, {"model": sizes | model, "depth": depth, "train": train or {}})


# -- known values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["flops", "params"])
def test_mini_grt_meets_mini_dense(by: str) -> None:
    found = match(*MINI, by, "d_ff")
    assert abs(found.off_percent) < 0.5
    got, wanted = found.recipe.ledger(), MINI[1].ledger()
    if by == "params":
        assert got.params == pytest.approx(wanted.params, rel=0.005)
    else:
        assert got.training_flops_per_token == pytest.approx(wanted.training_flops_per_token, rel=0.005)
    assert abs(100 * (found.before.cost / found.target.cost - 1)) > 0.5  # control: it did not before


def test_grt_small_at_truly_equal_flops() -> None:
    # 12 (24 d^2 + 4 S d) = 12 (8 d^2 + 4 S d + 4 d f) + 10 x 10 d^2  (papers.md 1.3)  <=>  f = 92 d / 48
    at_max = match(*SMALL, "flops", "d_ff", "max")
    assert at_max.after.value == 92 * 768 // 48 == 1472 and at_max.off_percent == 0
    assert at_max.settings == ("model.d_ff=1472",) and at_max.before.value == 3072
    # The same with 5.5 loops in the mean: 7.5 (8 d^2 + 4 S d + 4 d f) + 55 d^2  <=>  f = (173 d + 18 S) / 30
    at_mean = match(*SMALL, "flops", "d_ff")
    assert at_mean.at == "mean" and at_mean.after.value == round((173 * 768 + 18 * 1024) / 30)
    assert abs(at_mean.off_percent) < 0.5 and abs(match(*SMALL, "flops", "n_loops").off_percent) < 0.5


def test_free_loops_and_width_of_grt_small() -> None:
    # A loop is one block and 10 d^2: 10 (24 d + 4 S) / (34 d + 4 S) = 7.46 at d = 768
    assert match(*SMALL, "flops", "n_loops", "max").after.value == 7
    found = match(*SMALL, "params", "d_model")
    assert found.settings == ("model.d_model=1216", "model.n_heads=19")
    assert found.recipe.model.shape.d_head == 64 and found.recipe.model.shape.d_ff == 4 * 1216


def test_tokens_make_runs_cost_the_same() -> None:
    found = match(*MINI, "flops", "tokens")
    a, b = (r.ledger().training_flops_per_token for r in MINI)
    steps = round(2000 * b / a)
    assert found.settings == (f"train.steps={steps}",) and found.after.value == steps * 16 * 256
    assert found.target.value == 2000 * 16 * 256
    paid = load("mini/grt", WIDE, "train.steps=null", "train.budget={tokens: 1e6}")
    again = match(paid, MINI[1], "flops", "tokens")
    assert again.settings == ("train.budget=null", f"train.steps={steps}") and again.before.value == 245 * 16 * 256
    budget = match(MINI[0], load("mini/dense", "train.steps=null", "train.budget={tokens: 1e6}"), "flops", "tokens")
    assert budget.after.value == round(245 * b / a) * 16 * 256


# -- laws -------------------------------------------------------------------------------------------------------------

FREE = {
    "d_ff": lambda n: {"d_ff": n},
    "n_loops": lambda n: {"n_loops": n},
    "d_model": lambda n: {"d_model": 8 * n, "n_heads": n},
}


def costs(made: Recipe) -> dict[str | None, float]:
    ledger = made.ledger()
    return {"mean": ledger.training_flops_per_token, "max": ledger.forward_flops_per_token, None: ledger.params}


@functools.cache
def tried(free: str) -> list[dict[str | None, float]]:
    """What every value costs that the first recipe may take: the same in each example."""
    return [costs(recipe(**FREE[free](n))) for n in range(1, 200)]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(FREE)),
    st.sampled_from(["mean", "max", None]),
    st.integers(2, 40),
    st.integers(2, 40),
    st.integers(1, 3),
)
def test_no_value_is_nearer(free: str, at: str | None, own: int, other: int, n_prelude: int) -> None:
    if (free, at) == ("n_loops", None):
        return  # changes no parameters
    a, b = recipe(**FREE[free](own)), recipe(n_prelude=n_prelude, vocab_size=80, **FREE[free](other))

    def cost(made: Recipe) -> float:
        return costs(made)[at]

    found = match(a, b, "params" if at is None else "flops", free, at)
    aim = cost(b)
    assert abs(cost(found.recipe) - aim) == min(abs(one[at] - aim) for one in tried(free))
    assert (found.before.cost, found.after.cost, found.target.cost) == (cost(a), cost(found.recipe), cost(b))
    assert cost(a) == cost(recipe(**FREE[free](own)))


def test_the_settings_make_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MINI[0].to_yaml())
    for by, free, at in [("params", "d_model", None), ("flops", "n_loops", "mean"), ("flops", "tokens", None)]:
        found = match(*MINI, by, free, at)
        assert load_recipe(tmp_path / "a.yaml", found.settings) == found.recipe
        assert match(found.recipe, MINI[1], by, free, at).after == found.after  # nothing is nearer than the nearest


def test_a_kept_recipe_with_a_budget_is_solved_too() -> None:
    kept = recipe(train={"budget": {"flops": 1e10}}).resolved()
    found = match(kept, recipe(d_ff=100), "params", "d_ff")
    assert found.settings == ("model.d_ff=100", "train.steps=null") and found.off_percent == 0
    assert found.recipe.resolved().n_steps < kept.n_steps  # the same spend on a larger model
    assert match(kept, recipe(), "flops", "tokens").settings[:1] == ("train.budget=null",)


def test_what_is_left_to_the_loops_follows_them_and_what_is_named_stays() -> None:
    deeper = recipe(n_loops=12)
    assert match(recipe("uniform"), deeper, "flops", "n_loops").after.value == 12
    assert match(recipe({"kind": "uniform", "min": 3}), deeper, "flops", "n_loops").after.value == 10
    curriculum = {"kind": "curriculum", "inner": "uniform", "steps": 500}
    assert match(recipe(curriculum), deeper, "flops", "n_loops").after.value > 12  # shallow at first
    named = recipe({"kind": "uniform", "max": 6})
    with pytest.raises(UsageError, match=r"changes no training FLOPs .* names loops of its own; set them to null"):
        match(named, deeper, "flops", "n_loops")
    assert match(named, deeper, "flops", "n_loops", "max").after.value == 12


def test_heads_keep_their_width_and_heads_of_keys_divide() -> None:
    a = recipe(d_model=48, n_heads=6, block={"attention": {"kind": "gqa", "n_kv_heads": 3}})
    for d_model in (60, 70, 100, 30):
        shape = match(a, recipe(d_model=d_model, n_heads=d_model // 10), "params", "d_model").recipe.model.shape
        assert shape.d_head == 8 and shape.n_heads % 3 == 0 and shape.d_model == 8 * shape.n_heads
    # d_head of its own: 6 heads for 40 dimensions go in steps of 3 for 20.
    found = match(recipe(d_model=40, n_heads=6, d_head=10), recipe(d_model=100), "params", "d_model").recipe.model
    assert found.d_head == 10 and found.n_heads * 20 == found.d_model * 3


# -- what cannot be met -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "how", "says"),
    [
        (SMALL[1], SMALL[0], ("params", "d_ff"), r"down to d_ff=1 it stays above it \(parameters: 67,769,088 there, "),
        (SMALL[1], SMALL[0], ("params", "d_ff"), r"against 63,611,904\), .* d_ff goes from 1 to 1,000,000,000"),
        (SMALL[0], SMALL[1], ("params", "n_loops"), "changes no parameters .* loops share their parameters"),
        (SMALL[1], SMALL[0], ("flops", "n_loops"), "is dense .* free d_ff or d_model"),
        (SMALL[0], recipe(), ("params", "d_model"), r"down to d_model=64 it stays above .* from 64 to 1,000,000,000"),
        (SMALL[0], recipe(), ("flops", "n_loops"), r"down to n_loops=1 it stays above"),
        (recipe(), SMALL[0], ("flops", "n_loops", "max"), r"up to n_loops=10,000 it stays below"),
        (
            recipe({"kind": "lognormal", "max": 9}),
            SMALL[0],
            ("flops", "n_loops"),
            r"up to n_loops=9 it stays below .* n_loops ends there: depth\.mean=10 lies outside min=1 \.\. max=9",
        ),
        (SMALL[0], recipe(train={"steps": 1}), ("flops", "tokens"), r"down to tokens=491,520 it stays above"),
        (*MINI, ("flop", "d_ff"), "--match flop: there is no such choice; did you mean 'flops'"),
        (*MINI, ("flops", "dff"), "--free dff: there is no such choice; did you mean 'd_ff'"),
        (*MINI, ("flops", "d_ff", "men"), "--at men: there is no such choice; did you mean 'mean'"),
        (*MINI, ("params", "d_ff", "max"), "--at max says where FLOPs are compared"),
        (*MINI, ("params", "tokens"), "tokens change no parameters"),
        (*MINI, ("flops", "tokens", "max"), "--free tokens compares training FLOPs"),
        ("mini/grt.yaml", MINI[1], ("flops", "d_ff"), "match takes two Recipes"),
    ],
)
def test_an_impossible_match_says_why(a: Any, b: Any, how: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        alcoda.match(a, b, *how)
