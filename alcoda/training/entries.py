"""Every entry of a recipe in words: what ``alcoda entries`` prints."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from itertools import pairwise
from textwrap import dedent
from typing import NamedTuple

from alcoda.config import Choice, Config
from alcoda.errors import UsageError, did_you_mean
from alcoda.plugins import load_entry_points
from alcoda.training.recipe import Recipe


class Entry(NamedTuple):
    """One entry, or one choice on an axis.

    Attributes:
        name: dotted, as ``--set`` takes it; of what belongs to one choice, ``axis: kind.name``.
        default: as YAML; empty for a choice.
        meaning: from the docstrings.
    """

    name: str
    default: str
    meaning: str


def describe_entries(below: str = "") -> list[Entry]:
    """All entries, or those of one part (``train``, ``model.block``); an axis (``model.update``) with all its choices.

    Raises:
        UsageError: no entry of that name.
    """
    load_entry_points()
    found = list(_entries(Recipe, "", below))
    axis, _, entry = below.rpartition(".")  # an entry of a choice is set without its kind: model.update.noise
    kept = [e for e in found if not below or e.name == below or e.name.startswith((f"{below}.", f"{below}: "))]
    kept += [e for e in found if e.name.startswith(f"{axis}: ") and e.name.endswith(f".{entry}")]
    if not kept:
        parts = {e.name[:i] for e in found for i in (*_dots(e.name), len(e.name)) if ": " not in e.name}
        raise UsageError(f"no entry {below!r}{did_you_mean(below, parts)}")
    return kept


def _dots(name: str) -> list[int]:
    return [i for i, letter in enumerate(name) if letter == "."]


def _entries(config: type[Config], prefix: str, below: str) -> Iterator[Entry]:
    meanings = _meanings(config)
    for name, field in config.model_fields.items():
        meaning = meanings.get(name, "")
        if name == "kind":
            continue
        path, default = f"{prefix}{name}", field.get_default(call_default_factory=True)
        if isinstance(default, Choice):
            one_of = f"One of: {', '.join(sorted(default.choices))}."
            yield Entry(path, default.kind, f"{meaning} {one_of}".strip())
            if below == path or below.startswith(f"{path}."):
                yield from _choices(default, path, below)
        elif isinstance(default, Config):
            yield from _entries(type(default), f"{path}.", below)
        else:
            yield Entry(path, "(needed)" if field.is_required() else json.dumps(default), meaning)


def _choices(default: Choice, path: str, below: str) -> Iterator[Entry]:
    for kind, choice in sorted(default.choices.items()):
        yield Entry(f"{path}: {kind}", "", " ".join((choice.__doc__ or "").split()))
        yield from _entries(choice, f"{path}: {kind}.", below)


def _meanings(config: type[Config]) -> dict[str, str]:
    """What is said below each field, in one line. Pydantic would read all sources for it at every start of everything
    (``use_attribute_docstrings``: 0.2 s)."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        if not issubclass(cls, Config):
            continue
        (tree,) = ast.parse(dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                found[field.target.id] = " ".join(str(text.value).split()) if isinstance(text, ast.Constant) else ""
    return found
