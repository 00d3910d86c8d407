"""The bigram baseline: a true distribution, equal to an independent count, better than a unigram."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alcoda.errors import UsageError
from alcoda.measure import bigram
from alcoda.measure.bigram import Bigram


def table(model: Bigram) -> np.ndarray:
    """P(w | v) of all pairs, (V, V)."""
    ids = np.arange(model.vocab_size)
    previous, target = np.meshgrid(ids, ids, indexing="ij")
    return np.exp(-model.nats(previous, target))


def reference(tokens: list[int], vocab_size: int) -> np.ndarray:
    """The same table from dictionaries, by the equations."""
    pairs = Counter(pairwise(tokens))
    before = Counter(w for _, w in pairs)

    def discount(counts: Counter) -> float:
        tally = Counter(counts.values())
        return tally[1] / (tally[1] + 2 * tally[2]) if tally[1] else 0.5

    d, e = discount(pairs), discount(before)
    out = np.zeros((vocab_size, vocab_size))
    for v in range(vocab_size):
        c = sum(n for (a, _), n in pairs.items() if a == v)
        distinct = sum(a == v for a, _ in pairs)
        for w in range(vocab_size):
            q = max(before[w] - e, 0) / len(pairs) + e * len(before) / len(pairs) / vocab_size
            out[v, w] = max(pairs[v, w] - d, 0) / c + d * distinct / c * q if c else q
    return out


def test_hand_computed() -> None:
    # Pairs: 01 twice, 10 twice, 02 once; D = 1 / (1 + 2 * 2) = 0.2. Each token follows one other: D' = 1, Q = 1/3.
    model = Bigram.fit(np.array([0, 1, 0, 1, 0, 2]), 3)
    expected = [
        [0.2 * 2 / 3 / 3, 1.8 / 3 + 0.2 * 2 / 3 / 3, 0.8 / 3 + 0.2 * 2 / 3 / 3],
        [1.8 / 2 + 0.2 / 2 / 3, 0.2 / 2 / 3, 0.2 / 2 / 3],
        [1 / 3, 1 / 3, 1 / 3],  # never a context
    ]
    np.testing.assert_allclose(table(model), expected, rtol=1e-12)
    assert model.nats(np.array([1]), np.array([0]))[0] == pytest.approx(-math.log(1.8 / 2 + 0.2 / 2 / 3))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.integers(6, 9))
def test_equals_a_plain_count_and_sums_to_one(tokens: list[int], vocab_size: int) -> None:
    probability = table(Bigram.fit(np.array(tokens), vocab_size))
    assert (probability > 0).all(), "also of tokens and contexts that were never seen"
    np.testing.assert_allclose(probability.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(probability, reference(tokens, vocab_size), rtol=1e-10)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 20, size=1003).astype(np.uint16)
    whole = table(Bigram.fit(tokens, 20))
    for chunk in (1, 7, 501, 1001, 1002, 1003):
        monkeypatch.setattr(bigram, "_CHUNK_TOKENS", chunk)
        np.testing.assert_array_equal(table(Bigram.fit(tokens, 20)), whole)


def test_beats_a_unigram_on_text() -> None:
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8)
    cut = len(text) * 4 // 5
    train, test = text[:cut], text[cut:]
    model = Bigram.fit(train, 256)
    loss = model.nats(test[:-1], test[1:]).mean()
    counts = np.bincount(train, minlength=256) + 1
    unigram = -np.log(counts / counts.sum())[test[1:]].mean()
    assert loss < 0.85 * unigram


def test_smoothing_beats_adding_one_where_data_are_few() -> None:
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8)
    train, test = text[:4000], text[4000:20000]
    counts = np.ones((256, 256))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    add_one = -np.log(counts / counts.sum(1, keepdims=True))[test[:-1], test[1:]].mean()
    assert Bigram.fit(train, 256).nats(test[:-1], test[1:]).mean() < 0.9 * add_one


def test_large_vocabulary_stays_sparse() -> None:
    # The pair key of this vocabulary does not fit 32 bits, and a dense table would take terabytes.
    vocab_size = 300_000
    tokens = np.random.default_rng(0).zipf(1.3, size=200_000) % vocab_size
    model = Bigram.fit(tokens.astype(np.uint32), vocab_size)
    assert len(model.pair_P) <= len(tokens)
    last = np.array([vocab_size - 1], dtype=np.uint32)
    everything = np.arange(vocab_size)
    assert np.exp(-model.nats(np.repeat(last, vocab_size), everything)).sum() == pytest.approx(1)
    assert np.exp(-model.nats(np.ones(vocab_size, dtype=int), everything)).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "said"),
    [
        (np.array([0, 3, 1]), 3, "ids from 0 to 3, but vocab_size 3 allows 0 to 2"),
        (np.array([0, -1, 1]), 3, "ids from -1 to 1"),
        (np.array([0.0, 1.0]), 3, "whole numbers, not float64"),
        (np.array([0]), 3, "at least 2 ids"),
        (np.array([[0, 1]]), 3, "at least 2 ids"),
        (np.array([0, 1]), 0, "vocab_size is 0"),
    ],
)
def test_bad_tokens_are_refused(tokens: np.ndarray, vocab_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Bigram.fit(tokens, vocab_size)


def test_bad_queries_are_refused() -> None:
    model = Bigram.fit(np.array([0, 1, 0]), 2)
    with pytest.raises(ValueError, match="target hold ids from 0 to 2"):
        model.nats(np.array([0, 0]), np.array([0, 2]))
    with pytest.raises(UsageError, match=r"one shape, not \(1,\) and \(2,\)"):
        model.nats(np.array([0]), np.array([0, 1]))
    assert model.nats(np.array([], dtype=int), np.array([], dtype=int)).shape == (0,)
    assert model.nats(np.array([[0, 1]]), np.array([[1, 0]])).shape == (1, 2)
