"""A layout: how another project spells an architecture, and which of its tensors is which of our parameters.

A layout runs none of their code. It turns their config.json into a point of our design space (`ModelConfig`), and says
for each of our parameters which of their tensors it is made of. What it cannot express it refuses by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig

Theirs = Mapping[str, Any]
"""What their config.json says."""


class Take(NamedTuple):
    """Where a parameter of ours comes from.

    Attributes:
        name: of their tensor.
        change: a pure function of it (some rows of a fused map, another order, a scale), which must also work on the
            meta device; None: it is taken as it is. Parameters that share a tensor must use all of it between them.
    """

    name: str
    change: Callable[[Tensor], Tensor] | None = None


class Layout(ABC):
    """One project's spelling.

    Attributes:
        name: for messages and records.
        source: where the architecture is published.
        model_types, architectures: what config.json says of it, under ``model_type`` and ``architectures``.
        ignored: patterns (whole names) of tensors that are no weights: buffers of angles and the like.
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()
    architectures: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()

    def recognises(self, config: Theirs) -> bool:
        """Whether a config.json is of this layout."""
        named = config.get("architectures") or ()
        return config.get("model_type") in self.model_types or any(name in self.architectures for name in named)

    @abstractmethod
    def model(self, config: Theirs) -> dict[str, Any]:
        """Fields of our `ModelConfig`.

        Raises:
            UsageError: an entry that we cannot express (`entry` and `only` name it).
        """

    @abstractmethod
    def takes(self, model: ModelConfig, config: Theirs) -> dict[str, Take]:
        """Where every parameter of ``model`` comes from, by its name in ``state_dict``."""

    def copies(self, model: ModelConfig, config: Theirs) -> dict[str, str]:
        """Tensors that a checkpoint may hold a second time (a tied head), by the name that is used in their place."""
        return {}

    def recipe(self, model: ModelConfig, config: Theirs) -> dict[str, Any]:
        """Fields of our `Recipe` besides the model, where its defaults do not go with it."""
        return {}


_NEEDED: Any = object()


def entry(config: Theirs, name: str, kind: type | tuple[type, ...], default: Any = _NEEDED) -> Any:
    """An entry of config.json, of a type; UsageError where it is another, or missing without a default."""
    value = config.get(name, default)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is _NEEDED:
        raise UsageError(f"config.json has no {name}: {' or '.join(k.__name__ for k in kinds)} is needed")
    if value is default or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
        return value
    raise UsageError(f"config.json: {name} is {value!r}: {' or '.join(k.__name__ for k in kinds)} is needed")


def number(config: Theirs, name: str, default: Any = _NEEDED) -> Any:
    """An entry that is a number."""
    return entry(config, name, (int, float), default)


MOST = 1 << 24
"""Of any size: beyond those of every model, and such that the sizes of all tensors can be told."""


def size(config: Theirs, name: str, default: Any = _NEEDED, least: int = 1) -> Any:
    """An entry that counts something: a whole number from ``least`` to `MOST`; UsageError where it is none."""
    value = entry(config, name, int, default)
    if value is not default and not least <= value <= MOST:
        raise UsageError(f"config.json: {name} is {value}: a whole number from {least} to {MOST:,} is needed")
    return value


def agrees(config: Theirs, name: str, value: int, of: str) -> None:
    """UsageError where an entry that other entries (``of``) say already is there and says something else."""
    said = size(config, name, None, least=0)
    if said not in (None, value):
        raise UsageError(
            f"config.json: {name} is {said}, and {of} say {value}: one of them is of another model; mend it, or take "
            f"{name} out"
        )


def only(config: Theirs, name: str, *allowed: Any) -> Any:
    """An entry of which we can express some values; the first is what a config.json without it means."""
    value = config.get(name, allowed[0])
    if value not in allowed:
        raise UsageError(
            f"config.json: {name} is {value!r}, which has no counterpart here. Allowed: {', '.join(map(repr, allowed))}"
        )
    return value


def rope_base(config: Theirs, default: float) -> float:
    """The base of rotary positions of a transformers config, old (``rope_theta``, ``rope_scaling``) or new
    (``rope_parameters``); UsageError where they are scaled."""
    said = {name: x for of in ("rope_scaling", "rope_parameters") for name, x in mapping(config, of).items()}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind != "default":
        raise UsageError(
            f"config.json: rotary positions are scaled ({kind!r}), which has no counterpart here. Allowed: 'default'"
        )
    return number(said if "rope_theta" in said else config, "rope_theta", default)


def mapping(config: Theirs, name: str) -> dict[str, Any]:
    """An entry that is a mapping, if it is there; else an empty one."""
    return entry(config, name, dict, None) or {}


def layer_types(config: Theirs, n_layers: int) -> list[Any] | None:
    """What a transformers config says of each layer, if it does; UsageError where it is not one entry a layer."""
    kinds = entry(config, "layer_types", list, None)
    if kinds is not None and len(kinds) != n_layers:
        raise UsageError(
            f"config.json: layer_types has {len(kinds)} entries, and num_hidden_layers is {n_layers}: one a layer is "
            "needed"
        )
    return kinds


def attention(config: Theirs, heads: int) -> dict[str, Any]:
    """Our attention axis for a transformers config with ``num_key_value_heads``."""
    said = size(config, "num_key_value_heads", None)
    kv_heads = heads if said is None else said
    return {"kind": "mha"} if kv_heads == heads else {"kind": "gqa", "n_kv_heads": kv_heads}
