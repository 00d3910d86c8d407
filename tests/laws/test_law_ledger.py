"""Law 6: what the ledger says is what is there: parameters, FLOPs, bytes of keys. Configs survive their round trips.

FLOPs are counted by `torch.utils.flop_counter` on the meta device, where attention is one operation of a known price
(a CPU kernel of it is not counted) and the ledger's convention is the counter's: 2 a multiply-add, scores over all
``seq_len`` keys, nothing for elementwise work. Passes are in training mode, so that noise needs no values.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from space import GRT, cases, house, make, over_space, tokens
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import alcoda
from alcoda.model import cost
from alcoda.model.attention import Attention
from alcoda.model.config import ModelConfig
from alcoda.model.cost import KV_ITEM_BYTES, TrainingDepth, ledger
from alcoda.model.keys import KeyStore
from alcoda.model.lm import RecurrentLM
from alcoda.model.shape import Cost, Place, Shape
from alcoda.training.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = [*sorted((ROOT / "recipes").rglob("*.yaml")), Path(alcoda.__file__).parent / "quickstart.yaml"]

both_depths = pytest.mark.parametrize("n_loops", [1, 3])
over_recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")

B = 2


def on_meta(config: ModelConfig) -> RecurrentLM:
    with torch.device("meta"):
        return RecurrentLM(config).train()


def counted_flops(config: ModelConfig, n_loops: int, backward: bool, n_free: int = 0, recompute: bool = False) -> float:
    """A token, of a full context."""
    model = on_meta(config)
    ids_BT = torch.zeros(B, config.seq_len, dtype=torch.long, device="meta")
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = model(ids_BT, n_loops, n_free=n_free, recompute=recompute)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() / (B * config.seq_len)


# -- parameters -------------------------------------------------------------------------------------------------------


def check_params(config: ModelConfig) -> None:
    model = on_meta(config)
    assert ledger(config).params == sum(p.numel() for p in model.parameters()), "parameters"
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    for name, numel in parts.items():
        terms = sum(t.params for t in ledger(config).terms if t.name.split(".")[0] == name)
        # The loop norm is of no other stage; a tied head has no parameters of its own.
        assert terms == numel, f"parameters of {name}"


@over_space()
def test_params(config: ModelConfig) -> None:
    check_params(config)


@over_recipes
def test_params_of_recipes(path: Path) -> None:
    check_params(load_recipe(path).model)


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def check_forward_flops(config: ModelConfig, n_loops: int) -> None:
    assert ledger(config, n_loops).forward_flops_per_token == counted_flops(config, n_loops, False), "forward FLOPs"


@over_space()
def test_forward_flops(config: ModelConfig) -> None:
    check_forward_flops(config, 2)


@both_depths
def test_forward_flops_by_depth(n_loops: int) -> None:
    check_forward_flops(house(**GRT), n_loops)


@over_recipes
def test_forward_flops_of_recipes(path: Path) -> None:
    config = load_recipe(path).model
    check_forward_flops(config, min(config.n_loops, 2))


def check_training_flops(config: ModelConfig, n_loops: int, n_free: int = 0, recompute: bool = False) -> None:
    """Recomputed to the end of each loop: torch would stop before a last product that no gradient needs."""
    formula = ledger(config, n_loops, TrainingDepth(n_loops, n_loops - n_free, recompute)).training_flops_per_token
    with set_checkpoint_early_stop(False):
        counted = counted_flops(config, n_loops, True, n_free, recompute)
    assert formula == counted, "training FLOPs"


def reads_the_anchor(config: ModelConfig) -> bool:
    """Whether the loops that carry gradients hand any to the prelude (`test_law_gradients` proves it)."""
    return config.inject.carries_anchor or config.update.kind == "gate"


@over_space()
def test_training_flops(config: ModelConfig) -> None:
    """A forward pass, a backward pass and a recomputed one of each term; one loop of two carries gradients."""
    check_training_flops(config, 2, n_free=1 if reads_the_anchor(config) else 0, recompute=True)


@pytest.mark.parametrize("n_free", [0, 1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_flops_by_depth(n_free: int, recompute: bool) -> None:
    check_training_flops(house(**GRT), 3, n_free, recompute)


@over_space(lambda config: not reads_the_anchor(config))
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
                (n, c._replace(**{which: getattr(c, which) + 1}) if n == name else c, k)
                for n, c, k in parts(model, shape)
            ]

        return wrong

    config = house(**GRT, head="untied")
    monkeypatch.setattr(cost, "_parts", off("params"))
    with pytest.raises(AssertionError, match="parameters"):
        check_params(config)
    monkeypatch.setattr(cost, "_parts", off("flops"))
    with pytest.raises(AssertionError, match="forward FLOPs"):
        check_forward_flops(config, 1)
    with pytest.raises(AssertionError, match="training FLOPs"):
        check_training_flops(config, 1)


# -- keys -------------------------------------------------------------------------------------------------------------


def check_kv_bytes(config: ModelConfig, n_loops: int) -> None:
    model, ids_BT, store = make(config), tokens(1, 9), KeyStore()
    with torch.no_grad():
        for chunk in ids_BT.split([5, 1, 1, 2], 1):
            model(chunk, n_loops, store=store)
    item_bytes = model.embed.weight.element_size()
    assert store.n_bytes() * KV_ITEM_BYTES == ledger(config, n_loops).kv_bytes_per_token * 9 * item_bytes, "KV bytes"


@both_depths
@over_space()
def test_kv_bytes(config: ModelConfig, n_loops: int) -> None:
    check_kv_bytes(config, n_loops)


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
    text = config.model_dump_json()
    again = ModelConfig.model_validate_json(text)
    assert again == config
    assert again.model_dump_json() == text
    assert hash(again) == hash(config)


def test_control_configs_that_differ_in_one_choice_are_not_equal() -> None:
    configs = [case.config for case in cases()]
    assert len({config.model_dump_json() for config in configs}) == len(configs)
    a = house(state_init={"kind": "noise", "seed": 1}, inject="concat")
    assert a != house(state_init={"kind": "noise", "seed": 2}, inject="concat")


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
