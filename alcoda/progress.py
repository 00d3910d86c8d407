"""One progress bar for everything that takes more than two seconds. It goes to stderr: stdout stays for programs.

Of many processes of one run, the main one speaks.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from alcoda import launch
from alcoda.stderr import STDERR

PLAIN_EVERY_S = 15.0
"""Without a terminal (a log file, CI) one line at most this often."""


class Advance(Protocol):
    """Says that ``n`` more units are done; ``note`` is shown beside the bar (loss, tokens/s)."""

    def __call__(self, n: float = 1, note: str = "") -> None: ...


@contextmanager
def bar(description: str, total: float | None, done: float = 0) -> Generator[Advance]:
    """A bar of ``total`` units (None: a spinner) of which ``done`` are done already."""
    if not launch.is_main():
        yield _silent
        return
    if not STDERR.isatty():
        yield _plain(description, total, done)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(file=STDERR), transient=True) as progress:
        task = progress.add_task(description, total=total, completed=int(done), note="")

        def advance(n: float = 1, note: str = "") -> None:
            progress.update(task, advance=n, note=note)

        yield advance


def say(text: str) -> None:
    """A line for the user, beside the bars."""
    if launch.is_main():
        print(text, file=STDERR, flush=True)


def _silent(n: float = 1, note: str = "") -> None:
    pass


def _plain(description: str, total: float | None, done: float) -> Advance:
    last = time.monotonic()

    def advance(n: float = 1, note: str = "") -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= PLAIN_EVERY_S:
            last = now
            share = f"{done / total:4.0%}" if total else f"{done:g}"
            print(f"{description}: {share} {note}".rstrip(), file=STDERR, flush=True)

    return advance
