"""Batches for training, as an iterator of (batch, state) that continues anywhere.

    sources         several streams of tokens, each with a weight
      -> units      a window of seq_len tokens (unit "row") or a document, drawn from the source that is
                    furthest behind its weight in tokens (of a ladder, from its present stage); within a source in a
                    new order each epoch
      -> rows       a window is a row; documents are packed end to end and cut into rows
      -> batches    batch_size rows

Everything is a pure function of the seed and the counters in the state. An epoch of a source ends where it ends, in the
middle of a batch as a rule: the next one goes on in the same batch, so that nothing is lost and nothing doubled.

A ladder is several sources of which one is drawn from, the first, until the trainer says `climb`: then the next. Its
share of the tokens is that of all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from alcoda.data.shuffle import permutation
from alcoda.data.splits import Stream
from alcoda.errors import UsageError

NOT_SCORED = -100
"""Target of a position that is padding (torch's ``ignore_index``)."""
_KEY = 0xBA7C
Unit = Literal["row", "document"]


class Batch(NamedTuple):
    """B rows of T tokens. Padding, behind the last token of a short row, is input 0 and target -100."""

    inputs_BT: np.ndarray
    """int64"""
    targets_BT: np.ndarray
    """int64; the token after each input, or -100: not scored"""
    where: tuple[str, ...]
    """For each row, where its inputs come from: ``name[start:stop]`` in tokens of the stream, joined by `` + ``."""


class SourceState(TypedDict):
    """How far one source is."""

    name: str
    weight: float
    n_tokens: int
    """Tokens in its stream; these three only say whether a state fits."""
    epoch: int
    """Epochs finished, or begun and not finished: counted from 0."""
    unit: int
    """Windows or documents of this epoch that were drawn."""
    drawn_tokens: int
    """Tokens drawn in all epochs, in scored targets (unit "row") or tokens of documents (unit "document")."""


class BatchState(TypedDict):
    """Where the next batch begins. Plain JSON; it does not grow with the corpus."""

    unit: Unit
    seed: int
    seq_len: int
    sources: list[SourceState]
    current: int | None
    """Unit "document": the source whose document, the last that it drew, is not used up. None: none drawn yet."""
    offset_tokens: int
    """Tokens of that document that were inputs already."""
    stages: list[int]
    """For each ladder, how many steps up it is."""


class _Source:
    """One stream, and the units drawn from it."""

    def __init__(self, index: int, name: str, weight: float, stream: Stream, seed: int, seq_len: int | None) -> None:
        self.name, self.weight, self.stream = name, weight, stream
        self.epoch = self.unit = self.drawn_tokens = 0
        self._key, self._seq_len = (_KEY, seed, index), seq_len
        # The first token of a stream is no target, so n tokens have n - 1.
        self.n_units = stream.n_documents if seq_len is None else -(-(stream.n_tokens - 1) // seq_len)
        self._order, self._order_epoch = np.zeros(0, np.int64), -1

    def draw(self) -> tuple[int, int]:
        """Take the next unit; its first and last-plus-one input, as positions in the stream."""
        if self.unit == self.n_units:
            self.epoch, self.unit = self.epoch + 1, 0
        self.unit += 1
        start, stop = self.last()
        self.drawn_tokens += stop - start
        return start, stop

    def last(self) -> tuple[int, int]:
        """The unit that was drawn last."""
        if self._order_epoch != self.epoch:
            self._order, self._order_epoch = permutation(self.n_units, *self._key, self.epoch), self.epoch
        unit = int(self._order[self.unit - 1])
        if self._seq_len is None:
            return self.stream.range_of(unit)
        start = unit * self._seq_len
        return start, min(start + self._seq_len, self.stream.n_tokens - 1)

    def state(self) -> SourceState:
        return {
            "name": self.name,
            "weight": self.weight,
            "n_tokens": self.stream.n_tokens,
            "epoch": self.epoch,
            "unit": self.unit,
            "drawn_tokens": self.drawn_tokens,
        }


class Batches:
    """Endless ``(Batch, BatchState)``; the state, given to a new iterator, makes it go on with the next batch.

    ``sources`` are (name, weight, stream). Shares of tokens follow the weights: the next unit is from the source with
    the fewest tokens drawn for its weight. With ``unit="row"`` a row is a window of one source, and each target of a
    stream comes once in an epoch. With ``"document"`` a row may hold the ends and beginnings of several documents, of
    any source, and each document comes once in an epoch.

    ``ladders`` are indices of sources, those of each in the order in which they follow one another.

    Raises UsageError for sources with less than one batch, and for a state of other data.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, float, Stream]],
        batch_size: int,
        seq_len: int,
        seed: int,
        unit: Unit = "row",
        state: BatchState | None = None,
        ladders: Sequence[Sequence[int]] = (),
    ) -> None:
        _check(sources, batch_size, seq_len)
        self._batch_size, self._seq_len, self._seed, self._unit = batch_size, seq_len, seed, unit
        window = seq_len if unit == "row" else None
        self._sources = [_Source(i, *source, seed, window) for i, source in enumerate(sources)]
        self._ladders = [list(ladder) for ladder in ladders]
        self._stages = [0] * len(self._ladders)
        on_ladder = {i for ladder in self._ladders for i in ladder}
        self._alone = [[i] for i in range(len(self._sources)) if i not in on_ladder]
        self._current: int | None = None
        self._at, self._stop = 0, 0
        if state is not None:
            self._restore(state)

    def __iter__(self) -> Iterator[tuple[Batch, BatchState]]:
        return self

    def __next__(self) -> tuple[Batch, BatchState]:
        row = self._row if self._unit == "row" else self._packed
        rows = [row() for _ in range(self._batch_size)]
        return stack(rows, self._seq_len), self.state()

    def state(self) -> BatchState:
        """Where the next batch begins."""
        offset = 0 if self._current is None else self._at - self._sources[self._current].last()[0]
        return {
            "unit": self._unit,
            "seed": self._seed,
            "seq_len": self._seq_len,
            "sources": [source.state() for source in self._sources],
            "current": self._current,
            "offset_tokens": offset,
            "stages": list(self._stages),
        }

    def stage(self, ladder: int) -> int:
        """The source that this ladder draws from now."""
        return self._ladders[ladder][self._stages[ladder]]

    def climb(self, ladder: int) -> bool:
        """Draw from the next source of this ladder from now on; False where it was the last already."""
        if self._stages[ladder] + 1 == len(self._ladders[ladder]):
            return False
        self._stages[ladder] += 1
        return True

    def _behind(self) -> int:
        """The source that has the fewest tokens for its weight; of equals the first."""
        groups = [*self._alone, *self._ladders]
        present = [group[0] for group in self._alone] + [self.stage(i) for i in range(len(self._ladders))]

        def behind(k: int) -> tuple[float, int]:
            members = [self._sources[i] for i in groups[k]]
            drawn, weight = sum(one.drawn_tokens for one in members), sum(one.weight for one in members)
            return drawn / weight, groups[k][0]

        return present[min(range(len(groups)), key=behind)]

    def _row(self) -> tuple[np.ndarray, str]:
        source = self._sources[self._behind()]
        return window(source.name, source.stream, *source.draw())

    def _packed(self) -> tuple[np.ndarray, str]:
        if self._current is None:
            self._next_document()
        parts, where, missing = [], [], self._seq_len
        while missing:
            source = self._sources[self._current or 0]
            stop = min(self._at + missing, self._stop)
            parts.append(source.stream.read(self._at, stop))
            where.append(f"{source.name}[{self._at}:{stop}]")
            missing, self._at = missing - (stop - self._at), stop
            if self._at == self._stop:
                self._next_document()
        # The last target is the first input of the next row.
        parts.append(self._sources[self._current or 0].stream.read(self._at, self._at + 1))
        return np.concatenate(parts), " + ".join(where)

    def _next_document(self) -> None:
        self._current = self._behind()
        self._at, self._stop = self._sources[self._current].draw()

    def _restore(self, state: BatchState) -> None:
        mine, theirs = _identity(self.state()), _identity(state)
        if mine != theirs:
            differ = "; ".join(
                f"{key}: now {mine[key]!r}, then {theirs[key]!r}" for key in mine if mine[key] != theirs[key]
            )
            raise UsageError(
                f"the data of the run to be continued are not those of its checkpoint ({differ}). Continue with the "
                "same data config, or begin a new run"
            )
        self._stages = list(state["stages"])
        for source, old in zip(self._sources, state["sources"], strict=True):
            source.epoch, source.unit, source.drawn_tokens = old["epoch"], old["unit"], old["drawn_tokens"]
            if not 0 <= source.unit <= source.n_units:
                raise UsageError(
                    f"the checkpoint's state of the data is damaged: unit {source.unit} of {source.n_units}"
                )
        self._current = state["current"]
        if self._current is not None:
            start, self._stop = self._sources[self._current].last()
            self._at = start + state["offset_tokens"]


def _identity(state: BatchState) -> dict[str, object]:
    """What has to be the same for a state to mean the same batches. The batch size need not be."""
    try:
        sources = [(source["name"], source["weight"], source["n_tokens"]) for source in state["sources"]]
        return {
            "unit": state["unit"],
            "seed": state["seed"],
            "seq_len": state["seq_len"],
            "sources": sources,
            "ladders": len(state["stages"]),
        }
    except (KeyError, TypeError) as error:
        raise UsageError(f"the checkpoint's state of the data is not one of this version ({error!r})") from None


def _check(sources: Sequence[tuple[str, float, Stream]], batch_size: int, seq_len: int) -> None:
    if not sources or batch_size < 1 or seq_len < 1:
        raise UsageError(f"batches need a source, and batch_size ({batch_size}) and seq_len ({seq_len}) of at least 1")
    for name, weight, stream in sources:
        if stream.n_tokens < 2:
            raise UsageError(f"{name} has {stream.n_tokens} tokens, and a target needs one before it; leave it out")
        if not weight > 0:
            raise UsageError(f"weight of {name}: must be more than 0 (got {weight}); leave the source out instead")
    n_tokens, need_tokens = sum(stream.n_tokens for _, _, stream in sources), batch_size * seq_len
    if n_tokens < need_tokens:
        names = ", ".join(name for name, _, _ in sources)
        raise UsageError(
            f"{names}: {n_tokens:,} tokens are less than one batch of batch_size {batch_size} x seq_len {seq_len} = "
            f"{need_tokens:,} tokens; use a longer corpus, or make batch_size or seq_len smaller"
        )


def window(name: str, stream: Stream, start: int, stop: int) -> tuple[np.ndarray, str]:
    """A row: inputs ``start .. stop`` of ``stream`` and the token after them, and where that is."""
    return stream.read(start, stop + 1), f"{name}[{start}:{stop}]"


def stack(rows: Sequence[tuple[np.ndarray, str]], seq_len: int) -> Batch:
    """Rows of at most ``seq_len`` + 1 tokens as one batch."""
    inputs_BT = np.zeros((len(rows), seq_len), np.int64)
    targets_BT = np.full((len(rows), seq_len), NOT_SCORED, np.int64)
    for i, (tokens, _) in enumerate(rows):
        inputs_BT[i, : len(tokens) - 1] = tokens[:-1]
        targets_BT[i, : len(tokens) - 1] = tokens[1:]
    return Batch(inputs_BT, targets_BT, tuple(where for _, where in rows))
