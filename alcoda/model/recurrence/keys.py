"""Keys: which keys the core's queries read at each loop."""

from __future__ import annotations

from typing import ClassVar, Literal

from alcoda.config import Choice


class CoreKeys(Choice, axis="keys"):
    """Where the core's keys and values come from, and in which slots they lie."""

    own_keys: ClassVar[bool] = True
    """Whether the core's blocks project keys of their own."""

    def n_slots(self, n_loops: int) -> int:
        """Slots that each core layer fills when ``n_loops`` loops run: the cache grows by this many keys a token."""
        raise NotImplementedError

    def slot_loop(self, loop: int) -> int:
        """The loop whose slot loop ``loop`` (0-based) reads and writes."""
        raise NotImplementedError


class PerLoop(CoreKeys):
    """Each loop projects its own keys from what it reads, into a slot of its own (a plain transformer, unrolled)."""

    kind: Literal["per_loop"] = "per_loop"

    def n_slots(self, n_loops: int) -> int:
        return n_loops

    def slot_loop(self, loop: int) -> int:
        return loop
