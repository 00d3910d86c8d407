"""The part of the page about downstream tasks: accuracy by loops, and with exits (harness.json)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alcoda.report.fields import Fields, load
from alcoda.report.markup import MISSING, bits, count, esc, figure, note, number, quantity, section, table
from alcoda.report.svg import dash, draw, legend, marker, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from alcoda.report.read import Run

_ABOUT = (
    "Accuracy of the likeliest answer (acc), or of the answer likeliest for its length in bytes (acc_norm), with its "
    "standard error. Gain: over the first row of the task, paired by document. Loops and executed FLOPs are those of a "
    "token that was read, with what an exit rule looks at."
)
_N_CORE = 22


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error (None: it has none)."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskPoint:
    """A task at one depth, or with an exit (``is_exit``)."""

    point: str
    is_exit: bool
    mean_loops: float
    flops_per_token: float
    metrics: dict[str, Estimate]
    gain: Estimate | None
    centred: float | None


@dataclass(frozen=True)
class TaskScores:
    """One task; ``limit``: only so many documents of it (None: all); ``main``: the metric that it is summed up by."""

    task: str
    source: str
    shots: int
    main: str
    n: int
    train_step: int
    limit: int | None
    baseline: float | None
    by_point: tuple[TaskPoint, ...]


def read_tasks(path: Path) -> tuple[TaskScores, ...]:
    """``harness.json`` of a run; empty where there is none. Raises `RunError` where it is damaged."""
    if not path.is_file():
        return ()
    return tuple(
        _scores(one.child("result"), one.child("asked")) for one in Fields(load(path), str(path)).children("kept")
    )


def _scores(result: Fields, asked: Fields) -> TaskScores:
    limit = asked.maybe_number("limit")
    return TaskScores(
        task=result.text("task", "?"),
        source=result.text("source"),
        shots=result.integer("shots"),
        main=result.text("main", "acc"),
        n=result.integer("n"),
        train_step=asked.integer("train_step"),
        limit=None if limit is None else int(limit),
        baseline=result.maybe_number("baseline"),
        by_point=tuple(
            TaskPoint(
                point=one.text("point", "?"),
                is_exit="exit" in one,
                mean_loops=one.number("mean_loops"),
                flops_per_token=one.number("flops_per_token"),
                metrics={name: _estimate(one.child("metrics").child(name)) for name in one.child("metrics").data},
                gain=_estimate(one.child("gain")) if "gain" in one else None,
                centred=one.maybe_number("centred"),
            )
            for one in result.children("by_point")
        ),
    )


def _estimate(data: Fields) -> Estimate:
    return Estimate(data.number("value"), data.maybe_number("stderr"))


def core_scores(tasks: Sequence[TaskScores]) -> dict[str, float]:
    """CORE by point: the mean of the centred accuracies, where all 22 were measured alike."""
    core = [one for one in tasks if one.source == "core"]
    ways = {(tuple(at.point for at in one.by_point), one.limit, one.train_step) for one in core}
    if len(core) != _N_CORE or len(ways) != 1:
        return {}
    columns = zip(*(one.by_point for one in core), strict=True)
    return {column[0].point: sum(at.centred or 0.0 for at in column) / _N_CORE for column in columns}


def tasks(runs: Sequence[Run]) -> str:
    """A figure and a table a run."""
    parts = [f"<p>{esc(_ABOUT)}</p>"]
    for i, run in enumerate(runs):
        if not run.tasks:
            continue
        if len(runs) > 1:
            parts.append(f"<h3>{esc(run.label)}</h3>")
        parts += [f"<p>CORE at {esc(point)}: {number(score)}</p>" for point, score in core_scores(run.tasks).items()]
        if cut := sorted({one.limit for one in run.tasks if one.limit is not None}):
            first = " or ".join(map(str, cut))
            parts.append(note(f"Of some tasks only the first {first} documents were scored (`--limit`)."))
        if run.evaluation and any(run.evaluation.train_step not in (None, one.train_step) for one in run.tasks):
            parts.append(note("Some were measured on another checkpoint: `alcoda harness RUN` measures anew."))
        svg = accuracy_figure(run, f"tasks {i}")
        if svg:
            words = "Whiskers: one standard error. Open markers: with an exit, at the mean loops of a token."
            parts.append(figure(svg, "Accuracy by loops", words))
        parts.append(_table(run.tasks))
    return section("tasks", "Tasks", *parts)


def _table(found: Sequence[TaskScores]) -> str:
    metrics = list(dict.fromkeys(name for one in found for at in one.by_point for name in at.metrics))
    rows = []
    for one in found:
        for at in one.by_point:
            about = f"{esc(one.task)}<small>{one.n:,} documents, {count(one.shots, 'shot')}</small>"
            cells = [_cell(at.metrics.get(name)) for name in metrics]
            gain, loops = _cell(at.gain, signed=True), number(at.mean_loops)
            rows.append([about, esc(at.point), *cells, gain, loops, quantity(at.flops_per_token)])
    head = ["Task", "Loops or exit", *map(esc, metrics), "Gain", "Mean loops", "FLOPs per token"]
    return table(head, rows, "Accuracy on tasks by depth, with standard errors")


def _cell(one: Estimate | None, signed: bool = False) -> str:
    if one is None:
        return MISSING
    text = bits(one.value, 4) if abs(one.value) < 1000 else number(one.value)
    text = f"+{text}" if signed and one.value >= 0 else text
    return text if one.stderr is None else f"{text}<small>± {esc(number(one.stderr))}</small>"


def accuracy_figure(run: Run, key: str) -> str | None:
    """A line a task over the depths, and a marker for each exit."""
    drawn = []
    for one in run.tasks:
        points = [(at, at.metrics[one.main]) for at in one.by_point if one.main in at.metrics]
        if points and all(0 <= found.value <= 1 for _, found in points):
            drawn.append((one, points))
    if not drawn:
        return None

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles = []
        for i, (_, points) in enumerate(drawn):
            for is_exit in (False, True):
                these = sorted(
                    ((at.mean_loops, found) for at, found in points if at.is_exit == is_exit), key=lambda x: x[0]
                )
                if not these:
                    continue
                line = ax.errorbar(
                    [loops for loops, _ in these],
                    [found.value for _, found in these],
                    yerr=[found.stderr or 0.0 for _, found in these],
                    color=series(i),
                    linestyle="none" if is_exit else dash(i),
                    marker=marker(i),
                    markersize=4,
                    elinewidth=0.8,
                    fillstyle="none" if is_exit else "full",
                )
                if not is_exit:
                    handles.append(line)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.set_xlabel("loops")
        ax.set_ylabel("accuracy")
        ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
        legend(fig, handles, [one.task for one, _ in drawn])

    said = []
    for one, points in drawn:
        values = ", ".join(f"{at.point}: {bits(found.value)}" for at, found in points if math.isfinite(found.value))
        said.append(f"{one.task} {values}")
    return draw(key, f"Line plot of accuracy against loops, {run.label}. {'; '.join(said)}.", paint, height_in=3.2)
