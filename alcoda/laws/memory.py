"""Law 4 of a memory: reading token by token is the truth; every way to train on it or to prefill with it comes to it.

Models here read the memories that their own passes make, not those of `alcoda.laws.subject.reminded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from alcoda.laws.causal import changed_at
from alcoda.laws.decode import left_padded
from alcoda.laws.law import LawBroken, Parts, Place, close_logits, each, require
from alcoda.laws.subject import EXACT, Subject, at_most, bitwise, make_plain, tokens
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.memory import NoMemory
from alcoda.model.passes import Pass, run_passes
from alcoda.model.prefill import (
    SUBSETS,
    InterleavedPrefill,
    IteratedPrefill,
    Prefill,
    Reader,
    ZeroPrefill,
    prefills,
)
from alcoda.training.passes import Interleaved, Passes, Refined, Sequential

B, T = 2, 5
LOOPS = 2
SETTLED = 1e-13
"""A tolerance of iterated prefill that only memories which stand still reach."""


def loops_of(config: ModelConfig) -> int:
    """`LOOPS`, or as many as the model has."""
    return at_most(config, LOOPS)


def has_none(subject: Subject) -> str | None:
    """The exception: a model that tells no token of earlier ones but by their keys."""
    memory = subject.config.memory
    return None if memory.carries else f"memory {memory.kind} carries nothing from token to token"


def is_plain(subject: Subject) -> str | None:
    """The exception of the law on what a memory starts as."""
    memory = subject.config.memory
    return None if memory.carries or memory.mixes_keys else f"memory {memory.kind} adds nothing"


# -- passes and token by token ----------------------------------------------------------------------------------------


def newest(model: RecurrentLM, passes: Passes, ids_BT: Tensor) -> Tensor:
    """Logits of every token, each of the last pass that ran it."""
    n_tokens = ids_BT.size(1)
    found = ids_BT.new_zeros(*ids_BT.shape, model.config.vocab_size, dtype=torch.float64)
    for one, readouts in run_passes(model, ids_BT, passes.of(n_tokens), [loops_of(model.config)]):
        found[:, list(one.tokens)] = model.logits(readouts[-1].y_BTD).detach()
    return found


@torch.no_grad()
def read(model: RecurrentLM, ids_BT: Tensor, prefill: Prefill | None = None, cuts: Sequence[int] = ()) -> Tensor:
    """Logits of every token as a reader reads them, in chunks of these lengths (one where there are none)."""
    # A capacity of 2 makes the buffers grow several times.
    reader = Reader(model, loops_of(model.config), capacity_tokens=2)
    chunks = ids_BT.split(list(cuts) or ids_BT.size(1), 1)
    return model.logits(torch.cat([reader.read(chunk, prefill) for chunk in chunks], 1))


def check_refinement(model: RecurrentLM) -> None:
    """In as many subsets or passes as there are tokens, a token's last state is that of reading one by one; and
    prefill is training's twin in any number of them."""
    ids_BT, parts = tokens(B, T), Parts()
    truth = read(model, ids_BT)
    for what, passes in {
        f"{T} subsets": Interleaved(subsets=T),
        "one by one": Sequential(),
        f"{T} refinements": Refined(passes=T),
    }.items():
        with parts.part(what):
            close_logits(newest(model, passes, ids_BT), truth, EXACT, "the last state is not that of reading")
    for what, passes, prefill in (
        ("2 subsets", Interleaved(subsets=2), InterleavedPrefill(subsets=2)),
        ("2 refinements", Refined(passes=2), IteratedPrefill(max_passes=2, tolerance=SETTLED)),
    ):
        with parts.part(what):
            trained = newest(model, passes, ids_BT)
            close_logits(read(model, ids_BT, prefill), trained, EXACT, "prefill is not as training")
            if what == "2 subsets":
                off = (trained - truth).abs().max()
                require(off > 1e-6, "positive control: the memory changes nothing that a second subset would not")
    parts.settle()


def refinement(subject: Subject) -> None:
    """At two loops."""
    check_refinement(make_plain(subject.config, subject.seed))


# -- zero memories, and none ------------------------------------------------------------------------------------------


@torch.no_grad()
def check_zero_memory(model: RecurrentLM) -> None:
    """Zero memories, said or left out, are the first pass of training and the prefill of that name."""
    ids_BT, n_loops = tokens(B, T), loops_of(model.config)
    zeros_BTD = torch.zeros(B, T, model.config.d_model, dtype=torch.float64)
    said = model(ids_BT, n_loops, memory_BTD=zeros_BTD)
    equal = bitwise(model.config)
    close_logits(model(ids_BT, n_loops), said, equal, "no memories are not zero memories")
    _, (first,) = next(run_passes(model, ids_BT, Interleaved().of(T), [n_loops]))
    close_logits(model.logits(first.y_BTD), said, equal, "the first pass of training has not zero memories")
    if model.config.route.causal_at_eval:
        close_logits(read(model, ids_BT, ZeroPrefill()), said, EXACT, "prefill zero has not zero memories")
        in_chunks = read(model, ids_BT, ZeroPrefill(), (3, 1, T - 4))
        close_logits(in_chunks, said, EXACT, "chunked prefill zero is not the whole one")
    # Random: of a constant, a norm that takes the mean away leaves nothing.
    other_BTD = torch.randn(zeros_BTD.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    told = model(ids_BT, n_loops, memory_BTD=other_BTD)
    require((told - said).abs().max() > 1e-6, "positive control: other memories change nothing")


def zero_memory(subject: Subject) -> None:
    """Of random weights, at two loops."""
    check_zero_memory(make_plain(subject.config, subject.seed))


@torch.no_grad()
def check_without_memory(config: ModelConfig, seed: int = 0) -> None:
    """A fresh model with zero memories, and without the embedding's term, is the one that has no memory, to the bit."""
    memory = config.memory
    if getattr(memory, "beta", None):
        config = config.model_copy(update={"memory": memory.model_copy(update={"beta": 0.0})})
    model = RecurrentLM(config).double().init(seed).eval()
    bare = RecurrentLM(config.model_copy(update={"memory": NoMemory()})).double().eval()
    weights = model.state_dict()
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()})
    ids_BT, n_loops = tokens(B, T), loops_of(config)
    close_logits(model(ids_BT, n_loops), bare(ids_BT, n_loops), 0.0, "at its start, it is not the model without memory")


def without_memory(subject: Subject) -> None:
    """Of fresh weights, at two loops."""
    check_without_memory(subject.config, subject.seed)


# -- causality --------------------------------------------------------------------------------------------------------


def check_refinement_is_causal(model: RecurrentLM, subsets: int, n_tokens: int = 7) -> None:
    """In every pass, with the kernels of training: a token changes no logits before it, and its own."""
    places = (1, n_tokens // 2, n_tokens - 1)
    ids_BT, changed_BT = changed_at(places, n_tokens, model.config.vocab_size)

    def logits(ids_BT: Tensor) -> Iterator[tuple[Pass, Tensor]]:
        passes = Interleaved(subsets=subsets).of(n_tokens)
        for one, (readout,) in run_passes(model, ids_BT, passes, [loops_of(model.config)]):
            yield one, model.logits(readout.y_BTD).detach()

    leaks: list[Place] = []
    worst, moved = 0.0, 0.0
    for n, ((one, before), (_, after)) in enumerate(zip(logits(ids_BT), logits(changed_BT), strict=True)):
        off_BT = (before - after).abs().amax(-1)
        moved = max(moved, off_BT.max().item())
        for row, t in enumerate(places):
            off = dict(zip(one.tokens, off_BT[row].tolist(), strict=True))
            found = [at for at, value in off.items() if at < t and not value <= bitwise(model.config)]
            leaks += [(row, at) for at in found]
            worst = max([worst, *(off[at] for at in found)])
            # A token that a route lets out of every loop may change nothing; not every one of them.
            if t in off and not model.config.route.gathers:
                require(off[t] > 1e-6, f"pass {n}: the token at {t} changes nothing at {t}", [(row, t)])
    require(moved > 1e-6, "no changed token changes anything at all", [*enumerate(places)])
    if leaks:
        raise LawBroken(f"leak: a changed token changes logits before it, by up to {worst:.3g}", leaks)


def refinement_is_causal(subject: Subject) -> None:
    """In two subsets and in three."""
    model = make_plain(subject.config, subject.seed)
    each((f"{n} subsets", lambda n=n: check_refinement_is_causal(model, n)) for n in (2, 3))


# -- prefill ----------------------------------------------------------------------------------------------------------

LENGTHS = (T, T - 1, 1)
N_NEW = 1
FIRST = 2
"""Tokens of the first of two chunks: in it one row is all padding, and in the next, strides of rows are not as long."""


@torch.no_grad()
def check_prefill(model: RecurrentLM) -> None:
    """Exact prefill in any chunks, and the others with as many passes as tokens, are reading one by one, and what is
    decoded after them is too."""
    ids_BT, parts = tokens(B, T + N_NEW), Parts()
    truth, then = read(model, ids_BT, cuts=[1] * (T + N_NEW)), [1] * N_NEW
    for what, prefill, cuts in (
        ("exact, in chunks", None, [3, T - 3, *then]),
        (f"{T} subsets", InterleavedPrefill(subsets=T), [T, *then]),
        ("as many subsets as a chunk has tokens", InterleavedPrefill(subsets=3), [3, T - 3, *then]),
        ("as many passes as a chunk has tokens", IteratedPrefill(max_passes=3, tolerance=SETTLED), [3, T - 3, *then]),
    ):
        with parts.part(what):
            close_logits(read(model, ids_BT, prefill, cuts), truth, EXACT, "prefill and decoding are not one by one")
    parts.settle()


@torch.no_grad()
def check_prefill_in_batches(model: RecurrentLM, prefill: Prefill) -> None:
    """Left-padded rows of several lengths, and what is decoded after them, are those rows alone: what else is in the
    batch changes nothing."""
    whole = [tokens(1, n + N_NEW, seed=n)[0] for n in LENGTHS]
    n_loops, parts = loops_of(model.config), Parts()
    ids_BT, pos_BT, live_BT = left_padded([row[:-N_NEW] for row in whole])
    reader = Reader(model, n_loops)
    halves = (slice(0, FIRST), slice(FIRST, None))
    read_BTD = [reader.read(ids_BT[:, at], prefill, pos_BT[:, at], live_BT[:, at]) for at in halves]
    new_BT = torch.stack([row[-N_NEW:] for row in whole])
    read_BTD += [reader.read(new_BT[:, i : i + 1], prefill) for i in range(N_NEW)]
    together = model.logits(torch.cat(read_BTD, 1))
    for row, n in enumerate(LENGTHS):
        with parts.part(f"{n} tokens"):
            first = max(n - (T - FIRST), 0)  # what of the row is in the first chunk
            cuts = [*([first] if first else []), n - first, *[1] * N_NEW]
            alone = read(model, whole[row][None], prefill, cuts)[0]
            close_logits(together[row, -len(alone) :], alone, EXACT, f"prefill {prefill.kind}, left-padded", row)
    parts.settle()


@torch.no_grad()
def check_rows_stop_alone(model: RecurrentLM) -> None:
    """A row stops when its own memories do, at a tolerance between the changes of the rows in their first pass."""
    ids_BT, parts = tokens(3, T), Parts()
    passes = run_passes(model, ids_BT, Refined(passes=1).of(T), [loops_of(model.config)])
    zero_BTD, once_BTD = (readout.source_BTD for _, (readout,) in passes)
    assert zero_BTD is not None and once_BTD is not None
    change_B = (once_BTD - zero_BTD).square().mean(-1).sqrt().amax(1)
    prefill = IteratedPrefill(tolerance=(change_B.min() + change_B.max()).item() / 2)
    together = read(model, ids_BT, prefill)
    for row in range(len(ids_BT)):
        with parts.part(f"row {row}"):
            alone = read(model, ids_BT[row : row + 1], prefill)
            close_logits(together[row], alone[0], EXACT, "batch-mates change when a row stops", row)
    parts.settle()


def prefill_then_decode(subject: Subject) -> None:
    """Of every prefill there is, at two loops."""
    model = make_plain(subject.config, subject.seed)
    batches = [
        (f"{p.kind}, left-padded", lambda p=p: check_prefill_in_batches(model, p.resolve(SUBSETS)))
        for p in prefills().values()
    ]
    stops = ("iterated", lambda: check_rows_stop_alone(model))
    each([("prefill", lambda: check_prefill(model)), *batches, stops])
