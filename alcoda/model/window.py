"""Sliding windows: how far back the attention of each layer looks."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from alcoda.config import Choice, PositiveInt
from alcoda.model.shape import Place


class Window(Choice, axis="window"):
    """How far back each layer looks."""

    def sizes(self) -> tuple[int, ...]:
        """The windows that some layer may look through, in tokens."""
        return ()

    def at(self, place: Place) -> int | None:
        """The window of one layer, in tokens; None: it looks at everything."""
        return None


class NoWindow(Window):
    """Every layer looks at everything before it."""

    kind: Literal["none"] = "none"


class Everywhere(Window):
    """Every layer looks at the last ``tokens`` positions, its own included (Mistral 7B, arXiv 2310.06825).

    What reaches a token comes from further back through the layers between. Cost and cache as of `Pattern`.
    """

    kind: Literal["everywhere"] = "everywhere"
    tokens: PositiveInt

    def sizes(self) -> tuple[int, ...]:
        return (self.tokens,)

    def at(self, place: Place) -> int | None:
        return self.tokens


class Pattern(Window):
    """Layer i takes letter i of ``pattern``, over and over; the last layer is always L (nanochat, papers.md 4.1).

    Layers are counted over prelude, core and coda. The attention kernels mask what lies outside a window and do not
    skip it, so the ledger counts scores over all ``seq_len`` keys, and every key stays in the cache.
    """

    kind: Literal["pattern"] = "pattern"
    pattern: str = "SSSL"
    """S: a layer that looks at the last ``tokens`` positions; L: one that looks at everything."""
    tokens: PositiveInt
    """The window of an S layer, the token's own position included."""

    @field_validator("pattern")
    @classmethod
    def _letters(cls, pattern: str) -> str:
        if set(pattern) - set("SL"):
            raise ValueError("only the letters S (the window) and L (everything) are known: for example 'SSSL'")
        if "S" not in pattern:
            raise ValueError("no layer has the window: at least one S is needed, or window none")
        return pattern

    def sizes(self) -> tuple[int, ...]:
        return (self.tokens,)

    def at(self, place: Place) -> int | None:
        is_last = place.layer == place.n_layers - 1
        return None if is_last or self.pattern[place.layer % len(self.pattern)] == "L" else self.tokens
