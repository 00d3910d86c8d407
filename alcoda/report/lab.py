"""The part of the page about the lab (lab.json): when tokens converge, which, and whether the loop contracts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alcoda.report.fields import Fields, load
from alcoda.report.heat import Passage, passages, read_passages
from alcoda.report.markup import bits, count, esc, facts, figure, human, interval, note, number, section, table
from alcoda.report.svg import GRID, MUTED, draw, legend, marker, ramp, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from alcoda.report.read import Run

_DEPTH = (
    "A token's convergence depth is the loop from which on its next-token distribution changes by less than {eps} nats "
    "of KL from one loop to the next, up to loop {loops}. Tokens that still change there are censored: they count with "
    "that loop. A token is grouped by what it is, and its depth is that of predicting it."
)


@dataclass(frozen=True)
class Group:
    """Depths of some tokens; ``low`` and ``high``: of the mean, None where it was not measured."""

    name: str
    n_tokens: int
    mean: float
    low: float | None
    high: float | None
    median: float
    q90: float
    censored: float
    stable_loop: float


@dataclass(frozen=True)
class Band:
    """A number at a loop with what 10% and 90% of the tokens are below."""

    loop: int
    q10: float
    q50: float
    q90: float


@dataclass(frozen=True)
class Lab:
    """What ``alcoda lab`` measured."""

    data: str
    train_step: int
    loops: int
    eps: float
    unit: str
    n_units: int
    n_tokens: int
    notes: tuple[str, ...]
    depth: Group
    first_crossing: float
    histogram: tuple[tuple[int, int, int], ...]
    """Depth, tokens that settle there, tokens that are censored there."""
    by_eps: tuple[tuple[float, float, float, float], ...]
    """Eps, mean, median, censored."""
    groups: dict[str, tuple[Group, ...]]
    """By title."""
    hops_accuracy: dict[int, tuple[float, ...]]
    by_loop: dict[str, tuple[Band, ...]]
    elasticity: tuple[tuple[int, float, float | None, float | None], ...]
    """Loops, bits per byte and its interval."""
    saved: dict[int, tuple[float, float | None, float | None]]
    """Loops, bits per byte saved over the shallowest depth, paired by unit, and its interval."""
    how: str
    paths: tuple[tuple[int, Band, float, float], ...]
    """Loop, distance, KL, share that agrees."""
    contraction: tuple[tuple[int, int, Band, float], ...]
    """After which loop, tokens, radius, share at 1 or more."""
    passages: tuple[Passage, ...]


_GROUPS = {
    "by_class": "By class of token",
    "by_position": "By position in the row",
    "by_difficulty": "By loss at the last loop",
    "by_hops": "By hops of the answer",
}
_TRAJECTORIES = {
    "kl_previous": ("KL to the loop before", "nats"),
    "kl_final": ("KL from the last loop", "nats"),
    "state_change": ("Change of the state", "relative to its size"),
}


def read_lab(path: Path) -> Lab | None:
    """``lab.json`` of a run. Raises `RunError` where it is damaged."""
    if not path.is_file():
        return None
    data = Fields(load(path), str(path))
    paths = data.child("paths")
    return Lab(
        data=data.text("data", "valid"),
        train_step=data.integer("train_step"),
        loops=data.integer("loops"),
        eps=data.number("eps"),
        unit=data.text("unit", "documents"),
        n_units=data.integer("n_units"),
        n_tokens=data.integer("n_tokens"),
        notes=data.texts("notes"),
        depth=_group(data.child("depth")),
        first_crossing=data.child("depth").number("first_crossing"),
        histogram=tuple(
            (one.integer("depth"), one.integer("settled"), one.integer("censored"))
            for one in data.children("histogram")
        ),
        by_eps=tuple(
            (one.number("eps"), one.number("mean"), one.number("median"), one.number("censored"))
            for one in data.children("by_eps")
        ),
        groups={title: found for key, title in _GROUPS.items() if (found := tuple(map(_group, data.children(key))))},
        hops_accuracy={
            int(hops): data.child("hops_accuracy").numbers(hops)
            for hops in data.child("hops_accuracy").data
            if hops.isdecimal()
        },
        by_loop={
            name: tuple(_band(one.integer("loop"), one.child(name)) for one in data.children("by_loop") if name in one)
            for name in _TRAJECTORIES
        },
        elasticity=tuple(
            (one.integer("loops"), one.number("bits_per_byte"), one.maybe_number("low"), one.maybe_number("high"))
            for one in data.child("elasticity").children("by_depth")
        ),
        saved={
            one.integer("to_loops"): (one.number("bits_per_byte"), one.maybe_number("low"), one.maybe_number("high"))
            for one in data.child("elasticity").children("gain")
        },
        how=paths.text("how"),
        paths=tuple(
            (
                one.integer("loop"),
                _band(one.integer("loop"), one.child("distance")),
                one.number("kl"),
                one.number("agree"),
            )
            for one in paths.children("by_loop")
        ),
        contraction=tuple(
            (
                one.integer("loop"),
                one.integer("n_tokens"),
                _band(one.integer("loop"), one.child("radius")),
                one.number("expanding"),
            )
            for one in data.children("contraction")
        ),
        passages=read_passages(data),
    )


def _group(data: Fields) -> Group:
    rest = (data.number(name) for name in ("median", "q90", "censored", "stable_loop"))
    low, high = data.maybe_number("low"), data.maybe_number("high")
    return Group(data.text("name", "?"), data.integer("n_tokens"), data.number("mean"), low, high, *rest)


def _band(loop: int, data: Fields) -> Band:
    return Band(loop, *(data.number(name) for name in ("q10", "q50", "q90")))


def lab(runs: Sequence[Run]) -> str:
    """A part a run."""
    parts = []
    for i, run in enumerate(runs):
        if run.lab is not None:
            parts += [f"<h3>{esc(run.label)}</h3>"] if len(runs) > 1 else []
            parts += _of_run(run, run.lab, f"lab {i}")
    return section("lab", "Convergence", *parts)


def _of_run(run: Run, found: Lab, key: str) -> list[str]:
    about = f"On {found.data}: {found.n_tokens:,} tokens, {found.n_units:,} {found.unit}, {found.loops} loops. "
    parts = [f"<p>{esc(about + _DEPTH.format(eps=number(found.eps), loops=found.loops))}</p>"]
    if run.evaluation and run.evaluation.train_step not in (None, found.train_step):
        parts.append(
            note(
                f"Measured at train step {found.train_step:,}, the evaluation at {run.evaluation.train_step:,}: "
                "`alcoda lab RUN` measures anew."
            )
        )
    parts += [note(text) for text in found.notes]
    parts.append(_headline(found))
    drawn = [
        figure(histogram_figure(found, key), "Convergence depth", "Striped: not settled at the last loop."),
        *(
            figure(svg, title, f"{unit[0].upper()}{unit[1:]}. Line: median; band: 10% to 90% of tokens.")
            for name, (title, unit) in _TRAJECTORIES.items()
            if (svg := by_loop_figure(found, name, key))
        ),
        *(
            figure(groups_figure(groups, title, key), title, "Mean depth, with its 95% interval.")
            for title, groups in found.groups.items()
        ),
    ]
    if found.hops_accuracy:
        caption = "Share of answers that are right, by their number of hops."
        drawn.append(figure(hops_figure(found, key), "Answers by loop", caption))
    if found.elasticity:
        caption = "Bits per byte at a uniform depth, with 95% intervals; lower is better."
        drawn.append(figure(elasticity_figure(found, key), "Elasticity", caption))
    if found.paths:
        caption = f"Relative distance of two paths: {esc(found.how)}. Line: median; band: 10% to 90% of tokens."
        drawn.append(figure(paths_figure(found, key), "Path independence", caption))
    parts.append('<div class="grid">\n' + "\n".join(drawn) + "\n</div>")
    for title, groups in found.groups.items():
        parts += [f"<h3>{esc(title)}</h3>", _group_table(groups, title)]
    parts += _tables(found)
    return [*parts, passages(found.passages)]


def _headline(found: Lab) -> str:
    depth = found.depth
    between = f"95%: {interval(depth.low, depth.high, 2)}"
    items = [
        ("Mean depth", f"<strong>{bits(depth.mean, 2)}</strong><small>{esc(between)}</small>"),
        ("Median", f"<strong>{number(depth.median)}</strong><small>90% by loop {number(depth.q90)}</small>"),
        ("Censored", f"<strong>{depth.censored:.1%}</strong><small>not settled at loop {found.loops}</small>"),
        ("First crossing", f"<strong>{bits(found.first_crossing, 2)}</strong><small>mean loop</small>"),
        ("Likeliest token stays", f"<strong>{bits(depth.stable_loop, 2)}</strong><small>mean loop</small>"),
    ]
    if found.paths:
        loop, _, kl, agree = found.paths[-1]
        under = f"of tokens agree from two initial states after {count(loop, 'loop')}; KL {human_small(kl)}"
        items.append(("Path independence", f"<strong>{agree:.1%}</strong><small>{esc(under)}</small>"))
    if found.contraction:
        _, n, radius, _ = found.contraction[-1]
        under = f"median spectral radius of one loop, {count(n, 'token')}"
        items.append(("Contraction", f"<strong>{bits(radius.q50, 3)}</strong><small>{esc(under)}</small>"))
    return facts(items)


def human_small(value: float) -> str:
    """A number that may be tiny."""
    return human(value) if value == 0 or value >= 0.01 else f"{value:.1e}".replace("-", "−")


def _group_table(groups: Sequence[Group], title: str) -> str:
    head = ["Tokens", "Number", "Mean depth", "95% interval", "Median", "90%", "Censored", "Likeliest stays"]
    rows = [
        [
            esc(one.name.replace("_", " ")),
            f"{one.n_tokens:,}",
            bits(one.mean, 2),
            interval(one.low, one.high, 2),
            number(one.median),
            number(one.q90),
            f"{one.censored:.1%}",
            bits(one.stable_loop, 2),
        ]
        for one in groups
    ]
    return table(head, rows, f"Convergence depth {title[0].lower()}{title[1:]}")


def _tables(found: Lab) -> list[str]:
    parts = []
    if found.by_eps:
        rows = [
            [human_small(eps), bits(mean, 2), number(median), f"{censored:.1%}"]
            for eps, mean, median, censored in found.by_eps
        ]
        parts += [
            "<h3>With other thresholds</h3>",
            table(["KL below", "Mean depth", "Median", "Censored"], rows, "Convergence depth by threshold"),
        ]
    if found.contraction:
        rows = [
            [str(loop), str(n), bits(band.q10, 3), bits(band.q50, 3), bits(band.q90, 3), f"{expanding:.0%}"]
            for loop, n, band, expanding in found.contraction
        ]
        head = ["After loop", "Tokens", "Spectral radius, 10%", "Median", "90%", "1 or more"]
        parts += [
            "<h3>Contraction</h3>",
            "<p>Spectral radius of the next loop's Jacobian at the state of single tokens, the others held still: "
            "below 1, small changes die out.</p>",
            table(head, rows, "Spectral radius of one loop"),
        ]
    if found.elasticity:
        rows = []
        for n, value, low, high in found.elasticity:
            gain, gain_low, gain_high = found.saved.get(n, (None, None, None))
            rows.append(
                [
                    str(n),
                    bits(value, 4),
                    interval(low, high, 4),
                    bits(gain, 4),
                    interval(gain_low, gain_high, 4),
                ]
            )
        head = ["Loops", "Bits per byte", "95% interval", "Saved over the shallowest", "95% interval, paired"]
        parts += ["<h3>Elasticity</h3>", table(head, rows, "Elasticity curve")]
    return parts


def histogram_figure(found: Lab, key: str) -> str:
    """Bars of the share of tokens by depth."""
    total = max(1, found.n_tokens)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        loops = [depth for depth, _, _ in found.histogram]
        settled = [100 * n / total for _, n, _ in found.histogram]
        censored = [100 * n / total for _, _, n in found.histogram]
        ax.bar(loops, settled, color=series(0), width=0.8)
        ax.bar(loops, censored, bottom=settled, color=series(1), width=0.8, hatch="///", edgecolor=GRID, linewidth=0)
        ax.set_xlabel("loop")
        ax.set_ylabel("% of tokens")
        ax.grid(visible=False, axis="x")
        ax.locator_params(axis="x", integer=True, nbins=10)

    most = max(found.histogram, key=lambda one: one[1], default=(0, 0, 0))
    label = (
        f"Histogram of convergence depth. Mean {bits(found.depth.mean, 2)}, median {number(found.depth.median)}; most "
        f"tokens, {most[1] / total:.0%}, settle at loop {most[0]}; {found.depth.censored:.1%} do not settle."
    )
    return draw(f"{key} histogram", label, paint)


def by_loop_figure(found: Lab, name: str, key: str) -> str | None:
    """A quantity against the loop on a log axis; None where nothing is above 0."""
    points = [point for point in found.by_loop.get(name, ()) if point.q90 > 0]
    if not points:
        return None
    title, unit = _TRAJECTORIES[name]
    label = f"{title} by loop: median {human_small(points[0].q50)} at loop {points[0].loop}, "
    label += f"{human_small(points[-1].q50)} at loop {points[-1].loop}."
    line = found.eps if name == "kl_previous" else None
    return draw(f"{key} {name}", label, lambda fig: _band_plot(fig, points, unit, line))


def paths_figure(found: Lab, key: str) -> str:
    """The distance of two paths by loop."""
    points = [band for _, band, _, _ in found.paths]
    label = f"Relative distance of two paths: median {human_small(points[0].q50)} at the start, "
    label += f"{human_small(points[-1].q50)} after {count(points[-1].loop, 'loop')}."
    return draw(f"{key} paths", label, lambda fig: _band_plot(fig, points, "relative distance", None))


def _band_plot(fig: Figure, points: Sequence[Band], unit: str, line: float | None) -> None:
    ax = fig.add_subplot()
    loops = [point.loop for point in points]
    floor = min((value for p in points for value in (p.q10, p.q50, p.q90) if value > 0), default=1e-12)
    low, middle, high = ([max(getattr(p, q), floor) for p in points] for q in ("q10", "q50", "q90"))
    ax.fill_between(loops, low, high, color=series(0), alpha=0.16, linewidth=0)
    ax.plot(loops, middle, color=series(0), marker="o", markersize=3.5)
    if line is not None:
        ax.axhline(line, color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(_power)
    ax.set_xlabel("loop")
    ax.set_ylabel(unit)
    ax.grid(visible=False, axis="x")
    ax.locator_params(axis="x", integer=True, nbins=10)


def _power(value: float, place: float) -> str:
    """``10⁻³``: the words of an axis are not set as formulas (svg.py)."""
    exponent = f"{math.log10(value):.3g}".translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
    return f"10{exponent}" if "." not in exponent else ""


def groups_figure(groups: Sequence[Group], title: str, key: str) -> str:
    """Mean depth of each group with its interval."""

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        for row, one in enumerate(groups):
            if one.low is not None and one.high is not None:
                ax.plot([one.low, one.high], [row, row], color=MUTED, linewidth=1.4)
            ax.plot([one.mean], [row], color=series(0), marker="o", markersize=5)
        ax.set_yticks(range(len(groups)), [one.name.replace("_", " ") for one in groups])
        ax.set_ylim(len(groups) - 0.5, -0.5)
        ax.set_xlabel("loop")
        ax.grid(visible=True, axis="x", color=GRID)
        ax.locator_params(axis="x", nbins=6)

    spoken = "; ".join(f"{one.name.replace('_', ' ')} {bits(one.mean, 2)}" for one in groups)
    label = f"Mean convergence depth {title[0].lower()}{title[1:]}: {spoken}."
    return draw(f"{key} {title}", label, paint, height_in=0.7 + 0.24 * len(groups))


def hops_figure(found: Lab, key: str) -> str:
    """The share of right answers against the loop, a line a number of hops."""
    lines = sorted(found.hops_accuracy.items())

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles: list[Any] = []
        for i, (_, shares) in enumerate(lines):
            loops = range(1, len(shares) + 1)
            handles += ax.plot(
                loops, [100 * x for x in shares], color=ramp(i, len(lines)), marker=marker(i), markersize=3.5
            )
        ax.set_xlabel("loop")
        ax.set_ylabel("% right")
        ax.locator_params(axis="x", integer=True, nbins=10)
        legend(fig, handles, [count(hops, "hop") for hops, _ in lines])

    spoken = "; ".join(f"{count(hops, 'hop')} {shares[-1]:.0%}" for hops, shares in lines if shares)
    return draw(f"{key} hops", f"Share of right answers at the last loop: {spoken}.", paint)


def elasticity_figure(found: Lab, key: str) -> str:
    """Bits per byte against uniform depth."""

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        loops = [n for n, *_ in found.elasticity]
        ax.plot(loops, [value for _, value, _, _ in found.elasticity], color=series(0), marker="o", markersize=4)
        for n, _, low, high in found.elasticity:
            if low is not None and high is not None:
                ax.plot([n, n], [low, high], color=series(0), alpha=0.5, linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_xticks(loops, [str(n) for n in loops])
        ax.set_xlabel("loops")
        ax.set_ylabel("bits per byte")

    spoken = "; ".join(f"{count(n, 'loop')} {bits(value)}" for n, value, _, _ in found.elasticity)
    return draw(f"{key} elasticity", f"Bits per byte by uniform depth: {spoken}.", paint)
