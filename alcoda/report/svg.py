"""From a matplotlib figure to an inline SVG that takes its colours and font from the page.

Figures are drawn with placeholder colours (`INK`, `series`, `ramp`, ...). `draw` replaces each by a CSS variable that
page.css defines for light and dark, so one drawing reads well on both. Text stays text.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from alcoda.errors import UsageError
from alcoda.report.export import tell_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 4.35  # one width for all figures, so that the text is one size on the page

# Placeholder colours: any distinct values that no figure uses by itself.
INK, MUTED, GRID, CARD = "#000001", "#000002", "#000003", "#000004"
_NAMED = {INK: "--ink", MUTED: "--muted", GRID: "--grid", CARD: "--card"}
N_SERIES, N_RAMP = 8, 6
_SERIES = [f"#0000a{i}" for i in range(N_SERIES)]
_RAMP = [f"#0000b{i}" for i in range(N_RAMP)]
_VARIABLE = (
    _NAMED
    | {color: f"--series-{i}" for i, color in enumerate(_SERIES)}
    | {color: f"--ramp-{i}" for i, color in enumerate(_RAMP)}
)
_FONT = "DejaVu Sans"  # comes with matplotlib: text is laid out the same everywhere
_DASHES = ["-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1.2))]
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]

_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "alcoda",
    "font.family": [_FONT],
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "text.parse_math": False,  # the name of a run may hold a dollar sign
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.2,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


def series(index: int) -> str:
    """The colour of run ``index``; it comes back after eight runs, with another dash."""
    return _SERIES[index % N_SERIES]


def dash(index: int) -> Any:
    """The line style of run ``index``, so that runs differ in print and without colour vision too."""
    return _DASHES[(index + index // N_SERIES) % len(_DASHES)]


def marker(index: int) -> str:
    """The marker of run ``index``."""
    return _MARKERS[index % len(_MARKERS)]


def ramp(index: int, count: int) -> str:
    """The colour of item ``index`` of ``count`` ordered ones (shallow to deep)."""
    return _RAMP[round(index * (N_RAMP - 1) / (count - 1))] if count > 1 else _RAMP[-1]


def draw(key: str, label: str, paint: Callable[[Figure], None], height_in: float = 2.7) -> str:
    """The ``<svg>`` element of what ``paint`` draws; the same bytes for the same drawing.

    key: unique on the page, keeps the ids of figures apart. label: what the figure shows, for who cannot see it.
    Raises `UsageError` where matplotlib is missing.
    """
    tell_figure(key, paint, height_in)
    buffer = io.StringIO()
    with _painted(paint, height_in, _RC) as figure:
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), hashlib.sha256(key.encode()).hexdigest()[:8], label)


def pdf(paint: Callable[[Figure], None], height_in: float) -> bytes:
    """The same drawing as a PDF file."""
    return picture(paint, height_in, "pdf")


def picture(paint: Callable[[Figure], None], height_in: float, form: str) -> bytes:
    """The same drawing as a file (pdf, svg or png), in the page's colours of light; the same bytes each time."""
    light = _light_colours()
    buffer = io.BytesIO()
    named = {name: light.get(value, value) if isinstance(value, str) else value for name, value in _RC.items()}
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form, {})
    named |= {"pdf.fonttype": 42, "savefig.dpi": 200}
    if form != "pdf":  # shown on any page, a dark one too
        named |= {"savefig.facecolor": light[CARD]}
    with _painted(paint, height_in, named) as figure:
        figure.draw_without_rendering()  # makes all of its parts
        for part in figure.findobj():
            _recolour(part, light)
        figure.savefig(buffer, format=form, metadata=dates)
    return buffer.getvalue()


@contextmanager
def _painted(paint: Callable[[Figure], None], height_in: float, settings: dict[str, Any]) -> Generator[Figure]:
    """A figure, painted; to be saved in the block."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a report needs matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The name of a run may hold letters that the layout font lacks; the reader's browser has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        paint(figure)
        yield figure


def _light_colours() -> dict[str, str]:
    """What each placeholder is in page.css, in light."""
    style = files("alcoda.report").joinpath("page.css").read_text(encoding="utf-8").split("@media")[0]
    values = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", style))
    return {placeholder: values[variable] for placeholder, variable in _VARIABLE.items()}


def _recolour(part: Any, colours: dict[str, str]) -> None:
    """Put real colours in the place of a part's placeholders."""
    from matplotlib.colors import to_hex, to_rgba, to_rgba_array

    for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
        get, put = getattr(part, f"get_{name}", None), getattr(part, f"set_{name}", None)
        if get is None or put is None:
            continue
        now = to_rgba_array(get())
        new = [(*to_rgba(colours.get(to_hex(one), to_hex(one)))[:3], one[3]) for one in now]
        if any(to_hex(one) in colours for one in now):
            put(new[0] if len(new) == 1 else new)


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend over the axes, in as many columns as fit; the figure grows by its rows. Nothing for no entries."""
    if not handles:
        return
    # Long names of runs often differ at their end, so the middle is what goes.
    shown = [text if len(text) <= 44 else f"{text[:24]}…{text[-18:]}" for text in labels]
    widths = [36 + 5 * len(text) for text in shown]  # points: line, gaps and letters
    fit = 72 * WIDTH_IN - 6
    columns = len(shown) if sum(widths) <= fit else max(1, int(fit // max(widths)))
    figure.legend(handles, shown, loc="outside upper left", ncols=columns, borderaxespad=0.2)
    figure.set_figheight(figure.get_figheight() + 0.17 * (math.ceil(len(shown) / columns) - 1))


def text_at(ax: Axes, x: float, text: str, side: str = "left", end: Literal["top", "bottom"] = "top") -> None:
    """Muted words beside the vertical line at ``x``, at one ``end`` of it; ``side``: the end that is at the line."""
    box = {"facecolor": CARD, "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    y = 0.99 if end == "top" else 0.01
    ax.text(x, y, text, transform=ax.get_xaxis_transform(), ha=side, va=end, fontsize=8.5, color=MUTED, bbox=box)


def _inline(text: str, prefix: str, label: str) -> str:
    text = text[text.index("<svg") :]
    # Metadata and style belong to a document of its own; inside a page the style would hold for the whole page.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    view = re.search(r'viewBox="([^"]*)"', text)
    assert view is not None, "matplotlib wrote an SVG without a viewBox"
    root = f'<svg class="plot" role="img" aria-label="{html.escape(label)}" viewBox="{view[1]}">'
    text = re.sub(r"<svg[^>]*>", lambda _: root, text, count=1)
    text = text.replace("xlink:href=", "href=")
    used = set(re.findall(r'(?:\shref="#|url\(#)([^")]+)', text))
    text = re.sub(r'\sid="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(\shref="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r'style="[^"]*"', lambda found: _themed(found[0]), text)
    return re.sub(r"\n\s*", "\n", text).strip()


def _themed(style: str) -> str:
    style = re.sub(rf"['\"]?{_FONT}['\"]?(, sans-serif)?", "var(--sans)", style)
    return re.sub(r"#0000[0ab][0-9]", lambda found: f"var({_VARIABLE[found[0]]})", style)
