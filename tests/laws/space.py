"""The design space, read from the registries: every choice, and a pairwise covering array of combinations.

An axis is a field of `ModelConfig` (or of a config inside it) that is a `Choice`, a `Literal` or a bool, so a newly
registered choice, and a new axis, enter every law without an edit here. A choice with fields that have no default
needs one example in `REQUIRED`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
from pydantic import ValidationError

from alcoda.config import Choice, Config
from alcoda.laws.subject import VOCAB
from alcoda.model.config import ModelConfig

N_CASES = 66
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "seq_len": 48,
    "d_model": 32,
    "n_heads": 4,
    "n_prelude": 1,
    "n_core": 2,
    "n_coda": 1,
    "n_loops": 3,
    "init_std": 0.2,  # so that every part has a visible effect
}

REQUIRED: dict[tuple[str, str], dict[str, Any]] = {
    ("attention", "gqa"): {"n_kv_heads": 2},
    # With 3, 4 or 6 a router of the space sends no token of the laws' text into its last loop, whose weights then have
    # no gradient: true, and of no use.
    ("window", "everywhere"): {"tokens": 5},
    ("window", "pattern"): {"tokens": 3},
}
"""By (axis, kind): an example of the fields without a default."""

VARIANTS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("attention", "gqa"): [{"n_kv_heads": 1, "qk_norm": "after_rope"}],
    ("attention", "mha"): [{"qk_norm": "after_rope"}, {"qk_norm": "before_rope", "qk_bias": True, "v_bias": True}],
    ("attention", "mla"): [{"latent": 5, "qk_norm": "before_rope"}],
    ("carry", "hyper"): [{"states": 2, "first_logit": 8.0}],
    ("inject", "concat"): [{"noise": 0.1, "bias": True}, {"start": "identity"}],
    ("inject", "diagonal"): [{"b": "diagonal"}],
    ("keys", "anchor"): [{"rope": True}],
    ("memory", "prev_token"): [
        {"residual": False, "share": "per_layer", "gates": False, "mean_of": 2},
        {"kv": False, "beta": 0.3, "lag": 2, "source": "final"},
    ],
    ("norm", "layernorm"): [{"weight": False}],
    ("norm", "rmsnorm"): [{"weight": False}],
    ("position", "rope"): [{"pairs": "interleaved", "base": 50_000.0}],
    ("route", "expert_choice"): [{"auxiliary": "router", "apply": "blend", "drop_keys": False}],
    ("route", "token_choice"): [{"score": "sigmoid", "apply": "blend", "drop_keys": False}],
    ("sharing", "adapter"): [{"rank": 3}],
    ("sharing", "lora"): [{"rank": 3}],
    ("state_init", "noise"): [{"at_eval": "by_position", "seed": 3}],
    ("update", "gate"): [{"tau": 0.7, "bias": 0.0, "noise": 0.0}],
    ("value_embed", "table"): [{"every": 1, "gate": False}, {"every": 1, "gate_channels": 5}],
    ("window", "pattern"): [{"pattern": "LS", "tokens": 5}],
}
"""By (axis, kind): more settings of a choice that the laws should see."""

MORE_AXES: dict[str, list[dict[str, Any]]] = {
    "blocks": [
        {},
        {"n_prelude": 0, "n_core": 1, "n_coda": 0},
        {"n_prelude": 2, "n_core": 1, "n_coda": 0},
        {"n_prelude": 0, "n_core": 2, "n_coda": 2},
    ],
    "widths": [{}, {"d_head": 12, "d_ff": 40}],
}
"""Sizes at which a formula or a loop could go wrong: an empty stack, a head that is not d_model / n_heads."""


def options(axis: type[Choice]) -> list[Choice]:
    """Every registered choice of an axis, and its variants."""
    found = []
    for kind, choice in axis.choices.items():
        for fields in (REQUIRED.get((axis.axis, kind), {}), *VARIANTS.get((axis.axis, kind), [])):
            try:
                found.append(choice.model_validate({"kind": kind, **fields}))
            except ValidationError as error:
                raise LookupError(
                    f"no law covers {axis.axis} {kind!r}: it cannot be built from {fields}. Give an example of its "
                    f"fields in tests/laws/space.py, REQUIRED[{(axis.axis, kind)}]. {error}"
                ) from None
    return found


def axes(config: type[Config] = ModelConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """(dotted name, options) of every axis below a config."""
    for name, field in config.model_fields.items():
        kind, here = field.annotation, (*path, name)
        if isinstance(kind, type) and issubclass(kind, Choice):
            yield ".".join(here), options(kind)
        elif isinstance(kind, type) and issubclass(kind, Config):
            yield from axes(kind, here)
        elif kind is bool:
            yield ".".join(here), [False, True]
        elif get_origin(kind) is Literal:
            yield ".".join(here), list(get_args(kind))


AXES: dict[str, list[Any]] = {**dict(axes()), **MORE_AXES}

Row = dict[str, int]
"""An option's index for each axis."""
Pair = tuple[tuple[str, int], tuple[str, int]]


def config_data(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = dict(SIZES)
    for name, index in row.items():
        option = AXES[name][index]
        if name in MORE_AXES:
            data.update(option)
            continue
        *path, last = name.split(".")
        here = functools.reduce(lambda inner, key: inner.setdefault(key, {}), path, data)
        here[last] = option
    return data


def is_legal(row: Row) -> bool:
    """Whether `ModelConfig` takes the combination."""
    return _is_legal(tuple(sorted(row.items())))


@functools.cache  # the search comes back to a third of them
def _is_legal(row: tuple[tuple[str, int], ...]) -> bool:
    try:
        ModelConfig.model_validate(config_data(dict(row)))
    except ValidationError:
        return False
    return True


def can_complete(partial: Row) -> bool:
    """Whether some legal combination holds these choices: the rest at their first option, but for up to two axes."""
    base = {**dict.fromkeys(AXES, 0), **partial}
    free = [(name, i) for name in AXES if name not in partial for i in range(1, len(AXES[name]))]
    changes = itertools.chain.from_iterable(itertools.combinations(free, n) for n in range(3))
    return any(is_legal({**base, **dict(change)}) for change in changes)


def pairs_of(row: Row) -> list[Pair]:
    return list(itertools.combinations([(name, row[name]) for name in AXES if name in row], 2))


@functools.cache
def legal_pairs() -> tuple[Pair, ...]:
    every = [(name, i) for name in AXES for i in range(len(AXES[name]))]
    return tuple(p for p in itertools.combinations(every, 2) if p[0][0] != p[1][0] and can_complete(dict(p)))


@functools.cache
def covering_array() -> list[Row]:
    """Rows that hold every legal pair, and the rarer pairs again until there are `N_CASES`: greedy, deterministic."""
    counts = dict.fromkeys(legal_pairs(), 0)
    rows: list[Row] = []

    def gain(row: Row, name: str, index: int) -> float:
        trial = {**row, name: index}
        return sum(0.25 ** counts.get(pair, 99) for pair in pairs_of(trial) if (name, index) in pair)

    while min(counts.values()) == 0 or len(rows) < N_CASES:
        row: Row = dict(min(counts, key=counts.__getitem__))
        for name in AXES:
            if name not in row:
                best = sorted(range(len(AXES[name])), key=lambda i: -gain(row, name, i))
                row[name] = next(i for i in best if can_complete({**row, name: i}))
        rows.append(row)
        for pair in pairs_of(row):
            counts[pair] += 1
    return rows


class Case(NamedTuple):
    name: str
    config: ModelConfig


@functools.cache
def cases() -> tuple[Case, ...]:
    found = []
    for n, row in enumerate(covering_array()):
        config = ModelConfig.model_validate(config_data(row))
        block = config.block
        kinds = (config.state_init, config.inject, config.update, config.loop_norm, block.attention, config.position)
        found.append(Case(f"{n:02d}-" + "-".join(choice.kind for choice in kinds), config))
    return tuple(found)


def over_space(where: Callable[[ModelConfig], bool] = lambda config: True) -> pytest.MarkDecorator:
    """Parametrises a law over the cases of the space; its argument is ``config``."""
    chosen = [case for case in cases() if where(case.config)]
    assert chosen, "a law over no case proves nothing"
    return pytest.mark.parametrize("config", [c.config for c in chosen], ids=[c.name for c in chosen])


def house(**fields: Any) -> ModelConfig:
    """One small model, for positive controls and equations."""
    return ModelConfig.model_validate({**SIZES, **fields})


GRT: dict[str, Any] = {
    "inject": {"kind": "concat", "noise": 0.1, "bias": True},
    "update": {"kind": "gate", "tau": 0.8, "noise": 0.1},
}
