"""Every recipe of a folder with what it costs: what ``alcoda recipes`` lists."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alcoda.errors import UsageError
from alcoda.progress import bar
from alcoda.training.folders import is_overlay, project_recipes, recipe_files
from alcoda.training.recipe import load_recipe, read_mapping


@dataclass(frozen=True)
class Listed:
    """A recipe: its name below the folder, its file, and its ledger's totals (FLOPs a token)."""

    name: str
    path: str
    description: str
    source: str
    n_loops: int
    params: int
    effective_params: int
    forward_flops_per_token: float
    training_flops_per_token: float


@dataclass(frozen=True)
class ListedOverlay:
    """A part of a recipe."""

    name: str
    path: str
    description: str


@dataclass(frozen=True)
class Catalogue:
    """What a folder holds; ``broken`` says of the files that are no recipe why (name -> message)."""

    folder: Path
    recipes: tuple[Listed, ...]
    overlays: tuple[ListedOverlay, ...]
    broken: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self) | {"folder": str(self.folder)}


def catalogue(folder: str | Path | None = None) -> Catalogue:
    """All recipes below ``folder`` (the project's where None) and, from folders called ``ablations``, the overlays.

    Raises:
        UsageError: no such folder, or nothing in it.
    """
    root = project_recipes() if folder is None else Path(folder)
    if not root.is_dir():
        raise UsageError(f"{root} is no folder: give one with recipes in it, or none for the project's")
    files = recipe_files(root)
    if not files:
        raise UsageError(f"{root} holds no recipe: no file below it ends in .yaml")
    recipes, overlays, broken = [], [], {}
    with bar("recipes", len(files)) as advance:
        for file in files:
            name = file.relative_to(root).with_suffix("").as_posix()
            try:
                if is_overlay(file, root):
                    described = read_mapping(file).get("description", "")
                    overlays.append(ListedOverlay(name, str(file), str(described)))
                else:
                    recipes.append(_listed(name, file))
            except UsageError as error:
                broken[name] = str(error)
            advance()
    return Catalogue(root, tuple(recipes), tuple(overlays), broken)


def _listed(name: str, file: Path) -> Listed:
    recipe = load_recipe(file)
    ledger = recipe.ledger()
    return Listed(
        name,
        str(file),
        recipe.description,
        recipe.source,
        recipe.model.n_loops,
        ledger.params,
        ledger.effective_params,
        ledger.forward_flops_per_token,
        ledger.training_flops_per_token,
    )
