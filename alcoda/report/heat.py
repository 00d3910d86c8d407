"""A text whose tokens are coloured by their convergence depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alcoda.report.fields import Fields
from alcoda.report.markup import esc

N_SHADES = 8
"""Classes ``h0`` (shallowest) to ``h7`` of page.css."""


@dataclass(frozen=True)
class Token:
    """A piece of a text; ``depth`` None: it was not predicted."""

    text: str
    depth: int | None
    censored: bool
    kind: str
    loss: float | None


@dataclass(frozen=True)
class Passage:
    """The beginning of a source."""

    source: str
    tokens: tuple[Token, ...]


def read_passages(data: Fields) -> tuple[Passage, ...]:
    """Those of lab.json."""
    return tuple(
        Passage(
            one.text("source", "?"),
            tuple(
                Token(
                    token.text("text"),
                    token.integer("depth") if "depth" in token else None,
                    bool(token.flag("censored")),
                    token.text("class"),
                    token.maybe_number("loss"),
                )
                for token in one.children("tokens")
            ),
        )
        for one in data.children("passages")
    )


def passages(found: Sequence[Passage]) -> str:
    """Each as a figure with a legend; depths are in words too, on each token."""
    depths = sorted({token.depth for one in found for token in one.tokens if token.depth is not None})
    if not depths:
        return ""
    low, high = depths[0], depths[-1]
    legend = "".join(f'<span class="h{_shade(d, low, high)}">{d}</span>' for d in range(low, high + 1))
    parts = ["<h3>A passage, by depth</h3>"]
    for one in found:
        said = f"Text of {one.source}: the darker a token's ground, the deeper the loop at which it converges"
        body = "".join(_span(token, low, high) for token in one.tokens)
        parts.append(
            f'<figure class="heat" role="group" aria-label="{esc(said)}">\n'
            f"<figcaption><strong>{esc(one.source)}</strong> "
            f'<span class="legend" aria-label="Legend: loops {low} to {high}">loop {legend}</span></figcaption>\n'
            f"<pre>{body}</pre>\n"
            '<p class="caption">Each token by the loop at which its prediction settles; dotted underline: not settled '
            "at the last loop. Point at a token for its depth, class and loss.</p>\n</figure>"
        )
    return "\n".join(parts)


def _shade(depth: int, low: int, high: int) -> int:
    return round((N_SHADES - 1) * (depth - low) / (high - low)) if high > low else 0


def _span(token: Token, low: int, high: int) -> str:
    if token.depth is None or not token.text:
        return esc(token.text)
    loss = "" if token.loss is None else f", {token.loss:.2f} nats"
    words = f"loop {token.depth}{' (not settled)' if token.censored else ''}: {token.kind.replace('_', ' ')}{loss}"
    late = " late" if token.censored else ""
    # A line break has no ground to colour: its own mark stands for it.
    shown = token.text.replace("\n", "⏎\n") if not token.text.strip() and "\n" in token.text else token.text
    return f'<span class="h{_shade(token.depth, low, high)}{late}" title="{esc(words)}">{esc(shown)}</span>'
