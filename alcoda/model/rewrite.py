"""Keys of several passes over one text: a later pass runs some tokens again, and their keys replace the old ones.

Training keeps every version, because gradients flow through all of them (`KeyPages`); inference writes in place
(`Again`). Both are stores of `alcoda.model.keys`: no layer knows which pass it is in.
"""

from __future__ import annotations

from typing import Any, ClassVar

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
        return Replaced.apply(old, new.to(old.dtype), dim, self.tokens)


class Replaced(torch.autograd.Function):
    """``old`` with ``new`` at some tokens. As `torch.slice_scatter`, but that the gradient of ``new`` is no view of
    every other token: what comes before it would read it at half the speed."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor, dim: int, tokens: range) -> Tensor:
        ctx.dim, ctx.tokens = dim, tokens
        return torch.slice_scatter(old, new, dim, tokens.start, tokens.stop, tokens.step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,), at = grads, (slice(None),) * ctx.dim + (slice(ctx.tokens.start, ctx.tokens.stop, ctx.tokens.step),)
        old = grad.clone()
        old[at] = 0
        return old, grad[at].contiguous(), None, None


class Again:
    """A store for one pass that runs some of the tokens that ``store`` holds once more, in place.

    Args:
        store: as the pass before left it.
        tokens: columns of the store that it runs: the same of each row, where its keys are positions 0 .. n - 1; or
            [B, K], of each row.
        real_BK: with the latter: False where an entry only fills its row up and is to change nothing.
    """

    decodes: ClassVar[bool] = True

    def __init__(self, store: KeyStore, tokens: range | Tensor, real_BK: Tensor | None = None) -> None:
        assert isinstance(tokens, range) is (real_BK is None) and (store.pos_BS is None or real_BK is not None)
        self.store, self.tokens, self.real_BK = store, tokens, real_BK
        self.n_tokens = store.n_tokens

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `KeyStore.open`; positions are those that the tokens have."""
        assert n_loops == self.store.n_loops and pos_BT is None and live_BT is None
        if isinstance(self.tokens, range):
            pos_T = torch.arange(self.tokens.start, self.tokens.stop, self.tokens.step, device=device)
            key_pos_S = torch.arange(self.n_tokens, device=device)
            return View(pos_T, key_pos_S, None, key_pos_S <= pos_T[:, None], False)
        key_pos_BS = self.store.positions(self.tokens)
        return View.tagged(key_pos_BS.gather(1, self.tokens), key_pos_BS, self.store.live_BS)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """As `KeyStore.ran`."""
        before_BS = self.store.ran_BS[loop]
        self.store.ran_BS[loop] = ran_BS = replaced(before_BS, self.tokens, ran_BT, self.real_BK)
        return ran_BS if self.store.live_BS is None else ran_BS & self.store.live_BS

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`."""
        held = self.store.held(slot, k_BGTK, v_BGTK)
        for held_BGSK, new_BGTK in zip(held, (k_BGTK, v_BGTK), strict=True):
            if isinstance(self.tokens, range):
                held_BGSK[:, :, every(self.tokens)] = new_BGTK
            else:
                new_BTGK = new_BGTK.transpose(1, 2)
                held_BGSK.copy_(
                    replaced(held_BGSK.transpose(1, 2), self.tokens, new_BTGK, self.real_BK).transpose(1, 2)
                )
        return held


def every(tokens: range) -> slice:
    """``tokens`` as an index."""
    return slice(tokens.start, tokens.stop, tokens.step)


def some_of(x_BT: Tensor, tokens: range | Tensor) -> Tensor:
    """Those tokens of ``[B, T, ...]``; as `Again` names them."""
    return x_BT[:, every(tokens)] if isinstance(tokens, range) else tokens_at(x_BT, tokens)


def replaced(x_BT: Tensor, tokens: range | Tensor, new_BK: Tensor, real_BK: Tensor | None) -> Tensor:
    """``[B, T, ...]`` with ``new_BK`` at those tokens (as `Again` names them), but for entries that only fill up."""
    new_BK = new_BK.to(x_BT.dtype)
    if isinstance(tokens, range):
        return torch.slice_scatter(x_BT, new_BK, 1, tokens.start, tokens.stop, tokens.step)
    if real_BK is not None:
        real = real_BK.view(*real_BK.shape, *[1] * (new_BK.dim() - 2))
        new_BK = torch.where(real, new_BK, tokens_at(x_BT, tokens))
    return put_tokens(x_BT, tokens, new_BK)
