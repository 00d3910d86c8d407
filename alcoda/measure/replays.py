"""One text read many times, all tokens at one depth or with exits: nats and loops of each token.

With exits it is read as decoding would read it (copy-on-exit, `alcoda.depth.replay`). What is compared is compared on
the same tokens, so that intervals are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from alcoda.data.splits import Stream
from alcoda.depth.replay import replay
from alcoda.depth.watch import ExitTest
from alcoda.errors import RunError, UsageError
from alcoda.measure.bootstrap import Interval, mean_interval, paired_gain, ratio_interval
from alcoda.measure.evaluate import rows_at_a_time
from alcoda.measure.text import Text
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.prefill import Tell
from alcoda.training.device import autocast
from alcoda.training.load import LoadedRun
from alcoda.training.score import nats, rows_between, score


class Read(NamedTuple):
    """A text read with exits.

    Attributes:
        nats_N: loss of the token after each; 0 where that stands for no text.
        depths_N: loops that each ran.
        scores_NR: of the rule after each loop, where they were asked for: NaN where it was not looked at.
    """

    nats_N: np.ndarray
    depths_N: np.ndarray
    scores_NR: np.ndarray | None


def untold(n_tokens: float) -> None:
    """Tells nobody."""


@dataclass(frozen=True, eq=False)
class Passage:
    """The N tokens of a text that have one after them, in U units.

    Attributes:
        bytes_N: of text that the token after each stands for; 0: it is not scored.
        unit_N: which unit that token is of.
        batch_size: rows read at a time.
        cache: what tokens leave in the cache.
    """

    run: LoadedRun
    text: Text
    bytes_N: np.ndarray
    unit_N: np.ndarray
    batch_size: int
    cache: CachePolicy = PER_LOOP

    @classmethod
    def open(
        cls,
        run: LoadedRun,
        data: str,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        least_tokens: int = 2,
        cache: CachePolicy = PER_LOOP,
    ) -> Passage:
        """A split of the run's data, or a corpus; ``max_tokens`` of each source.

        Raises:
            UsageError: a corpus that cannot be read, or fewer than ``least_tokens`` tokens to score.
        """
        text = Text.open(run, data, max_tokens)
        n_rows = rows_at_a_time(batch_size, run.recipe.model.memory.carries or not cache.is_parallel)
        sizes, units, n_units = [], [], 0
        for stream in text.streams.values():
            n_tokens, ends_U = text.n_tokens_of(stream), text.unit_ends(stream)
            sizes.append(run.tokenizer.token_bytes_V[stream.read(1, n_tokens)])
            units.append(n_units + np.searchsorted(ends_U, np.arange(1, n_tokens), side="right"))
            n_units += len(ends_U)
        found = cls(run, text, np.concatenate(sizes), np.concatenate(units), n_rows, cache)
        n_scored = int((found.bytes_N > 0).sum())
        if n_scored < least_tokens or len(np.unique(found.unit_N[found.bytes_N > 0])) < 2:
            raise UsageError(
                f"{data}: {n_scored} tokens to score, at least {least_tokens} in two documents or blocks are needed; "
                "name a longer text (text:PATH), score more of it, or train with a larger share of the corpus in "
                "data.splits"
            )
        return found

    @property
    def n_tokens(self) -> int:
        return len(self.bytes_N)

    @property
    def n_scored(self) -> int:
        return int((self.bytes_N > 0).sum())

    @property
    def n_units(self) -> int:
        return len(np.unique(self.unit_N[self.bytes_N > 0]))

    def note(self) -> str | None:
        """What the reader should know of the text."""
        return "; ".join(self.text.notes(self.run, self.n_units, int(self.bytes_N.sum()))) or None

    def uniform(self, loops: Sequence[int], tell: Tell = untold) -> np.ndarray:
        """Nats of each token where all run one depth, ``[L, N]``, for increasing depths."""
        reading = self.run.reading(None, None, self.cache)
        parts = [
            part.nats_LN
            for stream in self.text.streams.values()
            for part in score(
                self.run.model,
                stream,
                self.run.tokenizer.token_bytes_V,
                loops,
                batch_size=self.batch_size,
                max_tokens=self.text.max_tokens,
                dtype=self.run.dtype,
                reading=reading,
                tell=tell,
            )
        ]
        return np.stack([self._finite(nats_N, f"{n} loops") for n, nats_N in zip(loops, np.hstack(parts), strict=True)])

    def read(self, test: ExitTest, scores: bool = False, tell: Tell = untold) -> Read:
        """The text with exits."""
        parts = [part for stream in self.text.streams.values() for part in self._read(stream, test, scores, tell)]
        nats_N = self._finite(np.concatenate([part.nats_N for part in parts]) * (self.bytes_N > 0), "these exits")
        scores_NR = np.concatenate([part.scores_NR for part in parts if part.scores_NR is not None]) if scores else None
        return Read(nats_N, np.concatenate([part.depths_N for part in parts]), scores_NR)

    def _read(self, stream: Stream, test: ExitTest, scores: bool, tell: Tell) -> list[Read]:
        model, seq_len = self.run.model, self.run.recipe.model.seq_len
        device, n_tokens, parts = model.embed.weight.device, self.text.n_tokens_of(stream), []
        for start in range(0, n_tokens - 1, self.batch_size * seq_len):
            stop = min(start + self.batch_size * seq_len, n_tokens - 1)
            n = stop - start
            inputs_BT, target_N = rows_between(stream, start, stop, seq_len, device)
            with torch.no_grad(), autocast(device, self.run.dtype):
                # Of the columns of a row that is padded, the text's part is what counts as read.
                part = n / inputs_BT.size(1)
                how = {"scores": scores, "cache": self.cache, "tell": lambda k, part=part: tell(k * part)}
                found = replay(model, inputs_BT, test, **how)
                nats_N = nats(model, found.y_BTD.flatten(0, 1)[:n], target_N)
            of_rule = None if found.scores_BTR is None else found.scores_BTR.flatten(0, 1)[:n].cpu().numpy()
            parts.append(Read(nats_N, found.depths_BT.flatten()[:n].cpu().numpy(), of_rule))
        return parts

    def loss(self, nats_N: np.ndarray) -> float:
        """Mean nats a scored token."""
        return float(nats_N.sum()) / self.n_scored

    def bits(self, nats_N: np.ndarray) -> Interval:
        """Bits per byte."""
        return ratio_interval(*self._by_unit(nats_N, self.bytes_N))

    def gain(self, nats_a_N: np.ndarray, nats_b_N: np.ndarray) -> Interval:
        """Bits per byte of a minus that of b, paired: positive where b is better."""
        nats_a_U, bytes_U = self._by_unit(nats_a_N, self.bytes_N)
        return paired_gain(nats_a_U, self._by_unit(nats_b_N, self.bytes_N)[0], bytes_U)

    def mean(self, values_N: np.ndarray) -> Interval:
        """Of a number a token that is read."""
        return mean_interval(*self._by_unit(values_N, np.ones(self.n_tokens)))

    def _by_unit(self, values_N: np.ndarray, weights_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values_U, weights_U = np.bincount(self.unit_N, values_N), np.bincount(self.unit_N, weights_N)
        return values_U[weights_U > 0], weights_U[weights_U > 0]

    def _finite(self, nats_N: np.ndarray, what: str) -> np.ndarray:
        if not np.isfinite(nats_N).all():
            raise RunError(
                f"the loss with {what} is not finite: the model of train step {self.run.train_step} diverged, or does "
                "not stand that depth; give other loops, or another checkpoint"
            )
        return nats_N
