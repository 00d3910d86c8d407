"""The project's recipes: each is what it says it is, at the size that is published, and matched where it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml

from alcoda.model import cost
from alcoda.model.cost import Ledger
from alcoda.model.lm import RecurrentLM
from alcoda.training.folders import is_overlay, project_recipes, recipe_files
from alcoda.training.recipe import Recipe, load_recipe

ROOT = project_recipes()
FILES = recipe_files(ROOT)
OVERLAYS = {file.stem for file in FILES if is_overlay(file, ROOT)}
NAMES = [file.relative_to(ROOT).with_suffix("").as_posix() for file in FILES if not is_overlay(file, ROOT)]
MINI = sorted(name.removeprefix("mini/") for name in NAMES if name.startswith("mini/"))
LARGEST_LINE = 120
WITHIN = 0.005


def numel(recipe: Recipe) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in RecurrentLM(recipe.model).parameters())


def test_the_recipes_that_there_are() -> None:
    """The list is read from the folder: it is not empty, and holds each design twice in mini."""
    designs = {"grt", "elastic", "cart", "huginn", "parcae", "mor", "mor_token_choice", "ouro", "rrt"} | set(LRT)
    assert set(MINI) == {"dense"} | designs | {f"{name}_isoparam" for name in designs}
    assert len([name for name in NAMES if name.startswith("papers/cart_d")]) == 14  # with dense_7l and dense_12l


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe(name: str) -> None:
    file = ROOT / f"{name}.yaml"
    recipe = load_recipe(file)
    assert recipe.resolved().name == file.stem
    assert recipe.source and recipe.description and "\n" not in recipe.description
    assert "papers.md" in recipe.source
    assert recipe.ledger().params == numel(recipe)
    assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= LARGEST_LINE


def millions(name: str) -> float:
    return load_recipe(f"papers/{name}").ledger().params / 1e6


@pytest.mark.parametrize("r", [6, 8, 10])
@pytest.mark.parametrize(
    ("d", "params"), [(256, 14_365_187), (512, 41_051_139), (768, 75_339_267), (1024, 125_093_891)]
)
def test_cart(d: int, r: int, params: int) -> None:
    """The stored sizes are published: 14.37, 41.05, 75.34, 125.09 M (papers.md 2.1). They do not grow with R."""
    recipe = load_recipe(f"papers/cart_d{d}_r{r}")
    ledger = recipe.ledger()
    assert ledger.params == params
    core = sum(term.params for term in ledger.terms if term.name.startswith("core."))
    shared = d + 3 + 32 * d  # update, hyper-connections and loop embedding are used in every loop too
    assert ledger.effective_params == params + (r - 1) * (core + shared)
    assert ledger.loops == r and ledger.latent_kv_bytes_per_token == 2 * 8 * d // 4  # (P + 2) d / 4 floats


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [
        ("huginn_3.5b", 3500, 0.02),
        ("parcae_140m", 140, 0.06),
        ("parcae_370m", 370, 0.06),
        ("parcae_770m", 770, 0.06),
        ("parcae_1.3b", 1300, 0.06),
        ("ouro_1.4b", 1400, 0.03),
        ("elastic_135m", 135, 0.01),
    ],
)
def test_sizes_are_near_the_published_ones(name: str, published: float, within: float) -> None:
    """They are published by these rounded names only."""
    assert millions(name) == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("name", "published"),
    [("mor_360m_r2", 167), ("mor_360m_r3", 118), ("mor_360m_r3_token_choice", 118)],
)
def test_mor(name: str, published: float) -> None:
    """Without the embedding, SmolLM-360M has 315 M, MoR on it 167 and 118 M."""
    block_params = 2 * 960 * 960 + 2 * 960 * 320 + 3 * 960 * 2560
    assert round(32 * block_params / 1e6) == 315
    model = load_recipe(f"papers/{name}").model
    assert model.n_blocks_run == 32 and model.n_core * model.n_loops == 30
    assert round(millions(name) - 49152 * 960 / 1e6) == published


def test_grt_stays() -> None:
    assert load_recipe("papers/grt_medium_isoflop").ledger().params == 171_073_536
    assert load_recipe("papers/grt_large_isoparam").ledger().params == 781_780_480


def test_grt_large_has_three_eighths_of_gpt2_large() -> None:
    """62.5% fewer parameters at the same depth of 36 blocks; anchor keys change nothing but the cache."""
    isoflop, dense = load_recipe("papers/grt_large_isoflop"), load_recipe("papers/gpt2_large")
    assert (isoflop.ledger().params, dense.ledger().params) == (290_196_480, 773_582_080)
    assert isoflop.model.n_blocks_run == dense.model.n_blocks_run == 36
    assert isoflop.ledger().kv_bytes_per_token == dense.ledger().kv_bytes_per_token
    anchor = load_recipe("papers/grt_large_isoflop", ["model.keys=anchor"]).ledger()
    assert anchor.params == isoflop.ledger().params
    assert anchor.kv_bytes_per_token * 36 == isoflop.ledger().kv_bytes_per_token * (1 + 5 + 5)


def test_the_shape_of_serving_benchmarks() -> None:
    """Nothing but a core of 4 blocks, run 8 times: 4 of 32 blocks are stored, and the injection."""
    model = load_recipe("engine/d512").model
    assert (model.d_model, model.n_heads, model.vocab_size) == (512, 8, 8192)
    assert (model.n_prelude, model.n_core, model.n_coda, model.n_loops) == (0, 4, 0, 8)
    block = 4 * 512**2 + 3 * 512 * model.shape.d_ff + 2 * 512
    assert load_recipe("engine/d512").ledger().params == 8192 * 512 + 4 * block + 2 * 512**2 + 512


def test_the_arms_of_grts_comparison() -> None:
    """The same blocks and injection; the gate's 3 d^2 + 4 d less; the Poisson arm loops R times in the mean."""
    base = load_recipe("papers/grt_small_isoflop")
    for name, mean in (("grt_small_poisson", 10.0), ("grt_small_heavy_tail", 10 * 1.328)):
        arm = load_recipe(f"papers/{name}")
        changed = {
            field for field in type(arm.model).model_fields if getattr(arm.model, field) != getattr(base.model, field)
        }
        assert changed == {"inject", "update"}
        assert base.ledger().params - arm.ledger().params == 3 * 768**2 + 4 * 768
        assert arm.ledger().training_loops == pytest.approx(mean, rel=0.003)


def mini(name: str) -> tuple[Recipe, Ledger]:
    recipe = load_recipe(f"mini/{name}")
    return recipe, recipe.ledger()


LRT = ("lrt_dense", "lrt_elastic")


@pytest.mark.parametrize("name", [name for name in MINI if not name.startswith("lrt")])
def test_mini_is_matched_to_dense(name: str) -> None:
    dense_recipe, dense = mini("dense")
    recipe, ledger = mini(name)
    by_params = name.endswith("_isoparam")
    found, goal = (
        (ledger.params, dense.params)
        if by_params
        else (ledger.training_flops_per_token, dense.training_flops_per_token)
    )
    assert abs(found / goal - 1) <= WITHIN
    # Both are matched, and not one number twice: what is not matched differs.
    other = (
        ledger.training_flops_per_token / dense.training_flops_per_token if by_params else ledger.params / dense.params
    )
    assert name == "dense" or abs(other - 1) > 10 * WITHIN
    assert 2e6 < ledger.params < 10e6 and 128 <= recipe.model.shape.d_ff <= 2048
    assert (recipe.data, recipe.train) == (dense_recipe.data, dense_recipe.train)
    sizes = ("vocab_size", "seq_len", "d_model", "n_heads")
    assert all(getattr(recipe.model, size) == getattr(dense_recipe.model, size) for size in sizes)


@pytest.mark.parametrize("name", LRT)
def test_a_mini_memory_is_matched_to_dense_over_the_run(name: str) -> None:
    """A token costs two passes, so the same blocks as without a memory see about half the tokens."""
    dense_recipe, dense = mini("dense")
    base, recipe = (load_recipe(f"mini/{one}") for one in (name.removeprefix("lrt_"), name))
    goal = dense_recipe.n_steps * dense.training_flops_per_token
    assert abs(recipe.n_steps * recipe.ledger().training_flops_per_token / goal - 1) <= WITHIN
    own = {axis: getattr(recipe.model, axis) for axis in ("memory", "embedding")}
    assert recipe.model == base.model.model_copy(update=own) and recipe.model.embedding.kind == "norm"
    whole = recipe.train.model_copy(update={"steps": dense_recipe.n_steps})
    assert (recipe.data, whole) == (dense_recipe.data, dense_recipe.train)
    assert abs(load_recipe(f"mini/{name}_isoparam").ledger().params / dense.params - 1) <= WITHIN
    assert load_recipe(f"mini/{name}_isoparam").train == dense_recipe.train


@pytest.mark.parametrize(("name", "shared", "per_layer"), [("lrt_20l", 0.30, 5.0), ("lrt_24l", 0.30, 5.7)])
def test_lrt(name: str, shared: float, per_layer: float) -> None:
    """What the memory adds, in percent (papers.md 4.1), and the sizes that are named: 1.316 and 1.99 B without it."""
    plain = load_recipe(f"papers/{name}", ["passes=one", "model.memory=none"]).ledger().params
    assert plain / 1e9 == pytest.approx({"lrt_20l": 1.316, "lrt_24l": 1.99}[name], abs=0.002)
    assert 100 * (load_recipe(f"papers/{name}").ledger().params / plain - 1) == pytest.approx(shared, abs=0.05)
    own, _ = put(f"papers/{name}", "lrt_per_layer")
    assert 100 * (own.ledger().params / plain - 1) == pytest.approx(per_layer, abs=0.05)


def test_a_mini_recipe_with_another_d_ff_is_not_matched() -> None:
    """The control: eight more in d_ff are seen."""
    recipe, _ = mini("grt")
    assert recipe.model.d_ff is not None
    wider = load_recipe("mini/grt", [f"model.d_ff={recipe.model.d_ff + 8}"]).ledger()
    assert abs(wider.training_flops_per_token / mini("dense")[1].training_flops_per_token - 1) > WITHIN


GRT_BASES = ("papers/grt_small_isoflop", "mini/grt")
CART_BASES = ("papers/cart_d1024_r6", "mini/cart")
LRT_CHANGES: dict[str, dict[str, Any]] = {
    "source_first": {"source": "prelude.0"},
    "source_final": {"source": "final"},
    "lag_2": {"lag": 2},
    "mean_of_4": {"mean_of": 4},
    "kv_only": {"residual": False, "beta": None},
    "residual_only": {"kv": False},
    "per_layer": {"share": "per_layer"},
    "gated_only": {},
    "chunked": {},
    "1_subset": {},
    "4_subsets": {},
    "refined": {},
}
"""By overlay, what of the memory changes."""
LRT_PASSES: dict[str, tuple[float, Callable[[int], float]]] = {
    "chunked": (1, lambda n_tokens: 1 - 64 / n_tokens),
    "refined": (4, lambda n_tokens: 3),
}
"""By overlay, how many times a token is run, and in how many of them with a memory, where that is not 2 and 1."""
RUNGS = ("grt_1_recurrence", "grt_2_prelude_coda", "grt_3_state_noise", "grt_4_injection", "grt_5_gate")


def test_every_overlay_is_tested() -> None:
    cart = {"unfrozen_keys", "one_loop", "unshared_core", "no_hyper", "no_lti", "no_loop_index"}
    assert {*RUNGS, *(f"cart_{name}" for name in cart), *(f"lrt_{name}" for name in LRT_CHANGES)} == OVERLAYS
    for name in OVERLAYS:
        data: dict[str, Any] = yaml.safe_load((ROOT / "ablations" / f"{name}.yaml").read_text(encoding="utf-8"))
        assert data["description"] and set(data) <= {"description", "model", "eval", "passes"}


def put(base: str, *overlays: str) -> tuple[Recipe, Ledger]:
    recipe = load_recipe(base, (), [f"ablations/{name}" for name in overlays])
    recipe.resolved()
    assert recipe.ledger().params == numel(recipe)
    return recipe, recipe.ledger()


@pytest.mark.parametrize("base", GRT_BASES)
def test_the_ladder_of_grt(base: str) -> None:
    """Each rung adds what it says: two stacks, nothing, W_proj, the gate; the last one is the base."""
    whole, goal = load_recipe(base), load_recipe(base).ledger()
    rungs = [put(base, name) for name in RUNGS]
    (alone, *_, last), ledgers = [recipe for recipe, _ in rungs], [ledger for _, ledger in rungs]
    d, loops = whole.model.d_model, whole.model.n_loops
    assert last.model == whole.model and ledgers[-1].params == goal.params
    assert alone.model.n_blocks_run == whole.model.n_core * loops

    def parts(names: tuple[str, ...], what: str) -> float:
        return sum(getattr(term, what) for term in goal.terms if term.name.startswith(names))

    flops = [ledger.forward_flops_per_token for ledger in ledgers]
    params = [ledger.params for ledger in ledgers]
    assert params[1] - params[0] == parts(("prelude.", "coda."), "params")
    assert flops[1] - flops[0] == parts(("prelude.", "coda."), "forward_flops")
    assert (params[2], flops[2]) == (params[1], flops[1])
    assert (params[3] - params[2], flops[3] - flops[2]) == (2 * d * d + d, loops * 4 * d * d)
    assert (params[4] - params[3], flops[4] - flops[3]) == (3 * d * d + 4 * d, loops * 6 * d * d)
    noises = [getattr(recipe.model.inject, "noise", 0.0) for recipe, _ in rungs]
    assert noises == [0.0, 0.0, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("base", CART_BASES)
def test_the_ablations_of_cart(base: str) -> None:
    whole, goal = put(base)
    d, loops = whole.model.d_model, whole.model.n_loops
    terms = {term.name: term for term in goal.terms}
    core = [term for name, term in terms.items() if name.startswith("core.")]
    for name, params in (("no_hyper", 3), ("no_lti", d), ("no_loop_index", 32 * d)):
        _, ledger = put(base, f"cart_{name}")
        assert goal.params - ledger.params == params
        assert ledger.forward_flops_per_token == goal.forward_flops_per_token

    _, one = put(base, "cart_one_loop")
    assert (one.loops, one.training_loops, one.params) == (1, 1, goal.params)
    assert (
        goal.forward_flops_per_token - one.forward_flops_per_token
        == sum(term.forward_flops for term in core) * (loops - 1) / loops
    )

    _, own = put(base, "cart_unfrozen_keys")
    assert own.params == goal.params
    keys = terms["keys"]
    assert own.forward_flops_per_token - goal.forward_flops_per_token == (loops - 1) * keys.forward_flops
    assert own.kv_bytes_per_token - goal.kv_bytes_per_token == (loops - 1) * keys.kv_bytes > 0

    recipe, unshared = put(base, "cart_unshared_core")
    assert unshared.params - goal.params == (loops - 1) * sum(term.params for term in core)
    assert unshared.forward_flops_per_token == goal.forward_flops_per_token
    assert recipe.model.max_loops == loops and recipe.resolved().eval.loops == (loops,)
    both, _ = put(base, "cart_unshared_core", "cart_unfrozen_keys")
    assert both.model.keys.own_keys and not both.model.sharing.is_tied


@pytest.mark.parametrize("base", ["papers/lrt_20l", "mini/lrt_dense", "mini/lrt_elastic"])
def test_the_ablations_of_lrt(base: str) -> None:
    """Each changes the memory, or the passes, and costs what that costs."""
    whole, goal = put(base)

    def flops(passes: float, remembered: float) -> float:
        """Of the whole model, were a token run so many times, in so many of them with a memory."""
        mixture = whole.step_flops.mixture(whole.depth.resolve(whole.model.n_loops, whole.n_steps))
        changed = [(share, replace(depth, passes=passes, remembered=remembered)) for share, depth in mixture]
        return cost.ledger(whole.model, None, changed).training_flops_per_token

    assert flops(1, 1) > flops(1, 0) > 0
    for name, changes in LRT_CHANGES.items():
        recipe, ledger = put(base, f"lrt_{name}")
        kind = {"gated_only": "gated"}.get(name, "prev_token")
        assert recipe.model.memory.kind == kind
        if kind == "prev_token":
            assert recipe.model.memory == whole.model.memory.model_copy(update=changes)
        assert (recipe.passes == whole.passes) is (
            name not in ("gated_only", "chunked", "1_subset", "4_subsets", "refined", "lag_2")
        )
        if not changes and kind == "prev_token":
            assert ledger.params == goal.params
            passes, remembered_of = LRT_PASSES.get(name, (2, lambda n_tokens: 1))
            remembered = remembered_of(whole.model.seq_len)
            expected = (passes - remembered) * flops(1, 0) + remembered * flops(1, 1)
            assert recipe.passes.cost() == passes
            assert ledger.training_flops_per_token == pytest.approx(expected, rel=1e-12)
    none = load_recipe(base, ["passes=one", "model.memory=none"]).ledger()
    only_kv, only_residual = put(base, "lrt_kv_only")[1], put(base, "lrt_residual_only")[1]
    assert (only_kv.params - none.params) + (only_residual.params - none.params) == goal.params - none.params
    assert only_residual.forward_flops_per_token == none.forward_flops_per_token
