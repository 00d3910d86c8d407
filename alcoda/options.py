"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[
    Path, typer.Argument(help="A run folder (what alcoda train --out or alcoda pack wrote).", metavar="RUN")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change an entry of the recipe: train.steps=500 (alcoda entries lists them). Repeatable.",
        metavar="A.B=C",
    ),
]


def load_plugins(context: typer.Context, plugins: list[str] | None) -> list[str] | None:
    if plugins and not context.resilient_parsing:
        from alcoda.plugins import load

        for plugin in plugins:
            load(plugin)
    return plugins


Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        help="A Python file (or a module's name) that registers choices of its own; it is run. Repeatable.",
        metavar="FILE.py",
        callback=load_plugins,
    ),
]
"""A command that has this option needs to do nothing with it: what is named is loaded before the command runs."""
With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with", help="An overlay: a YAML file with a part of a recipe, put over it. Repeatable.", metavar="OVERLAY"
    ),
]
MaxTokens = Annotated[str, typer.Option("--tokens", help="Of each source at most: 20000, 20k, all.", metavar="NUMBER")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON, one line.")]
Checkpoint = Annotated[str, typer.Option(help="best, last, or a checkpoint's name (step_00000500).")]
