"""The figure of a load: what a server answers in time, and how long it takes, by what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alcoda.errors import UsageError, install
from alcoda.files import disk
from alcoda.report.svg import MUTED, dash, legend, marker, picture, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("svg", "png", "pdf")


def check_form(path: Path) -> str:
    """The form of a file by its name; UsageError for others, for a folder that is not there, or without matplotlib."""
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(f"--plot {path}: a file that ends in .{', .'.join(FORMS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(f"--plot needs matplotlib: {install('report')}") from None
    return form


def draw_load(found: Mapping[str, Any], path: Path) -> None:
    """Draw the JSON of `alcoda bench serve` into a file: goodput, time to the first text, time between texts."""
    form = check_form(path)
    scores: list[Mapping[str, Any]] = list(found["scores"])
    models = list(dict.fromkeys(one["model"] for one in scores))
    open_loop = any(one["rate_per_s"] is not None for one in scores)

    def offered(one: Mapping[str, Any]) -> float:
        return one["rate_per_s"] if open_loop else one["concurrency"]

    def paint(figure: Figure) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        good, first, between = figure.subplots(1, 3)
        handles = []
        for i, model in enumerate(models):
            mine = sorted((one for one in scores if one["model"] == model), key=offered)
            x = [offered(one) for one in mine]
            style: dict[str, Any] = {"color": series(i), "marker": marker(i), "markersize": 4}
            handles += good.plot(x, [one["goodput_per_s"] for one in mine], linestyle=dash(i), **style)
            for ax, name in ((first, "ttft_ms"), (between, "itl_ms")):
                for quantile, alpha in (("p50", 1.0), ("p99", 0.45)):
                    told = [(at, one[name][quantile]) for at, one in zip(x, mine, strict=True) if one[name]]
                    ax.plot([a for a, _ in told], [b for _, b in told], linestyle=dash(i), alpha=alpha, **style)
        if open_loop:
            most = max(map(offered, scores), default=1.0)
            good.plot([0, most], [0, most], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        for ax, target in ((first, found["ttft_ms"]), (between, found["itl_ms"])):
            ax.axhline(target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
            ax.set_yscale("log")
            # 1, 2, 5, 10 in plain digits: what lies within one power of ten has marks too.
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        for ax, words in (
            (good, "good/s"),
            (first, "first text, ms"),
            (between, "between, ms"),
        ):
            ax.set_title(words, fontsize=8.5, loc="left", color=MUTED)
            ax.set_xlabel("requests/s" if open_loop else "clients")
            ax.set_xlim(left=0)
        good.set_ylim(bottom=0)
        handles.append(Line2D([], [], color=MUTED, alpha=0.45))
        handles.append(Line2D([], [], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2))))
        legend(figure, handles, [*models, "pale: 99th percentile", "offered, target" if open_loop else "target"])

    with disk(path):
        path.write_bytes(picture(paint, 2.7, form))
