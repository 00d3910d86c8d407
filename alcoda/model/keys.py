"""The key store: the one place that knows which keys a query may see.

Every key carries the position of its token. A key is visible to a query if it is live and ``key_pos <= query_pos``.
Training, prefill, chunked prefill, decoding, left-padded batches and the refinement of a subset of positions are then
one operation with another set of positions. Identity (``pos``) and visibility (``live``) are separate fields: a token
that is written again must be found by its position, and its old key retired.

Slots are (stage, layer, loop). All slots share one table of positions, because one pass of the model writes all of
them; the driver opens a pass once, and no layer knows whether it is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from alcoda.model.gather import tokens_at
from alcoda.model.positions import PositionModule, Rotation

Slot = tuple[str, int, int]
"""(stage, layer, loop)"""

Keys = tuple[Tensor, Tensor]
"""``k_BGSK, v_BGSK``"""


class View(NamedTuple):
    """What the queries of one pass may see of the keys that they read.

    Attributes:
        pos: positions of the queries, [T] where all rows agree, else [B, T].
        key_pos: positions of the keys, [S] or [B, S].
        key_live: False for keys that no query sees, [B, S]; None: all are live.
        mask: bool, True where visible, broadcastable to [B, H, T, S]; None where ``is_causal`` says it all, or where
            every key is visible.
        is_causal: keys are exactly the queries' own, in order: the attention kernel's own causal path serves.
    """

    pos: Tensor
    key_pos: Tensor
    key_live: Tensor | None
    mask: Tensor | None
    is_causal: bool

    @classmethod
    def causal(cls, pos: Tensor) -> View:
        """Queries in order of position, and their own keys."""
        return cls(pos, pos, None, None, True)

    @classmethod
    def tagged(cls, pos_BT: Tensor, key_pos_BS: Tensor, key_live_BS: Tensor | None) -> View:
        """The general case: a key is visible if it is live and not after the query."""
        mask_BTS = key_pos_BS[:, None, :] <= pos_BT[:, :, None]
        if key_live_BS is not None:
            mask_BTS = mask_BTS & key_live_BS[:, None, :]
        return cls(pos_BT, key_pos_BS, key_live_BS, mask_BTS[:, None], False)

    def within(self, window: int) -> View:
        """The same view, but of the last ``window`` positions only, the query's own included."""
        if self.pos.dim() == 1 and self.key_pos.size(-1) <= window:  # tagged positions may have gaps
            return self
        near = self.key_pos[..., None, :] > self.pos[..., :, None] - window
        if self.is_causal:
            near = near & (self.key_pos[..., None, :] <= self.pos[..., :, None])
        near = near if near.dim() == 2 else near[:, None]
        return self._replace(mask=near if self.mask is None else near & self.mask, is_causal=False)


class RowsView(NamedTuple):
    """What queries may see where each row is one token of a text of its own: all keys of `RowKeys`, of which a window
    leaves the last.

    Attributes:
        pos: positions of the queries, [W, 1].
        window: tokens; None: all.
        kernel: attends all rows in one call, as ``kernel(q_WH1K, k, v, window)``; None: there is none.
    """

    pos: Tensor
    window: int | None = None
    kernel: Callable[..., Tensor] | None = None

    def within(self, window: int) -> RowsView:
        """As `View.within`."""
        return self._replace(window=window)


class RowKeys(NamedTuple):
    """Keys and values of rows whose texts are of different lengths, S of each: ``k_1GSK`` and ``v_1GSK`` by row."""

    k: Sequence[Tensor]
    v: Sequence[Tensor]


class Store(Protocol):
    """Where the keys of a pass go, and which earlier ones its queries see.

    Attributes:
        decodes: what it keeps is for one depth, and for passes to come.
        n_tokens: tokens a row, those of the pass that is open included.
    """

    decodes: ClassVar[bool]
    n_tokens: int

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View | RowsView:
        """Begin a pass of ``n_tokens`` a row at ``n_loops`` loops; what its queries may see."""
        ...

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """Note which tokens of this pass run ``loop``; True for every stored token that has a key there, [B, S]."""
        ...

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys | RowKeys:
        """Keep this pass's keys and values in ``slot``; returns all that its queries read, ``k_BGSK, v_BGSK``."""
        ...


class KeyStore:
    """Keys and values of earlier tokens, by slot. For inference: written in place, without gradients.

    Args:
        capacity_tokens: room made at first; it doubles when it is short.
    """

    decodes: ClassVar[bool] = True

    def __init__(self, capacity_tokens: int = 256) -> None:
        self.capacity_tokens = capacity_tokens
        self.n_tokens = 0
        self.n_loops: int | None = None
        self.slots: dict[Slot, Keys] = {}
        self._written: dict[Slot, int] = {}
        self._start = 0
        # Positions and liveness; None while the keys are exactly positions 0 .. n_tokens-1 of every row: the case that
        # must cost nothing.
        self.pos_BS: Tensor | None = None
        self.live_BS: Tensor | None = None
        # By loop, where a router lets some tokens out: whether the token ran it, and so has a key there.
        self.ran_BS: dict[int, Tensor] = {}

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
        if pos_BT is None and live_BT is None and self.pos_BS is None:
            pos_T = torch.arange(start, self.n_tokens, device=device)
            if start == 0:
                return View.causal(pos_T)
            key_pos_S = torch.arange(self.n_tokens, device=device)
            return View(pos_T, key_pos_S, None, None if n_tokens == 1 else key_pos_S <= pos_T[:, None], False)
        return self._open_tagged(start, n_tokens, pos_BT, live_BT, device)

    def _open_tagged(
        self, start: int, n_tokens: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        known = next((t for t in (pos_BT, live_BT, self.pos_BS) if t is not None), None)
        assert known is not None
        n_rows = known.size(0)
        if pos_BT is None:
            last_B1 = torch.full((n_rows, 1), start - 1, device=device)
            if self.pos_BS is not None and self.live_BS is not None and start:
                last_B1 = self.pos_BS.masked_fill(~self.live_BS, -1).amax(1, keepdim=True)
            pos_BT = last_B1 + 1 + torch.arange(n_tokens, device=device)
        if live_BT is None:
            live_BT = torch.ones_like(pos_BT, dtype=torch.bool)
        if self.pos_BS is None:
            self.pos_BS = torch.arange(start, device=device).expand(n_rows, start)
            self.live_BS = torch.ones(n_rows, start, dtype=torch.bool, device=device)
        assert self.live_BS is not None
        same_BST = (self.pos_BS[:, :, None] == pos_BT[:, None, :]) & live_BT[:, None, :]
        self.pos_BS = torch.cat([self.pos_BS, pos_BT], 1)
        self.live_BS = torch.cat([self.live_BS & ~same_BST.any(-1), live_BT], 1)
        return View.tagged(pos_BT, self.pos_BS, self.live_BS)

    def positions(self, like_BT: Tensor) -> Tensor:
        """Of all stored tokens, [B, S], for as many rows as ``like_BT`` has."""
        if self.pos_BS is not None:
            return self.pos_BS
        return torch.arange(self.n_tokens, device=like_BT.device).expand(like_BT.size(0), -1)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """Note which tokens of this pass run ``loop``; True for every stored token that has a key there, [B, S]."""
        before_BS = self.ran_BS.get(loop, ran_BT[:, :0])
        self.ran_BS[loop] = ran_BS = torch.cat([before_BS, ran_BT], 1)
        return ran_BS if self.live_BS is None else ran_BS & self.live_BS

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """Store this pass's keys and values in ``slot``; returns all that it holds, ``k_BGSK, v_BGSK``."""
        written = self._written.get(slot, 0)
        routed = slot[0] == CORE and slot[2] in self.ran_BS
        assert routed or written == self._start, f"slot {slot} holds keys of {written} of {self._start} earlier tokens"
        held = self.held(slot, k_BGTK, v_BGTK)
        for held_BGSK, fresh_BGTK in zip(held, (k_BGTK, v_BGTK), strict=True):
            held_BGSK[:, :, self._start :] = fresh_BGTK
        return held

    def held(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """The keys and values in ``slot``, with room for all tokens, of the form of those given. Written in place."""
        written, held = self._written.get(slot, 0), self.slots.get(slot)
        if held is None or held[0].size(2) < self.n_tokens:
            capacity = max(self.capacity_tokens, self.n_tokens, 0 if held is None else 2 * held[0].size(2))
            # Zeros, not what the memory held: a token that did not run leaves a gap, and 0 times a NaN is a NaN.
            k_BGSK, v_BGSK = (x.new_zeros(x.size(0), x.size(1), capacity, x.size(3)) for x in (k_BGTK, v_BGTK))
            for grown, before in zip((k_BGSK, v_BGSK), held or (), strict=False):
                grown[:, :, :written] = before[:, :, :written]
            self.slots[slot] = held = k_BGSK, v_BGSK
        self._written[slot] = self.n_tokens
        return held[0][:, :, : self.n_tokens], held[1][:, :, : self.n_tokens]

    def n_bytes(self) -> int:
        """Bytes of the keys and values held (not of the room made for more)."""
        return sum(2 * k[:, :, : self._written[slot]].numel() * k.element_size() for slot, (k, _) in self.slots.items())


CORE = "core"


class Recall(NamedTuple):
    """What the tokens of a pass are told of earlier ones (`alcoda.model.memory`), a row a token.

    Attributes:
        m_BTD: the memory of each; None: zero, and nothing is computed of it.
        x0_BTD: what each is before the first block.
        shared: what the memory adds to keys and to values, ``[B, T, G K]`` each, where the layers share the maps.
    """

    m_BTD: Tensor | None
    x0_BTD: Tensor
    shared: tuple[Tensor, ...] = ()

    def map(self, f: Callable[[Tensor], Tensor]) -> Recall:
        """``f`` of every tensor."""
        return Recall(None if self.m_BTD is None else f(self.m_BTD), f(self.x0_BTD), tuple(f(x) for x in self.shared))


@dataclass(frozen=True)
class Context:
    """What one pass knows besides activations: the tokens, their positions, visibility, and where keys go.

    Attributes:
        ids_BT: token ids of the rows that run.
        views: by window, in tokens; None is the view without one.
        rotation: of the queries and keys of the pass.
        store: where keys are kept; None keeps nothing.
        loop: the slot of the core's keys.
        frozen: keys and values that the core's layers read in place of their own, by layer.
        index_BK: of a pass over some tokens only (a router let the others out): which of the T they are.
        n_tokens: T.
        recall: what they are told of earlier tokens; None where the model has no memory.
    """

    ids_BT: Tensor
    views: dict[int | None, View | RowsView]
    rotation: Rotation | None
    store: Store | None = None
    loop: int = 0
    frozen: tuple[Keys | RowKeys, ...] | None = None
    index_BK: Tensor | None = None
    n_tokens: int = 0
    recall: Recall | None = None

    @property
    def pos(self) -> Tensor:
        """Positions of the tokens that run, [T] or [B, T]."""
        return self.views[None].pos

    def at_loop(self, loop: int) -> Context:
        """The context of another loop's slots. Without a store all loops share one, so a compiled pass is one graph."""
        return self if self.store is None else replace(self, loop=loop)

    def some(self, index_BK: Tensor, runs_BT: Tensor, exact: bool) -> Context:
        """The context of a loop that some tokens run.

        Args:
            index_BK: which, in order of position, and behind them others that fill the row up.
            runs_BT: True for those that run.
            exact: every row has K of them, so that none is filled up.
        """
        base, n_rows = self.views[None], index_BK.size(0)
        assert isinstance(base, View), "a route needs whole sequences"
        pos_BK = base.pos.expand(n_rows, -1).gather(1, index_BK)
        if self.frozen is not None:
            view = View.tagged(pos_BK, base.key_pos.expand(n_rows, -1), base.key_live)
        elif self.store is not None:
            view = View.tagged(pos_BK, base.key_pos.expand(n_rows, -1), self.store.ran(self.loop, runs_BT))
        elif exact and base.is_causal:
            view = View.causal(pos_BK)
        else:
            live_BT = runs_BT if base.key_live is None else runs_BT & base.key_live
            view = View.tagged(pos_BK, pos_BK, live_BT.gather(1, index_BK))
        return self._of(index_BK, view)

    def these(self, index_BK: Tensor) -> Context:
        """The context of a loop that some tokens run, [B, K] in order of position, while every stored token has a key
        that they may see."""
        base = self.views[None]
        assert isinstance(base, View)
        pos, key_pos = (x.expand(index_BK.size(0), -1) for x in (base.pos, base.key_pos))
        return self._of(index_BK, View.tagged(pos.gather(1, index_BK), key_pos, base.key_live))

    def _of(self, index_BK: Tensor, view: View) -> Context:
        return replace(
            self,
            ids_BT=self.ids_BT.gather(1, index_BK),
            views=of_windows(view, self.views),
            rotation=None if self.rotation is None else self.rotation.at(index_BK),
            index_BK=index_BK,
            recall=None if self.recall is None else self.recall.map(lambda x: tokens_at(x, index_BK)),
        )

    def rows(self, index_N: Tensor) -> Context:
        """The context of some sequences of the batch, in a pass that does not decode."""
        assert self.store is None or not self.store.decodes

        def pick(x: Tensor | None, batch_dims: int) -> Tensor | None:
            return x if x is None or x.dim() < batch_dims or x.size(0) == 1 else x[index_N]

        views: dict[int | None, View | RowsView] = {}
        for window, view in self.views.items():
            assert isinstance(view, View)
            pos, key_pos, live = (pick(x, 2) for x in (view.pos, view.key_pos, view.key_live))
            assert pos is not None and key_pos is not None
            views[window] = View(pos, key_pos, live, pick(view.mask, 4), view.is_causal)
        rotation = self.rotation
        if rotation is not None and rotation.cos.dim() == 4:
            rotation = rotation._replace(cos=rotation.cos[index_N], sin=rotation.sin[index_N])
        frozen = None if self.frozen is None else tuple(_some_rows(keys, index_N) for keys in self.frozen)
        recall = None if self.recall is None else self.recall.map(lambda x: x[index_N])
        return replace(self, ids_BT=self.ids_BT[index_N], views=views, rotation=rotation, frozen=frozen, recall=recall)

    def keys(self, stage: str, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys | RowKeys:
        """All keys and values that this pass's queries read in this layer: ``k_BGSK, v_BGSK``."""
        if self.store is None:
            return k_BGTK, v_BGTK
        if self.index_BK is not None:
            k_BGTK, v_BGTK = self._spread(k_BGTK), self._spread(v_BGTK)
        return self.store.write((stage, layer, self.loop), k_BGTK, v_BGTK)

    def _spread(self, x_BGKK: Tensor) -> Tensor:
        assert self.index_BK is not None
        whole = x_BGKK.new_zeros(x_BGKK.size(0), x_BGKK.size(1), self.n_tokens, x_BGKK.size(3))
        return whole.scatter(2, self.index_BK[:, None, :, None].expand_as(x_BGKK), x_BGKK)


def open_context(
    ids_BT: Tensor,
    n_loops: int,
    position: PositionModule,
    windows: tuple[int, ...],
    dtype: torch.dtype,
    pos_BT: Tensor | None = None,
    live_BT: Tensor | None = None,
    store: Store | None = None,
) -> Context:
    """The context of one pass of ``n_loops`` loops over ``ids_BT``.

    Args:
        position: what rotates queries and keys, and how many positions it holds.
        windows: the windows that some layer looks through.
        dtype: of activations outside autocast.
        pos_BT: positions of the tokens; None: they follow what ``store`` holds.
        live_BT: False for padding, which no query sees; None: all live.
        store: keys of earlier tokens, to which this pass adds its own; None keeps nothing.
    """
    n_tokens, device = ids_BT.size(1), ids_BT.device
    if store is not None:
        view = store.open(n_tokens, n_loops, pos_BT, live_BT, device)
    elif pos_BT is None and live_BT is None:
        view = View.causal(torch.arange(n_tokens, device=device))
    else:
        if pos_BT is None:
            pos_BT = torch.arange(n_tokens, device=device).expand_as(ids_BT)
        view = View.tagged(pos_BT, pos_BT, live_BT)
    # Untagged positions end where the keys do; only tagged ones must be looked at (a wait, on a GPU).
    stored = n_tokens if store is None else store.n_tokens
    position.check(int(view.pos.max()) + 1 if view.pos.dim() == 2 else stored)
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    rotation = position.rotation(view.pos, dtype)
    return Context(ids_BT, of_windows(view, (None, *windows)), rotation, store, n_tokens=n_tokens)


def of_windows(view: View | RowsView, windows: Iterable[int | None]) -> dict[int | None, View | RowsView]:
    """``view`` through each of these windows."""
    return {window: view if window is None else view.within(window) for window in windows}


def _some_rows(keys: Keys | RowKeys, index_N: Tensor) -> Keys:
    k_BGSK, v_BGSK = keys
    assert isinstance(k_BGSK, Tensor) and isinstance(v_BGSK, Tensor)
    return k_BGSK[index_N], v_BGSK[index_N]
