"""Keys and values of all requests that decode at one time.

An `Arena` has room for so many tokens, and a request reserves a span of them for its whole life: what has begun can
always end. Every (stage, layer, loop) has a slab over all tokens, so that a row's keys are a view of it, whatever loop
the row is at. On a GPU tokens are in pages (`alcoda.engine.paged`): other strides, and spans of whole pages. A token
that leaves the loop has its keys copied into the slots of all deeper loops (docs/design, section 3:
`alcoda.model.exit_keys.CopiedKeys` is the same for texts that are read in one go, and reads prompts into the spans).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alcoda.engine.kernels import RowPlaces, SlabRows, missing, row_attention
from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.config import ModelConfig
from alcoda.model.exit_keys import CODA, CopiedKeys
from alcoda.model.keys import CORE, Keys, RowKeys, RowsView, Slot, View

STAGES = ("prelude", CORE, CODA)


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` - 1 of an arena."""

    start: int
    stop: int


class Attends(NamedTuple):
    """How the rows of a launch are attended.

    Attributes:
        name: varlen, one call over the pages of a GPU; rows kernel, one call of ours on a CPU; sdpa, torch's: row by
            row on a CPU, on a GPU in one call over keys that are padded to the longest.
        reason: why not a faster one; empty where it is the fastest.
    """

    name: Literal["varlen", "rows kernel", "sdpa"]
    reason: str = ""


class CacheSize(NamedTuple):
    """How much an arena takes.

    Attributes:
        bytes_per_token: of all slots.
        n_tokens: that there is room for.
    """

    bytes_per_token: int
    n_tokens: int

    @property
    def n_bytes(self) -> int:
        """Of all."""
        return self.bytes_per_token * self.n_tokens


def slots_of(
    config: ModelConfig, n_loops: int, coda_per_loop: bool, policy: CachePolicy = PER_LOOP
) -> dict[str, tuple[int, int]]:
    """By stage: layers that keep keys, and slots in each.

    Args:
        coda_per_loop: whether some rule looks at logits after every loop.
        policy: what a token leaves in those of the core.
    """
    layers = {"prelude": config.n_prelude, CORE: config.n_core, CODA: config.n_coda}
    core = policy.n_slots(config.keys.n_slots(n_loops))
    loops = {"prelude": 1, CORE: core, CODA: n_loops if coda_per_loop else 1}
    return {stage: (layers[stage], loops[stage]) for stage in STAGES if layers[stage]}


def bytes_per_token(
    config: ModelConfig,
    n_loops: int,
    dtype: torch.dtype,
    coda_per_loop: bool = False,
    policy: CachePolicy = PER_LOOP,
) -> int:
    """Of keys and values in an `Arena`; arguments as `slots_of`."""
    n_slots = sum(layers * loops for layers, loops in slots_of(config, n_loops, coda_per_loop, policy).values())
    return 2 * n_slots * config.block.d_kv(config.shape) * dtype.itemsize


class Arena:
    """Room for the keys and values of ``n_tokens`` tokens, and one more, behind them, for rows that only fill a launch.

    The memory is taken from the system as it is written.

    Args:
        coda_per_loop, policy: as `slots_of`.
        attends: told where it is not what a CPU does.
    """

    page_tokens: int = 1
    """Spans, and the arena itself, are whole pages of so many."""

    def __init__(
        self,
        config: ModelConfig,
        n_loops: int,
        n_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        coda_per_loop: bool = True,
        policy: CachePolicy = PER_LOOP,
        attends: Attends | None = None,
    ) -> None:
        self.n_tokens, self.n_loops, self.policy = up(n_tokens, self.page_tokens), n_loops, policy
        self.size = CacheSize(bytes_per_token(config, n_loops, dtype, coda_per_loop, policy), self.n_tokens)
        heads, width = config.block.attention.kv_heads(config.shape.n_heads), config.shape.d_head
        held = {"dtype": dtype, "device": device}
        self.kv: dict[str, Tensor] = {
            stage: self._made(2, layers, loops, heads, self.n_tokens + self.page_tokens, width, **held)
            for stage, (layers, loops) in slots_of(config, n_loops, coda_per_loop, policy).items()
        }
        """By stage, [keys and values, layer, slot, G, token, K], whatever lies beside what in memory."""
        self._slabs = {
            (stage, layer): (kv[0, layer], kv[1, layer]) for stage, kv in self.kv.items() for layer in range(kv.size(1))
        }
        self.kernel: Callable[..., Tensor] | None = row_attention(dtype) if device.type == "cpu" else None
        """Attends all rows of a launch in one call; None: there is none."""
        if attends is None:
            attends = Attends("sdpa", missing(dtype)) if self.kernel is None else Attends("rows kernel")
        self.attends = attends
        self._flat = {key: tuple(_heads(x) for x in kv) for key, kv in self._slabs.items()}
        # From a slot, a token and a head to the next, in keys of one token and head.
        self._steps: dict[str, tuple[int, int, np.ndarray]] = {}
        for stage, kv in self.kv.items():
            of_slot, of_head, of_token = (n // width for n in kv.stride()[2:5])
            self._steps[stage] = of_slot, of_token, np.arange(heads) * of_head
        self._free = [Span(0, self.n_tokens)]
        for kv in self.kv.values():
            kv[..., self.n_tokens :, :] = 0  # what filling rows read is a number

    def _made(self, *sizes: int, **held: Any) -> Tensor:
        """What `kv` has of a stage."""
        return torch.empty(*sizes, **held)

    @property
    def filling(self) -> Span:
        """The token of rows that only fill a launch."""
        return Span(self.n_tokens, self.n_tokens + 1)

    @property
    def n_free(self) -> int:
        """Tokens that no request has reserved."""
        return sum(span.stop - span.start for span in self._free)

    @property
    def largest_free(self) -> int:
        """Of the longest request that could begin."""
        return max((span.stop - span.start for span in self._free), default=0)

    def reserve(self, n_tokens: int) -> Span | None:
        """The first span of so many tokens that is free, up to the end of its last page; None where there is none now.

        Raises:
            UsageError: more than there would ever be.
        """
        if n_tokens > self.n_tokens:
            raise UsageError(
                f"a request of {n_tokens} tokens (prompt and max_tokens) and a cache of {self.n_tokens}: lower "
                "max_tokens, or give the engine a larger cache (cache_tokens)"
            )
        n_tokens = up(n_tokens, self.page_tokens)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= n_tokens:
                taken, rest = Span(start, start + n_tokens), Span(start + n_tokens, stop)
                self._free[i : i + 1] = [rest] if rest.stop > rest.start else []
                return taken
        return None

    def free(self, span: Span) -> None:
        """Give a reserved span back."""
        insort(self._free, span)
        merged = [self._free[0]]
        for start, stop in self._free[1:]:
            assert start >= merged[-1].stop, f"tokens {start} to {stop - 1} were free already"
            if start == merged[-1].stop:
                merged[-1] = Span(merged[-1].start, stop)
            else:
                merged.append(Span(start, stop))
        self._free = merged

    def slabs(self, stage: str, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [slot, G, token, K] each."""
        return self._slabs[stage, layer]

    def put(self, stage: str, layer: int, places_N: Tensor, keys: Keys) -> None:
        """Write keys and values of some heads, ``[.., K]`` each, where `places` has them."""
        for slab_PK, x in zip(self._flat[stage, layer], keys, strict=True):
            x_NK = x.reshape(-1, x.size(-1))
            slab_PK.index_copy_(0, places_N, x_NK if x.dtype == slab_PK.dtype else x_NK.to(slab_PK.dtype))

    def places(self, stage: str, slots: Sequence[int], at: Sequence[int]) -> Tensor:
        """Where the heads of some tokens are in a slab, its dimensions before the last taken as one, in the order of
        memory, [N G].

        Args:
            slots, at: slot and token of each of N.
        """
        of_slot, of_token, of_heads_G = self._steps[stage]
        first_N = np.array(slots) * of_slot + np.array(at) * of_token  # by numpy: torch takes ten small kernels
        places_NG = first_N[:, None] + of_heads_G
        return torch.from_numpy(places_NG.reshape(-1)).to(self.kv[stage].device)

    def row_places(self, stage: str, slots: Sequence[int], ends: Sequence[tuple[int, int]]) -> RowPlaces:
        """Where the keys of rows are in each layer of a stage.

        Args:
            slots: of each row.
            ends: where its text begins, and ends.
        """
        of_slot, _, of_token, _ = self.kv[stage].stride()[2:]
        first = [slot * of_slot + start * of_token for slot, (start, _) in zip(slots, ends, strict=True)]
        return RowPlaces(first, [stop - start for start, stop in ends])

    def row_keys(self, stage: str, layer: int, places: RowPlaces) -> RowKeys:
        """Keys and values of rows."""
        k, v = self.slabs(stage, layer)
        return RowKeys(SlabRows(k, places), SlabRows(v, places))

    def slots(self, span: Span) -> dict[Slot, Keys]:
        """Views of a span as the slots of a `alcoda.model.keys.KeyStore` of one row, ``k_1GSK, v_1GSK`` each."""
        return {
            (stage, layer, loop): (
                kv[0, layer, loop : loop + 1, :, span.start : span.stop],
                kv[1, layer, loop : loop + 1, :, span.start : span.stop],
            )
            for stage, kv in self.kv.items()
            for layer in range(kv.size(1))
            for loop in range(kv.size(2))
        }

    def fill(self, slots: dict[Slot, Keys], texts: Sequence[tuple[int, int]]) -> None:
        """Put the keys of texts that were read together, ``k_BGSK, v_BGSK`` by slot, where they belong.

        Args:
            texts: where each begins, and how many tokens it has; what is behind them is padding.
        """
        for (stage, layer, loop), keys in slots.items():
            for kept_GSK, x_BGSK in zip(self.kv[stage][:, layer, loop], keys, strict=True):
                for (start, n_tokens), x_GSK in zip(texts, x_BGSK, strict=True):
                    kept_GSK[:, start : start + n_tokens] = x_GSK[:, :n_tokens]

    def copy_deeper(self, stage: str, places: Sequence[tuple[int, int]]) -> None:
        """The keys of some tokens at some slot, into all deeper slots.

        Args:
            places: slot (from 0) and token of each.
        """
        kv = self.kv.get(stage)
        if kv is None:
            return
        n_slots = kv.size(2)
        for slot, at in places:  # few leave at one time: a copy each takes less than one of all by index
            if slot + 1 < n_slots:
                token = kv.select(4, at)
                token.narrow(2, slot + 1, n_slots - slot - 1).copy_(token.narrow(2, slot, 1))

    def newest(self, stage: str, places: Sequence[int]) -> Tensor:
        """Keys and values of some tokens in the only slot of a stage, [N, 2, layer, G, K]."""
        at_N = torch.tensor(places, device=self.kv[stage].device)
        return self.kv[stage][:, :, 0, :, at_N].permute(3, 0, 1, 2, 4)

    def replace(self, stage: str, places: Sequence[int], kv_N2LGK: Tensor) -> None:
        """Put what `newest` gives in its place."""
        at_N, kv = torch.tensor(places, device=self.kv[stage].device), self.kv[stage]
        kv[:, :, 0, :, at_N] = kv_N2LGK.permute(1, 2, 3, 0, 4).to(kv.dtype)


def up(n_tokens: int, page_tokens: int) -> int:
    """To the end of the last page."""
    return -(-n_tokens // page_tokens) * page_tokens


def _heads(slab: Tensor) -> Tensor:
    """A slab's keys of one token and head, ``[.., K]``, in the order of memory."""
    width = slab.size(-1)
    return slab.as_strided((slab.numel() // width, width), (width, 1), slab.storage_offset())


class WholeKeys(CopiedKeys):
    """Keys of whole texts that are read together, padded behind their ends. No token sees what is behind it, so
    that a pass needs no mask of padding."""

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `KeyStore.open`, whichever tokens are live."""
        assert pos_BT is None
        return super().open(n_tokens, n_loops, None, None, device)


class RowStore:
    """A store (`alcoda.model.keys.Store`) of one launch: W rows, each one token of a text of its own, at loops of their
    own.

    Args:
        ends: where each row's text begins in the arena, and ends behind the row's token.
        pos_W1: positions of the tokens in their texts.
        slots: by stage, the slot of each row; a stage that is not named has one.
    """

    decodes: ClassVar[bool] = True

    def __init__(
        self,
        arena: Arena,
        ends: Sequence[tuple[int, int]],
        pos_W1: Tensor,
        slots: dict[str, Sequence[int]],
    ) -> None:
        self.arena, self.n_tokens, self.ends, self.pos_W1, self.slots = arena, 1, ends, pos_W1, slots
        # Of a stage, once for all its layers.
        self._written: dict[str, Tensor] = {}
        self._read: dict[str, RowPlaces] = {}

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> RowsView:
        """As `KeyStore.open`; positions are those of the rows."""
        assert n_tokens == 1 and pos_BT is None and live_BT is None
        return self.view

    @property
    def view(self) -> RowsView:
        """What the rows see."""
        return RowsView(self.pos_W1, kernel=self.arena.kernel)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        raise AssertionError("a route needs whole sequences: the engine refuses it")

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> RowKeys:
        """As `KeyStore.write`, each row in its slot of the stage, whatever loop is named."""
        stage, layer, _ = slot
        places_N = self._written.get(stage)
        if places_N is None:
            at = [stop - 1 for _, stop in self.ends]
            places_N = self._written[stage] = self.arena.places(stage, self._slots(stage), at)
        self.arena.put(stage, layer, places_N, (k_BGTK, v_BGTK))
        return self._rows(stage, layer)

    def stored(self, slot: Slot) -> RowKeys:
        """All keys and values that each row may see."""
        stage, layer, _ = slot
        return self._rows(stage, layer)

    def _slots(self, stage: str) -> Sequence[int]:
        return self.slots.get(stage, (0,) * len(self.ends))

    def _rows(self, stage: str, layer: int) -> RowKeys:
        places = self._read.get(stage)
        if places is None:
            places = self._read[stage] = self.arena.row_places(stage, self._slots(stage), self.ends)
        return self.arena.row_keys(stage, layer, places)
