"""The part of the page about prefill: what reading a text faster than token by token costs (prefills.json)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alcoda.report.fields import Fields, load
from alcoda.report.markup import MISSING, bits, count, duration, esc, figure, interval, note, quantity, section, table
from alcoda.report.svg import GRID, INK, MUTED, draw, legend, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from alcoda.report.read import Run

_ABOUT = (
    "Exact prefill reads a text token by token, as it is decoded; the others read many tokens at once. Gap: bits per "
    "byte more than exact prefill on the same text, paired by unit. After a prompt: the prefill reads the first half "
    "of each row; the second half, which alone is scored, is read token by token."
)


@dataclass(frozen=True)
class Bits:
    """Bits per byte with their 95% interval, and their gap to the first way to read (None: this is it)."""

    bits_per_byte: float
    low: float
    high: float
    gap: float | None
    gap_low: float | None
    gap_high: float | None


@dataclass(frozen=True)
class Prefill:
    """One prefill; ``words`` names it with its numbers."""

    words: str
    whole: Bits
    continuation: Bits
    read_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Prefills:
    """What ``alcoda eval --prefill all`` measured, exact prefill first."""

    data: str
    train_step: int
    loops: int
    chunk_tokens: float | None
    prompt_tokens: int
    batch_size: int
    n_tokens: int
    note: str
    by_prefill: tuple[Prefill, ...]


def read_prefills(path: Path) -> Prefills | None:
    """``prefills.json`` of a run. Raises `RunError` where it is damaged."""
    if not path.is_file():
        return None
    data = Fields(load(path), str(path))
    return Prefills(
        data=data.text("data", "valid"),
        train_step=data.integer("train_step"),
        loops=data.integer("loops"),
        chunk_tokens=data.maybe_number("chunk_tokens"),
        prompt_tokens=data.integer("prompt_tokens"),
        batch_size=data.integer("batch_size"),
        n_tokens=data.integer("n_tokens"),
        note=data.text("note"),
        by_prefill=tuple(
            Prefill(
                words=choice_words(one.text("name", "?"), one.child("prefill")),
                whole=read_bits(one.child("whole")),
                continuation=read_bits(one.child("continuation")),
                read_s=one.number("read_s"),
                tokens_per_s=one.number("tokens_per_s"),
            )
            for one in data.children("by_prefill")
        ),
    )


def choice_words(name: str, fields: Fields) -> str:
    """A choice by its name, with its numbers."""
    rest = ", ".join(f"{key} {value}" for key, value in fields.plain().items() if key != "kind")
    return f"{name} ({rest})" if rest else name


def read_bits(data: Fields) -> Bits:
    """Of one way to read, with the gap to the first."""
    gap = (data.maybe_number(key) for key in ("gap", "gap_low", "gap_high"))
    return Bits(*(data.number(key) for key in ("bits_per_byte", "low", "high")), *gap)


def prefill(runs: Sequence[Run]) -> str:
    """A table and bars a run."""
    parts = [f"<p>{esc(_ABOUT)}</p>"]
    for i, run in enumerate(runs):
        found = run.prefills
        if found is None:
            continue
        if len(runs) > 1:
            parts.append(f"<h3>{esc(run.label)}</h3>")
        chunks = f", read {found.chunk_tokens:g} tokens at a time" if found.chunk_tokens else ""
        at = count(found.loops, "loop")
        parts.append(f"<p>{esc(f'On {found.data}: {found.n_tokens:,} tokens at {at}{chunks}.')}</p>")
        if run.evaluation and run.evaluation.train_step not in (None, found.train_step):
            parts.append(
                note(
                    f"Measured at train step {found.train_step:,}, the evaluation at {run.evaluation.train_step:,}: "
                    "`alcoda eval RUN --prefill all` measures anew."
                )
            )
        if found.note:
            parts.append(note(found.note))
        svg = gap_figure(run, found, f"prefill {i}")
        drawn = figure(svg, "Gap to exact prefill", "Lower is better. Whiskers: 95% intervals.") if svg else ""
        parts += [_table(found), drawn]
    return section("prefill", "Prefill", *parts)


def _table(found: Prefills) -> str:
    rows = []
    for one in found.by_prefill:
        cells = []
        for measured in (one.whole, one.continuation):
            cells.append(f"{bits(measured.bits_per_byte)}<small>{interval(measured.low, measured.high)}</small>")
            gap = f"{bits(measured.gap, 4)}<small>{interval(measured.gap_low, measured.gap_high, 4)}</small>"
            cells.append(MISSING if measured.gap is None else gap)
        rows.append([esc(one.words), *cells, esc(duration(one.read_s)), quantity(one.tokens_per_s)])
    head = [
        "Prefill",
        "Bits per byte",
        "Gap",
        f"After a prompt of {found.prompt_tokens:,}",
        "Gap",
        "Time",
        f"Tokens per second, {count(found.batch_size, 'row')} at a time",
    ]
    return table(head, rows, "Bits per byte, gap to exact prefill and speed, by prefill")


def gap_figure(run: Run, found: Prefills, key: str) -> str | None:
    """Bars of the gap to exact prefill: of whole rows, and after a prompt."""
    known = [one for one in found.by_prefill if one.whole.gap is not None]
    if not known:
        return None

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        for row, one in enumerate(known):
            ax.text(0, row - 0.42, one.words, transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
            for j, measured in enumerate((one.whole, one.continuation)):
                at = row - 0.13 + 0.3 * j
                ax.barh(at, measured.gap or 0.0, height=0.26, color=series(j), alpha=0.8, linewidth=0)
                if measured.gap_low is not None and measured.gap_high is not None:
                    ax.plot([measured.gap_low, measured.gap_high], [at, at], color=MUTED, linewidth=1)
        from matplotlib.patches import Patch

        names = ["whole rows", "after a prompt"]
        legend(fig, [Patch(color=series(j), alpha=0.8) for j in range(2)], names)
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.set_ylim(len(known) - 0.4, -0.65)
        ax.set_yticks([])
        ax.grid(visible=True, axis="x", color=GRID)
        ax.locator_params(axis="x", nbins=5)
        ax.set_xlabel("bits per byte more than exact")

    spoken = "; ".join(
        f"{one.words}: {bits(one.whole.gap, 4)}, after a prompt {bits(one.continuation.gap, 4)}" for one in known
    )
    label = f"Bar chart of the gap to exact prefill in bits per byte, {run.label}. {spoken}."
    return draw(key, label, paint, height_in=0.75 + 0.62 * len(known))
