"""Law 2: one pass with keys kept is the full pass, however the tokens are cut, padded, batched or written again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alcoda.laws.law import LawBroken, Parts, close_logits, each, require
from alcoda.laws.subject import DEEP, EXACT, Subject, at_most, bitwise, depths, long_text, tokens
from alcoda.model.keys import KeyStore
from alcoda.model.lm import RecurrentLM

T = 12
PADDING = 5
"""The id that stands where there is no token."""


def in_chunks(model: RecurrentLM, ids_BT: Tensor, n_loops: int, cuts: Sequence[int], store: KeyStore) -> Tensor:
    """Logits of all tokens, run in chunks of the given lengths."""
    return torch.cat([model(chunk, n_loops, store=store) for chunk in ids_BT.split(list(cuts), 1)], 1)


@torch.no_grad()
def check_cached(model: RecurrentLM, n_loops: int, store: type[KeyStore] = KeyStore, n_tokens: int = T) -> None:
    """Prefill, chunked prefill and decoding are the full pass."""
    ids_BT, parts = tokens(2, n_tokens), Parts()
    full = model(ids_BT, n_loops)
    # A capacity of 2 makes the buffers grow several times.
    for what, cuts in {
        "decoding from the first token": [1] * n_tokens,
        "prefill of 7, then decoding": [7, *[1] * (n_tokens - 7)],
        "chunked prefill": [3, 1, 6, n_tokens - 10],
    }.items():
        with parts.part(what):
            close_logits(in_chunks(model, ids_BT, n_loops, cuts, store(capacity_tokens=2)), full, EXACT, "logits")
    parts.settle()


def cached(subject: Subject) -> None:
    """At each depth, and in a longer text."""
    ways = [(n, T) for n in depths(subject.config, DEEP)] + [(at_most(subject.config, 3), long_text(subject.config))]
    each(
        (f"{n} loops, {n_tokens} tokens", lambda n=n, k=n_tokens: check_cached(subject.model(), n, n_tokens=k))
        for n, n_tokens in ways
    )


@torch.no_grad()
def check_own_depth(model: RecurrentLM) -> None:
    """Rows that run several numbers of loops in one batch are those rows alone."""
    ids_BT, rows, parts = tokens(3, T), (4, 1, 2), Parts()
    together = model(ids_BT, max(rows), rows=rows)
    for row, n_loops in enumerate(rows):
        with parts.part(f"a row of {n_loops} loops"):
            close_logits(together[row : row + 1], model(ids_BT[row : row + 1], n_loops), EXACT, "logits")
    parts.settle()


def own_depth(subject: Subject) -> None:
    """At 4, 1 and 2 loops."""
    check_own_depth(subject.model())


# -- left padding -----------------------------------------------------------------------------------------------------

LENGTHS = (T, 7, 1)
N_NEW = 3


def left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, pos, live): rows that end together. Padding has position 0, which is also the first token's."""
    width = max(len(row) for row in rows)
    ids_BT = torch.stack([torch.cat([torch.full((width - len(row),), PADDING), row]) for row in rows])
    first_B1 = torch.tensor([[width - len(row)] for row in rows])
    pos_BT = torch.arange(width) - first_B1
    return ids_BT, pos_BT.clamp(min=0), pos_BT >= 0


@torch.no_grad()
def check_left_padded(model: RecurrentLM, n_loops: int, hides_padding: bool = True, tells_pos: bool = True) -> None:
    """Rows of several lengths in one batch are those rows alone, scored, prefilled and decoded on.

    Args:
        hides_padding: whether the model is told which tokens are padding (not, in a control).
        tells_pos: whether it is told the positions.
    """
    whole = [tokens(1, n + N_NEW, seed=n)[0] for n in LENGTHS]
    alone = [model(row[None], n_loops)[0] for row in whole]
    ids_BT, pos_BT, live_BT = left_padded([row[:-N_NEW] for row in whole])
    if not hides_padding:
        live_BT = torch.ones_like(live_BT)
    store, parts = KeyStore(), Parts()
    place = {"pos_BT": pos_BT if tells_pos else None, "live_BT": live_BT}
    scored = model(ids_BT, n_loops, **place)
    kept = model(ids_BT, n_loops, **place, store=store)
    new_BT = torch.stack([row[-N_NEW:] for row in whole])
    decoded = torch.cat([model(new_BT[:, i : i + 1], n_loops, store=store) for i in range(N_NEW)], 1)
    for row, n in enumerate(LENGTHS):
        at = range(n + N_NEW)
        for what, actual, expected, where in (
            (f"{n} tokens, left-padded, no store", scored[row, -n:], alone[row][:n], at[:n]),
            (f"{n} tokens, left-padded prefill", kept[row, -n:], alone[row][:n], at[:n]),
            (f"decoding on from {n} left-padded tokens", decoded[row], alone[row][n:], at[n:]),
        ):
            with parts.part(what):
                close_logits(actual, expected, EXACT, "logits", row, where)
    parts.settle()


def padded(subject: Subject) -> None:
    """At each depth."""
    each((f"{n} loops", lambda n=n: check_left_padded(subject.model(), n)) for n in depths(subject.config))


# -- rows that idle ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_idle_row(model: RecurrentLM, n_loops: int) -> None:
    """A chunk in which one row is all padding, at a position that the row has stored, leaves its keys alone."""
    whole_BT = tokens(2, 7)
    alone = model(whole_BT, n_loops)
    store = KeyStore()
    first = model(whole_BT[:, :3], n_loops, store=store)
    pos_BT, live_BT = torch.tensor([[3, 4, 5], [0, 0, 0]]), torch.tensor([[True] * 3, [False] * 3])
    second = model(whole_BT[:, 3:6], n_loops, pos_BT=pos_BT, live_BT=live_BT, store=store)
    third = model(torch.stack([whole_BT[0, 6:7], whole_BT[1, 3:4]]), n_loops, store=store)
    close_logits(first, alone[:, :3], EXACT, "before")
    close_logits(second[0], alone[0, 3:6], EXACT, "the row that went on", 0, range(3, 6))
    close_logits(third[0], alone[0, 6:7], EXACT, "the row that went on, after the other idled", 0, [6])
    close_logits(third[1], alone[1, 3:4], EXACT, "the row that idled, after it idled", 1, [3])


@torch.no_grad()
def check_row_of_padding(model: RecurrentLM, n_loops: int) -> None:
    """A row of padding alone spoils no other. Its queries see no key at all; what they compute must be a number."""
    ids_BT = tokens(2, 5)
    live_BT = torch.tensor([[True] * 5, [False] * 5])
    pos_BT = torch.arange(5).expand(2, 5) * live_BT
    store = KeyStore()
    logits = model(ids_BT, n_loops, pos_BT=pos_BT, live_BT=live_BT, store=store)
    close_logits(logits[0], model(ids_BT[:1], n_loops)[0], EXACT, "the row beside one of padding")
    bad = [(row, t) for row, t in (~logits.isfinite()).any(-1).nonzero().tolist()]
    require(not bad, "a row of padding computes what is not a number", bad)
    new_BT = tokens(2, 1, seed=9)
    later = model(new_BT, n_loops, store=store)
    whole = model(torch.cat([ids_BT[:1], new_BT[:1]], 1), n_loops)[0, -1:]
    close_logits(later[0], whole, EXACT, "the row beside one of padding, one token on", 0, [5])
    close_logits(later[1], model(new_BT[1:], n_loops)[0], EXACT, "the row that begins after its padding", 1)


def idle(subject: Subject) -> None:
    """A row that waits, at each depth, and one of padding alone."""
    checks = [(f"{n} loops", lambda n=n: check_idle_row(subject.model(), n)) for n in depths(subject.config)]
    deepest = depths(subject.config)[-1]
    each([*checks, ("a row of padding", lambda: check_row_of_padding(subject.model(), deepest))])


# -- batch-mates ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_batch_mates(model: RecurrentLM, n_loops: int) -> None:
    """What else is in the batch changes nothing in a row: at the same width to the bit, alone within `EXACT`."""
    one, other = tokens(6, T), tokens(6, T, seed=1)
    other[0] = one[0]
    equal = bitwise(model.config)
    full = model(one, n_loops)[0]
    close_logits(model(other, n_loops)[0], full, equal, "batch-mates change a full pass")
    cuts = [5, *[1] * (T - 5)]
    kept, others = (in_chunks(model, ids_BT, n_loops, cuts, KeyStore())[0] for ids_BT in (one, other))
    close_logits(others, kept, equal, "batch-mates change decoding")
    close_logits(model(one[:1], n_loops)[0], full, EXACT, "alone and in a batch")


def batch_mates(subject: Subject) -> None:
    """At each depth."""
    each((f"{n} loops", lambda n=n: check_batch_mates(subject.model(), n)) for n in depths(subject.config))


# -- writing again, and order -----------------------------------------------------------------------------------------


@torch.no_grad()
def check_written_again(model: RecurrentLM, n_loops: int, store: type[KeyStore] = KeyStore) -> None:
    """From token 4 on the text is written anew, at the positions that it had."""
    old_BT, from_, parts = tokens(2, T), 4, Parts()
    new_BT = old_BT.clone()
    new_BT[:, from_:] = tokens(2, T - from_, seed=7)
    expected = model(new_BT, n_loops)[:, from_:]
    pos_BT = torch.arange(from_, T).expand(2, -1)
    next_B1 = tokens(2, 1, seed=8)
    whole = model(torch.cat([new_BT, next_B1], 1), n_loops)[:, -1:]
    for cuts in ([T - from_], [1] * (T - from_), [3, T - from_ - 3]):
        keys = store()
        model(old_BT, n_loops, store=keys)
        chunks = zip(new_BT[:, from_:].split(cuts, 1), pos_BT.split(cuts, 1), strict=True)
        again = [model(ids, n_loops, pos_BT=pos, store=keys) for ids, pos in chunks]
        with parts.part(f"written again in chunks of {cuts}"):
            close_logits(torch.cat(again, 1), expected, EXACT, "logits", tokens=range(from_, T))
            # And on: the next position follows the text, not the count of keys.
            close_logits(model(next_B1, n_loops, store=keys), whole, EXACT, "the token after it", tokens=[T])
    parts.settle()


def written_again(subject: Subject) -> None:
    """At each depth."""
    each((f"{n} loops", lambda n=n: check_written_again(subject.model(), n)) for n in depths(subject.config))


@torch.no_grad()
def check_order(model: RecurrentLM, n_loops: int) -> None:
    """In one pass, a token is where its position says, not where it lies."""
    ids_BT = tokens(2, T)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0))
    shuffled = model(ids_BT[:, order], n_loops, pos_BT=order.expand(2, -1))
    expected = model(ids_BT, n_loops)[:, order]
    close_logits(shuffled, expected, EXACT, "shuffled tokens with their positions", tokens=order.tolist())


def order(subject: Subject) -> None:
    """At the deepest."""
    check_order(subject.model(), depths(subject.config)[-1])


# -- depths -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_one_depth(model: RecurrentLM, first: int, then: int) -> None:
    """A store of ``first`` loops refuses ``then`` loops, and goes on at its own."""
    ids_BT, store = tokens(2, T), KeyStore()
    model(ids_BT[:, :-1], first, store=store)
    try:
        model(ids_BT[:, -1:], then, store=store)
    except ValueError as error:
        wanted = "one store serves one number of loops; start a new store"
        require(wanted in str(error), f"a store of {first} loops refuses {then} without saying so: {error}")
    else:
        raise LawBroken(f"a store of {first} loops takes {then} loops: keys of some loops are missing")
    actual, expected = model(ids_BT[:, -1:], first, store=store), model(ids_BT, first)[:, -1:]
    close_logits(actual, expected, EXACT, "after the refusal", tokens=[T - 1])


def one_depth(subject: Subject) -> None:
    """Deeper, and shallower."""
    low, high = depths(subject.config, (1, 3))
    each(
        (f"{a} loops, then {b}", lambda a=a, b=b: check_one_depth(subject.model(), a, b))
        for a, b in ((low, high), (high, low))
    )


@torch.no_grad()
def check_readouts(model: RecurrentLM, loops: Sequence[int]) -> None:
    """Depths that are read from one run are runs of their own, to the bit."""
    ids_BT, parts = tokens(2, T), Parts()
    for n_loops, readout in zip(loops, model.readouts(ids_BT, loops), strict=True):
        with parts.part(f"{n_loops} of {loops[-1]} loops"):
            close_logits(model.logits(readout.y_BTD), model(ids_BT, n_loops), 0.0, "logits")
    parts.settle()


def readouts(subject: Subject) -> None:
    """At several depths."""
    check_readouts(subject.model(), depths(subject.config, (1, 2, 4)))
