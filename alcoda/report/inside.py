"""The part of the page about what happens inside the loop: each quantity by loop, and over training at a few loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from alcoda.report.curves import step_axis, thin
from alcoda.report.markup import count, esc, figure, human, note, section
from alcoda.report.read import LoopPoint, Run
from alcoda.report.svg import dash, draw, legend, marker, ramp, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLES = {
    "state_norm": ("State size", "root mean square of the state"),
    "state_change": ("Change of the state", "|new - old| / |old|"),
}
_MOST_LINES = 5


def loops(runs: Sequence[Run]) -> str:
    """Two figures a quantity: by loop at the last validation, and by train step."""
    names = dict.fromkeys(point.name for run in runs for point in run.inside)
    drawn = []
    for name in sorted(names, key=lambda name: (name not in _TITLES, name)):
        title, what = _words(name)
        svg = by_loop_figure(runs, name)
        if svg:
            band = " Band: 10% to 90% of tokens and dimensions." if len(runs) == 1 and _has_band(runs[0], name) else ""
            drawn.append(figure(svg, f"{title} by loop", f"At the last validation: {esc(what)}.{band}"))
        svg = by_step_figure(runs, name)
        if svg:
            which = "One line a loop." if len(runs) == 1 else "At the last loop."
            drawn.append(figure(svg, f"{title} over training", which))
    said = note("Measured in one pass at n_loops over the beginning of the validation text, without noise or dropout.")
    return section("loops", "Inside the loop", said, '<div class="grid">\n' + "\n".join(drawn) + "\n</div>")


def by_loop_figure(runs: Sequence[Run], name: str) -> str | None:
    """A quantity against the loop at the last validation of each run; with its 10% to 90% band for one run."""
    lines = [(i, run, _last(run, name)) for i, run in enumerate(runs)]
    lines = [(i, run, points) for i, run, points in lines if points]
    if not lines:
        return None
    _, what = _words(name)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles = []
        for i, _, points in lines:
            loop_N = [point.loop for point in points]
            style: dict[str, Any] = {"color": series(i), "marker": marker(i), "markersize": 3}
            handles += ax.plot(loop_N, [p.mean for p in points], linestyle=dash(i) if len(runs) > 1 else "-", **style)
            band = [(p.q10, p.q90) for p in points if p.q10 is not None and p.q90 is not None]
            if len(runs) == 1 and len(band) == len(points):
                low_N, high_N = np.array(band).T
                ax.fill_between(loop_N, low_N, high_N, color=series(i), alpha=0.15, linewidth=0)
        ax.set_xlabel("loop")
        ax.set_ylabel(what)
        ax.grid(visible=False, axis="x")
        ax.locator_params(axis="x", integer=True, nbins=9)
        ax.locator_params(axis="y", nbins=6)
        if len(runs) > 1:
            legend(fig, handles, [run.label for _, run, _ in lines])

    spoken = "; ".join(
        f"{run.label}: from {human(points[0].mean)} at loop {points[0].loop} to {human(points[-1].mean)} at loop "
        f"{points[-1].loop}"
        for _, run, points in lines
    )
    return draw(f"by loop {name}", f"Line plot of {name} ({what}) against the loop. {spoken}.", paint)


def by_step_figure(runs: Sequence[Run], name: str) -> str | None:
    """A quantity against train step: at a few loops for one run, at the last loop for several."""
    lines: list[tuple[str, Any, Any, list[LoopPoint]]] = []
    for i, run in enumerate(runs):
        points = [point for point in run.inside if point.name == name]
        every = sorted({point.loop for point in points})
        chosen = _few(every) if len(runs) == 1 else every[-1:]
        for j, loop in enumerate(chosen):
            here = [point for point in points if point.loop == loop]
            if len(runs) == 1:
                lines.append((f"loop {loop}", ramp(j, len(chosen)), "-", here))
            else:
                lines.append((f"{run.label}, loop {loop}", series(i), dash(i), here))
    if not any(len(points) > 1 for *_, points in lines):
        return None
    _, what = _words(name)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles = []
        for _, color, style, points in lines:
            x_N, y_N = np.array([p.train_step for p in points]), np.array([p.mean for p in points])
            sparse: dict[str, Any] = {"marker": "o", "markersize": 3} if len(points) <= 20 else {}
            handles += ax.plot(*thin(x_N, y_N), color=color, linestyle=style, **sparse)
        step_axis(ax, what)
        legend(fig, handles, [line[0] for line in lines])

    spoken = "; ".join(f"{label}: {human(points[-1].mean)} at the end" for label, _, _, points in lines)
    n = count(len(lines), "line")
    return draw(f"by step {name}", f"Line plot of {name} ({what}) against train step, {n}. {spoken}.", paint)


def _last(run: Run, name: str) -> list[LoopPoint]:
    """Of one quantity at the last validation that measured it, by loop."""
    points = [point for point in run.inside if point.name == name]
    return [point for point in points if point.train_step == points[-1].train_step]


def _has_band(run: Run, name: str) -> bool:
    return all(point.q10 is not None and point.q90 is not None for point in _last(run, name))


def _few(loops: Sequence[int]) -> list[int]:
    """The first, the last, and powers of two between them."""
    if len(loops) <= _MOST_LINES:
        return list(loops)
    between = [loop for loop in loops if loop & (loop - 1) == 0]
    return sorted({loops[0], *between[-(_MOST_LINES - 2) :], loops[-1]})


def _words(name: str) -> tuple[str, str]:
    """A title, and the label of the axis."""
    return _TITLES.get(name, (name.split(".", 1)[-1].replace("_", " ").capitalize(), name))
