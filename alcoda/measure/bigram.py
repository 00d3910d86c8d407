"""A bigram language model with interpolated Kneser-Ney smoothing: the baseline that a trained model has to beat.

For a pair (v, w) seen c(v,w) times, with c(v) the pairs that begin with v and N(v) the distinct ones among them,

    P(w | v) = max(c(v,w) - D, 0) / c(v)  +  D N(v) / c(v) * Q(w)          Q(w) alone where v was never a context
    Q(w)     = max(N'(w) - D', 0) / M     +  D' S / M * 1 / V

where N'(w) counts the distinct tokens seen before w, M is the number of distinct pairs, S the number of w with
N'(w) > 0, and V the vocabulary. Q is the continuation unigram, discounted in the same way and mixed with the uniform
distribution, so that each token has a probability above 0. Each discount is D = n1 / (n1 + 2 n2), with n1 and n2 the
counts that are 1 and 2 (of pairs for D, of N' for D').

Kneser & Ney, "Improved backing-off for m-gram language modeling" (1995); Chen & Goodman, "An empirical study of
smoothing techniques for language modeling" (1999), which finds the interpolated form to be the better one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alcoda.errors import UsageError

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, eq=False)
class Bigram:
    """A fitted bigram model; build it with `Bigram.fit`.

    pair_P: the distinct pairs in order, each as previous * vocab_size + target. seen_P: max(c - D, 0) / c(v) of each.
    backoff_V: the weight of ``lower_V`` after each token. lower_V: Q of each token.
    """

    vocab_size: int
    pair_P: np.ndarray
    seen_P: np.ndarray
    backoff_V: np.ndarray
    lower_V: np.ndarray

    @classmethod
    def fit(cls, tokens: np.ndarray, vocab_size: int) -> Bigram:
        """The model of the neighbouring pairs of ``tokens`` (T,), whole numbers in [0, vocab_size).

        Pairs that span two documents count like others. Memory is O(distinct pairs + vocab_size) beside the tokens,
        which may be memory-mapped. Raises `UsageError` (a ValueError) for ids out of range and under two tokens.
        """
        if not 1 <= vocab_size < 1 << 31:
            raise UsageError(f"vocab_size is {vocab_size}; it has to be between 1 and {(1 << 31) - 1}")
        if getattr(tokens, "ndim", 0) != 1 or len(tokens) < 2:
            raise UsageError("tokens have to be one sequence (a vector) of at least 2 ids to have a pair")
        pair_P, count_P = np.empty(0, np.int64), np.empty(0, np.int64)
        for start in range(0, len(tokens) - 1, _CHUNK_TOKENS):
            ids = _ids(tokens[start : start + _CHUNK_TOKENS + 1], vocab_size, "tokens")
            pairs, counts = np.unique(ids[:-1] * vocab_size + ids[1:], return_counts=True)
            pair_P, count_P = _merged(pair_P, count_P, pairs, counts)
        previous_P, target_P = pair_P // vocab_size, pair_P % vocab_size

        discount = _discount(count_P)
        total_V = np.bincount(previous_P, weights=count_P, minlength=vocab_size)
        distinct_V = np.bincount(previous_P, minlength=vocab_size)
        # A token that was never a context has no pairs to discount: all of its weight goes to the lower order.
        backoff_V = np.where(total_V > 0, discount * distinct_V / np.maximum(total_V, 1), 1.0)

        before_V = np.bincount(target_P, minlength=vocab_size)
        followed = before_V > 0
        lower_discount = _discount(before_V[followed])
        n_pairs = len(pair_P)
        uniform = lower_discount * followed.sum() / n_pairs / vocab_size
        lower_V = np.maximum(before_V - lower_discount, 0) / n_pairs + uniform
        return cls(vocab_size, pair_P, np.maximum(count_P - discount, 0) / total_V[previous_P], backoff_V, lower_V)

    def nats(self, previous: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The loss -ln P(target | previous) of each pair, in nats; both of one shape, which is also that of the result.

        Raises `UsageError` (a ValueError) for ids out of range and for shapes that differ.
        """
        previous = _ids(np.asarray(previous), self.vocab_size, "previous")
        target = _ids(np.asarray(target), self.vocab_size, "target")
        if previous.shape != target.shape:
            raise UsageError(f"previous and target need one shape, not {previous.shape} and {target.shape}")
        pair = previous * self.vocab_size + target
        place = np.minimum(np.searchsorted(self.pair_P, pair), len(self.pair_P) - 1)
        seen = np.where(self.pair_P[place] == pair, self.seen_P[place], 0.0)
        return -np.log(seen + self.backoff_V[previous] * self.lower_V[target])


def _ids(ids: np.ndarray, vocab_size: int, name: str) -> np.ndarray:
    if not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"{name} have to be whole numbers, not {ids.dtype}")
    low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    if low < 0 or high >= vocab_size:
        allowed = f"vocab_size {vocab_size} allows 0 to {vocab_size - 1}"
        raise UsageError(f"{name} hold ids from {low} to {high}, but {allowed}")
    return ids.astype(np.int64)


def _merged(
    pair_P: np.ndarray, count_P: np.ndarray, more_P: np.ndarray, more_count_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    if not len(pair_P):
        return more_P, more_count_P
    both, place = np.unique(np.concatenate([pair_P, more_P]), return_inverse=True)
    counts = np.zeros(len(both), np.int64)
    np.add.at(counts, place, np.concatenate([count_P, more_count_P]))
    return both, counts


def _discount(counts: np.ndarray) -> float:
    n1, n2 = int((counts == 1).sum()), int((counts == 2).sum())
    # Without a count of 1 the estimate is 0 and would leave nothing for what was not seen.
    return n1 / (n1 + 2 * n2) if n1 else 0.5
