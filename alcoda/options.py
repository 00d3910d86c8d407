"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from alcoda.errors import UsageError

Run = Annotated[
    Path,
    typer.Argument(
        help="A run folder (what alcoda train --out, alcoda pack or alcoda import wrote), or mini, which comes along.",
        metavar="RUN",
    ),
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
Cache = Annotated[
    str | None,
    typer.Option(
        help="What a token leaves in the decode cache: per_loop (a slot a loop; default), mean (of its loops' keys), "
        "last (of its last loop).",
        metavar="NAME",
    ),
]
Wavefront = Annotated[
    int | None,
    typer.Option(
        help="Draft the next token after so many loops and check it where this one leaves: the same text, sooner.",
        metavar="LOOPS",
        min=1,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON, one line.")]
Checkpoint = Annotated[str, typer.Option(help="best, last, or a checkpoint's name (step_00000500).")]


def parse_tokens(text: str, option: str = "--tokens") -> int | None:
    """``20k`` as 20,000; None for ``all``."""
    if text == "all":
        return None
    number, scale = (text[:-1], {"k": 10**3, "M": 10**6}[text[-1]]) if text[-1:] in ("k", "M") else (text, 1)
    try:
        found = round(float(number) * scale)
    except (ValueError, OverflowError):
        found = 0
    if found < 2:
        raise UsageError(f"{option} {text}: a number of 2 or more, as 20000, 20k or 1M; or all")
    return found


def parse_loops(text: str, option: str = "--loops") -> list[int]:
    """``"1,2,4"`` as numbers."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise UsageError(f"{option} {text}: write whole numbers with commas between, for example 1,2,4,8") from None


def parse_rates(text: str, option: str = "--rate") -> list[float]:
    """``"2,4,0.5"`` as numbers."""
    try:
        return [float(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise UsageError(f"{option} {text}: write numbers with commas between, for example 2,4,8") from None


def parse_size(text: str, option: str = "--memory") -> int:
    """``24GB`` (10^9 bytes each), ``24GiB`` (2^30) or ``512MB`` as bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT])(i?)B\s*", text, re.IGNORECASE)
    if found is None:
        raise UsageError(f"{option} {text}: a size with its unit, as 24GB, 24GiB or 512MB")
    number, unit, binary = found.groups()
    size = round(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1))
    if size < 1:
        raise UsageError(f"{option} {text}: more than nothing, as 24GB, 24GiB or 512MB")
    return size


def parse_keep(text: str) -> tuple[str, int]:
    """``valid=200k`` as ("valid", 200000)."""
    split, equals, tokens = text.partition("=")
    n_tokens = parse_tokens(tokens, f"--keep {split}=") if equals else None
    if n_tokens is None:
        raise UsageError(f"--keep {text}: SPLIT=TOKENS, for example valid=200k")
    return split, n_tokens
