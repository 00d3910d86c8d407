"""Overlays: a part of a recipe, put over a whole one (``alcoda train A --with OVERLAY``).

Mappings merge, name by name. A choice of another kind replaces the old choice with its fields. Lists and single values
replace. The overlay's ``description`` says what it changes, so it is added to the recipe's; the recipe's name becomes
NAME+STEM, STEM the name of the overlay's file, where the overlay gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from alcoda.errors import UsageError

Overlay = tuple[str, dict[str, Any]]
"""The stem of its file, and what it holds."""


def overlay_all(
    data: dict[str, Any], overlays: Sequence[Overlay], complete: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """``data`` with each overlay over it, in order.

    Args:
        data: a whole recipe.
        overlays: what to put over it. Only the end has to be a recipe: one overlay may need the next.
        complete: checks a recipe and fills in its defaults; UsageError where it is none.

    Raises:
        UsageError: the end is no recipe; names the overlay from which on it is none, and the entry.
    """
    since: list[str] = []
    trouble = ""
    for stem, part in overlays:
        data = put_over(data, stem, part)
        since.append(stem)
        try:
            data, since = complete(data), []
        except UsageError as error:
            trouble = str(error)
    if since:
        raise UsageError(f"--with {', '.join(since)}: {trouble}")
    return data


def put_over(data: dict[str, Any], stem: str, part: dict[str, Any]) -> dict[str, Any]:
    """``data`` with one overlay over it, name and description included."""
    described = [text for text in (data.get("description"), part.get("description")) if text]
    named = {"name": part.get("name", f"{data.get('name', 'run')}+{stem}")}
    texts = {"description": "; ".join(described)} if all(isinstance(text, str) for text in described) else {}
    return {**merge(data, part), **named, **texts}


def merge(old: Any, new: Any) -> Any:
    """``new`` over ``old``; neither is changed."""
    if not isinstance(old, dict):
        return new
    if isinstance(new, str) and "kind" in old:
        new = {"kind": new}
    if not isinstance(new, dict):
        return new
    if "kind" in new and new["kind"] != old.get("kind"):
        return new
    return {**old, **{key: merge(old[key], value) if key in old else value for key, value in new.items()}}
