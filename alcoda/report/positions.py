"""Bits per byte over the position in the row: what the text before a token is worth to a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from alcoda.report.markup import MISSING, bits, count, esc, figure, table
from alcoda.report.read import PositionPoint, Run
from alcoda.report.svg import dash, draw, legend, marker, ramp, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Line(NamedTuple):
    """One run at one depth, by position."""

    label: str
    loops: int
    color: str
    style: Any
    mark: str
    points: list[PositionPoint]


def lines(runs: Sequence[Run]) -> list[Line]:
    """Of one run its shallowest, nominal and deepest depth; of several each at its nominal depth."""
    found = []
    for i, run in enumerate(runs):
        nominal, evaluation = run.headline, run.evaluation
        if nominal is None or evaluation is None:
            continue
        chosen = {nominal.loops}
        if len(runs) == 1:
            chosen |= {evaluation.by_depth[0].loops, evaluation.by_depth[-1].loops}
        for j, loops in enumerate(sorted(chosen)):
            points = [point for point in evaluation.by_position if loops in point.bits_per_byte]
            if not points:
                continue
            at = count(loops, "loop")
            if len(runs) == 1:
                found.append(Line(at, loops, ramp(j, len(chosen)), "-", "o", points))
            else:
                found.append(Line(f"{run.label}, {at}", loops, series(i), dash(i), marker(i), points))
    return found


def positions(runs: Sequence[Run]) -> str:
    """A figure and a table; nothing where no run was evaluated by position."""
    drawn = lines(runs)
    svg = position_figure(drawn)
    if svg is None:
        return ""
    caption = "Lower is better. Each point: the tokens that are predicted from one part of their row, at its middle."
    shown = figure(svg, "Bits per byte over position", caption)
    spans = sorted({(point.start, point.stop) for line in drawn for point in line.points})
    rows = []
    for start, stop in spans:
        cells = []
        for line in drawn:
            point = next((p for p in line.points if (p.start, p.stop) == (start, stop)), None)
            cells.append(bits(point.bits_per_byte[line.loops]) if point else MISSING)
        rows.append([f"{start:,} to {stop - 1:,}", *cells])
    words = table(["Position", *(esc(line.label) for line in drawn)], rows, "Bits per byte by position in the row")
    return f'<div class="split">\n{shown}\n<div>{words}</div>\n</div>'


def position_figure(drawn: Sequence[Line]) -> str | None:
    """Bits per byte against the middle of each part of the row."""
    if not drawn:
        return None

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles = []
        for line in drawn:
            x = [(point.start + point.stop - 1) / 2 for point in line.points]
            y = [point.bits_per_byte[line.loops] for point in line.points]
            handles += ax.plot(x, y, color=line.color, linestyle=line.style, marker=line.mark, markersize=3)
        ax.set_xlim(0, max(point.stop for line in drawn for point in line.points) - 1 or 1)
        ax.set_xlabel("position in the row, tokens")
        ax.set_ylabel("bits per byte")
        ax.grid(visible=False, axis="x")
        ax.locator_params(axis="x", integer=True, nbins=9)
        ax.locator_params(axis="y", nbins=6)
        legend(fig, handles, [line.label for line in drawn])

    spoken = "; ".join(
        f"{line.label}: from {bits(line.points[0].bits_per_byte[line.loops])} at the beginning to "
        f"{bits(line.points[-1].bits_per_byte[line.loops])} at the end"
        for line in drawn
    )
    return draw("position", f"Line plot of bits per byte against the position in the row. {spoken}.", paint)
