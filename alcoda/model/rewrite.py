"""Keys of several passes over one text: a later pass runs some tokens again, and their keys replace the old ones.

Training keeps every version, because gradients flow through all of them (`KeyPages`); inference writes in place
(`Again`). Both are stores of `alcoda.model.keys`: no layer knows which pass it is in.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from alcoda.model.gather import put_tokens, tokens_at
from alcoda.model.keys import Keys, KeyStore, Slot, View


class KeyPages:
    """The keys that one pass of training leaves behind: those of the pass before it, with its own in their place.

    A page is written once and read by the pass that writes it and the next, so that a recomputed loop finds what it
    found before. Rows are whole: no padding, positions 0 .. n - 1.

    Args:
        tokens: positions that the pass runs, increasing; those from ``earlier.n_tokens`` on are new.
        earlier: the page before; None: the pass begins the text.
    """

    decodes: ClassVar[bool] = False

    def __init__(self, tokens: range, earlier: KeyPages | None = None) -> None:
        self.tokens, self.earlier = tokens, earlier
        self.n_before = 0 if earlier is None else earlier.n_tokens
        self.n_tokens = max(self.n_before, tokens[-1] + 1)
        self.is_new = tokens.start == self.n_before and tokens.step == 1
        assert self.is_new or self.n_tokens == self.n_before, "a pass runs new tokens, or old ones again"
        self.slots: dict[Slot, Keys] = {}
        self.ran_BS: dict[int, Tensor] = {}

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `KeyStore.open`; positions are those of ``tokens``."""
        assert n_tokens == len(self.tokens) and pos_BT is None and live_BT is None, "rows of training are whole"
        pos_T = torch.arange(self.tokens.start, self.tokens.stop, self.tokens.step, device=device)
        if self.is_new and self.n_before == 0:
            return View.causal(pos_T)
        key_pos_S = torch.arange(self.n_tokens, device=device)
        return View(pos_T, key_pos_S, None, key_pos_S <= pos_T[:, None], False)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """As `KeyStore.ran`."""
        ran_BS = ran_BT
        if self.earlier is not None and loop in self.earlier.ran_BS:
            ran_BS = self._merged(self.earlier.ran_BS[loop], ran_BT, 1)
        return self.ran_BS.setdefault(loop, ran_BS)

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`, with gradients."""
        keys = k_BGTK, v_BGTK
        if self.earlier is not None:
            # A route may have let every token out of the loop until now.
            old = self.earlier.held(slot) or tuple(self._none_of(x, self.n_before) for x in keys)
            keys = self._merged(old[0], k_BGTK, 2), self._merged(old[1], v_BGTK, 2)
        self.slots.setdefault(slot, keys)  # a recomputed loop writes again, and what others read stays
        return keys

    def held(self, slot: Slot) -> Keys | None:
        """The keys and values in ``slot`` after the pass; None where no pass wrote any."""
        if slot in self.slots or self.earlier is None:
            return self.slots.get(slot)
        old = self.earlier.held(slot)
        if old is None or self.n_before == self.n_tokens:
            return old
        k_BGSK, v_BGSK = (torch.cat([x, self._none_of(x, self.n_tokens - self.n_before)], 2) for x in old)
        return k_BGSK, v_BGSK

    @staticmethod
    def _none_of(like_BGSK: Tensor, n_tokens: int) -> Tensor:
        return like_BGSK.new_zeros(like_BGSK.size(0), like_BGSK.size(1), n_tokens, like_BGSK.size(3))

    def _merged(self, old: Tensor, new: Tensor, dim: int) -> Tensor:
        if self.is_new:
            return torch.cat([old, new.to(old.dtype)], dim)
        return torch.slice_scatter(old, new.to(old.dtype), dim, self.tokens.start, self.tokens.stop, self.tokens.step)


class Again:
    """A store for one pass that runs some of the tokens that ``store`` holds once more, in place.

    Args:
        store: as the pass before left it.
        index: columns of the store that it runs, [B, K]; or [K], where its keys are positions 0 .. n - 1.
        real_BK: with the latter: False where an entry only fills its row up and is to change nothing.
    """

    decodes: ClassVar[bool] = True

    def __init__(self, store: KeyStore, index: Tensor, real_BK: Tensor | None = None) -> None:
        assert (index.dim() == 1) is (real_BK is None) and (store.pos_BS is None or index.dim() == 2)
        self.store, self.index, self.real_BK = store, index, real_BK
        self.n_tokens = store.n_tokens

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `KeyStore.open`; positions are those that the tokens have."""
        assert n_loops == self.store.n_loops and pos_BT is None and live_BT is None
        if self.index.dim() == 1:
            key_pos_S = torch.arange(self.n_tokens, device=device)
            return View(self.index, key_pos_S, None, key_pos_S <= self.index[:, None], False)
        key_pos_BS = self.store.positions(self.index)
        return View.tagged(key_pos_BS.gather(1, self.index), key_pos_BS, self.store.live_BS)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """As `KeyStore.ran`."""
        before_BS = self.store.ran_BS[loop]
        self.store.ran_BS[loop] = ran_BS = self._put(before_BS, ran_BT)
        return ran_BS if self.store.live_BS is None else ran_BS & self.store.live_BS

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`."""
        held = self.store.held(slot, k_BGTK, v_BGTK)
        for held_BGSK, new_BGTK in zip(held, (k_BGTK, v_BGTK), strict=True):
            if self.index.dim() == 1:
                held_BGSK[:, :, self.index] = new_BGTK.to(held_BGSK.dtype)
            else:
                held_BGSK.copy_(self._put(held_BGSK.transpose(1, 2), new_BGTK.transpose(1, 2)).transpose(1, 2))
        return held

    def _put(self, held_BS: Tensor, new_BT: Tensor) -> Tensor:
        """``held_BS`` (and what is behind) with the real ones of ``new_BT`` in it."""
        index_BK = self.index if self.index.dim() == 2 else self.index.expand(held_BS.size(0), -1)
        if self.real_BK is not None:
            real = self.real_BK.view(*self.real_BK.shape, *[1] * (new_BT.dim() - 2))
            new_BT = torch.where(real, new_BT.to(held_BS.dtype), tokens_at(held_BS, index_BK))
        return put_tokens(held_BS, index_BK, new_BT)
