"""Launches: the engine's tensors. Which launch is next is the scheduler's; what a token is worth, the engine's.

Every token in the loop has a row in the banks: its state, the anchor, what it remembers, what its exit rule keeps. A
launch gathers some rows, whatever loop each is at, runs them, and puts them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alcoda.depth.watch import ExitTest, Seen, Where
from alcoda.engine.cache import RowStore, Span
from alcoda.engine.packed import served
from alcoda.engine.paged import arena_of, kept_in
from alcoda.engine.prompts import Prompts
from alcoda.engine.request import Completion, Item, Step, filler
from alcoda.engine.scheduler import Part
from alcoda.engine.stats import Stopwatch
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.exit_keys import CODA
from alcoda.model.keys import CORE, Context, Recall, of_windows
from alcoda.model.lm import RecurrentLM
from alcoda.model.positions import Rotation
from alcoda.model.precision import at_least_fp32
from alcoda.model.state import Begun, State
from alcoda.training.device import autocast

TOP = 5
"""Tokens that a trajectory names at each loop."""


class Bank:
    """Tensors of which each token in the loop has a row. Their form is that of what is first put."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.parts: list[Tensor] | None = None

    def put(self, rows_N: Tensor, values: Sequence[Tensor]) -> None:
        """Values of some rows; each part keeps the finest type that it was given."""
        if self.parts is None:
            self.parts = [x.new_zeros(self.n_rows, *x.shape[1:]) for x in values]
        for i, x in enumerate(values):
            part = self.parts[i]
            if part.dtype != x.dtype:
                dtype = torch.promote_types(part.dtype, x.dtype)
                self.parts[i], x = part.to(dtype), x.to(dtype)
            self.parts[i].index_copy_(0, rows_N, x)

    def take(self, rows_N: Tensor) -> list[Tensor]:
        """Of some rows, what was put last."""
        return [] if self.parts is None else [part.index_select(0, rows_N) for part in self.parts]


class Rows(NamedTuple):
    """The rows of a launch.

    Attributes:
        items: their tokens, those that only fill it up included.
        n_positions: more than the position of any.
        rows_W: of the banks.
        n: of them, those that do not only fill it up; they come first.
        loops_W, ran_W: loops that each has run before the launch, and with it.
        ids_W1: token ids.
        store: where their keys go.
    """

    items: Sequence[Item]
    n: int
    n_positions: int
    rows_W: Tensor
    loops_W: Tensor
    ran_W: Tensor
    ids_W1: Tensor
    store: RowStore

    def own(self, x_W: Tensor) -> Tensor:
        """Without the rows that only fill the launch up."""
        return x_W if self.n == len(self.items) else x_W[: self.n]


class Runner:
    """Runs launches of one model.

    Args:
        n_loops: of a token, at most.
        n_tokens: that the cache has room for.
        width: tokens of a launch, at most; so many have a row.
        dtype: of the passes.
        fill: whether each launch is filled up to ``width``, so that a row's bits do not depend on the others.
        n_rows: tokens that may be in the loop at one time.
        policy: what a token leaves in the cache.
    """

    def __init__(
        self,
        model: RecurrentLM,
        n_loops: int,
        n_tokens: int,
        width: int,
        dtype: torch.dtype,
        fill: bool,
        n_rows: int,
        policy: CachePolicy = PER_LOOP,
    ) -> None:
        self.n_loops, self.width, self.fill, self.dtype = n_loops, width, fill, dtype
        self.model = served(model, dtype)
        self.device = model.embed.weight.device
        self.arena = arena_of(model.config, n_loops, n_tokens, kept_in(model, dtype), self.device, policy, fill)
        self.prompts = Prompts(self.model, self.arena)
        self.policy, self.sums = policy, Bank(n_rows + 1)
        self.windows = (None, *model.config.block.windows())
        self.carries = model.config.memory.carries
        # Row 0 is that of rows that only fill a launch.
        self.free_rows = list(range(n_rows, 0, -1))
        self.state, self.anchor, self.recall = Bank(n_rows + 1), Bank(n_rows + 1), Bank(n_rows + 1)
        self.kept: dict[ExitTest, Bank] = {}
        self.filler = filler()
        self.in_model = Stopwatch()
        self._rotation: Rotation | None = None
        self._turns_P211K = torch.empty(0)
        self._n_turned = 0

    def passes(self) -> AbstractContextManager[Any]:
        """What launches run in."""
        return autocast(self.device, self.dtype)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def open(self, completion: Completion) -> None:
        """As `Prompts.open`."""
        self.prompts.open(completion)

    def read(self, parts: Sequence[Part]) -> Tensor | None:
        """As `Prompts.read`."""
        with self.passes(), self.in_model:
            return self.prompts.read(parts)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def begin(self, items: Sequence[Item]) -> None:
        """All before the first loop of some tokens; each is given a row."""
        for item in items:
            item.row, item.depth = self.free_rows.pop(), self._known_depth(item)
        rows = self._rows(items)
        with self.passes(), self.in_model:
            memory_BTD = self._memories(rows.items)
            begun, state = self.model.begin(rows.ids_W1, self.n_loops, memory_BTD, self._opened(rows))
        rows_N = rows.own(rows.rows_W)
        self.state.put(rows_N, [rows.own(x) for x in (state.h_BTD, *state.kept)])
        # A state that comes of the anchor is in the type of the stream from its first loop on.
        kept = (begun.e_BTD, begun.early_BTD) if self.carries else (begun.e_BTD,)
        self.anchor.put(rows_N, [rows.own(x) for x in kept])
        if begun.core.recall is not None:
            recall = begun.core.recall
            assert recall.m_BTD is not None
            self.recall.put(rows_N, [rows.own(x) for x in (recall.m_BTD, recall.x0_BTD, *recall.shared)])
        for test, index in _by_test(items):
            if not test.keeps:
                continue
            index_N, text_N, token_N = self._numbers([index, *zip(*(_where(items[i]) for i in index), strict=True)])
            bank = self.kept.setdefault(test, Bank(self.state.n_rows))
            bank.put(rows_N[index_N], test.start(state.h_BTD[index_N, 0], Where(text_N, token_N)))

    def _known_depth(self, item: Item) -> int | None:
        completion, test = item.completion, item.completion.request.test
        if test is None or (completion.coda_per_loop and CODA in self.arena.kv):
            return None  # in the second case tokens after it read the coda's keys of each of its loops
        return test.known(*_where(item))

    def loop(self, items: Sequence[Item]) -> list[bool]:
        """Run a loop of tokens at any loops; which of them leave. Those that do have their keys copied deeper."""
        rows = self._rows(items)
        with self.passes():
            context = self.model.keys.resume(self._context(rows), rows.store.stored)
            before, anchor = self._state(rows.rows_W), self.anchor.take(rows.rows_W)
            with self.in_model:
                state = self.model.run_loop(before, anchor[0], rows.loops_W, context)
            self.state.put(rows.own(rows.rows_W), [rows.own(x) for x in (state.h_BTD, *state.kept)])
            leaves = self._leaves(items, rows.own(before.h_BTD)[:, 0], rows.own(state.h_BTD)[:, 0], rows)
        if self.policy.averages and self.model.config.keys.own_keys:
            self._average(items, leaves)
        self._copy(items, leaves)
        return leaves

    def _average(self, items: Sequence[Item], leaves: Sequence[bool]) -> None:
        """Add the keys of this loop to those before; a token that leaves leaves their mean."""
        rows_N = torch.tensor([item.row for item in items], device=self.device)
        places = [_at(item) for item in items]
        sum_N = at_least_fp32(self.arena.newest(CORE, places))
        if any(item.loops for item in items):
            # In its first loop a row still has what the token before it in the row left there, a NaN perhaps.
            begins_N = torch.tensor([item.loops == 0 for item in items], device=self.device)
            sum_N = sum_N + self.sums.take(rows_N)[0].masked_fill(begins_N[:, None, None, None, None], 0)
        self.sums.put(rows_N, [sum_N])
        out = [i for i, leaves_here in enumerate(leaves) if leaves_here]
        if out:
            n_N = torch.tensor([items[i].loops + 1 for i in out], device=self.device)[:, None, None, None, None]
            self.arena.replace(CORE, [places[i] for i in out], sum_N[out] / n_N)

    def _leaves(self, items: Sequence[Item], before_ND: Tensor, after_ND: Tensor, rows: Rows) -> list[bool]:
        n = len(items)
        leaves = [item.loops + 1 >= (item.depth or item.completion.n_loops) for item in items]
        told = rows.own(rows.ran_W), before_ND, after_ND
        for test, index in _by_test(items):
            group = [items[i] for i in index]
            # Where bits must not depend on the rows beside, a rule too is always asked of so many: its first once more.
            n_more = self.width - len(group) if self.fill else 0
            some: Tensor | None = None  # mostly all tokens have one rule
            if n_more or len(group) < n:
                some = torch.tensor([*index, *[index[0]] * n_more], device=self.device)
            rows_N = rows.own(rows.rows_W) if some is None else rows.rows_W[some]
            found: list[tuple[Tensor, Tensor | None]] = []

            def logits(group: Sequence[Item] = group, found: list[Any] = found, n_more: int = n_more) -> Tensor:
                found.append(self.read_out(group, [item.loops for item in group]))
                of_group = found[0][0]
                return torch.cat([of_group, of_group[:1].expand(n_more, -1)]) if n_more else of_group

            loop_N, from_ND, to_ND = told if some is None else (x[some] for x in told)
            seen = Seen(loop_N, from_ND, to_ND, logits)
            bank = self.kept.get(test)
            kept = () if bank is None else tuple(bank.take(rows_N))
            leaves_N, _, now = test.exits(seen, kept)
            if bank is not None and any(one is not before for one, before in zip(now, kept, strict=True)):
                bank.put(rows_N[: len(group)], [x[: len(group)] for x in now])
            if not found and CODA in self.arena.kv and group[0].completion.coda_per_loop:
                logits()  # a recorded trace: those after it read the coda's keys of this loop
            for k, (i, out) in enumerate(zip(index, leaves_N[: len(group)].tolist(), strict=True)):
                leaves[i] = leaves[i] or out
                if found and leaves[i]:
                    items[i].readout = found[0][0][k], None if found[0][1] is None else found[0][1][k]
        return leaves

    def _copy(self, items: Sequence[Item], leaves: Sequence[bool]) -> None:
        out = [item for item, leaves_here in zip(items, leaves, strict=True) if leaves_here]
        self.arena.copy_deeper(CORE, [(self._core_slot(item), _at(item)) for item in out])
        per_loop = [(item.loops, _at(item)) for item in out if item.completion.coda_per_loop]
        self.arena.copy_deeper(CODA, per_loop)

    def read_out(self, items: Sequence[Item], loops: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits of tokens as they are now, [N, V], and what is remembered of each, [N, D].

        Args:
            loops: after which loop (from 0) each is read out, whose slot of the coda's keys is used where there is one
                for each.
        """
        rows, n = self._rows(items, loops), len(items)
        with self.passes():
            context = self._context(rows)
            e_BTD, *early = self.anchor.take(rows.rows_W)
            begun = Begun(self.n_loops, e_BTD, early[0] if early else e_BTD, context, context)
            state = self._state(rows.rows_W)
            with self.in_model:
                out = self.model.read_out(begun, state, 0)
                logits_NV = self.model.logits(out.y_BTD[:, 0])[:n]
        return logits_NV, None if out.source_BTD is None else out.source_BTD[:n, 0]

    def remember(self, completion: Completion, source_D: Tensor) -> None:
        """What a text's newest token has become, for those after it."""
        if completion.carried_LD is not None:
            completion.carried_LD = torch.cat([completion.carried_LD[1:], source_D[None].to(completion.carried_LD)])

    def early_source(self, item: Item) -> Tensor:
        """What is remembered of a token that is still in the loop, of a memory whose source is the prelude."""
        _, early_BTD = self.anchor.take(torch.tensor([item.row], device=self.device))
        source_BTD = self.model.memory.source(early_BTD, early_BTD, early_BTD, early_BTD)
        assert source_BTD is not None
        return source_BTD[0, 0]

    def release(self, items: Sequence[Item]) -> None:
        """Tokens need their rows no more."""
        for item in items:
            if item.row > 0:
                self.free_rows.append(item.row)
                item.row = -1

    def trace(self, items: Sequence[Item], before_ND: Tensor) -> None:
        """Note what a loop did to tokens; ``before_ND``: their states before it."""
        logits_NV, _ = self.read_out(items, [item.loops for item in items])
        log_p_NV = torch.log_softmax(at_least_fp32(logits_NV), -1)
        rows_N = torch.tensor([item.row for item in items], device=self.device)
        h_ND = at_least_fp32(self._state(rows_N).h_BTD[:, 0])
        change_N = (h_ND - at_least_fp32(before_ND)).norm(dim=-1) / h_ND.norm(dim=-1)
        top = log_p_NV.topk(min(TOP, log_p_NV.size(-1)), -1)
        for i, item in enumerate(items):
            kl = None
            if item.log_p is not None:
                kl = max(float((log_p_NV[i].exp() * (log_p_NV[i] - item.log_p)).sum()), 0.0)
            named = tuple(zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True))
            item.steps.append(Step(float(change_N[i]), kl, named))
            item.log_p = log_p_NV[i]

    def states(self, items: Sequence[Item]) -> Tensor:
        """h of some tokens, [N, D]."""
        return self._state(torch.tensor([item.row for item in items], device=self.device)).h_BTD[:, 0]

    # -- parts of a launch --------------------------------------------------------------------------------------------

    def _rows(self, items: Sequence[Item], coda_loops: Sequence[int] = ()) -> Rows:
        """The rows of a launch; ``coda_loops``: as of `read_out`."""
        n_filling = self.width - len(items) if self.fill else 0
        filled = [*items, *[self.filler] * n_filling] if n_filling else items
        starts = [self._span(item).start for item in filled]
        positions = [item.position for item in filled]
        ends = [(start, start + at + 1) for start, at in zip(starts, positions, strict=True)]
        core = [self._core_slot(item) for item in filled]
        loops = [*coda_loops, *[0] * (len(filled) - len(coda_loops))]
        coda = [loop if item.completion.coda_per_loop else 0 for loop, item in zip(loops, filled, strict=True)]
        ran = [item.loops for item in filled]
        rows_W, loops_W, ran_W, ids_W, pos_W = self._numbers(
            [[item.row for item in filled], ran, [n + 1 for n in ran], [item.token for item in filled], positions]
        )
        store = RowStore(self.arena, ends, pos_W[:, None], {CORE: core, CODA: coda})
        return Rows(filled, len(items), max(positions) + 1, rows_W, loops_W, ran_W, ids_W[:, None], store)

    def _numbers(self, lines: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Lines of numbers, in one tensor, by numpy: torch takes as long as a small layer to make one of lists."""
        return torch.from_numpy(np.array(lines)).to(self.device).unbind()

    def _core_slot(self, item: Item) -> int:
        """Of the loop that a token runs next."""
        return self.model.config.keys.slot_loop(item.loops) if self.policy.is_parallel else 0

    def _span(self, item: Item) -> Span:
        return self.arena.filling if item is self.filler else _span(item)

    def _opened(self, rows: Rows) -> Context:
        """Of tokens that begin; as `RecurrentLM.begin` makes it."""
        pos_W1 = rows.store.pos_W1
        self.model.position.check(rows.n_positions)
        views = of_windows(rows.store.view, self.windows)
        return Context(rows.ids_W1, views, self._turned(pos_W1, rows.n_positions), rows.store, n_tokens=1)

    def _context(self, rows: Rows) -> Context:
        """Of a loop, or of the coda."""
        context, recall = self._opened(rows), self.recall.take(rows.rows_W)
        return replace(context, recall=Recall(recall[0], recall[1], tuple(recall[2:]))) if recall else context

    def _turned(self, pos_W1: Tensor, n_positions: int) -> Rotation | None:
        """The rotation at some positions, from a table: making it anew costs as much as a small layer."""
        if n_positions > self._n_turned:
            self._n_turned = max(2 * self._n_turned, n_positions, 256)
            dtype = self.dtype if self.dtype == torch.bfloat16 else self.model.embed.weight.dtype
            self._rotation = self.model.position.rotation(torch.arange(self._n_turned, device=self.device), dtype)
            if self._rotation is not None:
                self._turns_P211K = torch.stack(self._rotation[:2], 1)[:, :, None, None]
        if self._rotation is None:
            return None
        cos_W11K, sin_W11K = self._turns_P211K.index_select(0, pos_W1[:, 0]).unbind(1)
        return self._rotation._replace(cos=cos_W11K, sin=sin_W11K)

    def _state(self, rows_W: Tensor) -> State:
        h_BTD, *kept = self.state.take(rows_W)
        return State(h_BTD, tuple(kept))

    def _memories(self, items: Sequence[Item]) -> Tensor | None:
        if not self.carries:
            return None
        weight = self.model.embed.weight
        none_LD = weight.new_zeros(self.model.memory.n_carried, weight.size(1))
        rows = []
        for item in items:
            carried_LD = none_LD if item is self.filler else item.completion.carried_LD
            assert carried_LD is not None
            if item.parent is not None:
                chain = item.parent.line()
                sources = torch.stack([self.early_source(one) for one in chain])
                carried_LD = torch.cat([carried_LD, sources.to(carried_LD)])[-len(carried_LD) :]
            rows.append(carried_LD)
        carried_BLD = torch.stack(rows)
        return self.model.memory.recall(torch.cat([carried_BLD, carried_BLD[:, :1]], 1))


def _span(item: Item) -> Span:
    assert item.completion.span is not None
    return item.completion.span


def _at(item: Item) -> int:
    return _span(item).start + item.position


def _where(item: Item) -> tuple[int, int]:
    return item.completion.request.row, item.position


def _by_test(items: Sequence[Item]) -> list[tuple[ExitTest, list[int]]]:
    """Which items each rule looks at; left out are those without one, and those whose depth is known."""
    groups: dict[ExitTest, list[int]] = {}
    for i, item in enumerate(items):
        test = item.completion.request.test
        if test is not None and item.depth is None:
            groups.setdefault(test, []).append(i)
    return list(groups.items())
