"""The key store: the one place that knows which keys a query may see.

Every key carries the position of its token. A key is visible to a query if it is live and ``key_pos <= query_pos``.
Training, prefill, chunked prefill, decoding, left-padded batches and the refinement of a subset of positions are then
one operation with another set of positions. Identity (``pos``) and visibility (``live``) are separate fields: a token
that is written again must be found by its position, and its old key retired.

Slots are (stage, layer, loop). All slots share one table of positions, because one pass of the model writes all of
them; the driver opens a pass once, and no layer knows whether it is the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from alcoda.model.positions import Rotation

Slot = tuple[str, int, int]
"""(stage, layer, loop)"""


class View(NamedTuple):
    """What the queries of one pass may see of the keys that they read.

    Attributes:
        pos: positions of the queries, [T] where all rows agree, else [B, T].
        mask: bool, True where visible, broadcastable to [B, H, T, S]; None where ``is_causal`` says it all, or where
            every key is visible.
        is_causal: keys are exactly the queries' own, in order: the attention kernel's own causal path serves.
    """

    pos: Tensor
    mask: Tensor | None
    is_causal: bool


def view_alone(n_tokens: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device) -> View:
    """The view of a pass that keeps no keys (training, scoring): queries see keys of this pass only."""
    if pos_BT is None and live_BT is None:
        return View(torch.arange(n_tokens, device=device), None, True)
    if pos_BT is None:
        pos_BT = torch.arange(n_tokens, device=device).expand_as(live_BT)
    return View(pos_BT, _visible(pos_BT, pos_BT, live_BT), False)


def _visible(pos_BT: Tensor, pos_BS: Tensor, live_BS: Tensor | None) -> Tensor:
    mask_BTS = pos_BS[:, None, :] <= pos_BT[:, :, None]
    return (mask_BTS if live_BS is None else mask_BTS & live_BS[:, None, :])[:, None]


class KeyStore:
    """Keys and values of earlier tokens, by slot. For inference: written in place, without gradients.

    Args:
        capacity_tokens: room made at first; it doubles when it is short.
    """

    def __init__(self, capacity_tokens: int = 256) -> None:
        self.capacity_tokens = capacity_tokens
        self.n_tokens = 0
        self.n_loops: int | None = None
        self.slots: dict[Slot, tuple[Tensor, Tensor]] = {}
        self._written: dict[Slot, int] = {}
        self._start = 0
        # None while the keys are exactly positions 0 .. n_tokens-1 of every row: the case that must cost nothing.
        self._pos_BS: Tensor | None = None
        self._live_BS: Tensor | None = None

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """Make room for the tokens of one pass and say what their queries may see.

        Args:
            n_tokens: T, tokens of this pass in each row.
            n_loops: loops of this pass; those of the passes before it (ValueError otherwise: keys would be missing, or
                come from another depth).
            pos_BT: their positions; None means that they follow what is stored, without a gap.
            live_BT: False for padding; None means all live.

        Tokens whose position is stored already replace it: the old key is retired in every slot.
        """
        if self.n_loops not in (None, n_loops):
            raise ValueError(
                f"n_loops={n_loops} on keys of n_loops={self.n_loops}: one store serves one number of loops; start a "
                "new store to decode at another depth"
            )
        self.n_loops = n_loops
        start, self._start, self.n_tokens = self.n_tokens, self.n_tokens, self.n_tokens + n_tokens
        if pos_BT is None and live_BT is None and self._pos_BS is None:
            pos_T = torch.arange(start, self.n_tokens, device=device)
            if start == 0:
                return View(pos_T, None, True)
            if n_tokens == 1:
                return View(pos_T, None, False)
            return View(pos_T, torch.arange(self.n_tokens, device=device) <= pos_T[:, None], False)
        return self._open_tagged(start, n_tokens, pos_BT, live_BT, device)

    def _open_tagged(
        self, start: int, n_tokens: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        known = next((t for t in (pos_BT, live_BT, self._pos_BS) if t is not None), None)
        assert known is not None
        n_rows = known.size(0)
        if pos_BT is None:
            last_B1 = torch.full((n_rows, 1), start - 1, device=device)
            if self._pos_BS is not None and self._live_BS is not None and start:
                last_B1 = self._pos_BS.masked_fill(~self._live_BS, -1).amax(1, keepdim=True)
            pos_BT = last_B1 + 1 + torch.arange(n_tokens, device=device)
        if live_BT is None:
            live_BT = torch.ones_like(pos_BT, dtype=torch.bool)
        if self._pos_BS is None:
            self._pos_BS = torch.arange(start, device=device).expand(n_rows, start)
            self._live_BS = torch.ones(n_rows, start, dtype=torch.bool, device=device)
        assert self._live_BS is not None
        same_BST = (self._pos_BS[:, :, None] == pos_BT[:, None, :]) & live_BT[:, None, :]
        self._pos_BS = torch.cat([self._pos_BS, pos_BT], 1)
        self._live_BS = torch.cat([self._live_BS & ~same_BST.any(-1), live_BT], 1)
        return View(pos_BT, _visible(pos_BT, self._pos_BS, self._live_BS), False)

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Store this pass's keys and values in ``slot``; returns all that it holds, ``k_BGSK, v_BGSK``."""
        written = self._written.get(slot, 0)
        assert written == self._start, f"slot {slot} holds keys of {written} of {self._start} earlier tokens"
        old = self.slots.get(slot)
        if old is None or old[0].size(2) < self.n_tokens:
            capacity = max(self.capacity_tokens, self.n_tokens)
            if old is not None:
                capacity = max(capacity, 2 * old[0].size(2))
            new = tuple(t.new_empty(t.size(0), t.size(1), capacity, t.size(3)) for t in (k_BGTK, v_BGTK))
            if old is not None:
                for buffer, kept in zip(new, old, strict=True):
                    buffer[:, :, :written] = kept[:, :, :written]
            self.slots[slot] = old = (new[0], new[1])
        for buffer, fresh in zip(old, (k_BGTK, v_BGTK), strict=True):
            buffer[:, :, self._start : self.n_tokens] = fresh
        self._written[slot] = self.n_tokens
        return old[0][:, :, : self.n_tokens], old[1][:, :, : self.n_tokens]

    def n_bytes(self) -> int:
        """Bytes of the keys and values held (not of the room made for more)."""
        return sum(2 * k[:, :, : self._written[slot]].numel() * k.element_size() for slot, (k, _) in self.slots.items())


@dataclass(frozen=True)
class Context:
    """What one pass knows besides activations: positions, visibility, and where its keys go."""

    view: View
    rotation: Rotation | None
    store: KeyStore | None = None
    loop: int = 0

    def at_loop(self, loop: int) -> Context:
        """The context of another loop's slots. Without a store all loops share one, so a compiled pass is one graph."""
        return self if self.store is None else replace(self, loop=loop)

    def keys(self, stage: str, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that this pass's queries read in this layer: ``k_BGSK, v_BGSK``."""
        return (k_BGTK, v_BGTK) if self.store is None else self.store.write((stage, layer, self.loop), k_BGTK, v_BGTK)
