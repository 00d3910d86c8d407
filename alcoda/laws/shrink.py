"""The same design at a size at which every law runs in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from alcoda.config import explain
from alcoda.errors import UsageError
from alcoda.laws.subject import VOCAB
from alcoda.model.config import ModelConfig
from alcoda.training.run import flatten

D_MODEL = 32
N_HEADS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "seq_len": 48,
    "d_model": D_MODEL,
    "init_std": 0.2,  # so that every part has a visible effect
}
AT_MOST = {"n_prelude": 2, "n_core": 2, "n_coda": 2, "n_loops": 3}
WINDOW = 5
"""Tokens that a window keeps: fewer than the texts of the laws have, so that it cuts."""

NEAR = 12
"""Legal neighbours of a number that are tried beside those of another one."""

Path = tuple[str | int, ...]


class Shrunk(NamedTuple):
    """A small model, and what was changed to make it: ``d_model 960 -> 32``."""

    config: ModelConfig
    changes: tuple[str, ...]


def shrink(config: ModelConfig) -> Shrunk:
    """``config`` at a law's size: every axis keeps its choice, and numbers of a choice that are tied to sizes follow.

    Tied numbers are known by their names (docs/design, section 6): ``d_...`` and latents are in proportion to d_model,
    ``..._heads`` to n_heads, a window is cut to `WINDOW` tokens. Any other keeps its value, or takes the nearest that
    is legal.

    Raises:
        UsageError: no legal neighbour was found.
    """
    data = config.model_dump(mode="json")
    n_heads = max(n for n in range(1, min(config.n_heads, N_HEADS) + 1) if D_MODEL % n == 0)
    data.update(SIZES, n_heads=n_heads)
    data.update({name: min(data[name], most) for name, most in AT_MOST.items()})
    if config.d_head is not None:
        share = config.d_head * config.n_heads / config.d_model
        data["d_head"] = max(2, 2 * round(share * D_MODEL / n_heads / 2))
    if config.d_ff is not None:
        data["d_ff"] = max(1, round(config.d_ff * D_MODEL / config.d_model))
    _move_source(data)
    tied = list(_numbers({name: value for name, value in data.items() if isinstance(value, dict)}))
    for path in tied:
        _put(data, path, _scaled(path, _get(data, path), config, n_heads))
    small = _legal(data, [*tied, ("n_heads",), *([("d_head",)] if config.d_head is not None else [])])
    before, after = (flatten(c.model_dump(mode="json")) for c in (config, small))
    return Shrunk(small, tuple(f"{n} {before.get(n)} -> {v}" for n, v in after.items() if before.get(n) != v))


def _move_source(data: dict[str, Any]) -> None:
    """Bring a memory's source, ``prelude.11``, to the last block that the stage still has."""
    stage, dot, layer = str(data["memory"].get("source")).partition(".")
    if dot:
        data["memory"]["source"] = f"{stage}.{min(int(layer), data[f'n_{stage}'] - 1)}"


def _numbers(data: Any, path: Path = ()) -> Iterator[Path]:
    """Where whole numbers stand."""
    if isinstance(data, int) and not isinstance(data, bool):
        yield path
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(value, (*path, key))


def _get(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def _put(data: Any, path: Path, value: Any) -> None:
    _get(data, path[:-1])[path[-1]] = value


def _scaled(path: Path, value: int, config: ModelConfig, n_heads: int) -> int:
    name = next(key for key in reversed(path) if isinstance(key, str))
    if any("window" in str(key) for key in path):
        return min(value, WINDOW)
    if name.startswith("d_") or "latent" in name:
        return max(1, round(value * D_MODEL / config.d_model))
    if name.endswith("heads"):
        return max(1, round(value * n_heads / config.n_heads))
    return value


def _legal(data: dict[str, Any], tied: list[Path]) -> ModelConfig:
    """The config of ``data``, or of its nearest legal neighbour: one tied number moved, or two."""
    try:
        return ModelConfig.model_validate(data)
    except ValidationError as error:
        first = error
    for n in (1, 2):
        for paths in itertools.combinations(tied, n):
            for values in itertools.product(*(_neighbours(_get(data, path), n) for path in paths)):
                config = _try(data, paths, values)
                if config is not None:
                    return config
    why = explain(first, "the shrunk model")
    raise UsageError(f"no small model of this design was found: {why}. Check it as it is with --full-size")


def _neighbours(value: int, n: int) -> list[int]:
    every: list[int] = sorted(range(max(2 * value, D_MODEL) + 1), key=lambda other: abs(other - value))
    return every[1:] if n == 1 else every[:NEAR]


def _try(data: dict[str, Any], paths: tuple[Path, ...], values: tuple[int, ...]) -> ModelConfig | None:
    before = [_get(data, path) for path in paths]
    for path, value in zip(paths, values, strict=True):
        _put(data, path, value)
    try:
        return ModelConfig.model_validate(data)
    except ValidationError:
        return None
    finally:
        for path, value in zip(paths, before, strict=True):
            _put(data, path, value)
