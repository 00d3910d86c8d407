"""Views of a tokenised corpus, and its split into train, valid, calib (thresholds) and probe (exit routers).

The split is by whole documents, so that no document is half in training. It is sized by bytes of text, not by tokens:
then it can be made before there is a tokenizer, and models with different tokenizers are measured on the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alcoda.data.cache import TokenStore
from alcoda.data.shuffle import permutation
from alcoda.errors import UsageError

TRAIN = "train"
MIN_DOCUMENTS = 20
"""Fewer are not split by whole documents."""
_OFF = 3.0
"""Nor are documents that make any part this many times larger or smaller than it was to be."""
_LARGEST = 0.25
"""Share of a part that one document is at most, while there are others."""
_KEY = 0x5B11  # keeps these orders apart from those of other users of the same seed
_BLOCK_TOKENS = 1 << 22


class Stream:
    """Some documents of a token store, end to end, as one read-only sequence of tokens.

    Each document is EOT and its tokens. N tokens, M documents; where a corpus was split inside a document, each
    part of it counts as a document, and only the first part begins with EOT.
    """

    def __init__(
        self, store: TokenStore, starts_M: np.ndarray, stops_M: np.ndarray, bytes_M: np.ndarray, name: str
    ) -> None:
        """``starts_M`` and ``stops_M``: positions in ``store.tokens``; ``bytes_M``: bytes of text of each document."""
        self.name = name
        self._store, self._starts_M = store, starts_M
        self._ends_M = np.cumsum(stops_M - starts_M)
        self.n_tokens = int(self._ends_M[-1]) if len(starts_M) else 0
        self.n_bytes = int(bytes_M.sum())
        self.n_documents = len(starts_M)
        self.notes = store.notes

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start .. stop`` of the sequence (uint16 or uint32), across the borders of documents."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"{self.name}: tokens {start} to {stop} of {self.n_tokens}")
        parts = []
        document = int(np.searchsorted(self._ends_M, start, side="right"))
        while start < stop:
            begin, end = self.range_of(document)
            upto = min(stop, end)
            at = int(self._starts_M[document]) + start - begin
            parts.append(np.asarray(self._store.tokens[at : at + upto - start]))
            start, document = upto, document + 1
        return np.concatenate(parts) if parts else np.zeros(0, self._store.tokens.dtype)

    def doc_of(self, position: int) -> int:
        """Which document (0 .. M-1) the token at ``position`` belongs to."""
        if not 0 <= position < self.n_tokens:
            raise IndexError(f"{self.name}: token {position} of {self.n_tokens}")
        return int(np.searchsorted(self._ends_M, position, side="right"))

    def range_of(self, document: int) -> tuple[int, int]:
        """Where ``document`` lies in the sequence: its first position, and the one after its last."""
        return int(self._ends_M[document - 1]) if document else 0, int(self._ends_M[document])

    def hashes(self) -> np.ndarray:
        """Of the documents that are whole here, a hash of the tokens of each (uint64)."""
        offsets = self._store.offsets
        in_store_M = np.searchsorted(offsets, self._starts_M, side="right") - 1
        whole_M = np.diff(offsets)[in_store_M] == np.diff(self._ends_M, prepend=0)
        return self._store.doc_hashes[in_store_M[whole_M]]

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of each document, EOT first."""
        for document in range(self.n_documents):
            yield self.read(*self.range_of(document))


def whole(store: TokenStore) -> Stream:
    """All of ``store``."""
    return Stream(store, store.offsets[:-1], store.offsets[1:], store.doc_bytes, store.name)


@dataclass(frozen=True, eq=False)
class Plan:
    """Which part each document goes to, or, where documents are too few, where the text is cut."""

    names: tuple[str, ...]
    labels_M: np.ndarray | None
    """Index into ``names`` of each document."""
    cuts_bytes: tuple[int, ...]
    """Else: part i is the text between bytes ``cuts[i]`` and ``cuts[i + 1]``."""
    note: str | None


def plan(doc_bytes: np.ndarray, fractions: Mapping[str, float], seed: int, name: str = "corpus") -> Plan:
    """How documents of these sizes are split: a part for each of ``fractions`` (of all bytes), train the rest."""
    names, total = (TRAIN, *fractions), int(doc_bytes.sum())
    if len(names) == 1:
        return Plan(names, np.zeros(len(doc_bytes), np.int64), (), None)
    why = f"has {len(doc_bytes)} document{'s' * (len(doc_bytes) != 1)}"
    if len(doc_bytes) >= MIN_DOCUMENTS:
        labels_M = _assign(doc_bytes, [total * fractions[part] for part in names[1:]], seed)
        wanted = np.array([1.0 - sum(fractions.values()), *fractions.values()])
        off = np.bincount(labels_M, weights=doc_bytes, minlength=len(names)) / total / wanted
        if doc_bytes.max() * 2 <= total and off.max() <= _OFF and off.min() >= 1 / _OFF:
            return Plan(names, labels_M, (), None)
        why = f"has documents of very unequal size (the largest is {doc_bytes.max() / total:.0%} of it)"
    edges = np.cumsum([0.0, 1.0 - sum(fractions.values()), *fractions.values()])
    cuts = (*(round(edge * total) for edge in edges[:-1]), total)
    note = (
        f"{name} {why}, too few to share out whole: it was cut into consecutive parts ({', '.join(names)}), "
        "so that a document may begin in one part and end in the next"
    )
    return Plan(names, None, cuts, note)


def _assign(doc_bytes: np.ndarray, targets: list[float], seed: int) -> np.ndarray:
    """A label for each document: 1 + the index of the target (in bytes) that it helps to fill, or 0."""
    labels_M = np.zeros(len(doc_bytes), np.int64)
    have, order_M = [0.0] * len(targets), permutation(len(doc_bytes), _KEY, seed)
    # A part that is one huge document says little, so those come second, where the others were not enough.
    for largest in (_LARGEST, np.inf):
        for document in order_M[labels_M[order_M] == 0].tolist():
            size = float(doc_bytes[document])
            for part, target in enumerate(targets):
                # Taken only if that brings the part nearer to its size.
                if size <= largest * target and size / 2 <= target - have[part]:
                    labels_M[document] = 1 + part
                    have[part] += size
                    break
            else:
                if all(got >= 0.98 * target for got, target in zip(have, targets, strict=True)):
                    break
    for part in range(len(targets)):
        rest_M = order_M[labels_M[order_M] == 0]
        if not have[part] and len(rest_M):
            labels_M[rest_M[np.argmin(doc_bytes[rest_M])]] = 1 + part
    return labels_M


def split(store: TokenStore, fractions: Mapping[str, float], seed: int) -> tuple[dict[str, Stream], str | None]:
    """The parts of ``store`` by name, train first: disjoint, not empty, together all of it. And a note for the user.

    ``fractions`` are those of the parts beside train. Raises UsageError for a corpus with fewer tokens than that takes.
    """
    how = plan(store.doc_bytes, fractions, seed, store.name)
    if how.labels_M is None:
        return _blocks(store, how), how.note
    starts_M, stops_M = store.offsets[:-1], store.offsets[1:]
    parts = {}
    for label, part in enumerate(how.names):
        mine = how.labels_M == label
        parts[part] = Stream(store, starts_M[mine], stops_M[mine], store.doc_bytes[mine], f"{store.name}/{part}")
    return parts, how.note


def _blocks(store: TokenStore, how: Plan) -> dict[str, Stream]:
    ends_M = np.cumsum(store.doc_bytes)
    edges = [0, *(_token_at(store, ends_M, cut) for cut in how.cuts_bytes[1:-1]), len(store.tokens)]
    if any(stop - start < 2 for start, stop in pairwise(edges)):
        raise UsageError(
            f"corpus {store.name} has {len(store.tokens)} tokens, too few to split into {', '.join(how.names)}; "
            "give a longer one"
        )
    parts = {}
    for part, begin, end in zip(how.names, edges[:-1], edges[1:], strict=True):
        first = int(np.searchsorted(store.offsets, begin, side="right")) - 1
        last = int(np.searchsorted(store.offsets, end, side="left"))
        starts_M = np.maximum(store.offsets[first:last], begin)
        stops_M = np.minimum(store.offsets[first + 1 : last + 1], end)
        bytes_M = store.doc_bytes[first:last].copy()
        for i in {0, len(bytes_M) - 1}:  # only the outer ones can be cut
            if (starts_M[i], stops_M[i]) != (store.offsets[first + i], store.offsets[first + i + 1]):
                bytes_M[i] = _n_bytes(store, int(starts_M[i]), int(stops_M[i]))
        parts[part] = Stream(store, starts_M, stops_M, bytes_M, f"{store.name}/{part}")
    return parts


def _n_bytes(store: TokenStore, start: int, stop: int) -> int:
    blocks = (store.tokens[at : min(at + _BLOCK_TOKENS, stop)] for at in range(start, stop, _BLOCK_TOKENS))
    return sum(int(store.token_bytes_V[block].sum()) for block in blocks)


def _token_at(store: TokenStore, ends_M: np.ndarray, cut_bytes: int) -> int:
    """The first token whose text begins at byte ``cut_bytes`` of the corpus or behind it."""
    document = int(np.searchsorted(ends_M, cut_bytes, side="left"))
    at, stop = int(store.offsets[document]), int(store.offsets[document + 1])
    seen = int(ends_M[document]) - int(store.doc_bytes[document])
    while at < stop:
        lengths = store.token_bytes_V[store.tokens[at : min(at + _BLOCK_TOKENS, stop)]]
        begins = seen + np.cumsum(lengths, dtype=np.int64) - lengths
        if begins[-1] >= cut_bytes:
            return at + int(np.searchsorted(begins, cut_bytes, side="left"))
        at, seen = at + len(lengths), seen + int(lengths.sum())
    return stop
