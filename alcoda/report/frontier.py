"""The part of the page about leaving the loop: loss against loops and FLOPs, by exit rule (frontier.json)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alcoda.report.fields import Fields, load
from alcoda.report.markup import MISSING, bits, count, esc, figure, interval, note, quantity, section, table
from alcoda.report.svg import INK, MUTED, dash, draw, legend, marker, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from alcoda.report.read import Run

_ABOUT = (
    "Each token leaves the loop when a rule says so, and its keys stand for all deeper loops: what an engine computes. "
    "FLOPs are those executed, with what the rule looks at: KL takes coda and head after every loop. Readout-only is "
    "an upper bound that nothing can serve."
)


@dataclass(frozen=True)
class Saved:
    """Bits per byte fewer than all tokens at one depth, paired, with their 95% interval."""

    bits_per_byte: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """A depth for all tokens, or a rule at one setting; differences are of rules only."""

    loops: float
    bits_per_byte: float
    low: float
    high: float
    flops_per_token: float
    equal_loops: Saved | None = None
    equal_flops: Saved | None = None
    sufficient: Saved | None = None


@dataclass(frozen=True)
class Curve:
    """A rule, strict to loose; ``best``: the point of the fewest loops within the tolerance."""

    name: str
    points: tuple[Point, ...]
    best: Point | None


@dataclass(frozen=True)
class Frontier:
    """What ``alcoda frontier`` measured."""

    data: str
    train_step: int
    n_loops: int
    tolerance: float
    sufficient_loops: int
    n_tokens: int
    note: str
    uniform: tuple[Point, ...]
    curves: tuple[Curve, ...]


def read_frontier(path: Path) -> Frontier | None:
    """``frontier.json`` of a run. Raises `RunError` where it is damaged."""
    if not path.is_file():
        return None
    data = Fields(load(path), str(path))
    return Frontier(
        data=data.text("data", "valid"),
        train_step=data.integer("train_step"),
        n_loops=data.integer("n_loops"),
        tolerance=data.number("tolerance"),
        sufficient_loops=data.integer("sufficient_loops"),
        n_tokens=data.integer("n_tokens"),
        note=data.text("note"),
        uniform=tuple(_point(one, "loops") for one in data.children("uniform")),
        curves=tuple(_curve(one) for one in data.children("curves")),
    )


def _curve(data: Fields) -> Curve:
    points = tuple(_point(one, "mean_loops") for one in data.children("points"))
    best = data.maybe_number("best")
    name = data.text("rule", "?") + (", readout-only" if data.flag("is_upper_bound") else "")
    return Curve(name, points, None if best is None or not 0 <= best < len(points) else points[int(best)])


def _point(data: Fields, loops: str) -> Point:
    ends = data.number("low"), data.number("high")
    point = Point(data.number(loops), data.number("bits_per_byte"), *ends, data.number("flops_per_token"))
    if loops == "loops":
        return point
    differences = (data.child(key) for key in ("at_equal_loops", "at_equal_flops", "over_sufficient"))
    saved = [Saved(*(one.number(key) for key in ("bits_per_byte", "low", "high"))) for one in differences]
    return replace(point, equal_loops=saved[0], equal_flops=saved[1], sufficient=saved[2])


def exits(runs: Sequence[Run]) -> str:
    """Two figures and a table a run."""
    parts = [f"<p>{esc(_ABOUT)}</p>"]
    for i, run in enumerate(runs):
        found = run.frontier
        if found is None:
            continue
        if len(runs) > 1:
            parts.append(f"<h3>{esc(run.label)}</h3>")
        said = (
            f"On {found.data}: {found.n_tokens:,} tokens, {count(found.n_loops, 'loop')} at most. All tokens at "
            f"{count(found.sufficient_loops, 'loop')} are within {found.tolerance:.2%} of the loss of {found.n_loops}: "
            "what a rule saves is to be held against that depth."
        )
        parts.append(f"<p>{esc(said)}</p>")
        if run.evaluation and run.evaluation.train_step not in (None, found.train_step):
            parts.append(
                note(
                    f"Measured at train step {found.train_step:,}, the evaluation at {run.evaluation.train_step:,}: "
                    "`alcoda frontier RUN` measures anew."
                )
            )
        if found.note:
            parts.append(note(found.note))
        drawn = []
        for key, what in (("loops", "mean loops a token"), ("flops_per_token", "executed FLOPs a token")):
            svg = frontier_figure(run, found, key, what, f"frontier {key} {i}")
            title, caption = f"Bits per byte against {what}", "Lower and further left is better."
            drawn += [figure(svg, title, caption)] if svg else []
        parts += ['<div class="grid">\n' + "\n".join(drawn) + "\n</div>" if drawn else "", _table(found)]
    return section("exits", "Exits", *parts)


def _table(found: Frontier) -> str:
    rows = []
    for curve in found.curves:
        if curve.best is None:
            rows.append([esc(curve.name), *[MISSING] * 6])
            continue
        best, cells = curve.best, []
        for saved in (best.equal_loops, best.equal_flops, best.sufficient):
            assert saved is not None
            cells.append(f"{bits(saved.bits_per_byte, 4)}<small>{interval(saved.low, saved.high, 4)}</small>")
        rows.append(
            [esc(curve.name), f"{best.loops:.2f}", quantity(best.flops_per_token), bits(best.bits_per_byte), *cells]
        )
    head = ["Fewest loops within the tolerance", "Mean loops", "FLOPs a token", "Bits per byte"]
    head += ["Saved at equal loops", "at equal FLOPs", f"against {count(found.sufficient_loops, 'loop')}"]
    return table(head, rows, "Exit rules within the tolerance, against all tokens at one depth")


def frontier_figure(run: Run, found: Frontier, by: str, what: str, key: str) -> str | None:
    """Bits per byte against loops or FLOPs: all tokens at each depth, and every rule."""
    if not found.uniform:
        return None
    lines = [("all at one depth", found.uniform), *((curve.name, curve.points) for curve in found.curves)]

    def paint(fig: Figure) -> None:
        ax, handles = fig.add_subplot(), []
        for i, (_, points) in enumerate(lines):
            ordered = sorted(points, key=lambda point: getattr(point, by))
            x, y = [getattr(point, by) for point in ordered], [point.bits_per_byte for point in ordered]
            style: dict[str, Any] = {"color": INK, "marker": "s"} if i == 0 else {"color": series(i - 1)}
            style = {"marker": marker(i), "linestyle": dash(max(i - 1, 0)), "markersize": 3.5, **style}
            handles += ax.plot(x, y, **style)
        legend(fig, handles, [name for name, _ in lines])
        enough = next((point for point in found.uniform if point.loops == found.sufficient_loops), None)
        if enough is not None:
            ax.axvline(getattr(enough, by), color=MUTED, linewidth=0.8, linestyle=":")
        ax.set_xlabel(what)
        ax.set_ylabel("bits per byte")

    spoken = "; ".join(
        f"{name}: " + ", ".join(f"{bits(point.bits_per_byte)} at {getattr(point, by):.3g}" for point in points)
        for name, points in lines
    )
    return draw(key, f"Line chart of bits per byte against {what}, {run.label}. {spoken}.", paint, height_in=3.0)
