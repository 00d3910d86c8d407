"""Streams and splits: disjoint, complete, about the sizes asked for."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alcoda.data.cache import TokenStore
from alcoda.data.shuffle import hashes, permutation, uniform
from alcoda.data.splits import plan, split, whole
from alcoda.errors import UsageError

FRACTIONS = {"valid": 0.05, "calib": 0.02, "probe": 0.02}


def store_of(lengths, name="books", token_bytes=1):
    """Documents of these many tokens (of ``token_bytes`` bytes) behind EOT (0); all other tokens are distinct."""
    lengths = np.array(lengths, np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    tokens[offsets[:-1]] = 0
    token_bytes_V = np.full(int(offsets[-1]) + 1, token_bytes, np.int32)
    token_bytes_V[0] = 0
    return TokenStore(
        name, tokens, offsets, lengths * token_bytes, token_bytes_V, np.arange(len(lengths), dtype=np.uint64)
    )


def test_a_stream_reads_across_documents():
    store = store_of([3, 1, 2])
    stream = whole(store)
    assert (stream.n_tokens, stream.n_bytes, stream.n_documents, stream.name) == (9, 6, 3, "books")
    for start in range(10):
        for stop in range(start, 10):
            assert stream.read(start, stop).tolist() == store.tokens[start:stop].tolist()
    assert [stream.doc_of(i) for i in range(9)] == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert [stream.range_of(i) for i in range(3)] == [(0, 4), (4, 6), (6, 9)]
    assert [part.tolist() for part in stream.documents()] == [[0, 1, 2, 3], [0, 5], [0, 7, 8]]
    for bad in (lambda: stream.read(0, 10), lambda: stream.read(-1, 2), lambda: stream.doc_of(9)):
        with pytest.raises(IndexError, match="of 9"):
            bad()


def where(stream):
    """Positions in the store of a stream's tokens."""
    return [
        at for a, b in zip(stream._starts_M, np.diff(stream._ends_M, prepend=0), strict=True) for at in range(a, a + b)
    ]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    sizes=st.tuples(st.floats(0.01, 0.3), st.floats(0.01, 0.3), st.floats(0.01, 0.3)),
    seed=st.integers(0, 5),
)
def test_parts_are_disjoint_and_together_everything(lengths, sizes, seed):
    store = store_of(lengths, token_bytes=2)
    fractions = dict(zip(FRACTIONS, sizes, strict=True))
    try:
        parts, note = split(store, fractions, seed)
    except UsageError as error:
        assert "too few to split" in str(error) and len(store.tokens) < 300
        return
    assert list(parts) == ["train", "valid", "calib", "probe"]
    found = [where(stream) for stream in parts.values()]
    assert all(found) and sorted(chain(*found)) == list(range(len(store.tokens)))
    assert sum(stream.n_bytes for stream in parts.values()) == store.doc_bytes.sum()
    for stream in parts.values():
        assert stream.read(0, stream.n_tokens).tolist() == store.tokens[where(stream)].tolist()
        assert stream.n_bytes == store.token_bytes_V[store.tokens[where(stream)]].sum()
    if note is None:
        assert all(document[0] == 0 for stream in parts.values() for document in stream.documents())
        assert sum(stream.n_documents for stream in parts.values()) == len(lengths)


@pytest.mark.parametrize("n", [20, 50, 1000])
def test_fractions_are_about_right(n):
    lengths = (hashes(n, 7) % 900 + 100).astype(np.int64)
    parts, note = split(store_of(lengths), FRACTIONS, 0)
    assert note is None
    for part, fraction in FRACTIONS.items():
        share = parts[part].n_bytes / lengths.sum()
        assert abs(share - fraction) < (0.001 if n == 1000 else 0.03), part


def test_the_seed_chooses_the_documents():
    store = store_of([10] * 100)
    first, again, other = (where(split(store, FRACTIONS, seed)[0]["valid"]) for seed in (0, 0, 1))
    assert first == again != other


def test_no_part_is_mostly_one_document_while_there_are_others():
    lengths = [100] * 500 + [4000] * 10
    for seed in range(20):
        parts, _ = split(store_of(lengths), {"valid": 0.05}, seed)
        assert max(len(document) for document in parts["valid"].documents()) == 101


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([1000], "has 1 document,"),
        ([50] * 19, "has 19 documents,"),
        ([10] * 30 + [1000], "the largest is 77% of it"),
        ([400] * 5 + [1] * 20, "of very unequal size"),
    ],
)
def test_too_few_documents_are_cut_into_consecutive_parts(lengths, says):
    store = store_of(lengths)
    parts, note = split(store, FRACTIONS, 0)
    assert (
        note is not None
        and "books" in note
        and says in note
        and "consecutive parts (train, valid, calib, probe)" in note
    )
    assert list(chain(*map(where, parts.values()))) == list(range(len(store.tokens)))
    for part, fraction in FRACTIONS.items():
        assert abs(parts[part].n_bytes - fraction * sum(lengths)) <= 1


def test_a_part_that_would_be_much_too_small_is_cut_out_instead():
    parts, note = split(store_of([400] * 5 + [1] * 20), {"valid": 0.05}, 0)
    assert note is not None and abs(parts["valid"].n_bytes - 101) <= 1


def test_a_cut_is_where_the_plan_says_whatever_the_tokens():
    # Planned on bytes before there is a tokenizer, made on tokens: no token of valid begins before the cut.
    store = store_of([7, 9, 11], token_bytes=3)
    cut = plan(store.doc_bytes, {"valid": 0.5}, 0).cuts_bytes[1]
    parts, _ = split(store, {"valid": 0.5}, 0)
    assert cut == 40 and parts["train"].n_bytes == 42 and parts["valid"].n_bytes == 39
    assert parts["train"].n_documents == 2 and parts["valid"].n_documents == 2


def test_too_short_to_split():
    with pytest.raises(UsageError, match=r"books has 5 tokens, too few to split into train, valid, calib, probe"):
        split(store_of([4]), FRACTIONS, 0)


def test_nothing_to_split_off():
    parts, note = split(store_of([4]), {}, 0)
    assert list(parts) == ["train"] and parts["train"].n_tokens == 5 and note is None


def test_orders_never_change():
    # Numbers written down on purpose: other ones would change every split and every resumed run.
    assert permutation(10, 1, 2).tolist() == [0, 8, 3, 5, 9, 1, 7, 6, 2, 4]
    assert sorted(permutation(1000, 3).tolist()) == list(range(1000))
    assert permutation(50, 1, 2).tolist() != permutation(50, 2, 1).tolist() != permutation(50, -1).tolist()
    values = uniform(10_000, 5)
    assert values.min() >= 0 and values.max() < 1 and abs(values.mean() - 0.5) < 0.02
