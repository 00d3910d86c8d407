"""`write_report`: one HTML file that needs nothing else, about one run or comparing several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from alcoda.errors import RunError, UsageError
from alcoda.report import caches, frontier, inside, lab, prefills, record, results, tasks
from alcoda.report.export import check_forms, collecting, write_parts
from alcoda.report.markup import esc
from alcoda.report.read import Run, read_runs

_PARTS = {
    "training": "Training",
    "depth": "Depth",
    "tasks": "Tasks",
    "exits": "Exits",
    "prefill": "Prefill",
    "cache": "Decode cache",
    "loops": "Loops",
    "lab": "Convergence",
    "cost": "Cost",
    "samples": "Samples",
    "config": "Config",
    "provenance": "Provenance",
}


def write_report(runs: Sequence[Path], out: Path, figures: str | None = None, tables: Sequence[str] = ()) -> Path:
    """Write the report about the run folders ``runs`` to the file ``out`` and return ``out``.

    figures: ``pdf``, tables: ``csv``, ``latex``: also write those of the page into `parts_folder`.

    The file is complete or not there at all: it is written beside its place and then renamed. The same folders give
    the same bytes. Raises `UsageError` where a folder is not a run, ``out`` cannot be a file or matplotlib is missing,
    `RunError` where a file of a run is damaged or the disk refuses.
    """
    out = Path(out)
    if out.is_dir():
        raise UsageError(f"{out} is a folder; give the file to write, such as {out / 'report.html'}")
    check_forms(figures, tables)
    with collecting() as collected:
        text = render(read_runs(runs))
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, out)
    except OSError as error:
        raise RunError(f"{out}: the report cannot be written ({error})") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    write_parts(collected, parts_folder(out), figures, tables)
    return out


def parts_folder(out: Path) -> Path:
    """Where the figures and tables of a page go: ``report_parts`` beside ``report.html``."""
    return out.with_name(f"{out.stem}_parts")


def render(runs: Sequence[Run]) -> str:
    """The page as HTML text. Raises `UsageError` where matplotlib is missing."""
    style = files("alcoda.report").joinpath("page.css").read_text(encoding="utf-8")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    # Parts that not every run has.
    there = {
        "tasks": any(run.tasks for run in runs),
        "exits": any(run.frontier for run in runs),
        "lab": any(run.lab for run in runs),
        "loops": any(run.inside for run in runs),
        "prefill": any(run.prefills for run in runs),
        "cache": any(run.caches for run in runs),
    }
    parts = {key: name for key, name in _PARTS.items() if there.get(key, True)}
    links = "\n".join(f'<a href="#{key}">{name}</a>' for key, name in parts.items())
    body = [
        results.headline(runs),
        f'<nav aria-label="Sections">\n{links}\n</nav>',
        results.training(runs),
        results.depth(runs),
        *([tasks.tasks(runs)] if there["tasks"] else []),
        *([frontier.exits(runs)] if there["exits"] else []),
        *([prefills.prefill(runs)] if there["prefill"] else []),
        *([caches.cache(runs)] if there["cache"] else []),
        *([inside.loops(runs)] if there["loops"] else []),
        *([lab.lab(runs)] if there["lab"] else []),
        results.cost(runs),
        record.samples(runs),
        record.config(runs),
        record.provenance(runs),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{esc(title)} · alcoda report</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "<footer><p>Written by <code>alcoda report</code>. This file is complete in itself.</p></footer>",
            "</body>",
            "</html>",
            "",
        ]
    )
