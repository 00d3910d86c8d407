"""The figures of results: bits per byte by depth, and cost by term; each from runs to an inline SVG, or None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alcoda.report.markup import bits, count, human, number
from alcoda.report.read import DepthPoint, Ledger, Run
from alcoda.report.svg import GRID, MUTED, dash, draw, legend, marker, series, text_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def depth_figure(runs: Sequence[Run]) -> str | None:
    """Bits per byte against loops (log2 axis) with 95% bands, the bigram baseline and the mean depth of training."""
    lines: list[tuple[int, Run, list[DepthPoint]]] = []
    bigrams: set[float] = set()
    for i, run in enumerate(runs):
        points = [point for point in run.evaluation.by_depth if point.loops >= 1] if run.evaluation else []
        if run.evaluation and points:
            lines.append((i, run, points))
            baseline = run.evaluation.bigram_bits_per_byte
            bigrams |= {baseline} if baseline is not None and math.isfinite(baseline) else set()
    if not lines:
        return None
    values = [v for _, _, points in lines for p in points for v in (p.bits_per_byte, p.low, p.high) if v is not None]
    values = [value for value in values if math.isfinite(value)]
    bottom, top = (min(values), max(values)) if values else (0.0, 1.0)
    span = max(top - bottom, 0.02)
    means = {run.mean_loops for _, run, _ in lines if run.mean_loops is not None}

    def curves(ax: Axes) -> list[Any]:
        handles = []
        for i, _, points in lines:
            x = [p.loops for p in points]
            y = [p.bits_per_byte for p in points]
            low = [math.nan if p.low is None else p.low for p in points]
            high = [math.nan if p.high is None else p.high for p in points]
            ax.fill_between(x, low, high, color=series(i), alpha=0.16, linewidth=0)
            ax.vlines(x, low, high, color=series(i), alpha=0.55, linewidth=1)
            style = dash(i) if len(runs) > 1 else "-"
            handles += ax.plot(x, y, color=series(i), linestyle=style, marker=marker(i), markersize=4)
        return handles

    def paint(fig: Figure) -> None:
        # A baseline far above would press the curve flat, so it gets a strip of its own over a broken axis.
        far = {value for value in bigrams if value > top + span}
        upper = None
        if far:
            upper, ax = fig.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [len(far), 6]})
            _broken(upper, ax, sorted(far))
        else:
            ax = fig.add_subplot()
        handles = curves(ax)
        ax.set_ylim(min([bottom, *bigrams]) - 0.08 * span, max([top, *(bigrams - far)]) + 0.12 * span)
        for value in sorted(bigrams):
            _bigram(upper if upper is not None and value in far else ax, value)
        for mean in sorted(means):
            owner = [i for i, run, _ in lines if run.mean_loops == mean]
            shared = len(means) == 1 or len(owner) > 1
            ax.axvline(mean, color=MUTED if shared else series(owner[0]), linewidth=1, linestyle=(0, (1, 2)))
            if len(means) == 1:
                deepest = all(mean >= p.loops for _, _, points in lines for p in points)
                text_at(ax, mean, f" training mean {number(mean)} ", "right" if deepest else "left", "bottom")
        _loops_axis(ax, sorted({p.loops for _, _, points in lines for p in points}), means)
        ax.set_ylabel("bits per byte")
        ax.locator_params(axis="y", nbins=6)
        if len(runs) > 1:
            legend(fig, handles, [run.label for _, run, _ in lines])

    spoken = "; ".join(
        f"{run.label}: " + ", ".join(f"{bits(p.bits_per_byte)} at {count(p.loops, 'loop')}" for p in points)
        for _, run, points in lines
    )
    base = "".join(f" A line marks the bigram baseline at {bits(value)}." for value in sorted(bigrams))
    return draw("depth", f"Plot of bits per byte against loops. {spoken}.{base}", paint, height_in=3.1)


def cost_figure(runs: Sequence[Run]) -> str | None:
    """Bars of the forward FLOPs a token by term of the ledger; terms that are zero in every run are left out."""
    known = [(i, run, _forward(run.ledger)) for i, run in enumerate(runs) if run.ledger]
    names = list(dict.fromkeys(name for _, _, terms in known for name, value in terms.items() if value))
    if not names:
        return None
    step = 1.0 + 0.62 * len(known)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        longest = max(max(terms.values(), default=0.0) for _, _, terms in known)
        for row, name in enumerate(names):
            y = row * step
            ax.text(0, y, name, ha="left", va="center", fontsize=8.5)
            for j, (i, _, terms) in enumerate(known):
                value, at = terms.get(name, 0.0), y + 0.68 + 0.62 * j
                share = value / (sum(terms.values()) or 1.0)
                ax.barh(at, value, height=0.5, color=series(i), alpha=0.8, linewidth=0)
                words = f"{human(value)} · {100 * share:.1f}%" if value else "none"
                ax.text(value + 0.012 * longest, at, words, ha="left", va="center", fontsize=8.5, color=MUTED)
        if len(runs) > 1:
            from matplotlib.patches import Patch

            legend(fig, [Patch(color=series(i), alpha=0.8) for i, _, _ in known], [run.label for _, run, _ in known])
        ax.set_xlim(0, longest * 1.3)
        ax.set_ylim(len(names) * step - 0.4, -0.7)
        ax.set_axis_off()
        ax.axvline(0, color=GRID, linewidth=1)

    spoken = "; ".join(
        f"{run.label}: {', '.join(f'{n} {human(terms.get(n, 0.0))}' for n in names)}" for _, run, terms in known
    )
    height = 0.19 * step * len(names) + (0.1 if len(runs) == 1 else 0.37)
    return draw("cost", f"Bar chart of forward FLOPs per token by term. {spoken}.", paint, height_in=height)


def _forward(ledger: Ledger) -> dict[str, float]:
    flops: dict[str, float] = {}
    for term in ledger.terms:
        flops[term.name] = flops.get(term.name, 0.0) + term.forward_flops
    return flops


def _loops_axis(ax: Axes, depths: Sequence[int], means: set[float]) -> None:
    ax.set_xscale("log", base=2)
    first, last = min(depths[0], *means, depths[0]), max(depths[-1], *means, depths[-1])
    wide = math.log2(last / first) or 1.0
    ticks: list[int] = []
    for loops in depths:  # labels must not touch
        if not ticks or math.log2(loops / ticks[-1]) >= wide / 16:
            ticks.append(loops)
    ax.set_xlim(first * 2 ** (-0.05 * wide), last * 2 ** (0.05 * wide))
    ax.set_xticks(ticks, [str(loops) for loops in ticks])
    ax.set_xticks([], minor=True)
    ax.grid(visible=False, axis="x")
    ax.set_xlabel("loops (log scale)")


def _broken(upper: Axes, lower: Axes, values: Sequence[float]) -> None:
    upper.figure.get_layout_engine().set(hspace=0.0, h_pad=0.05)  # type: ignore[union-attr]
    middle = (min(values) + max(values)) / 2
    reach = max(max(values) - min(values), 0.02)
    upper.set_ylim(middle - reach, middle + reach)
    upper.set_yticks(list(values), [bits(value, 2) for value in values])
    upper.grid(visible=False)
    upper.spines.bottom.set_visible(False)
    upper.tick_params(axis="x", length=0, labelbottom=False)
    cut: dict[str, Any] = {
        "marker": [(-1, -0.5), (1, 0.5)],
        "markersize": 7,
        "linestyle": "none",
        "color": MUTED,
        "clip_on": False,
    }
    upper.plot([0], [0], transform=upper.transAxes, **cut)
    lower.plot([0], [1], transform=lower.transAxes, **cut)


def _bigram(ax: Axes, value: float) -> None:
    ax.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
    ax.annotate(
        f"bigram baseline {bits(value)}",
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2.5),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8.5,
        color=MUTED,
    )
