"""Log-likelihoods of the harness are the model's own, however rows are read together: at every depth, with exits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loaded import loaded

from alcoda.data.vocabulary import Bpe
from alcoda.depth.replay import replay
from alcoda.downstream import score
from alcoda.downstream.encode import Ask, Encoder
from alcoda.downstream.score import Answer, Scorer, points
from alcoda.engine.llm import LM
from alcoda.errors import RunError, UsageError
from alcoda.model.cost import ledger

ATOL = 1e-9
EXIT = "state:0.5"
DESIGNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"memory": "prev_token"},
    "window": {"block": {"window": {"kind": "pattern", "tokens": 5}}},
    "routed": {"route": {"kind": "expert_choice", "auxiliary": "none"}, "n_loops": 3},
}


def asks(n: int = 12, longest: int = 20, seed: int = 0) -> list[Ask]:
    """Of many lengths."""
    rng = random.Random(seed)

    def ids(n_most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(rng.randint(1, n_most)))

    return [Ask(ids(longest), ids(6)) for _ in range(n)]


@torch.no_grad()
def by_hand(lm: LM, ask: Ask, loops: int) -> tuple[float, bool]:
    """One ask alone, from the model's own pass."""
    ids = torch.tensor([[*ask.context, *ask.continuation]])
    logits_TV = lm.model(ids[:, :-1], loops)[0, -len(ask.continuation) :]
    target = torch.tensor(ask.continuation)
    nats = F.cross_entropy(logits_TV, target, reduction="sum")
    return float(nats), bool((logits_TV.argmax(-1) == target).all())


def numbers(answers: list[Answer]) -> np.ndarray:
    return np.array([answer.nats_P for answer in answers])


def test_they_are_those_of_the_models_own_pass() -> None:
    lm = loaded()
    given = [*asks(), Ask((5,), (7,))]
    # The likeliest token after a text, so that some are greedy.
    given += [Ask(ask.context, (int(lm.model(torch.tensor([ask.context]), 2)[0, -1].argmax()),)) for ask in asks(3)]
    found = Scorer(lm.loaded, points(lm.loaded, [1, 2, 4])).score(given)
    for p, loops in enumerate((1, 2, 4)):
        hand = [by_hand(lm, ask, loops) for ask in given]
        assert numbers(found)[:, p] == pytest.approx([nats for nats, _ in hand], abs=ATOL)
        assert [answer.greedy_P[p] for answer in found] == [right for _, right in hand]
    assert any(answer.greedy_P[1] for answer in found) and not all(answer.greedy_P[1] for answer in found)
    assert [answer.n_tokens for answer in found] == [len(ask.continuation) for ask in given]


@pytest.mark.parametrize("design", DESIGNS)
def test_batching_changes_nothing(design: str) -> None:
    lm = loaded(**DESIGNS[design])
    at = points(lm.loaded, [1, 3], [] if design == "routed" else [EXIT])
    given = asks()
    alone = Scorer(lm.loaded, at, batch_size=1)
    expected = numbers(alone.score(given))
    for batch_size in (3, None):
        together = Scorer(lm.loaded, at, batch_size)
        assert numbers(together.score(given)) == pytest.approx(expected, abs=ATOL)
        assert together.spent.n_tokens == alone.spent.n_tokens
        for p in range(len(at)):
            assert (together.spent.counts_PR[p] == alone.spent.counts_PR[p]).all()
    # The control: rows of several lengths were read together, where padding is out of sight.
    rows = list(Scorer(lm.loaded, at)._batches(sorted((ask.row(32) for ask in given), key=len, reverse=True)))
    mixed = any(len({len(row) for row in batch}) > 1 for batch in rows)
    assert mixed == (design != "routed")


def test_one_pass_at_several_depths_is_a_pass_at_each() -> None:
    lm, given = loaded(), asks()
    together = numbers(Scorer(lm.loaded, points(lm.loaded, [1, 2, 4], [EXIT])).score(given))
    for p, (loops, exits) in enumerate([([1], []), ([2], []), ([4], [])]):
        assert numbers(Scorer(lm.loaded, points(lm.loaded, loops, exits)).score(given))[:, 0] == pytest.approx(
            together[:, p], abs=ATOL
        )
    (alone,) = numbers(Scorer(lm.loaded, points(lm.loaded, [4], [EXIT])).score(given)).T[1:]
    assert alone == pytest.approx(together[:, 3], abs=ATOL)
    assert not np.allclose(together[:, 0], together[:, 2]) and not np.allclose(together[:, 3], together[:, 2])


def test_with_exits_they_are_those_of_the_replay_and_loops_are_counted() -> None:
    lm, given = loaded(), asks()
    at = points(lm.loaded, [4], [EXIT])
    scorer = Scorer(lm.loaded, at)
    found = numbers(scorer.score(given))[:, 1]
    assert at[1].exit is not None
    ran = []
    for ask, nats in zip(given, found, strict=True):
        read = replay(lm.model, torch.tensor([ask.row(32)]), at[1].exit.test)
        with torch.no_grad():
            logits = lm.model.logits(read.y_BTD)[0, -len(ask.continuation) :]
        assert float(F.cross_entropy(logits, torch.tensor(ask.continuation), reduction="sum")) == pytest.approx(
            nats, abs=ATOL
        )
        ran += read.depths_BT.flatten().tolist()
    assert 1 < np.mean(ran) < 4, "some leave early"
    assert scorer.spent.n_tokens == len(ran) and scorer.spent.mean_loops(1) == pytest.approx(np.mean(ran))
    flops = np.array(at[1].flops_R)[np.array(ran) - 1].mean()
    assert scorer.spent.flops_per_token(1) == pytest.approx(flops)
    assert scorer.spent.mean_loops(0) == 4
    assert scorer.spent.flops_per_token(0) == ledger(lm.recipe.model, 4).forward_flops_per_token


def test_what_is_read_alike_is_read_once() -> None:
    lm = loaded()
    scorer = Scorer(lm.loaded, points(lm.loaded))
    found = scorer.score([Ask((1, 2, 3), (n,)) for n in range(256)])
    assert scorer.spent.n_tokens == 3
    # All tokens but the end of the text: their likelihoods sum to nearly one, and one is the likeliest.
    assert np.exp(-numbers(found)).sum() < 1
    assert sum(answer.greedy_P[0] for answer in found) == 1


def test_long_texts_are_cut_from_the_left() -> None:
    lm = loaded()
    context = tuple(range(100))
    scorer = Scorer(lm.loaded, points(lm.loaded))
    long, short = scorer.score([Ask(context, (1, 2)), Ask(context[-31:], (1, 2))])
    assert long.nats_P == pytest.approx(short.nats_P, abs=ATOL)
    other = scorer.score([Ask((*context[:-1], 0), (1, 2))])[0]
    assert abs(other.nats_P[0] - long.nats_P[0]) > 1e-3, "what is in sight counts"


def test_a_continuation_longer_than_the_context_is_scored_in_pieces() -> None:
    lm = loaded()
    ids = tuple(random.Random(1).randrange(256) for _ in range(71))
    ask = Ask((256,), ids)
    pieces = list(ask.pieces(32))
    assert [len(piece.continuation) for piece in pieces] == [32, 32, 7]
    assert [piece.row(32) for piece in pieces] == [(256, *ids[:31]), ids[31:63], ids[38:70]]
    whole = Scorer(lm.loaded, points(lm.loaded)).score([ask])[0]
    hand = sum(
        by_hand(lm, Ask((*piece.row(32)[: 33 - len(piece.continuation)],), piece.continuation), 4)[0]
        for piece in pieces
    )
    assert whole.nats_P == pytest.approx((hand,), abs=ATOL) and whole.n_tokens == 71
    assert list(Ask((1,), ()).pieces(4)) == []


def test_a_known_distribution() -> None:
    lm = loaded()
    with torch.no_grad():
        for p in lm.model.parameters():
            p.zero_()
    found = Scorer(lm.loaded, points(lm.loaded, [1, 4])).score(asks())
    for answer in found:
        assert answer.nats_P == pytest.approx([answer.n_tokens * np.log(257)] * 2, abs=1e-6)


def test_a_model_that_diverged_is_refused() -> None:
    lm = loaded()
    with torch.no_grad():
        lm.model.embed.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="not finite"):
        Scorer(lm.loaded, points(lm.loaded)).score(asks(1))


def test_points_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded()
    assert [point.name for point in points(lm.loaded)] == ["4"]
    assert [point.name for point in points(lm.loaded, [2, 1, 2], ["state:0.1", "fixed:2"])] == [
        "1",
        "2",
        "state:0.1",
        "fixed:2",
    ]
    with pytest.raises(UsageError, match="loops"):
        points(lm.loaded, [0])
    with pytest.raises(UsageError, match=r"unknown exit 'stat'.*did you mean 'state'"):
        points(lm.loaded, [], ["stat"])
    with pytest.raises(UsageError, match="batch_size=0"):
        Scorer(lm.loaded, points(lm.loaded), 0)
    monkeypatch.setattr(score, "BATCH_TOKENS", 1)
    assert len(list(Scorer(lm.loaded, points(lm.loaded))._batches([(1, 2), (1,)]))) == 2, "at least one row a time"


def test_loops_that_share_their_weights_have_every_depth() -> None:
    lm = loaded(n_loops=2)
    given = asks(3)
    found = numbers(Scorer(lm.loaded, points(lm.loaded, [2, 9])).score(given))
    deep = [by_hand(lm, ask, 9)[0] for ask in given]
    assert found[:, 1] == pytest.approx(deep, abs=ATOL)
    assert not np.allclose(found[:, 0], found[:, 1]), "control: 9 loops are not 2"
    for changes in (
        {"sharing": "untied"},
        {"sharing": {"kind": "lora", "rank": 2}},
        {"n_core": 0, "n_loops": 1, "inject": "none"},
    ):
        fixed = loaded(**{"n_loops": 2, **changes})
        with pytest.raises(UsageError, match=r"weights for n_loops=2 loops and no more|has nothing to loop"):
            points(fixed.loaded, [1, 3])


# -- texts ------------------------------------------------------------------------------------------------------------


def test_spaces_go_to_the_continuation() -> None:
    tokenizer = loaded().tokenizer
    encoder, eot = Encoder(tokenizer), tokenizer.eot

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text).tolist())

    asks = encoder.pairs([("ab  ", "cd"), ("ab", "  cd"), ("", "cd"), ("  ", "cd")])
    assert asks[0] == asks[1] == Ask(ids("ab"), ids("  cd"))
    assert asks[2] == Ask((eot,), ids("cd")) and asks[3] == Ask((eot,), ids("  cd"))
    assert Encoder(tokenizer, bos=True).pairs([("ab", "c")]) == [Ask((eot, *ids("ab")), ids("c"))]
    assert encoder.texts(["ab", ""]) == [Ask((eot,), ids("ab")), Ask((eot,), ())]
    with pytest.raises(UsageError, match="behind 'ab' has no token"):
        encoder.pairs([("ab", "")])


def test_texts_are_encoded_whole_and_split() -> None:
    """With merges across the border the tokens of the whole count, not those of the parts."""
    tokenizer = Bpe(vocab_size=300).build(["the cat sat on the mat, then the other cats sat"] * 30)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text).tolist())

    for context, after in (("the cat s", "at on the mat"), ("the", " cat"), ("on the mat,", " then")):
        (ask,) = Encoder(tokenizer).pairs([(context, after)])
        assert ask == Ask(ids(context), ids(context + after)[len(ids(context)) :])
    assert (*ids("the cat s"), *ids("at on the mat")) != ids("the cat sat on the mat"), "the control"
    assert ids("the cat sat") == ids("the cat sat")[: len(ids("the cat s"))]
    (ask,) = Encoder(tokenizer).pairs([("the cat s", "at")])
    assert ask == Ask(ids("the cat s"), ids("at")), "no token is left: each by itself"
