"""Small pieces of HTML and the words for numbers. All text from a run goes through `esc` before it is HTML."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from alcoda.report.export import tell_table

MISSING = "–"


def esc(value: Any) -> str:
    """``value`` as HTML text, safe in quoted attributes too; what a page cannot hold is shown as a picture of it.

    A byte-level model may sample control characters and a JSON file may hold half a surrogate pair.
    """
    text = str(value).replace("\r\n", "\n")
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda found: chr(0x2400 + ord(found[0])), text).replace("\x7f", "\u2421")
    return html.escape(re.sub(r"[\x80-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text))


def human(value: float | None, unit: str = "") -> str:
    """Three digits with an SI prefix: ``human(12_345_678) == "12.3 M"``; ``unit`` follows the prefix ("12.3 MB")."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not a number"
    scale, prefix = 1.0, ""
    for limit, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            scale, prefix = limit, name
            break
    short = value / scale
    if scale == 1.0 and value == int(value):
        text = str(int(value))
    else:
        text = f"{short:.{0 if abs(short) >= 99.95 else 1 if abs(short) >= 9.995 else 2}f}"
    return f"{text} {prefix}{unit}".rstrip()


def exact(value: float) -> str:
    """All digits before the point, in groups of three; of small numbers that are not whole, those after it too."""
    return f"{value:,.0f}" if math.isfinite(value) and (value == int(value) or abs(value) >= 1000) else f"{value:,}"


def quantity(value: float | None, unit: str = "") -> str:
    """``human(value)`` as HTML that shows the exact number on hover."""
    if value is None or not math.isfinite(value):
        return human(value)
    full = f"{exact(value)} {unit}".rstrip()
    return f'<data value="{value}" title="{esc(full)}">{esc(human(value, unit))}</data>'


def duration(seconds: float | None) -> str:
    """Two units of time: ``"1 h 23 min"``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 59.5:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        whole = int(seconds) // 60
        return f"{whole} min {int(seconds) % 60} s" if whole < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def bits(value: float | None, digits: int = 3) -> str:
    """Bits per byte with ``digits`` decimals, with a true minus sign."""
    if value is None:
        return MISSING
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else "not a number"


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    """``"1.691 to 1.734"``, or a dash where it was not measured."""
    return MISSING if low is None or high is None else f"{bits(low, digits)} to {bits(high, digits)}"


def number(value: float) -> str:
    """A small number without needless decimals: 8.0 is "8"."""
    return f"{value:.4g}"


def count(value: float, noun: str) -> str:
    """``"1 loop"``, ``"8 loops"``."""
    return f"{number(value)} {noun}" if value == 1 else f"{number(value)} {noun}s"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], label: str, total: bool = False, numbers: bool = True
) -> str:
    """A table that scrolls sideways by itself on a narrow page.

    The cells are HTML; the first of each row is its header. label: what the table shows (plain text). total: the last
    row is a total. numbers: the other cells are numbers, set to the right.
    """
    body = list(rows)
    tell_table(label, head, body)
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = []
    for index, (first, *rest) in enumerate(body):
        mark = ' class="total"' if total and index == len(body) - 1 else ""
        lines.append(f'<tr{mark}><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>')
    style = "numbers" if numbers else "words"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(label)}"><table class="{style}">\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody></table></div>"
    )


def figure(svg: str, title: str, caption: str = "") -> str:
    """A figure with its title over it and a caption (HTML) under it."""
    under = f'\n<p class="caption">{caption}</p>' if caption else ""
    return f"<figure>\n<figcaption><strong>{esc(title)}</strong></figcaption>\n{svg}{under}\n</figure>"


def facts(items: Iterable[tuple[str, str]]) -> str:
    """A list of names (plain text) and values (HTML)."""
    pairs = "\n".join(f"<div><dt>{esc(name)}</dt><dd>{value}</dd></div>" for name, value in items)
    return f'<dl class="facts">\n{pairs}\n</dl>'


def section(key: str, title: str, *parts: str) -> str:
    """A section of the page with the heading ``title``; ``key`` is its id."""
    body = "\n".join(part for part in parts if part)
    heading = f'<h2 id="{key}-title">{esc(title)}</h2>'
    return f'<section id="{key}" aria-labelledby="{key}-title">\n{heading}\n{body}\n</section>'


def details(summary: str, body: str, opened: bool = False) -> str:
    """A part that opens on a click; ``summary`` is plain text, ``body`` HTML."""
    return f"<details{' open' if opened else ''}>\n<summary>{esc(summary)}</summary>\n{body}\n</details>"


def note(text: str) -> str:
    """A paragraph that says what is missing or to be careful about; words in backticks are set as code."""
    worded = re.sub(r"`([^`]*)`", r"<code>\1</code>", esc(text))
    return f'<p class="note">{worded}</p>'
