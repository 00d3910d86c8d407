"""The cache of a GPU: pages of tokens, and one call that attends all rows of a launch, whatever loop each is at.

torch's `varlen_attn` reads keys from a pool of pages, of which a table names each row's. A layer's pool has the pages
of all its slots (loops), slot by slot, so that a row at another loop has another place in the same table: nothing is
padded, nothing is gathered. A span is whole pages that lie together, and a prompt is read into views of it.

What the kernel asks for is of a GPU, of bf16, and of heads whose size is a multiple of 8. It is held against SDPA
before it is used; where it cannot be had, rows are padded (`alcoda.model.attention.attend_padded`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.engine.cache import Arena, Attends, up
from alcoda.engine.kernels import TOLERANCE, RowPlaces, SlabRows
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.config import ModelConfig
from alcoda.model.keys import RowKeys
from alcoda.model.lm import RecurrentLM

DEVICES = ("cuda",)
"""Where the kernel may be. A CPU gathers pages slower than it reads what lies together."""

REASON_CHARS = 160
"""Of what torch says where it cannot; the rest is a list of all that it can."""


class Form(NamedTuple):
    """What an implementation of flash attention asks of paged keys.

    Attributes:
        page_tokens: of a page.
        starts: whether it is told where each row's keys would begin if they lay together (``cu_seq_k``), although it
            reads no such place; others refuse it.
    """

    page_tokens: int
    starts: bool


FA2, OTHERS = Form(256, True), Form(32, False)
"""torch's own, whose pages are multiples of 256; and those that `torch.nn.attention.activate_flash_attention_impl`
puts in its place."""


def load_varlen_attn() -> Callable[..., Any]:
    """torch's; ImportError before 2.10. (To import it takes a second, which a CPU need not wait.)"""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def implementation() -> Form:
    """Of the flash attention that torch uses now."""
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return FA2 if active in (None, "FA2") else OTHERS


class PageTables(RowPlaces):
    """Where the keys of rows are in a pool, once for all layers of a stage.

    Args:
        slab: of any layer, [slot, G, token, K].
        slots: of each row.
        ends: where its text begins, at the first token of a page, and ends.
        wide: pages of the table's rows; None: as many as the longest text has.

    Attributes:
        pages_WN: of each row; behind its text, its last one again, which is not read.
        used_W: keys of each row.
        cu_q, cu_k: where each row's query, and its part of the table, begin and end, [W + 1].
        most: keys of a row, at most: what the kernel divides its work by.
    """

    def __init__(
        self, slab: Tensor, slots: Sequence[int], ends: Sequence[tuple[int, int]], page_tokens: int, wide: int | None
    ) -> None:
        of_slot, _, of_token, _ = slab.stride()
        pages_a_slot = slab.size(2) // page_tokens
        places = list(zip(slots, ends, strict=True))
        lengths = [stop - start for start, stop in ends]
        super().__init__([slot * of_slot + start * of_token for slot, (start, _) in places], lengths)
        n_rows, own_W = len(lengths), -(-np.array(lengths) // page_tokens)
        wide = int(own_W.max()) if wide is None else wide
        first_W = np.array([slot * pages_a_slot + start // page_tokens for slot, (start, _) in places])
        pages_WN = first_W[:, None] + np.minimum(np.arange(wide), own_W[:, None] - 1)
        begins = np.arange(n_rows + 1)
        self.most = wide * page_tokens
        # One tensor: a GPU takes as long for a copy of a few numbers as for one of many.
        numbers = np.concatenate([begins, begins * self.most, lengths, pages_WN.reshape(-1)]).astype(np.int32)
        parts = torch.from_numpy(numbers).to(slab.device).split([n_rows + 1, n_rows + 1, n_rows, n_rows * wide])
        self.cu_q, self.cu_k, self.used_W, pages = parts
        self.pages_WN = pages.view(n_rows, wide)


class PoolRows(SlabRows):
    """As `SlabRows`, of a slab that is a pool ``[page, token, G, K]``."""

    def __init__(self, slab: Tensor, places: PageTables, pool: Tensor) -> None:
        super().__init__(slab, places)
        self.tables, self.pool = places, pool


@dataclass(frozen=True)
class PagedAttention:
    """The kernel.

    Attributes:
        call: `varlen_attn`, or what stands for it in a test.
        deterministic: a row's sums are taken in one order, whatever rows are beside it.
    """

    call: Callable[..., Any]
    form: Form
    deterministic: bool = False

    def __call__(self, q_WH1K: Tensor, k: PoolRows, v: PoolRows, window: int | None) -> Tensor:
        """``[W, H, 1, K]``: each row's attention over all its keys, or the last ``window``."""
        tables = k.tables
        y_WHK = self.call(
            q_WH1K.squeeze(2).to(k.pool.dtype),
            k.pool,
            v.pool,
            tables.cu_q,
            tables.cu_k if self.form.starts else None,
            1,
            tables.most,
            window_size=(-1, -1) if window is None else (window - 1, 0),  # how many before its own
            enable_gqa=q_WH1K.size(1) != k.pool.size(2),
            seqused_k=tables.used_W,
            block_table=tables.pages_WN,
            num_splits=1 if self.deterministic else None,
        )
        return y_WHK[:, :, None]


class PagedArena(Arena):
    """An arena whose tokens lie together with all their heads, in pages; arguments as `Arena`."""

    def __init__(
        self,
        config: ModelConfig,
        n_loops: int,
        n_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        kernel: PagedAttention,
        coda_per_loop: bool = True,
        policy: CachePolicy = PER_LOOP,
    ) -> None:
        self.page_tokens = kernel.form.page_tokens
        super().__init__(config, n_loops, n_tokens, dtype, device, coda_per_loop, policy, Attends("varlen"))
        self.kernel = kernel
        self._pools = {key: tuple(self._pool(x) for x in slabs) for key, slabs in self._slabs.items()}
        # Where bits must not depend on the rows beside, nor may how the work is divided.
        longest = up(min(config.seq_len, self.n_tokens), self.page_tokens)
        self._wide = longest // self.page_tokens if kernel.deterministic else None

    def _made(self, *sizes: int, **held: Any) -> Tensor:
        of_each, layers, loops, heads, n_tokens, width = sizes
        return torch.empty(of_each, layers, loops, n_tokens, heads, width, **held).transpose(3, 4)

    def _pool(self, slab: Tensor) -> Tensor:
        return slab.transpose(1, 2).view(-1, self.page_tokens, slab.size(1), slab.size(3))

    def row_places(self, stage: str, slots: Sequence[int], ends: Sequence[tuple[int, int]]) -> PageTables:
        """As `Arena.row_places`."""
        return PageTables(self._slabs[stage, 0][0], slots, ends, self.page_tokens, self._wide)

    def row_keys(self, stage: str, layer: int, places: RowPlaces) -> RowKeys:
        """As `Arena.row_keys`."""
        assert isinstance(places, PageTables)
        slabs, pools = self._slabs[stage, layer], self._pools[stage, layer]
        k, v = (PoolRows(slab, places, pool) for slab, pool in zip(slabs, pools, strict=True))
        return RowKeys(k, v)


def arena_of(
    config: ModelConfig,
    n_loops: int,
    n_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    policy: CachePolicy = PER_LOOP,
    deterministic: bool = False,
) -> Arena:
    """The arena that suits a device; arguments as `Arena` and `PagedAttention`."""
    found = paged_on(config, dtype, device)
    if found.kernel is None:
        attends = Attends("sdpa", found.reason) if found.reason else None
        return Arena(config, n_loops, n_tokens, dtype, device, policy=policy, attends=attends)
    kernel = replace(found.kernel, deterministic=deterministic)
    return PagedArena(config, n_loops, n_tokens, dtype, device, kernel, policy=policy)


class Paged(NamedTuple):
    """Whether a device attends over pages.

    Attributes:
        kernel: None where it does not.
        reason: why a GPU does not.
    """

    kernel: PagedAttention | None
    reason: str = ""

    @property
    def page_tokens(self) -> int:
        """Of a page of the arena; 1: there are none."""
        return 1 if self.kernel is None else self.kernel.form.page_tokens


def paged_on(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Paged:
    """What a model's keys of a type get on a device. Found once a process for each kind of heads."""
    if device.type not in DEVICES:
        return Paged(None)
    if dtype not in TOLERANCE:
        return Paged(None, f"varlen_attn: not tried in {dtype}")
    shape = config.shape
    heads = shape.n_heads, config.block.attention.kv_heads(shape.n_heads), shape.d_head
    return _probed(*heads, dtype, device, implementation())


@functools.cache
def _probed(n_heads: int, n_groups: int, width: int, dtype: torch.dtype, device: torch.device, form: Form) -> Paged:
    try:
        kernel = PagedAttention(load_varlen_attn(), form)
        ways = kernel, replace(kernel, deterministic=True)
        off = max(_off(way, n_heads, n_groups, width, dtype, device) for way in ways)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:  # what it asks for is not here
        said = shorten((str(error).splitlines() or [type(error).__name__])[0], REASON_CHARS)
        return Paged(None, f"varlen_attn: {said}")
    if off <= TOLERANCE[dtype]:
        return Paged(kernel)
    return Paged(None, f"varlen_attn: off by {off:.2g} from SDPA")


@torch.no_grad()
def _off(
    kernel: PagedAttention, n_heads: int, n_groups: int, width: int, dtype: torch.dtype, device: torch.device
) -> float:
    """By how much the kernel misses SDPA, at most; inf where it reads what it must not."""
    draws, page = torch.Generator().manual_seed(0), kernel.form.page_tokens
    slots, ends = (0, 1, 0, 1), ((0, 1), (0, min(7, page)), (page, 2 * page + 1), (page, 3 * page))
    tables_wide = 3 if kernel.deterministic else None
    q_WH1K = torch.randn(len(slots), n_heads, 1, width, generator=draws).to(device, dtype)
    rows = []
    for _ in range(2):
        pool = torch.full((2, 3 * page, n_groups, width), torch.nan, dtype=dtype, device=device)
        for slot, (start, stop) in zip(slots, ends, strict=True):
            pool[slot, start:stop] = torch.randn(stop - start, n_groups, width, generator=draws).to(pool)
        slab = pool.transpose(1, 2)
        tables = PageTables(slab, slots, ends, page, tables_wide)
        rows.append(PoolRows(slab, tables, pool.view(-1, page, n_groups, width)))
    k, v = rows
    exact, off = torch.promote_types(dtype, torch.float32), 0.0
    for window in (None, 5, page + 1, 10 * page):
        seen = slice(None if window is None else -window, None)
        expected = [
            F.scaled_dot_product_attention(
                q.to(exact), x[:, :, seen].to(exact), y[:, :, seen].to(exact), enable_gqa=n_heads != n_groups
            )
            for q, x, y in zip(q_WH1K.split(1), k, v, strict=True)
        ]
        found = kernel(q_WH1K, k, v, window)
        off = max(off, float((found - torch.cat(expected)).abs().nan_to_num(torch.inf).max()))
    return off


def kept_in(model: RecurrentLM, dtype: torch.dtype) -> torch.dtype:
    """Of the keys of an engine whose passes are in ``dtype``."""
    return dtype if dtype == torch.bfloat16 else model.embed.weight.dtype


def room(model: RecurrentLM, dtype: torch.dtype, lengths: Iterable[int]) -> int:
    """Tokens of a cache in which requests that keep so many tokens have room at one time: on a GPU, whole pages each.

    Args:
        dtype: of the engine's passes.
    """
    page_tokens = paged_on(model.config, kept_in(model, dtype), model.embed.weight.device).page_tokens
    return sum(up(n, page_tokens) for n in lengths)
