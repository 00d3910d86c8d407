"""Figures of a page as PDF, its tables as CSV and LaTeX: what the page is made of, taken while it is made."""

from __future__ import annotations

import csv
import html
import io
import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from alcoda.errors import RunError, UsageError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TableForm = Literal["csv", "latex"]
_SUFFIXES: dict[str, str] = {"csv": ".csv", "latex": ".tex"}
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "–": "--"}
_LATEX |= {char: f"\\{char}" for char in "&%$#_{}"}


@dataclass(frozen=True)
class Drawn:
    """One figure: its key on the page, what paints it, and its height in inches."""

    key: str
    paint: Callable[[Figure], None]
    height_in: float


@dataclass(frozen=True)
class Tabled:
    """One table, in plain text."""

    label: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass
class Collected:
    """What a page is made of, in its order."""

    figures: list[Drawn] = field(default_factory=list)
    tables: list[Tabled] = field(default_factory=list)


_COLLECTED: ContextVar[Collected | None] = ContextVar("collected", default=None)


@contextmanager
def collecting() -> Generator[Collected]:
    """Collect the figures and tables that are made in the block."""
    collected = Collected()
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


def tell_figure(key: str, paint: Callable[[Figure], None], height_in: float) -> None:
    """A figure is drawn."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.figures.append(Drawn(key, paint, height_in))


def tell_table(label: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table is made, of HTML cells."""
    collected = _COLLECTED.get()
    if collected is not None:
        plain = tuple(tuple(map(_plain, row)) for row in rows)
        collected.tables.append(Tabled(label, tuple(map(_plain, head)), plain))


def check_forms(figures: str | None, tables: Sequence[str]) -> None:
    """UsageError for a form that there is not."""
    if figures not in (None, "pdf"):
        raise UsageError(f"--figures {figures}: pdf is what there is")
    for form in tables:
        if form not in _SUFFIXES:
            raise UsageError(f"--tables {form!r}{did_you_mean(form, _SUFFIXES)} (several with commas between)")


def write_parts(collected: Collected, folder: Path, figures: str | None, tables: Sequence[str]) -> list[Path]:
    """Write figures and tables into ``folder``; their paths. RunError where the disk refuses."""
    from alcoda.report.svg import pdf

    files: dict[str, bytes] = {}
    for one in collected.figures if figures else ():
        files[_free(files, _slug(one.key), ".pdf")] = pdf(one.paint, one.height_in)
    for one in collected.tables:
        for form in tables:
            text = _csv(one) if form == "csv" else _latex(one)
            files[_free(files, _slug(one.label), _SUFFIXES[form])] = text.encode()
    written = []
    for name, content in files.items():
        path = folder / name
        part = path.with_name(f".{name}.{os.getpid()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            os.replace(part, path)
        except OSError as error:
            raise RunError(f"{path} cannot be written ({error})") from error
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        written.append(path)
    return written


def _plain(cell: str) -> str:
    """A cell without its HTML; of a rounded number the whole one."""
    text = re.sub(r'<data value="([^"]*)"[^>]*>.*?</data>', r"\1", cell)
    text = re.sub(r"<small>(.*?)</small>", r" (\1)", text)
    return html.unescape(re.sub(r"<[^>]*>", "", text)).strip()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:60] or "part"


def _free(taken: dict[str, bytes], stem: str, suffix: str) -> str:
    name, n = f"{stem}{suffix}", 2
    while name in taken:
        name, n = f"{stem}_{n}{suffix}", n + 1
    return name


def _csv(one: Tabled) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    # A program that reads it takes a hyphen for a minus sign, and nothing for what was not measured.
    cells = ([{"–": ""}.get(cell, cell.replace("−", "-")) for cell in row] for row in (one.head, *one.rows))
    writer.writerows(cells)
    return buffer.getvalue()


def _latex(one: Tabled) -> str:
    """A tabular of the package booktabs."""

    def row(cells: Sequence[str]) -> str:
        return " & ".join("".join(_LATEX.get(char, char) for char in cell) for cell in cells) + r" \\"

    body = "\n".join(map(row, one.rows))
    columns = "l" + "r" * (len(one.head) - 1)
    return (
        f"% {one.label}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{row(one.head)}\n\\midrule\n{body}\n"
        "\\bottomrule\n\\end{tabular}\n"
    )
