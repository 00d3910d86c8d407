"""Keys of tokens that have left the loop (docs/design, section 3): those of their last loop stand for all deeper ones.

Whoever drives the loops sets ``active_BT`` before each and leaves the rest to the store. A whole text at once needs one
slot a layer (`LastKeys`); decoding keeps a slot a loop and fills the deeper ones with copies (`CopiedKeys`), or, token
by token, one slot for all loops (`LastLoopKeys`, `MeanKeys`: `alcoda.model.cache_policy`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor

from alcoda.model.keys import CORE, Keys, KeyStore, Slot, View
from alcoda.model.precision import at_least_fp32

CODA = "coda"


class LastKeys:
    """Keys of one pass over whole texts, all loops of a layer in one slot: each token's of the last loop that it ran.

    Args:
        stages: those of which tokens that are out keep their keys; in others they are written anew.
    """

    decodes: ClassVar[bool] = False

    def __init__(self, stages: Collection[str]) -> None:
        self.stages = stages
        self.n_tokens = 0
        self.active_BT: Tensor | None = None
        """Tokens that run the loop; None: all."""
        self._slots: dict[tuple[str, int], Keys] = {}
        self._ran_BT: Tensor | None = None
        self._live_BT: Tensor | None = None

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `KeyStore.open`, once."""
        self.n_tokens, self._live_BT = n_tokens, live_BT
        if pos_BT is None and live_BT is None:
            return View.causal(torch.arange(n_tokens, device=device))
        assert pos_BT is not None, "padding without positions"
        return View.tagged(pos_BT, pos_BT, live_BT)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """As `KeyStore.ran`."""
        if self.active_BT is not None and self._ran_BT is not None and CORE in self.stages:
            ran_BT = torch.where(self.active_BT, ran_BT, self._ran_BT)
        self._ran_BT = ran_BT
        return ran_BT if self._live_BT is None else ran_BT & self._live_BT

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`, whatever the slot's loop."""
        stage, layer, _ = slot
        keys, before = (k_BGTK, v_BGTK), self._slots.get((stage, layer))
        if self.active_BT is not None and before is not None and stage in self.stages:
            keys = kept(self.active_BT, keys, before)
        if stage in self.stages:
            self._slots[stage, layer] = keys
        return keys

    def leave(self, loop: int, leaves_BT: Tensor) -> None:
        """As `CopiedKeys.leave`: what is in the slot stays."""


class CopiedKeys(KeyStore):
    """Keys for decoding: a token that leaves after loop d has its keys of loop d in the slots of all deeper loops.

    Args:
        n_slots: by stage, how many loops have slots; tokens that are out write their keys anew in stages not named.
        capacity_tokens: room made at first.
    """

    def __init__(self, n_slots: dict[str, int], capacity_tokens: int = 256) -> None:
        super().__init__(capacity_tokens)
        self.n_slots = n_slots
        self.active_BT: Tensor | None = None
        """Tokens of the open pass that run the loop; None: all."""

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """As `KeyStore.ran`."""
        ran_BS = self.ran_BS.get(loop)
        if self.active_BT is None or ran_BS is None or ran_BS.size(1) < self.n_tokens:
            return super().ran(loop, ran_BT)
        here_BT = ran_BS[:, self._start :]
        here_BT.copy_(torch.where(self.active_BT, ran_BT, here_BT))
        return ran_BS if self.live_BS is None else ran_BS & self.live_BS

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`."""
        if self.active_BT is None or self._written.get(slot, 0) < self.n_tokens:
            return super().write(slot, k_BGTK, v_BGTK)
        held, copies = self.held(slot, k_BGTK, v_BGTK), self._of_pass(slot)
        for there, x in zip(copies, (k_BGTK, v_BGTK), strict=True):
            torch.where(self.active_BT[:, None, :, None], x, there, out=there)
        return held

    def settle(self) -> None:
        """What is still kept of the newest tokens alone is put in its place."""

    def leave(self, loop: int, leaves_BT: Tensor) -> None:
        """Tokens of the open pass leave after ``loop`` (from 0): their keys of it are copied into all deeper slots."""
        row_N, token_N = leaves_BT.nonzero().unbind(1)
        if not len(row_N):
            return
        at_N = self._start + token_N
        for slot in [slot for slot in self.slots if slot[0] in self.n_slots and slot[2] == loop]:
            if self._written[slot] < self.n_tokens:  # a route let all of this pass out of the loop: they have no key
                continue
            keys = self._of_pass(slot)
            left = [x_BGTK[row_N, :, token_N] for x_BGTK in keys]
            for deeper in range(loop + 1, self.n_slots[slot[0]]):
                for there_BGSK, x_NGK in zip(self.held((*slot[:2], deeper), *keys), left, strict=True):
                    there_BGSK[row_N, :, at_N] = x_NGK
        if loop in self.ran_BS and CORE in self.n_slots:
            ran_BT = self.ran_BS[loop][:, self._start :]
            for deeper in range(loop + 1, self.n_slots[CORE]):
                held_BS = self.ran_BS.get(deeper, ran_BT[:, :0])
                missing = torch.zeros_like(ran_BT[:, : self.n_tokens - held_BS.size(1)])
                self.ran_BS[deeper] = held_BS = torch.cat([held_BS, missing], 1)
                held_BS[:, self._start :] = torch.where(leaves_BT, ran_BT, held_BS[:, self._start :])

    def _of_pass(self, slot: Slot) -> Keys:
        k_BGSK, v_BGSK = self.slots[slot]
        here = slice(self._start, self.n_tokens)
        return k_BGSK[:, :, here], v_BGSK[:, :, here]


class LastLoopKeys(CopiedKeys):
    """Keys for decoding token by token, one slot a core layer: a loop writes over what the one before it wrote, so that
    a token in the loop reads its own keys of this loop and of earlier tokens those of their last.

    Args:
        n_slots: as of `CopiedKeys`; the core's do not count.
    """

    def __init__(self, n_slots: dict[str, int], capacity_tokens: int = 256) -> None:
        super().__init__({stage: n for stage, n in n_slots.items() if stage != CORE}, capacity_tokens)

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `KeyStore.open`; ValueError for more than one token a row, of which the second would read what the first
        has not left yet."""
        if n_tokens != 1:
            raise ValueError(
                f"a pass of {n_tokens} tokens a row into a cache of one slot for all loops: each token must have left "
                "the loop before the next enters it; run them one by one, or decode with cache per_loop"
            )
        return super().open(n_tokens, n_loops, pos_BT, live_BT, device)

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`, whatever the loop of a slot of the core."""
        stage, layer, _ = slot
        if stage != CORE:
            return super().write(slot, k_BGTK, v_BGTK)
        shared, keys = (CORE, layer, 0), (k_BGTK, v_BGTK)
        if self.active_BT is not None and self._written.get(shared, 0) == self.n_tokens:
            keys = kept(self.active_BT, keys, self._of_pass(shared))
        held = self.held(shared, k_BGTK, v_BGTK)
        for there, x in zip(self._of_pass(shared), keys, strict=True):
            there.copy_(x)
        return held


class MeanKeys(LastLoopKeys):
    """As `LastLoopKeys`, but what a token leaves is the mean over the loops that it ran, of keys and of values.

    Sums are kept in fp32 at least, and only of the token that is in the loop; the mean is put in its place when the
    next token comes.
    """

    def __init__(self, n_slots: dict[str, int], capacity_tokens: int = 256) -> None:
        super().__init__(n_slots, capacity_tokens)
        self._sums: dict[Slot, tuple[Tensor, Tensor, Tensor]] = {}

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `LastLoopKeys.open`."""
        self.settle()
        return super().open(n_tokens, n_loops, pos_BT, live_BT, device)

    def settle(self) -> None:
        """As `CopiedKeys.settle`."""
        for shared, (k_BG1K, v_BG1K, n_B111) in self._sums.items():
            for there, x in zip(self._of_pass(shared), (k_BG1K, v_BG1K), strict=True):
                there.copy_(x / n_B111)
        self._sums = {}

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `LastLoopKeys.write`."""
        if slot[0] == CORE:
            shared = (CORE, slot[1], 0)
            k_BG1K, v_BG1K = at_least_fp32(k_BGTK), at_least_fp32(v_BGTK)
            here = k_BG1K, v_BG1K, torch.ones_like(k_BG1K[:, :1, :, :1])
            if shared in self._sums:
                out = None if self.active_BT is None else ~self.active_BT[:, None, :, None]
                k_BG1K, v_BG1K, n_B111 = (
                    before + (x if out is None else x.masked_fill(out, 0))
                    for before, x in zip(self._sums[shared], here, strict=True)
                )
                here = k_BG1K, v_BG1K, n_B111
            self._sums[shared] = here
        return super().write(slot, k_BGTK, v_BGTK)


def kept(active_BT: Tensor, new: Keys, before: Keys) -> Keys:
    """The new keys of the tokens that run, and those before of the others."""
    active_B1T1 = active_BT[:, None, :, None]
    k_BGTK, v_BGTK = (torch.where(active_B1T1, x, old.to(x.dtype)) for x, old in zip(new, before, strict=True))
    return k_BGTK, v_BGTK
