"""Batches: each target once an epoch, shares by weight, and a state that continues anywhere."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alcoda.data.batches import NOT_SCORED, Batches
from alcoda.data.cache import TokenStore
from alcoda.data.splits import whole
from alcoda.errors import UsageError

UNITS = pytest.mark.parametrize("unit", ["row", "document"])


def store_of(lengths, name="books"):
    """Documents of these many tokens behind EOT (0); all other tokens are distinct."""
    lengths = np.array(lengths, np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    tokens[offsets[:-1]] = 0
    return TokenStore(
        name, tokens, offsets, lengths, np.sign(tokens).astype(np.int32), np.zeros(len(lengths), np.uint64)
    )


def sources(*lengths, weights=None):
    names = "abcdef"
    return [
        (names[i], (weights or [1.0] * len(lengths))[i], whole(store_of(one, names[i])))
        for i, one in enumerate(lengths)
    ]


def same(one, other):
    return all(np.array_equal(x, y) for x, y in zip(one[0][:2], other[0][:2], strict=True)) and one[0][2] == other[0][2]


def test_a_batch_is_inputs_and_the_tokens_after_them():
    (source,) = sources([20, 9])
    batch, _ = next(Batches([source], 3, 4, seed=0))
    assert batch.inputs_BT.shape == batch.targets_BT.shape == (3, 4)
    assert batch.inputs_BT.dtype == batch.targets_BT.dtype == np.int64
    for row, where in enumerate(batch.where):
        start, stop = map(int, where.removeprefix("a[").removesuffix("]").split(":"))
        tokens = source[2].read(start, stop + 1).tolist()
        assert batch.inputs_BT[row, : stop - start].tolist() == tokens[:-1]
        assert batch.targets_BT[row, : stop - start].tolist() == tokens[1:]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    batch_size=st.integers(1, 5),
    seq_len=st.integers(1, 9),
    seed=st.integers(0, 3),
)
def test_row_every_target_once_an_epoch(lengths, batch_size, seq_len, seed):
    (source,) = sources(lengths)
    stream = source[2]
    if stream.n_tokens < batch_size * seq_len:
        return
    n_rows = -(-(stream.n_tokens - 1) // seq_len)
    rows = []
    it = Batches([source], batch_size, seq_len, seed)
    while len(rows) < 3 * n_rows:
        batch, _ = next(it)
        rows += list(batch.targets_BT)
    expected = sorted(stream.read(1, stream.n_tokens).tolist())
    for epoch in range(3):
        targets = np.concatenate(rows[epoch * n_rows : (epoch + 1) * n_rows])
        assert sorted(targets[targets != NOT_SCORED].tolist()) == expected, epoch


def test_row_epochs_have_different_orders():
    (source,) = sources([200])
    it = Batches([source], 4, 10, 0)
    wheres = [where for _ in range(10) for where in next(it)[0].where]
    assert sorted(wheres[:20]) == sorted(wheres[20:40]) and wheres[:20] != wheres[20:40]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=3),
    batch_size=st.integers(1, 4),
    seq_len=st.integers(1, 9),
    seed=st.integers(0, 3),
)
def test_document_every_document_once_an_epoch(lengths, batch_size, seq_len, seed):
    mixed = sources(*lengths)
    if sum(stream.n_tokens for _, _, stream in mixed) < batch_size * seq_len:
        return
    it = Batches(mixed, batch_size, seq_len, seed, "document")
    inputs, targets, parts, state = [], [], [], None
    while state is None or min(source["epoch"] for source in state["sources"]) < 2:
        batch, state = next(it)
        inputs += batch.inputs_BT.ravel().tolist()
        targets += batch.targets_BT.ravel().tolist()
        parts += [part for where in batch.where for part in where.split(" + ")]
    assert inputs[1:] == targets[:-1]  # packed without a gap: every token is a target, but for the first
    # Put the parts together to whole documents again, by source, in the order that they came in.
    order = {name: [] for name, _, _ in mixed}
    for part in parts:
        name, span = part.removesuffix("]").split("[")
        start, stop = map(int, span.split(":"))
        stream = {name: stream for name, _, stream in mixed}[name]
        if stream.range_of(stream.doc_of(start))[0] == start:
            order[name].append(stream.doc_of(start))
            expected_start = stop
        else:
            assert start == expected_start
            expected_start = stop
    for name, _, stream in mixed:
        n = stream.n_documents
        assert sorted(order[name][:n]) == sorted(order[name][n : 2 * n]) == list(range(n))


@UNITS
@settings(max_examples=40, deadline=None)
@given(stop_at=st.integers(0, 30), batch_size=st.integers(1, 3), seq_len=st.integers(1, 7), seed=st.integers(0, 3))
def test_resumed_is_uninterrupted(unit, stop_at, batch_size, seq_len, seed):
    # About 70 tokens and up to 630 drawn: epoch edges are crossed before, at and after the stop.
    mixed = sources([13, 4, 9], [5, 22, 1, 6], weights=[1.0, 2.5])
    whole_run = list(itertools.islice(Batches(mixed, batch_size, seq_len, seed, unit), 40))
    first = Batches(mixed, batch_size, seq_len, seed, unit)
    state = first.state()
    for _ in range(stop_at):
        _, state = next(first)
    state = json.loads(json.dumps(state))
    resumed = Batches(mixed, batch_size, seq_len, seed, unit, state)
    for one, other in zip(whole_run[stop_at:], resumed, strict=False):
        assert same(one, other) and one[1] == other[1]


@UNITS
def test_the_epoch_edge_is_inside_a_batch_and_resumes(unit):
    (source,) = sources([6, 3, 9, 2])
    it = Batches([source], 3, 4, 1, unit)
    states = [next(it)[1] for _ in range(30)]
    assert states[-1]["sources"][0]["epoch"] >= 10
    edge = next(
        i for i, (a, b) in enumerate(itertools.pairwise(states)) if a["sources"][0]["epoch"] != b["sources"][0]["epoch"]
    )
    for at in (edge, edge + 1):
        again = Batches([source], 3, 4, 1, unit, states[at])
        assert [next(again)[1] for _ in range(29 - at)] == states[at + 1 :]


@UNITS
def test_shares_follow_the_weights(unit):
    mixed = sources([40] * 50, [7] * 90, [300], weights=[1, 2, 0.5])
    drawn = Counter()
    it = Batches(mixed, 4, 16, 0, unit)
    for _ in range(400):
        batch, state = next(it)
        for where in batch.where:
            for part in where.split(" + "):
                start, stop = map(int, part[2:-1].split(":"))
                drawn[part[0]] += stop - start
    total = sum(drawn.values())
    for name, weight in {"a": 1, "b": 2, "c": 0.5}.items():
        assert abs(drawn[name] / total - weight / 3.5) < 0.02, name
    assert state["sources"][2]["epoch"] > 3  # the small one is repeated as its weight asks


@UNITS
def test_seeds(unit):
    mixed = sources([40] * 20, [7] * 30)
    runs = [[next(it)[0].where for _ in range(5)] for it in (Batches(mixed, 4, 8, seed, unit) for seed in (0, 0, 1))]
    assert runs[0] == runs[1] != runs[2]


def test_rows_of_a_mix_are_of_one_source_and_packed_ones_of_several():
    mixed = sources([5] * 20, [5] * 20)
    assert all("+" not in where for where in next(Batches(mixed, 4, 16, 0))[0].where)
    assert any("a[" in where and "b[" in where for where in next(Batches(mixed, 4, 16, 0, "document"))[0].where)


@UNITS
def test_the_state_does_not_grow_with_the_corpus(unit):
    small, large = (Batches(sources([5] * n), 2, 8, 0, unit) for n in (10, 10_000))
    assert abs(len(json.dumps(next(small)[1])) - len(json.dumps(next(large)[1]))) < 10


def test_another_batch_size_continues_with_the_next_row():
    mixed = sources([40, 30])
    first = Batches(mixed, 2, 4, 0)
    _, state = next(first)
    rest = [where for _ in range(3) for where in next(first)[0].where]
    again = Batches(mixed, 3, 4, 0, state=state)
    assert [*next(again)[0].where, *next(again)[0].where] == rest


def message_of(action):
    with pytest.raises(UsageError) as caught:
        action()
    return str(caught.value)


def test_errors():
    mixed = sources([40], [20])
    message = message_of(lambda: Batches(mixed, 8, 16, 0))
    assert "a, b: 62 tokens are less than one batch of batch_size 8 x seq_len 16 = 128 tokens" in message
    assert "longer corpus" in message
    assert "weight of a: must be more than 0 (got 0)" in message_of(lambda: Batches([("a", 0, mixed[0][2])], 1, 1, 0))
    assert "batch_size (0)" in message_of(lambda: Batches(mixed, 0, 4, 0))
    assert "need a source" in message_of(lambda: Batches([], 1, 4, 0))
    none = whole(store_of([0]))
    assert "b has 1 tokens" in message_of(lambda: Batches([mixed[0], ("b", 1.0, none)], 1, 4, 0))


def test_a_state_of_other_data_is_refused():
    mixed = sources([40], [20])
    state = next(Batches(mixed, 2, 4, 0))[1]
    for other, says in {
        lambda: Batches(mixed, 2, 4, 1, state=state): "seed: now 1, then 0",
        lambda: Batches(mixed, 2, 5, 0, state=state): "seq_len: now 5, then 4",
        lambda: Batches(mixed, 2, 4, 0, "document", state): "unit: now 'document', then 'row'",
        lambda: Batches(mixed[:1], 2, 4, 0, state=state): "sources: now [('a', 1.0, 41)], then",
        lambda: Batches(mixed, 2, 4, 0, state={"step": 3}): "not one of this version",
    }.items():
        assert says in message_of(other)
    state["sources"][0]["unit"] = 99
    assert "damaged: unit 99 of 10" in message_of(lambda: Batches(mixed, 2, 4, 0, state=state))


def test_a_ladder_draws_from_one_source_until_it_climbs_and_keeps_the_share_of_all():
    three = sources([40] * 5, [40] * 6, [40] * 7, weights=[2.0, 1.0, 1.0])

    def batches(state=None):
        return Batches(three, 2, 5, seed=3, state=state, ladders=[(1, 2)])

    def drawn(state):
        return [source["drawn_tokens"] for source in state["sources"]]

    walk = batches()
    for _ in range(20):
        _, state = next(walk)
    assert drawn(state)[2] == 0 and abs(drawn(state)[0] - drawn(state)[1]) <= 5 and walk.stage(0) == 1
    assert walk.climb(0) and walk.stage(0) == 2
    climbed = walk.state()
    left = drawn(climbed)[1]
    then = [next(walk) for _ in range(20)]
    assert drawn(then[-1][1])[1] == left and abs(drawn(then[-1][1])[0] - sum(drawn(then[-1][1])[1:])) <= 5
    again = batches(json.loads(json.dumps(climbed)))
    assert all(same(one, next(again)) for one in then)  # what is drawn after a climb follows from the state
    assert not walk.climb(0) and walk.stage(0) == 2
    with pytest.raises(UsageError, match="ladders: now 0, then 1"):
        Batches(three, 2, 5, seed=3, state=climbed)
