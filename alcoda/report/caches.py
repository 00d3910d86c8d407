"""The part of the page about decode caches: what one slot for all loops costs (caches.json)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alcoda.report.fields import Fields, load
from alcoda.report.markup import MISSING, bits, count, esc, figure, interval, note, number, quantity, section, table
from alcoda.report.prefills import Bits, choice_words, read_bits
from alcoda.report.svg import GRID, INK, MUTED, draw, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from alcoda.report.read import Run

_ABOUT = (
    "What a decoded token leaves in the core's slots of the cache: a slot a loop (per_loop, what the model was trained "
    "as), or one slot for all loops, with the mean of its keys (mean) or those of its last loop (last). Gap: bits per "
    "byte more than per_loop on the same text, paired by unit."
)


@dataclass(frozen=True)
class Cache:
    """One cache; ``words`` names it with its numbers."""

    words: str
    loss: float
    bits: Bits
    bytes_per_token: float | None
    s_per_token: float


@dataclass(frozen=True)
class Caches:
    """What ``alcoda eval --cache all`` measured, per_loop first."""

    data: str
    train_step: int
    loops: int
    batch_size: int
    n_tokens: int
    note: str
    by_cache: tuple[Cache, ...]


def read_caches(path: Path) -> Caches | None:
    """``caches.json`` of a run. Raises `RunError` where it is damaged."""
    if not path.is_file():
        return None
    data = Fields(load(path), str(path))
    return Caches(
        data=data.text("data", "valid"),
        train_step=data.integer("train_step"),
        loops=data.integer("loops"),
        batch_size=data.integer("batch_size"),
        n_tokens=data.integer("n_tokens"),
        note=data.text("note"),
        by_cache=tuple(
            Cache(
                words=choice_words(one.text("name", "?"), one.child("cache")),
                loss=one.number("loss"),
                bits=read_bits(one.child("bits")),
                bytes_per_token=one.maybe_number("bytes_per_token"),
                s_per_token=one.number("s_per_token"),
            )
            for one in data.children("by_cache")
        ),
    )


def cache(runs: Sequence[Run]) -> str:
    """A table and bars a run."""
    parts = [f"<p>{esc(_ABOUT)}</p>"]
    for i, run in enumerate(runs):
        found = run.caches
        if found is None:
            continue
        if len(runs) > 1:
            parts.append(f"<h3>{esc(run.label)}</h3>")
        at = f"{found.n_tokens:,} tokens at {count(found.loops, 'loop')}"
        parts.append(f"<p>{esc(f'On {found.data}: {at}, read token by token.')}</p>")
        if run.evaluation and run.evaluation.train_step not in (None, found.train_step):
            parts.append(
                note(
                    f"Measured at train step {found.train_step:,}, the evaluation at {run.evaluation.train_step:,}: "
                    "`alcoda eval RUN --cache all` measures anew."
                )
            )
        if found.note:
            parts.append(note(found.note))
        svg = gap_figure(run, found, f"cache {i}")
        drawn = figure(svg, "Gap to a slot a loop", "Lower is better. Whiskers: 95% intervals.") if svg else ""
        parts += [_table(found), drawn]
    return section("cache", "Decode cache", *parts)


def _table(found: Caches) -> str:
    rows = []
    for one in found.by_cache:
        gap = f"{bits(one.bits.gap, 4)}<small>{interval(one.bits.gap_low, one.bits.gap_high, 4)}</small>"
        rows.append(
            [
                esc(one.words),
                f"{bits(one.bits.bits_per_byte)}<small>{interval(one.bits.low, one.bits.high)}</small>",
                MISSING if one.bits.gap is None else gap,
                bits(one.loss, 4),
                MISSING if one.bytes_per_token is None else quantity(one.bytes_per_token, "B"),
                number(1000 * one.s_per_token),
            ]
        )
    head = [
        "Cache",
        "Bits per byte",
        "Gap",
        "Nats per token",
        "KV cache per token",
        f"Milliseconds per token, {count(found.batch_size, 'row')} at a time",
    ]
    return table(head, rows, "Bits per byte, gap to a slot a loop, bytes and time, by decode cache")


def gap_figure(run: Run, found: Caches, key: str) -> str | None:
    """Bars of the gap to a slot a loop."""
    known = [one for one in found.by_cache if one.bits.gap is not None]
    if not known:
        return None

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        for row, one in enumerate(known):
            ax.text(0, row - 0.36, one.words, transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
            ax.barh(row, one.bits.gap or 0.0, height=0.36, color=series(0), alpha=0.8, linewidth=0)
            if one.bits.gap_low is not None and one.bits.gap_high is not None:
                ax.plot([one.bits.gap_low, one.bits.gap_high], [row, row], color=MUTED, linewidth=1)
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.set_ylim(len(known) - 0.5, -0.65)
        ax.set_yticks([])
        ax.grid(visible=True, axis="x", color=GRID)
        ax.locator_params(axis="x", nbins=5)
        ax.set_xlabel("bits per byte more than per_loop")

    spoken = "; ".join(f"{one.words}: {bits(one.bits.gap, 4)}" for one in known)
    label = f"Bar chart of the gap to a slot a loop in bits per byte, {run.label}. {spoken}."
    return draw(key, label, paint, height_in=0.75 + 0.5 * len(known))
