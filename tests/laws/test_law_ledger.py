"""Law 6: what the ledger says is what is there: parameters, FLOPs, bytes of keys. Configs survive their round trips."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from space import GRT, cases, house, over_space

import alcoda
from alcoda.laws.law import LawBroken
from alcoda.laws.ledger import (
    check_checkpoint_round_trip,
    check_config_round_trip,
    check_forward_flops,
    check_kv_bytes,
    check_params,
    check_training_flops,
    counted_by_chance,
    counted_flops,
)
from alcoda.laws.subject import Subject, at_most, is_causal, make
from alcoda.model import cost
from alcoda.model.attention import Attention
from alcoda.model.config import ModelConfig
from alcoda.model.cost import TrainingDepth, ledger
from alcoda.model.shape import Cost, Place, Shape
from alcoda.training.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = [*sorted((ROOT / "recipes").rglob("*.yaml")), Path(alcoda.__file__).parent / "quickstart.yaml"]
RECIPES = [path for path in RECIPES if path.parent.name != "ablations"]  # overlays, which are parts of a recipe

both_depths = pytest.mark.parametrize("n_loops", [1, 3])
over_recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")

# -- parameters -------------------------------------------------------------------------------------------------------


@over_space()
def test_params(config: ModelConfig) -> None:
    check_params(config)


@over_recipes
def test_params_of_recipes(path: Path) -> None:
    check_params(load_recipe(path).model)


def is_counted(config: ModelConfig) -> bool:
    return counted_by_chance(Subject(config)) is None


def is_cut_off(config: ModelConfig) -> bool:
    kept = config.anchor_reaches_loop or config.carry.carries_anchor
    return not (kept or config.route.gathers)


# -- FLOPs ------------------------------------------------------------------------------------------------------------


@over_space(is_counted)
def test_forward_flops(config: ModelConfig) -> None:
    check_forward_flops(config, at_most(config, 2))


@both_depths
def test_forward_flops_by_depth(n_loops: int) -> None:
    check_forward_flops(house(**GRT), n_loops)


@over_recipes
def test_forward_flops_of_recipes(path: Path) -> None:
    config = load_recipe(path).model
    if not is_counted(config):
        pytest.skip("how many tokens run is the router's choice: test_law_recurrence counts them")
    check_forward_flops(config, min(config.n_loops, 2))


@over_space(is_counted)
def test_training_flops(config: ModelConfig) -> None:
    """A forward pass, a backward pass and a recomputed one of each term; one loop of two carries gradients."""
    n_loops = at_most(config, 2)
    check_training_flops(config, n_loops, n_free=n_loops - 1 if config.anchor_reaches_loop else 0, recompute=True)


@pytest.mark.parametrize("n_free", [0, 1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_flops_by_depth(n_free: int, recompute: bool) -> None:
    check_training_flops(house(**GRT), 3, n_free, recompute)


@over_space(is_cut_off)
def test_a_prelude_cut_off_by_free_loops_has_no_backward_pass(config: ModelConfig) -> None:
    """The exception: the ledger counts a backward pass of the prelude, which gets no gradient here."""
    terms = ledger(config, 3, TrainingDepth(3, 2)).terms
    overcounted = sum(2 * term.forward_flops for term in terms if term.name.startswith("prelude."))
    formula = sum(term.training_flops for term in terms)
    assert formula - overcounted == counted_flops(config, 3, True, n_free=1)


def test_torch_recomputes_less_where_a_loop_ends_in_a_matrix_product() -> None:
    """The exception: its output is not needed again, so torch stops before it. The ledger counts it."""
    config = house(inject="concat")
    formula = ledger(config, 3, TrainingDepth(3, 3, True)).training_flops_per_token
    last = 2 * config.shape.d_ff * config.shape.d_model
    assert formula - 3 * last == counted_flops(config, 3, True, recompute=True)


@pytest.mark.parametrize("path", [p for p in RECIPES if p.parent.name != "papers"], ids=lambda path: path.stem)
def test_training_flops_of_recipes(path: Path) -> None:
    config = load_recipe(path).model
    if not is_counted(config):
        pytest.skip("how many tokens run is the router's choice: test_law_recurrence counts them")
    check_training_flops(config, min(config.n_loops, 2))


def test_training_flops_are_those_of_the_mean_depth() -> None:
    """The ledger takes means over the depths; the mean of counts over the depths is the same number."""
    config = house(**GRT)
    counts = [counted_flops(config, n, True) for n in (1, 2)]
    assert ledger(config, 2, TrainingDepth(1.5, 1.5)).training_flops_per_token == sum(counts) / 2


@pytest.mark.parametrize("name", [term.name for term in ledger(house(**GRT, head="untied")).terms])
def test_control_a_term_that_is_off_by_one_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every term of the ledger in turn, one parameter or FLOP out."""
    parts = cost._parts

    def off(which: str):
        def wrong(model: ModelConfig, shape: Shape):
            return [
                replace(part, cost=part.cost._replace(**{which: getattr(part.cost, which) + 1}))
                if part.name == name
                else part
                for part in parts(model, shape)
            ]

        return wrong

    config = house(**GRT, head="untied")
    monkeypatch.setattr(cost, "_parts", off("params"))
    part = (name.split(".")[0],)
    with pytest.raises(LawBroken, match="parameters") as broken:
        check_params(config)
    assert broken.value.positions == part
    monkeypatch.setattr(cost, "_parts", off("flops"))
    with pytest.raises(LawBroken, match="forward FLOPs") as broken:
        check_forward_flops(config, 1)
    assert broken.value.positions == part
    with pytest.raises(AssertionError, match="training FLOPs"):
        check_training_flops(config, 1)


# -- keys -------------------------------------------------------------------------------------------------------------


@both_depths
@over_space(lambda config: is_causal(config, trains=False))
def test_kv_bytes(config: ModelConfig, n_loops: int) -> None:
    check_kv_bytes(config, at_most(config, n_loops))


def test_control_kv_bytes_that_forget_the_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Attention.cost

    def keys_only(self: Attention, shape: Shape, place: Place) -> dict[str, Cost]:
        return {name: c._replace(kv=c.kv // 2) for name, c in costs(self, shape, place).items()}

    monkeypatch.setattr(Attention, "cost", keys_only)
    with pytest.raises(AssertionError, match="KV bytes"):
        check_kv_bytes(house(**GRT), 3)


# -- configs ----------------------------------------------------------------------------------------------------------


@over_space()
def test_config_json_round_trip(config: ModelConfig) -> None:
    check_config_round_trip(config)


def test_control_configs_that_differ_in_one_choice_are_not_equal() -> None:
    configs = [case.config for case in cases()]
    assert len({config.model_dump_json() for config in configs}) == len(configs)
    a = house(state_init={"kind": "noise", "seed": 1}, inject="concat")
    assert a != house(state_init={"kind": "noise", "seed": 2}, inject="concat")


@over_space()
def test_checkpoint_round_trip(config: ModelConfig) -> None:
    check_checkpoint_round_trip(make(config))


def test_control_a_weight_that_a_checkpoint_forgets_is_noticed() -> None:
    model = make(house(**GRT))
    weight = model.update.logit.weight.detach().clone()
    # As a module does that keeps its weight out of its state.
    model.update._register_state_dict_hook(
        lambda module, state, prefix, meta: state.update({f"{prefix}logit.weight": 0 * weight})
    )
    with pytest.raises(LawBroken, match="changes or loses") as broken:
        check_checkpoint_round_trip(model)
    assert broken.value.positions == ("update.logit.weight",)


@over_recipes
def test_recipe_yaml_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    for version in (recipe, recipe.resolved()):
        copy = tmp_path / "copy.yaml"
        copy.write_text(version.to_yaml())
        again = load_recipe(copy)
        assert again == version
        assert again.to_yaml() == version.to_yaml()
        assert Recipe.model_validate_json(version.model_dump_json()) == version
        # Plain data only: any YAML reader understands it.
        assert yaml.safe_load(version.to_yaml()) == version.model_dump(mode="json")
    assert recipe.resolved().resolved() == recipe.resolved()


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 14


@over_recipes
def test_the_ledger_adds_up(path: Path) -> None:
    found = load_recipe(path).ledger()
    data = found.to_json()
    for total, term in {
        "params": "params",
        "forward_flops_per_token": "forward_flops",
        "training_flops_per_token": "training_flops",
        "kv_bytes_per_token": "kv_bytes",
    }.items():
        assert data[total] == sum(t[term] for t in data["terms"])
    assert data["terms"] == [dataclasses.asdict(term) for term in found.terms]
    assert len({term.name for term in found.terms}) == len(found.terms)
