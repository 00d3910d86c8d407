"""Configs: strict about keys and numbers, frozen, open to new choices; errors name the field and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from alcoda.config import Bool, Choice, Config, Float, Int, NonNegativeFloat, PositiveFloat, PositiveInt, validate
from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.recurrence.inject import Add, Concat, Inject
from alcoda.model.recurrence.update import Gate, Update
from alcoda.training.recipe import load_recipe


class Sizes(Config):
    """Test config."""

    count: PositiveInt = 3
    any_int: Int = 0
    rate: PositiveFloat = 0.5
    shift: Float = 0.0
    noise: NonNegativeFloat = 0.0
    on: Bool = False


@pytest.fixture
def registry() -> Iterator[None]:
    """Puts back the choices of the axes that a test adds to."""
    before = [(axis, dict(axis.choices)) for axis in (Inject, Update)]
    yield
    for axis, choices in before:
        axis.choices.clear()
        axis.choices.update(choices)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"n_loop": 3}, r"unknown key 'n_loop'; did you mean 'n_loops'\? Allowed: block, carry, d_ff"),
        ({"block": {"attension": "mha"}}, r"block: unknown key 'attension'; did you mean 'attention'\?"),
        ({"update": {"kind": "gate", "taw": 1.0}}, r"update: unknown key 'taw'; did you mean 'tau'\?"),
        ({"{0}": 3}, r"unknown key '\{0\}'\. Allowed"),
        ({3: 3}, r"unknown key 3\. Allowed"),
    ],
)
def test_an_unknown_key_is_refused_with_a_hint(data: dict[Any, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate(ModelConfig, data)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ad", r"unknown inject 'ad'; did you mean 'add'\? Allowed: add, concat, diagonal, none"),
        ({"kind": "xyz"}, r"unknown inject 'xyz'\. Allowed: add, concat, diagonal, none"),
        ({"noise": 0.1}, r"write a kind \(add, concat, diagonal, none\) or a mapping with one"),
        (3, r"write a kind \(add, concat, diagonal, none\)"),
        (None, r"write a kind \(add, concat, diagonal, none\)"),
        (True, r"write a kind \(add, concat, diagonal, none\)"),
        ("{x}", r"unknown inject '\{x\}'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"inject: {message}"):
        validate(ModelConfig, {"inject": value})


def test_several_errors_are_listed_together() -> None:
    with pytest.raises(UsageError) as caught:
        validate(ModelConfig, {"n_loops": 0, "update": {"kind": "gate", "tau": -1}, "head": "both"}, "the model")
    message = str(caught.value)
    assert message.startswith("the model has 3 errors:\n")
    assert "n_loops: input should be greater than or equal to 1 (got 0)" in message
    assert "tau: input should be greater than 0 (got -1)" in message
    assert "head: unknown head 'both'. Allowed: tied, untied" in message


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False, 1.0, 2.5, "3", None, 0, -1])
def test_a_positive_int_takes_nothing_else(value: Any) -> None:
    with pytest.raises(ValidationError, match="count"):
        Sizes(count=value)


@pytest.mark.parametrize("value", [True, 0.0, "0"])
def test_an_int_takes_nothing_else(value: Any) -> None:
    with pytest.raises(ValidationError, match="any_int"):
        Sizes(any_int=value)


@pytest.mark.parametrize("field", ["rate", "shift", "noise"])
@pytest.mark.parametrize("value", [True, False, float("nan"), float("inf"), "much", None])
def test_a_float_takes_numbers_only(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        Sizes(**{field: value})


def test_bool_as_float_says_what_is_needed() -> None:
    with pytest.raises(UsageError, match=r"rate: a number is needed, not a boolean \(got True\)"):
        validate(Sizes, {"rate": True})


def test_bounds_of_floats() -> None:
    with pytest.raises(ValidationError):
        Sizes(rate=0)
    with pytest.raises(ValidationError):
        Sizes(noise=-1e-9)
    assert Sizes(rate=1, shift=-2, noise=0) == Sizes(rate=1.0, shift=-2.0, noise=0.0)


@pytest.mark.parametrize("value", [1, 0, "yes", "true", None])
def test_a_bool_takes_nothing_else(value: Any) -> None:
    with pytest.raises(ValidationError, match="on"):
        Sizes(on=value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.n_loops=yes", r"model.n_loops: input should be a valid integer \(got True\)"),
        ("model.n_loops=true", r"model.n_loops: input should be a valid integer \(got True\)"),
        ("model.n_loops=1.0", r"model.n_loops: input should be a valid integer \(got 1.0\)"),
        ("model.n_loops=1e1", r"model.n_loops: input should be a valid integer"),
        ("model.init_std=yes", r"model.init_std: a number is needed, not a boolean \(got True\)"),
        ("model.block.bias=1", r"model.block.bias: input should be a valid boolean \(got 1\)"),
    ],
)
def test_yaml_types_are_not_bent(tmp_path: Any, setting: str, message: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\n")
    with pytest.raises(UsageError, match=message):
        load_recipe(recipe, [setting])


# -- frozen -----------------------------------------------------------------------------------------------------------


def test_a_config_is_frozen_and_hashable() -> None:
    config = ModelConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.n_loops = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.block.norm.eps = 1.0  # type: ignore[misc]
    assert hash(config) == hash(ModelConfig())
    assert config != ModelConfig(n_loops=9)


# -- choices ----------------------------------------------------------------------------------------------------------


def test_a_choice_is_written_as_kind_mapping_or_object() -> None:
    same = [ModelConfig(inject=v) for v in ("concat", {"kind": "concat"}, {"kind": "concat", "noise": 0}, Concat())]
    assert len(set(same)) == 1
    assert same[0].model_dump()["inject"] == {"kind": "concat", "noise": 0.0, "bias": False, "start": "normal"}


def test_a_choice_of_another_axis_is_refused() -> None:
    with pytest.raises(ValidationError, match="write a kind"):
        ModelConfig(inject=Gate())


def test_a_new_choice_registers_itself(registry: None) -> None:
    class Twice(Inject):
        kind: Literal["twice"] = "twice"
        factor: PositiveFloat = 2.0

    config = validate(ModelConfig, {"inject": {"kind": "twice", "factor": 3}})
    assert config.inject == Twice(factor=3.0)
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(UsageError, match="Allowed: add, concat, diagonal, none, twice"):
        validate(ModelConfig, {"inject": "thrice"})
    with pytest.raises(UsageError, match=r"inject: unknown key 'faktor'; did you mean 'factor'\?"):
        validate(ModelConfig, {"inject": {"kind": "twice", "faktor": 3}})
    assert "twice" not in Update.choices


def test_a_kind_is_taken_once(registry: None) -> None:
    with pytest.raises(TypeError, match=r"inject: 'add' is taken by alcoda\.model\.recurrence\.inject\.Add"):

        class Mine(Inject):
            kind: Literal["add"] = "add"

    assert Inject.choices["add"] is Add

    class Copy(Update):  # the same kind on another axis is another choice
        kind: Literal["add"] = "add"

    assert Update.choices["add"] is Copy


def test_a_kind_that_is_said_in_two_ways_is_refused(registry: None) -> None:
    with pytest.raises(TypeError, match=r"Half: kind is Literal\['half'\] and its default 'halve'"):

        class Half(Inject):
            kind: Literal["half"] = "halve"  # pyrefly: ignore


def test_the_registry_is_clean() -> None:
    """The tests above leave nothing behind."""
    assert set(Inject.choices) == {"none", "add", "concat", "diagonal"}
    assert set(Update.choices) == {"overwrite", "gate", "lti", "lti_delta"}


def test_an_axis_of_its_own(registry: None) -> None:
    class Colour(Choice, axis="colour"):
        pass

    class Red(Colour):
        kind: Literal["red"] = "red"

    class Wall(Config):
        colour: Colour = Red()

    assert Wall.model_validate({"colour": "red"}) == Wall()
    with pytest.raises(UsageError, match=r"colour: unknown colour 'rad'; did you mean 'red'\?"):
        validate(Wall, {"colour": "rad"})
