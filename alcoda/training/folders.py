"""Where recipes lie: the project's own folder of them, and how a name is found in it."""

from __future__ import annotations

import difflib
from pathlib import Path

from alcoda.errors import UsageError

OVERLAYS = "ablations"
"""A folder of this name holds overlays (parts of a recipe, for ``--with``), not recipes."""


def project_recipes() -> Path:
    """The folder ``recipes``: in the installed package, or beside it in a checkout.

    Raises:
        UsageError: neither is there.
    """
    package = Path(__file__).parents[1]
    beside = package.parent / "recipes"
    folder = beside if (package.parent / "pyproject.toml").exists() and beside.is_dir() else package / "recipes"
    if not folder.is_dir():
        raise UsageError(f"this installation of alcoda has no recipes ({folder} is missing): give a folder or a file")
    return folder


def find_recipe(path: str | Path) -> Path:
    """``path`` where it exists, else the project's recipe of that name: ``mini/grt``, with or without ``.yaml``.

    Raises:
        UsageError: neither; names those that are near.
    """
    path = Path(path)
    if path.exists():
        return path
    names = {}
    if not path.is_absolute():
        folder = project_recipes()
        names = {file.relative_to(folder).with_suffix("").as_posix(): file for file in recipe_files(folder)}
        found = names.get(path.as_posix().removesuffix(".yaml"))
        if found is not None:
            return found
    near = difflib.get_close_matches(path.as_posix().removesuffix(".yaml"), names, n=3, cutoff=0.5)
    hint = f", and the project has no recipe of that name; near it: {', '.join(near)}" if near else ""
    raise UsageError(
        f"cannot read the recipe {path}: No such file or directory{hint} (alcoda recipes lists those of the project)"
    )


def recipe_files(folder: Path) -> list[Path]:
    """Every YAML file below ``folder``, by name; hidden ones aside."""
    files = (file for pattern in ("*.yaml", "*.yml") for file in folder.rglob(pattern))
    # Regular files only: to read a pipe is to wait for who writes to it.
    return sorted(
        f for f in files if f.is_file() and not any(part.startswith(".") for part in f.relative_to(folder).parts)
    )


def is_overlay(file: Path, folder: Path) -> bool:
    """Whether ``file``, below ``folder``, lies in a folder of overlays."""
    return OVERLAYS in (folder.name, *file.relative_to(folder).parts[:-1])
