"""Prefill: how a text is read whose memories only one token at a time would tell exactly (papers.md 4.4).

`Reader` reads texts into a key store, in chunks of any length, and carries the memory from one to the next. A model
without memory reads a chunk in one pass, whatever the choice here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from alcoda.config import Choice, PositiveFloat, PositiveInt
from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.gather import tokens_at
from alcoda.model.keys import Store
from alcoda.model.lm import RecurrentLM
from alcoda.model.rewrite import Again, replaced, some_of
from alcoda.model.state import Readout

SUBSETS = 2
"""S where nothing names it (papers.md 4.2)."""


class Prefill(Choice, axis="prefill"):
    """How the memories of a chunk are found."""

    is_exact: ClassVar[bool] = False
    """Whether they are those of reading token by token."""

    def resolve(self, subsets: int) -> Prefill:
        """The choice with every number filled in, for a model trained in so many subsets."""
        return self

    def read(self, chunk: Chunk) -> None:
        """Read it; on return its states are what the choice makes of it."""
        raise NotImplementedError


class ExactPrefill(Prefill):
    """Token by token: what training approximates, and what decoding does. As many passes as tokens."""

    kind: Literal["exact"] = "exact"
    is_exact: ClassVar[bool] = True

    def read(self, chunk: Chunk) -> None:
        chunk.token_by_token()


class ZeroPrefill(Prefill):
    """One pass with every memory zero: the first pass of training, and what LRT's own release generates from."""

    kind: Literal["zero"] = "zero"

    def read(self, chunk: Chunk) -> None:
        chunk.at_once()


class InterleavedPrefill(Prefill):
    """As training does it: a pass with zero memories, then the tokens of each of S strides once more, in turn."""

    kind: Literal["interleaved"] = "interleaved"
    subsets: PositiveInt | None = None
    """S; null: that of training, 2 where it was trained otherwise."""

    def resolve(self, subsets: int) -> Prefill:
        return InterleavedPrefill(subsets=self.subsets or subsets)

    def read(self, chunk: Chunk) -> None:
        subsets = self.subsets or SUBSETS
        chunk.at_once()
        for first in chunk.strides(subsets):
            chunk.again(first, subsets)


class IteratedPrefill(Prefill):
    """A pass with zero memories, then whole passes with those of the pass before until they stop changing (Jacobi
    iteration). After k of them the first k tokens are exact, so that as many passes as tokens are exact prefill."""

    kind: Literal["iterated"] = "iterated"
    tolerance: PositiveFloat = 0.01
    """Largest change of a token's memory (root mean square over its width, where a memory's own is 1) at which its row
    has stopped."""
    max_passes: PositiveInt = 8
    """Passes after the first, at most."""

    def read(self, chunk: Chunk) -> None:
        chunk.at_once()
        going_B: Tensor | None = None
        for _ in range(min(self.max_passes, chunk.n_tokens)):
            before_BTD = chunk.sources_BTD
            chunk.again(0, 1, going_B)
            changed_B = chunk.changed_since(before_BTD) >= self.tolerance
            if not changed_B.any():
                return
            # A row that has stopped stays as it is, as it would alone.
            going_B = None if changed_B.all() else changed_B


def prefills() -> dict[str, Prefill]:
    """Every registered choice by its name, with its own defaults."""
    made = {kind: choice.model_validate({"kind": kind}) for kind, choice in Prefill.choices.items()}
    return {kind: choice for kind, choice in made.items() if isinstance(choice, Prefill)}


EXACT_TOKENS = 32
"""Tokens that are read one by one before progress is told: chunks change nothing in what is read so."""

Tell = Callable[[float], None]
"""Takes how many more tokens of each row have been read; of a model that is read at several depths, at all of them."""


@dataclass(frozen=True)
class Reading:
    """How the rows of a text are read, where the model has a memory, or a cache that one pass cannot fill.

    Attributes:
        prefill: how the memories of a chunk are found.
        chunk_tokens: length of a chunk; None: all that ``prefill`` reads is one (without a memory: whole rows).
        prompt_tokens: of each row ``prefill`` reads so many, and the rest is read token by token, as decoding would;
            None: it reads all of them.
        cache: what each token leaves in the cache.
    """

    prefill: Prefill
    chunk_tokens: int | None = None
    prompt_tokens: int | None = None
    cache: CachePolicy = PER_LOOP

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise UsageError(f"chunk of {self.chunk_tokens} tokens: at least 1; leave it out to read rows whole")

    def chunks(self, n_tokens: int) -> Iterator[tuple[slice, Prefill]]:
        """The parts of rows of ``n_tokens``, in order, and how each is read."""
        n_prompt = n_tokens if self.prompt_tokens is None else min(self.prompt_tokens, n_tokens)
        whole = EXACT_TOKENS if self.prefill.is_exact else n_tokens
        for first in range(0, n_prompt, self.chunk_tokens or whole):
            yield slice(first, min(first + (self.chunk_tokens or whole), n_prompt)), self.prefill
        for first in range(n_prompt, n_tokens, EXACT_TOKENS):
            yield slice(first, min(first + EXACT_TOKENS, n_tokens)), ExactPrefill()


def read_rows(
    model: RecurrentLM,
    ids_BT: Tensor,
    loops: Sequence[int],
    reading: Reading | None = None,
    tell: Tell = lambda n_tokens: None,
    n_text: int | None = None,
) -> Iterator[Tensor]:
    """What the head reads at every token of whole rows, ``y_BTD``, at each of the increasing depths ``loops``.

    Args:
        reading: how rows are read; None: exactly, with a slot of the cache a loop. Memories of one depth are not those
            of another, nor is what one slot for all loops holds, so each depth is then a run of its own.
        tell: is told of progress.
        n_text: of the tokens, row after row, so many are text, and what fills the last row up is not waited for; None:
            all.
    """
    n_tokens, how = ids_BT.size(1), reading or Reading(ExactPrefill())
    if not model.config.memory.carries and how.cache.is_parallel and how.chunk_tokens is None:
        for readout in model.readouts(ids_BT, loops):
            yield readout.y_BTD
            tell(n_tokens / len(loops))
        return
    text_BT = None
    if n_text is not None and n_text < ids_BT.numel():
        text_BT = (torch.arange(ids_BT.numel(), device=ids_BT.device) < n_text).view_as(ids_BT)
    for n_loops in loops:
        reader, parts = Reader(model, n_loops, n_tokens, how.cache), []
        for tokens, prefill in how.chunks(n_tokens):
            text = None if text_BT is None else text_BT[:, tokens]
            parts.append(reader.read(ids_BT[:, tokens], prefill, text_BT=text))
            tell((tokens.stop - tokens.start) / len(loops))
        yield torch.cat(parts, 1)


class Reader:
    """Reads rows of text, chunk by chunk, at one depth.

    Args:
        capacity_tokens: room made at first.
        cache: what a token leaves in the cache; UsageError where the model cannot have it.
        n_slots: as of `CopiedKeys`.
    """

    def __init__(
        self,
        model: RecurrentLM,
        n_loops: int,
        capacity_tokens: int = 256,
        cache: CachePolicy = PER_LOOP,
        n_slots: dict[str, int] | None = None,
    ) -> None:
        cache.check(model.config)
        self.model, self.n_loops, self.cache = model, n_loops, cache
        self.store = cache.store(n_slots or {}, capacity_tokens)
        self.carried_BLD: Tensor | None = None
        """What the last tokens of each row have become, as many as a memory reads; None before the first chunk."""

    def check_prefill(self, prefill: Prefill | None) -> None:
        """UsageError where a text cannot be read so."""
        if prefill is not None and not prefill.is_exact and self.model.config.memory.carries:
            self._check_prefill(prefill)

    def _check_prefill(self, prefill: Prefill) -> None:
        """`check_prefill` of one that is not exact, where the model has a memory."""
        if not self.cache.is_parallel:
            raise UsageError(
                f"prefill {prefill.kind!r} with cache {self.cache.kind!r}: it is filled token by token; leave prefill "
                "out, or set it to exact"
            )

    def read(
        self,
        ids_BT: Tensor,
        prefill: Prefill | None = None,
        pos_BT: Tensor | None = None,
        live_BT: Tensor | None = None,
        text_BT: Tensor | None = None,
    ) -> Tensor:
        """Read on; what the head reads at each token, ``y_BTD``.

        Args:
            prefill: how, where a chunk has more than one token; None: exactly.
            pos_BT, live_BT: as `RecurrentLM.readouts`. The live tokens of a row are in order.
            text_BT: False for tokens behind a row's text, whose own change is not waited for; None: as ``live_BT``.
        """
        self.check_prefill(prefill)
        if not self.model.config.memory.carries:
            parts = [(ids_BT, pos_BT, live_BT)] if self.cache.is_parallel else columns(ids_BT, pos_BT, live_BT)
            return torch.cat([self.run(ids, self.store, None, pos, live).y_BTD for ids, pos, live in parts], 1)
        if self.carried_BLD is None:
            weight = self.model.embed.weight
            self.carried_BLD = weight.new_zeros(ids_BT.size(0), self.model.memory.n_carried, weight.size(1))
        chunk = Chunk(self, ids_BT, pos_BT, live_BT, self.carried_BLD, live_BT if text_BT is None else text_BT)
        (prefill or ExactPrefill()).read(chunk)
        self.carried_BLD = chunk.last(chunk.carried_BLD, chunk.sources_BTD, live_BT)
        return chunk.y_BTD

    def run(
        self,
        ids_BT: Tensor,
        store: Store,
        memory_BTD: Tensor | None,
        pos_BT: Tensor | None = None,
        live_BT: Tensor | None = None,
    ) -> Readout:
        """One pass."""
        return next(
            self.model.readouts(
                ids_BT, [self.n_loops], store=store, memory_BTD=memory_BTD, pos_BT=pos_BT, live_BT=live_BT
            )
        )


class Chunk:
    """A chunk that a reader is reading.

    Attributes:
        carried_BLD: what the tokens before it have become.
        text_BT: of which tokens a change counts; None: of all.
        y_BTD, sources_BTD: what its own have, by the newest pass over each: for the head, and to be remembered.
    """

    y_BTD: Tensor
    sources_BTD: Tensor

    def __init__(
        self,
        reader: Reader,
        ids_BT: Tensor,
        pos_BT: Tensor | None,
        live_BT: Tensor | None,
        carried_BLD: Tensor,
        text_BT: Tensor | None,
    ) -> None:
        self.reader, self.ids_BT, self.pos_BT, self.live_BT = reader, ids_BT, pos_BT, live_BT
        self.carried_BLD, self.text_BT = carried_BLD, text_BT
        self.start, self.n_tokens = reader.store.n_tokens, ids_BT.size(1)

    def token_by_token(self) -> None:
        """Each with the memory of those before it."""
        parts, carried_BLD = [], self.carried_BLD
        for ids_B1, pos_B1, live_B1 in columns(self.ids_BT, self.pos_BT, self.live_BT):
            memory_B1D = self._recall(torch.cat([carried_BLD, carried_BLD[:, :1]], 1))
            part = self.reader.run(ids_B1, self.reader.store, memory_B1D, pos_B1, live_B1)
            assert part.source_BTD is not None
            carried_BLD = self.last(carried_BLD, part.source_BTD, live_B1)
            parts.append(part)
        self.y_BTD = torch.cat([part.y_BTD for part in parts], 1)
        self.sources_BTD = torch.cat([part.source_BTD for part in parts if part.source_BTD is not None], 1)

    def at_once(self) -> None:
        """All with zero memories."""
        part = self.reader.run(self.ids_BT, self.reader.store, None, self.pos_BT, self.live_BT)
        assert part.source_BTD is not None
        self.y_BTD, self.sources_BTD = part.y_BTD, part.source_BTD

    def strides(self, n: int) -> Sequence[int]:
        """Which of ``n`` strides hold a token, in order."""
        if n <= self.n_tokens:
            return range(n)
        return (self.reader.store.positions(self.ids_BT)[:, self.start :] % n).unique().tolist()

    def again(self, first: int, stride: int, rows_B: Tensor | None = None) -> None:
        """Those at positions ``first`` modulo ``stride`` once more, with the memories that there are now.

        Args:
            rows_B: of which rows; None: of all.
        """
        memory_BTD, store = self._memories(), self.reader.store
        tokens: range | Tensor
        real_BK: Tensor | None = None
        if store.pos_BS is None and rows_B is None:
            tokens = range((first - self.start) % stride, self.n_tokens, stride)
            if not tokens:
                return
            columns = range(self.start + tokens.start, self.start + tokens.stop, stride)
        else:
            runs_BT = store.positions(self.ids_BT)[:, self.start :] % stride == first
            runs_BT = runs_BT if self.live_BT is None else runs_BT & self.live_BT
            runs_BT = runs_BT if rows_B is None else runs_BT & rows_B[:, None]
            n_most = int(runs_BT.sum(1).max())
            if not n_most:
                return
            # Those that run first, in their order; behind them, where a row has fewer, others to fill it up.
            tokens = (~runs_BT).to(torch.int8).argsort(dim=1, stable=True)[:, :n_most]
            real_BK, columns = runs_BT.gather(1, tokens), self.start + tokens
        again = Again(store, columns, real_BK)
        part = self.reader.run(some_of(self.ids_BT, tokens), again, some_of(memory_BTD, tokens))
        assert part.source_BTD is not None
        self.y_BTD = replaced(self.y_BTD, tokens, part.y_BTD, real_BK)
        self.sources_BTD = replaced(self.sources_BTD, tokens, part.source_BTD, real_BK)

    def changed_since(self, sources_BTD: Tensor) -> Tensor:
        """The largest change of what a token of each row's text has become, [B], root mean square over its width."""
        change_BT = (self.sources_BTD - sources_BTD).float().square().mean(-1).sqrt()
        return (change_BT if self.text_BT is None else change_BT * self.text_BT).amax(1)

    def _recall(self, sources_BTD: Tensor) -> Tensor:
        return self.reader.model.memory.recall(sources_BTD)

    def _memories(self) -> Tensor:
        """Of every token."""
        both_BTD, order_BT = _in_order(self.carried_BLD, self.sources_BTD, self.live_BT)
        n_carried = self.carried_BLD.size(1)
        if order_BT is None:
            return self._recall(both_BTD)
        # In order, the tokens stand after all that they may remember; what padding would remember is not asked.
        padded_BTD = torch.cat([both_BTD.new_zeros(self.carried_BLD.shape), both_BTD], 1)
        found_BTD = self._recall(padded_BTD)
        return tokens_at(found_BTD, order_BT.argsort(1))[:, n_carried:]

    @staticmethod
    def last(carried_BLD: Tensor, sources_BTD: Tensor, live_BT: Tensor | None) -> Tensor:
        """What the last live tokens have become, of those carried and those here."""
        both_BTD, _ = _in_order(carried_BLD, sources_BTD, live_BT)
        return both_BTD[:, both_BTD.size(1) - carried_BLD.size(1) :]


def columns(
    ids_BT: Tensor, pos_BT: Tensor | None, live_BT: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """The tokens of each place in the rows, with their positions and liveness, one place after the other."""
    for t in range(ids_BT.size(1)):
        at = slice(t, t + 1)
        yield ids_BT[:, at], None if pos_BT is None else pos_BT[:, at], None if live_BT is None else live_BT[:, at]


def _in_order(carried_BLD: Tensor, sources_BTD: Tensor, live_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What was carried and what is here in one row, padding moved to the front; and where each came from."""
    both_BTD = torch.cat([carried_BLD.to(sources_BTD.dtype), sources_BTD], 1)
    if live_BT is None:
        return both_BTD, None
    live_BT = torch.cat([live_BT.new_ones(carried_BLD.shape[:2]), live_BT], 1)
    order_BT = live_BT.to(torch.int8).argsort(dim=1, stable=True)
    return tokens_at(both_BTD, order_BT), order_BT
