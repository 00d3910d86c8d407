"""The text that a model is scored on, and the units of it that the bootstrap resamples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alcoda.data.config import Splits
from alcoda.data.corpora import FORMS
from alcoda.data.prepare import open_corpus, prepare
from alcoda.data.splits import Stream
from alcoda.errors import RunError, UsageError, did_you_mean
from alcoda.measure.bootstrap import MIN_DOCUMENTS, N_BLOCKS
from alcoda.training.load import LoadedRun
from alcoda.training.score import Scored

MISSING_SHARE = 0.02
"""A larger share of the text that no token stands for is told."""

N_BUCKETS = 8
"""Into so many buckets a row is cut, to see what a token gains from what stands before it."""


@dataclass(frozen=True)
class Text:
    """What is scored.

    Attributes:
        name: a split of the run (``valid``) or a corpus.
        streams: by source.
        max_tokens: of each at most; None: all.
        by_documents: whether the units are documents, else blocks: equal shares of the tokens.
    """

    name: str
    streams: Mapping[str, Stream]
    max_tokens: int | None
    by_documents: bool

    @classmethod
    def open(cls, run: LoadedRun, name: str, max_tokens: int | None) -> Text:
        """A split of the run's data, or the whole of another corpus.

        Raises:
            UsageError: a corpus that cannot be read, or a stream of fewer than two tokens.
        """
        streams = streams_of(run, name)
        if max_tokens is not None and all(s.n_tokens <= max_tokens for s in streams.values()):
            max_tokens = None
        enough = all(s.n_documents >= MIN_DOCUMENTS for s in streams.values())
        text = cls(name, streams, max_tokens, enough and max_tokens is None)
        for stream in streams.values():
            if text.n_tokens_of(stream) < 2:
                n = text.n_tokens_of(stream)
                raise UsageError(f"{stream.name}: {n} tokens are too few to score; at least 2 are needed")
        return text

    def n_tokens_of(self, stream: Stream) -> int:
        """How many of its tokens are read."""
        return stream.n_tokens if self.max_tokens is None else min(stream.n_tokens, self.max_tokens)

    @property
    def n_tokens(self) -> int:
        return sum(map(self.n_tokens_of, self.streams.values()))

    @property
    def unit(self) -> str:
        return "documents" if self.by_documents else "blocks"

    def sums(self, stream: Stream, n_depths: int, seq_len: int) -> Sums:
        """Empty ones."""
        return Sums(n_depths, seq_len, self.unit_ends(stream))

    def unit_ends(self, stream: Stream) -> np.ndarray:
        """Where the units of a stream end, in tokens."""
        if self.by_documents:
            return np.array([stream.range_of(i)[1] for i in range(stream.n_documents)])
        n_tokens = self.n_tokens_of(stream)
        return np.linspace(0, n_tokens, min(N_BLOCKS, n_tokens) + 1).round().astype(int)[1:]

    def notes(self, run: LoadedRun, n_units: int, n_bytes: int) -> list[str]:
        """What the reader should know of the numbers, of so many units and bytes scored."""
        told = [note for stream in self.streams.values() for note in stream.notes]
        kept = run.run.kept(self.name)
        if gone := [part.name for part in run.recipe.data.mix or () if kept and part.name not in kept]:
            told.append(f"no text of {', '.join(map(str, gone))} went along with this model: give some with --data")
        if not run.recipe.model.route.causal_at_eval:
            told.append(
                "the route looks at the whole text, also at what is predicted: these are not bits of a prediction"
            )
        if not self.by_documents:
            n_documents = min(s.n_documents for s in self.streams.values())
            few = (
                f"{n_documents} document{'s are' if n_documents != 1 else ' is'} too few"
                if n_documents < MIN_DOCUMENTS
                else "only part of it was scored"
            )
            told.append(f"{few}: intervals are over {n_units} contiguous blocks of tokens")
        text_bytes = sum(s.n_bytes for s in self.streams.values())
        is_cut = any(self.n_tokens_of(s) < s.n_tokens for s in self.streams.values())
        if abs(n_bytes - text_bytes) > MISSING_SHARE * text_bytes and not is_cut:
            told.append(
                f"the scored tokens stand for {n_bytes:,} of {text_bytes:,} bytes: the tokenizer does not name all of "
                "this text, and bits per byte cannot be compared with those of other tokenizers"
            )
        return told


def streams_of(run: LoadedRun, data: str) -> Mapping[str, Stream]:
    """The streams of a split of the run's data (of a packed run: of what went along), or of a corpus, by source."""
    parts = ("train", *Splits.model_fields)
    if data in parts:
        if kept := run.run.kept(data):
            return {name: open_corpus(spec, run.tokenizer) for name, spec in kept.items()}
        prepared = prepare(run.recipe.data, run.tokenizer)
        run.run.check_corpora(prepared)
        return prepared.split(data)
    if ":" in data or data in FORMS or Path(data).exists():
        return {data: open_corpus(data, run.tokenizer)}
    raise UsageError(f"data {data!r}{did_you_mean(data, (*parts, *FORMS))} (a corpus is FORM:PATH, as text:{data})")


class Sums:
    """Nats and bytes of one stream: by unit, and by position in the row.

    Attributes:
        nats_LU, bytes_U: a row a depth, a column a unit.
        nats_LP, bytes_P, scored_P: a column a bucket of `buckets`; scored: tokens.
    """

    def __init__(self, n_depths: int, seq_len: int, ends_U: np.ndarray) -> None:
        self.seq_len, self.ends_U, self.starts_P = seq_len, ends_U, buckets(seq_len)[:-1]
        self.nats_LU, self.bytes_U = np.zeros((n_depths, len(ends_U))), np.zeros(len(ends_U))
        n_buckets = len(self.starts_P)
        self.nats_LP, self.bytes_P = np.zeros((n_depths, n_buckets)), np.zeros(n_buckets)
        self.scored_P = np.zeros(n_buckets, np.int64)

    def add(self, part: Scored, from_position: int = 0) -> None:
        """Add the tokens that are predicted at ``from_position`` of their row or later."""
        # A token's place in the text less one is that of the token that it is predicted from.
        place_N = np.arange(part.start, part.start + len(part.bytes_N))
        pos_N = (place_N - 1) % self.seq_len
        counts_N = pos_N >= from_position
        bytes_N, nats_LN = part.bytes_N * counts_N, part.nats_LN * counts_N
        unit_N = np.searchsorted(self.ends_U, place_N, side="right")
        bucket_N = np.searchsorted(self.starts_P, pos_N, side="right") - 1
        for nats_LK, bytes_K, at_N in (
            (self.nats_LU, self.bytes_U, unit_N),
            (self.nats_LP, self.bytes_P, bucket_N),
        ):
            np.add.at(bytes_K, at_N, bytes_N)
            for row_K, nats_N in zip(nats_LK, nats_LN, strict=True):
                np.add.at(row_K, at_N, nats_N)
        np.add.at(self.scored_P, bucket_N, bytes_N > 0)

    @property
    def n_scored(self) -> int:
        return int(self.scored_P.sum())


def buckets(seq_len: int) -> np.ndarray:
    """Where each bucket of the positions of a row begins, and the last ends: as equal as whole numbers are."""
    return np.linspace(0, seq_len, min(N_BUCKETS, seq_len) + 1).round().astype(int)


def joined(
    sums: Iterable[Sums], depths: Sequence[int], name: str, train_step: int, what: str = "its tokens"
) -> tuple[np.ndarray, np.ndarray]:
    """``nats_LU, bytes_U`` of the units of several streams that hold text.

    Raises:
        UsageError: fewer than two units.
        RunError: a loss that is not finite.
    """
    sums = list(sums)
    nats_LU = np.concatenate([s.nats_LU for s in sums], 1)
    bytes_U = np.concatenate([s.bytes_U for s in sums])
    nats_LU, bytes_U = nats_LU[:, bytes_U > 0], bytes_U[bytes_U > 0]
    if len(bytes_U) < 2:
        raise UsageError(
            f"{name}: {sum(s.n_scored for s in sums)} of {what} stand for text and have one before them; at least 2 "
            "are needed to score"
        )
    for n, nats_U in zip(depths, nats_LU, strict=True):
        if not np.isfinite(nats_U).all():
            raise RunError(
                f"the loss at {n} loops is not finite: the model of train step {train_step} diverged, or does not "
                "stand that depth; give other --loops, or another --checkpoint"
            )
    return nats_LU, bytes_U
