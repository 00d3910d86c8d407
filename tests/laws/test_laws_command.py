"""``alcoda laws``: every recipe keeps every law, and planted faults are told from it, with their places."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from space import GRT, cases, house
from typer.testing import CliRunner

import alcoda
from alcoda import plugins
from alcoda.cli import app
from alcoda.config import Choice
from alcoda.errors import UsageError
from alcoda.laws import LAWS, LawBroken, check_laws, registry, resume, run, sharing, shrink
from alcoda.laws.law import MOST_POSITIONS, Law, Parts, close_logits
from alcoda.laws.subject import Subject, declares_leak, make
from alcoda.model.config import ModelConfig
from alcoda.training import loop
from alcoda.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = [*sorted((ROOT / "recipes").rglob("*.yaml")), Path(alcoda.__file__).with_name("quickstart.yaml")]
RECIPES = [path for path in RECIPES if path.parent.name != "ablations"]  # overlays, which are parts of a recipe
PLUGINS = Path(__file__).with_name("plugins")
GRT_MINI = ROOT / "recipes/mini/grt.yaml"


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What plugins register is forgotten: the space of the other laws must not hold it."""
    before = [(axis.choices, dict(axis.choices)) for axis in Choice.__subclasses__()]
    loaded = dict(plugins._LOADED)
    yield
    for choices, old in before:
        choices.clear()
        choices.update(old)
    plugins._LOADED.clear()
    plugins._LOADED.update(loaded)


def laws(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["laws", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


# -- recipes ----------------------------------------------------------------------------------------------------------


NUMBERS = {"n_prelude", "n_core", "n_coda", "n_loops", "n_heads", "d_ff"}
"""Of these there are others in the space of the laws (`space.MORE_AXES`)."""


def designs() -> dict[str, Path]:
    """A recipe of each design: those of other sizes are the same small model, but for its numbers of blocks, loops and
    heads and the width of its MLP. With and without a part (a core, a coda) are two designs."""
    found: dict[str, Path] = {}
    for path in RECIPES:
        small = shrink(load_recipe(path).model).config.model_dump()
        small.update({name: bool(small[name]) for name in NUMBERS})
        found.setdefault(json.dumps(small, sort_keys=True), path)
    return {f"{path.parent.name}-{path.stem}": path for path in found.values()}


SLOW = {"papers", "oracles"}
"""Their designs are those of the other folders, but for a choice or two: of pairs of choices the space is made."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=[pytest.mark.slow] if path.parent.name in SLOW else [])
        for name, path in designs().items()
    ],
)
def test_every_recipe_keeps_every_law(path: Path) -> None:
    recipe = load_recipe(path)
    report = check_laws(recipe)
    assert report.hold, [(result.law, result.message) for result in report.broken]
    assert [result.law for result in report.results] == [law.name for law in LAWS]
    # All that says nothing about this model is known by name.
    silent = {result.law for result in report.results if result.status == "not applicable"}
    dense = {"one_depth", "readouts", "free_loops", "tied", "own_depth"}
    declared = set() if recipe.model.sharing.is_tied else {"tied"}
    if recipe.model.max_loops is not None:
        declared.add("own_depth")
    of_memory, of_exits = ({law.name for law in LAWS if law.number == number} for number in (4, 3))
    dense |= of_exits
    if recipe.model.has_weights_by_loop:
        declared |= of_exits
    elif recipe.model.keys.own_keys:
        declared.add("frozen_keys")
        declared |= {"one_slot", "one_slot_is_slots", "one_slot_in_batches"} if recipe.model.route.gathers else set()
    if recipe.model.route.gathers:
        declared |= {"forward_flops", "training_flops", "no_leak_in_training", "bf16"}
    silent -= set() if recipe.model.memory.carries else of_memory
    assert silent <= {"compiled"} | (declared if recipe.model.is_recurrent else dense)


@pytest.mark.parametrize("name", ["mini/cart", "mini/mor_token_choice"])
def test_a_recipe_with_a_memory_keeps_its_laws(name: str) -> None:
    """Those of a memory, and the one that trains; the rest are checked in the space, with each pair of choices."""
    wanted = [law.name for law in LAWS if law.number == 4] + ["resume"]
    report = check_laws(load_recipe(name, ["model.memory=prev_token"]), wanted)
    assert report.hold, [(result.law, result.message) for result in report.broken]
    assert {result.status for result in report.results} == {"holds"}


def test_the_command_prints_a_table_and_json() -> None:
    code, out = laws(GRT_MINI, "--law", "no_leak", "--law", "params", "--law", "compiled")
    assert code == 0
    assert "a token changes no logits before it" in out and out.count("holds") == 2 and "resume" not in out
    assert "d_model 256 -> 32" in out and "n.a. compiled: takes a minute; asked for with --compile" in out
    code, out = laws(GRT_MINI, "--law", "params", "--seed", 3, "--json")
    found = json.loads(out)
    assert code == 0 and len(out.splitlines()) == 1
    assert found["hold"] and found["seed"] == 3 and [law["law"] for law in found["laws"]] == ["params"]
    assert found["model"]["d_model"] == 32


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown law 'no_leek'; did you mean 'no_leak'\? Allowed: batch_mates, "):
        check_laws(house(), ["no_leek"])
    with pytest.raises(UsageError, match="laws are of a Recipe or a ModelConfig"):
        check_laws("recipe.yaml")  # pyrefly: ignore
    with pytest.raises(UsageError, match=r"seq_len=8: .* set it to 16 or more, or leave --full-size out"):
        check_laws(house(seq_len=8), full_size=True)


def test_full_size_checks_the_model_as_it_is() -> None:
    config = house(**GRT, vocab_size=300, d_model=48)
    report = check_laws(config, ["no_leak", "resume"], full_size=True)
    assert report.config == config and report.changes == () and report.hold
    large = Subject(load_recipe(ROOT / "recipes/papers/gpt2_small.yaml").model)
    assert "train steps of this size are" in str(resume.too_long(large))
    assert resume.too_long(Subject(house())) is None


# -- planted faults ---------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, str, set[str]]] = {
    "future_leak": ("model.keys=future_leak", "no_leak", {"no_leak_in_training", "cached"}),
    "ignored_padding": ("model.block.attention=ignored_padding", "left_padded", {"idle_rows"}),
    "untied": ("model.sharing=claims_tied", "tied", {"params"}),
    "late_memory": ("model.memory=late_memory", "refinement", {"prefill_then_decode", "refinement_gradients"}),
    "lossy_cache": ("model.block.attention=lossy_cache", "cached", {"left_padded", "written_again"}),
}
"""By plugin: what names it in a recipe, the law that must catch it, and others that it breaks."""


def faulty(name: str, *arguments: Any) -> dict[str, Any]:
    """What the command says of a recipe with a fault."""
    code, out = laws(GRT_MINI, "--plugin", PLUGINS / f"{name}.py", "--set", FAULTS[name][0], "--json", *arguments)
    found = json.loads(out)
    assert code == 1 and not found["hold"]
    return found


def test_a_planted_fault_is_caught_among_all_laws_within_a_minute() -> None:
    began = time.perf_counter()
    found = faulty("future_leak")
    assert time.perf_counter() - began < 60
    assert {law["law"] for law in found["laws"]} == {law.name for law in LAWS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    _, law, others = FAULTS[name]
    wanted = {law, *others, "no_leak", "cached", "gradients"}
    found = faulty(name, *(f"--law={one}" for one in sorted(wanted)))
    results = {result["law"]: result for result in found["laws"]}
    assert {law, *others} <= set(found["broken"])
    assert results[law]["positions"], "it is said where"
    assert "the check ended in" not in results[law]["message"]
    if name == "ignored_padding":  # what has no padding is as it was
        assert results["no_leak"]["status"] == results["cached"]["status"] == "holds"
    if name == "late_memory":  # what reads memories that it is given is as it was
        assert results["cached"]["status"] == results["gradients"]["status"] == "holds"
    if name == "lossy_cache":
        assert results["no_leak"]["status"] == results["gradients"]["status"] == "holds"


def test_the_places_of_a_leak_are_printed() -> None:
    code, out = laws(
        GRT_MINI, "--plugin", PLUGINS / "future_leak.py", "--set", "model.keys=future_leak", "--law", "no_leak"
    )
    assert code == 1 and "BROKEN" in out
    # Tokens 1, 6 and 11 of three rows are changed; each token before them sees it.
    assert "BROKEN no_leak: 1 loops, 12 tokens: leak: the token at 1, 6, 11 changes logits before it" in out
    assert "at (row 0, token 0), (row 1, token 0), (row 1, token 1)" in out and "(row 2, token 10)" in out


def test_a_causal_choice_in_the_same_place_holds() -> None:
    """Positive control of the faults: it is the plugin that is caught, not the setting."""
    assert laws(GRT_MINI, "--set", "model.keys=anchor", "--law", "no_leak", "--law", "cached", "--law", "tied")[0] == 0


def test_a_choice_that_raises_breaks_the_law_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(subject: Subject) -> None:
        raise IndexError("out of range")

    laws = (Law("bad", 1, "no", fails), Law("good", 1, "yes", lambda subject: None))
    monkeypatch.setattr(run, "LAWS", laws)
    report = check_laws(house())
    assert [(r.law, r.status) for r in report.results] == [("bad", "broken"), ("good", "holds")]
    assert report.broken[0].message.startswith(
        "the check ended in IndexError: out of range (test_laws_command.py line "
    )


# -- what a law says --------------------------------------------------------------------------------------------------


def test_positions_are_bounded_and_counted() -> None:
    import torch

    logits = torch.zeros(3, 10, 4)
    off = logits.clone()
    off[1, 2:, 0] = 1
    off[2, 0, 3] = float("nan")
    with pytest.raises(LawBroken, match="off by nan") as broken:
        close_logits(off, logits, 1e-3, "x")
    assert broken.value.positions == (*((1, t) for t in range(2, 10)), (2, 0))
    many = LawBroken("x", [(0, t) for t in range(100)])
    assert len(many.positions) == MOST_POSITIONS and many.n_positions == 100
    parts = Parts()
    for name in ("a", "b"):
        with parts.part(name):
            raise LawBroken("is off", [(0, 1), name])
    with pytest.raises(LawBroken, match="a: is off; b: is off") as broken:
        parts.settle()
    assert broken.value.positions == ((0, 1), "a", "b")


def test_declared_exceptions_are_named() -> None:
    route = SimpleNamespace(kind="top", causal_in_training=False, causal_at_eval=True)
    subject: Any = SimpleNamespace(config=SimpleNamespace(route=route))
    assert declares_leak(subject, trains=False) is None
    assert declares_leak(subject, trains=True) == "declared: route top is not causal in training"


def test_tied_loops_and_control() -> None:
    sharing.check_tied(make(house(**GRT)))
    untied = house(**GRT, sharing="untied")
    assert "sharing untied gives loops weights of their own" in str(sharing.not_tied(Subject(untied)))
    with pytest.raises(LawBroken, match="tied: the core is another function at loop 1") as broken:
        sharing.check_tied(make(untied))
    assert broken.value.n_positions == 2 * 12


def test_a_resumed_run_and_control(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(shrink(house(**GRT)).config)
    resume.check_resume(subject)
    restore = loop.Trainer.restore

    def forgets_the_noise(self: loop.Trainer, path: Path) -> None:
        restore(self, path)
        loop.torch.manual_seed(0)

    monkeypatch.setattr(loop.Trainer, "restore", forgets_the_noise)
    with pytest.raises(LawBroken, match="stopped after step 3 of 6 and resumed") as broken:
        resume.check_resume(subject)
    assert all(str(place).startswith("model.") for place in broken.value.positions)
    assert broken.value.n_positions > MOST_POSITIONS


# -- the size ---------------------------------------------------------------------------------------------------------


def kinds(config: ModelConfig) -> dict[str, Any]:
    """Every choice of a config, by axis, and the switches of its blocks."""
    block = config.block
    found = {name: getattr(config, name) for name in ModelConfig.model_fields}
    found |= {name: getattr(block, name) for name in type(block).model_fields}
    return {name: getattr(x, "kind", x) for name, x in found.items() if isinstance(x, Choice | str | bool)}


@pytest.mark.parametrize("config", [case.config for case in cases()[:20]], ids=[case.name for case in cases()[:20]])
def test_a_shrunk_model_keeps_every_choice(config: ModelConfig) -> None:
    large = config.model_copy(update={"d_model": 32 * 20, "vocab_size": 50_000, "seq_len": 1024, "n_heads": 20})
    small, changes = shrink(large)
    assert kinds(small) == kinds(large)
    assert (small.d_model, small.vocab_size, small.seq_len, small.init_std) == (32, 64, 48, 0.2)
    assert "d_model 640 -> 32" in changes and "vocab_size 50000 -> 64" in changes
    assert shrink(small).config == small


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"d_model": 960, "n_heads": 15, "block": {"attention": {"kind": "gqa", "n_kv_heads": 5}}}, (4, 1)),
        ({"d_model": 960, "n_heads": 3, "block": {"attention": {"kind": "gqa", "n_kv_heads": 1}}}, (2, 1)),
        ({"d_model": 96, "n_heads": 12, "block": {"attention": {"kind": "gqa", "n_kv_heads": 6}}}, (4, 2)),
        # 3 of 4 would be in proportion, and does not divide: 2 is nearer than 1, and legal, as is 4.
        ({"d_model": 96, "n_heads": 12, "block": {"attention": {"kind": "gqa", "n_kv_heads": 12}}}, (4, 4)),
    ],
)
def test_heads_are_shrunk_legally(given: dict[str, Any], expected: tuple[int, int]) -> None:
    small = shrink(house(**given)).config
    attention: Any = small.block.attention
    assert (small.n_heads, attention.n_kv_heads) == expected


def test_numbers_that_are_tied_to_sizes_follow() -> None:
    config = house(
        d_model=1024,
        n_heads=16,
        d_head=128,
        d_ff=3000,
        block={
            "attention": {"kind": "mla", "latent": 256},
            "window": {"kind": "pattern", "tokens": 256},
            "value_embed": {"kind": "table", "gate_channels": 64},
        },
    )
    small, changes = shrink(config)
    assert (small.d_head, small.d_ff) == (16, 94)
    block: Any = small.block
    # A gate that reads 64 channels of 32 is not legal; the nearest that is reads all of them.
    assert (block.attention.latent, block.window.tokens, block.value_embed.gate_channels) == (8, 5, 32)
    assert "block.value_embed.gate_channels 64 -> 32" in changes and "block.window.tokens 256 -> 5" in changes


def test_a_model_without_a_legal_small_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    validate = ModelConfig.model_validate

    def picky(data: Any) -> ModelConfig:
        validate({"n_heads": -1})
        return validate(data)

    monkeypatch.setattr(ModelConfig, "model_validate", picky)
    with pytest.raises(UsageError, match=r"no small model of this design was found: n_heads: .* --full-size"):
        shrink(ModelConfig())
    monkeypatch.undo()
    with pytest.raises(ValidationError):
        validate({"n_heads": -1})


def test_laws_have_names_of_their_own() -> None:
    assert len({law.name for law in registry.LAWS}) == len(registry.LAWS) >= 20
    assert {law.number for law in registry.LAWS} == set(range(1, 8))
