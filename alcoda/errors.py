"""The two kinds of failure that a user meets, and their exit codes. Anything else is a bug of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path


class UsageError(ValueError):
    """What was asked for cannot be done: a wrong key, value, path or combination. The command line exits with 2.

    The message names the field, the value, what is allowed, and the way out.
    """

    exit_code = 2
    is_said: bool | None = None
    """Of many processes, whether another one tells the user; None: all may have found it."""


class RunError(RuntimeError):
    """Something went wrong while doing what was asked for: a damaged file, a full disk, a loss that is not a number.

    The command line exits with 1.
    """

    exit_code = 1
    is_said: bool | None = None
    """Of many processes, whether another one tells the user; None: all may have found it."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'x'? Allowed: a, b, x"`` for a message about the unknown ``name``."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} Allowed: {', '.join(allowed)}"


def install(extra: str) -> str:
    """The command that installs what an extra of alcoda needs: it is on no index, so one that pip did not install is
    named by its checkout."""
    try:
        metadata.distribution("alcoda")
    except metadata.PackageNotFoundError:
        return f"pip install -e '{Path(__file__).parents[1]}[{extra}]'"
    return f"pip install 'alcoda[{extra}]'"


def some(names: Sequence[str], most: int = 8) -> str:
    """Names for a message, at most so many of them, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
