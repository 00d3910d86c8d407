"""The figures of training: loss, validation, loops drawn, speed; each from runs to an inline SVG, or None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from alcoda.report.markup import bits, count, human
from alcoda.report.read import Run, ValidPoint
from alcoda.report.svg import INK, dash, draw, legend, marker, ramp, series, text_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 500  # of one line: what a screen can show, and the page stays small for a long run


def smooth(values_N: np.ndarray) -> tuple[np.ndarray, int]:
    """The centred moving mean over about a fiftieth of the points, and its window (odd). Nan counts as absent.

    At the ends the window holds what there is of it, so the last value is a mean over the last half window.
    """
    n = len(values_N)
    half = n // 100
    known_N = np.isfinite(values_N)
    total = np.concatenate([[0.0], np.cumsum(np.where(known_N, values_N, 0.0))])
    known = np.concatenate([[0], np.cumsum(known_N)])
    index_N = np.arange(n)
    low_N, high_N = np.maximum(index_N - half, 0), np.minimum(index_N + half + 1, n)
    n_N = known[high_N] - known[low_N]
    mean_N = (total[high_N] - total[low_N]) / np.maximum(n_N, 1)
    return np.where(n_N > 0, mean_N, math.nan), 2 * half + 1


def thin(x_N: np.ndarray, y_N: np.ndarray, most: int = _MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most about ``most`` points of a line: the lowest and the highest of each bin, so that no peak is lost."""
    keep_N = np.isfinite(y_N)
    x_N, y_N = x_N[keep_N], y_N[keep_N]
    if len(x_N) <= most:
        return x_N, y_N
    picked: set[int] = {0, len(x_N) - 1}
    for part in np.array_split(np.arange(len(x_N)), most // 2):
        picked |= {int(part[np.argmin(y_N[part])]), int(part[np.argmax(y_N[part])])}
    index = np.array(sorted(picked))
    return x_N[index], y_N[index]


def sources(runs: Sequence[Run]) -> list[str]:
    """The names of what the runs were evaluated on during training, by run and name."""
    return list(dict.fromkeys(point.source for run in runs for point in run.valid))


def loss_figure(runs: Sequence[Run]) -> str | None:
    """Training loss against train_step, raw (faint) and smoothed."""
    return _curves("loss", [(run, run.curve.loss_N) for run in runs], "training loss (nats per token)", from_zero=False)


def speed_figure(runs: Sequence[Run]) -> str | None:
    """Tokens a second against train_step, raw (faint) and smoothed."""
    return _curves("speed", [(run, run.curve.tokens_per_s_N) for run in runs], "tokens per second", from_zero=True)


def _curves(key: str, columns: Sequence[tuple[Run, np.ndarray]], what: str, from_zero: bool) -> str | None:
    lines = [(i, run, y_N) for i, (run, y_N) in enumerate(columns) if np.isfinite(y_N).any()]
    if not lines:
        return None
    spoken = []

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles = []
        faint = 0.28 if len(columns) == 1 else 0.12
        for i, run, y_N in lines:
            x_N = run.curve.train_step_N
            mean_N, window = smooth(y_N)
            if window > 1:
                ax.plot(*thin(x_N, y_N), color=series(i), alpha=faint, linewidth=0.7)
            style = dash(i) if len(columns) > 1 else "-"
            few: dict[str, Any] = {"marker": marker(i), "markersize": 3} if len(x_N) == 1 else {}
            handles += ax.plot(*thin(x_N, mean_N), color=series(i), linestyle=style, **few)
        step_axis(ax, what)
        if from_zero:
            ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        if len(columns) > 1:
            legend(fig, handles, [run.label for _, run, _ in lines])

    for _, run, y_N in lines:
        mean_N = smooth(y_N)[0][np.isfinite(y_N)]
        spoken.append(f"{run.label}: from {human(mean_N[0])} to {human(mean_N[-1])}")
    return draw(key, f"Line plot of {what} against train step. {'; '.join(spoken)}.", paint)


def valid_figure(runs: Sequence[Run], source: str) -> str | None:
    """Validation bits per byte against train_step: a line a depth for one run, a line a run for several."""
    lines: list[tuple[str, Any, Any, str, list[ValidPoint]]] = []
    for i, run in enumerate(runs):
        points = [point for point in run.valid if point.source == source]
        depths = sorted({point.loops for point in points})
        if len(runs) > 1 and depths:
            mean = run.nominal_loops or depths[-1]
            depths = [min(depths, key=lambda loops: abs(math.log(max(loops, 0.5)) - math.log(mean)))]
        for j, loops in enumerate(depths):
            here = [point for point in points if point.loops == loops]
            if len(runs) > 1:
                lines.append((f"{run.label}, {count(loops, 'loop')}", series(i), dash(i), marker(i), here))
            else:
                lines.append((count(loops, "loop"), ramp(j, len(depths)), "-", "o", here))
    if not lines:
        return None

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles = []
        for _, color, style, mark, points in lines:
            x_N = np.array([point.train_step for point in points])
            y_N = np.array([point.bits_per_byte for point in points])
            sparse: dict[str, Any] = {"marker": mark, "markersize": 3} if len(points) <= 20 else {}
            handles += ax.plot(*thin(x_N, y_N), color=color, linestyle=style, **sparse)
        step_axis(ax, "bits per byte")
        legend(fig, handles, [line[0] for line in lines])

    spoken = "; ".join(f"{line[0]}: {bits(line[4][-1].bits_per_byte)} at the end" for line in lines)
    return draw(f"valid {source}", f"Line plot of bits per byte on {source} against train step. {spoken}.", paint)


def loops_figure(runs: Sequence[Run]) -> str | None:
    """The depths that training drew: bars for one run, outlines for several."""
    drawn = []
    for i, run in enumerate(runs):
        loops_N = run.curve.loops_N[np.isfinite(run.curve.loops_N)]
        if len(loops_N):
            drawn.append((i, run, np.rint(loops_N).astype(np.int64)))
    if not drawn:
        return None
    low = min(int(loops_N.min()) for _, _, loops_N in drawn)
    high = max(int(loops_N.max()) for _, _, loops_N in drawn)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        handles = []
        for i, _, loops_N in drawn:
            share = np.bincount(loops_N - low, minlength=high - low + 1) / len(loops_N)
            if len(runs) == 1:
                ax.bar(np.arange(low, high + 1), share, width=0.8, color=series(i), alpha=0.75, linewidth=0)
            else:
                edges = np.arange(low, high + 2) - 0.5
                ax.stairs(share, edges, color=series(i), linestyle=dash(i), linewidth=1.3)
                handles += ax.plot([], [], color=series(i), linestyle=dash(i))
            ax.axvline(loops_N.mean(), color=series(i) if len(runs) > 1 else INK, linewidth=0.9, linestyle=(0, (1, 2)))
        if len(runs) == 1:
            mean = drawn[0][2].mean()
            right = mean > low + 0.6 * (high - low)
            text_at(ax, mean, f" mean drawn {mean:.3g} ", "right" if right else "left")
        else:
            legend(fig, handles, [run.label for _, run, _ in drawn])
        middle, reach = (low + high) / 2, max(high - low, 6) / 2 + 0.8
        ax.set_xlim(middle - reach, middle + reach)
        ax.set_ylim(top=ax.get_ylim()[1] * 1.08)
        ax.grid(visible=False, axis="x")
        ax.locator_params(axis="x", integer=True, nbins=9)
        ax.locator_params(axis="y", nbins=5)
        ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
        ax.set_xlabel("loops")
        ax.set_ylabel("share of logged train steps")

    spoken = "; ".join(
        f"{run.label}: {loops_N.min()} to {loops_N.max()}, mean {loops_N.mean():.3g}" for _, run, loops_N in drawn
    )
    return draw("loops", f"Histogram of the loops drawn for each train step. {spoken}.", paint)


def step_axis(ax: Axes, what: str) -> None:
    """Axes of ``what`` against train step."""
    ax.set_xlabel("train step")
    ax.set_ylabel(what)
    ax.grid(visible=False, axis="x")
    ax.margins(x=0.02)
    ax.locator_params(axis="x", integer=True, nbins=6)
    ax.locator_params(axis="y", nbins=6)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
