"""Law 3: tokens that leave the loop early (copy-on-exit). One pass over a text is what reading token by token computes.

Models here read the memories that their own passes make. Thresholds lie in gaps between scores, so that about half of
the tokens leave at a loop, and none is decided by a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from alcoda.depth.exiting import Exits, pick_coda_keys
from alcoda.depth.record import CodaKeys, ProbeWeights, fingerprint
from alcoda.depth.replay import Replayed, replay
from alcoda.depth.rules import NEVER, ExitRule, Fixed, Probe, Scored, StateChange, TraceRule, rules
from alcoda.depth.sequential import ExitReader
from alcoda.depth.watch import ExitTest
from alcoda.errors import UsageError
from alcoda.laws.causal import changed_at
from alcoda.laws.law import LawBroken, Parts, Place, close_logits, require
from alcoda.laws.subject import EXACT, Subject, at_most, bitwise, make_plain, needs_loops, tokens
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reader

B, T = 2, 6
LOOPS = 3
MODES: tuple[CodaKeys, ...] = ("at_exit", "per_loop")
LEAST_GAP = 1e-9
"""Between scores on the two sides of a threshold: far above what sums in another order change."""


def loops_of(model: RecurrentLM) -> int:
    """`LOOPS`, or as many as the model has."""
    return at_most(model.config, LOOPS)


def refuses_exits(subject: Subject) -> str | None:
    """The exception: a model whose tokens cannot leave, which says so."""
    reason = needs_loops(subject)
    if reason is not None:
        return reason
    try:
        NEVER.check(subject.config, at_most(subject.config, LOOPS))
    except UsageError as error:
        return f"declared: {error}"
    return None


def projects_keys(subject: Subject) -> str | None:
    """The exception of the law on frozen keys."""
    if subject.config.keys.own_keys:
        return f"keys {subject.config.keys.kind}: loops make keys of their own, and a copy is not the same"
    return refuses_exits(subject)


# -- rules at work ----------------------------------------------------------------------------------------------------


def between(scores: Tensor) -> float:
    """A threshold in the widest gap of the middle half of some scores; 0 where they are all the same."""
    x = scores[scores.isfinite()].double().sort().values
    middle = x[len(x) // 4 : len(x) - len(x) // 4]
    gaps = middle.diff()
    if not len(gaps) or gaps.max() < LEAST_GAP:
        return 0.0
    at = int(gaps.argmax())
    return float(middle[at] + middle[at + 1]) / 2


def at_work(model: RecurrentLM, ids_BT: Tensor, kinds: Collection[str] = ()) -> Iterator[tuple[str, ExitTest]]:
    """Every rule that the model can be left by, at thresholds by which tokens of this text leave at several loops.

    Args:
        kinds: these only.
    """
    n_loops = loops_of(model)
    for kind, choice in rules().items():
        rule, given = choice.model_validate({"kind": kind}), None
        if choice is TraceRule or (kinds and kind not in kinds):
            continue
        if isinstance(rule, Probe):
            generator = torch.Generator().manual_seed(8)
            weight_D = torch.randn(model.config.d_model, generator=generator, dtype=torch.float64) / 4
            given = ProbeWeights(weight_D, torch.zeros(n_loops), "argmax_changes", fingerprint(model))
        if _refused(rule, model):
            continue
        if isinstance(rule, Scored):
            scores_BTR = replay(model, ids_BT, rule.build(model, n_loops, given), scores=True).scores_BTR
            assert scores_BTR is not None
            rule = rule.model_copy(update={"threshold": tuple(between(s) for s in scores_BTR.flatten(0, 1).unbind(-1))})
        elif "loops" in type(rule).model_fields:
            rule = rule.model_copy(update={"loops": 1})
        yield kind, rule.build(model, n_loops, given)
        if isinstance(rule, StateChange) and n_loops > 1:
            late = rule.model_copy(update={"horizon": 1, "min_loops": 2})
            yield f"{kind}, a loop late", late.build(model, n_loops)


def modes(test: ExitTest) -> Sequence[CodaKeys]:
    """The coda keys that a rule may have."""
    return [mode for mode in MODES if test.coda_keys in (None, mode)]


def token_by_token(
    model: RecurrentLM, ids_BT: Tensor, test: ExitTest, coda_keys: CodaKeys | None = None, cuts: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Logits and depths of every token, as decoding computes them; or in chunks of these lengths."""
    # A capacity of 2 makes the buffers grow several times.
    reader = ExitReader(model, Exits(test, pick_coda_keys(test, coda_keys)), capacity_tokens=2)
    chunks = ids_BT.split(list(cuts) or 1, 1)
    logits_BTV = model.logits(torch.cat([reader.read(chunk) for chunk in chunks], 1))
    return logits_BTV, reader.depths_BT()


def same_depths(actual_BT: Tensor, expected_BT: Tensor, what: str, rows: Sequence[int] | None = None) -> None:
    """`LawBroken` where a token ran another number of loops."""
    found = (actual_BT != expected_BT).nonzero().tolist()
    places: list[Place] = [(i if rows is None else rows[i], t) for i, t in found]
    require(not places, f"{what}: tokens leave after other loops", places)


# -- laws -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_never(model: RecurrentLM, kinds: Collection[str] = ()) -> None:
    """A rule that never fires is the fixed depth, and one that fires at a loop is that depth: to the bit."""
    ids_BT, n_loops, parts = tokens(B, T), loops_of(model), Parts()

    def plain(loops: int) -> Tensor:
        if model.config.memory.carries:
            return Reader(model, loops).read(ids_BT)
        return next(model.readouts(ids_BT, [loops])).y_BTD

    ways: list[tuple[str, ExitRule, int]] = [
        (f"{kind}, threshold 0", rule, n_loops) for kind, rule in zeros(model, kinds)
    ]
    ways += [(f"fixed {n}", Fixed(loops=n), n) for n in range(1, n_loops + 1)]
    for what, test, depth in [(w, rule.build(model, n_loops), depth) for w, rule, depth in ways]:
        for mode in modes(test)[: 2 if depth == n_loops else 1]:
            with parts.part(f"{what}, coda keys {mode}"):
                found = replay(model, ids_BT, test, coda_keys=mode)
                same_depths(found.depths_BT, torch.full_like(ids_BT, depth), "fixed depth")
                logits = model.logits(found.y_BTD), model.logits(plain(depth))
                close_logits(*logits, bitwise(model.config), "not the fixed depth")
    parts.settle()


def zeros(model: RecurrentLM, kinds: Collection[str]) -> Iterator[tuple[str, Scored]]:
    """Rules that need nothing from a file, at threshold 0."""
    for kind, choice in rules().items():
        if issubclass(choice, Scored) and choice is not Probe and (not kinds or kind in kinds):
            rule = choice.model_validate({"kind": kind, "threshold": 0.0})
            if not _refused(rule, model):
                yield kind, rule


def _refused(rule: ExitRule, model: RecurrentLM) -> bool:
    try:
        rule.check(model.config, loops_of(model))
    except UsageError:
        return True
    return False


def mixes(found: Replayed) -> bool:
    """Whether tokens left at several loops: a law on tokens that all leave together would say little."""
    return bool((found.depths_BT != found.depths_BT[0, 0]).any())


@torch.no_grad()
def check_trace(model: RecurrentLM, kinds: Collection[str] = ()) -> None:
    """Recorded depths give the run that recorded them, to the bit; with other coda keys they are refused."""
    ids_BT, parts = tokens(B, T), Parts()
    for what, test in at_work(model, ids_BT, kinds):
        for mode in modes(test):
            with parts.part(f"{what}, coda keys {mode}"):
                found = replay(model, ids_BT, test, coda_keys=mode)
                traced = TraceRule().build(model, test.n_loops, found.trace())
                again = replay(model, ids_BT, traced)
                same_depths(again.depths_BT, found.depths_BT, "trace")
                close_logits(model.logits(again.y_BTD), model.logits(found.y_BTD), 0.0, "trace")
                _refuses_others(model, ids_BT, traced, mode)
    parts.settle()


def _refuses_others(model: RecurrentLM, ids_BT: Tensor, traced: ExitTest, mode: CodaKeys) -> None:
    """`LawBroken` unless a trace is refused with coda keys that it was not recorded with."""
    for other in MODES:
        if other != mode:
            try:
                replay(model, ids_BT, traced, coda_keys=other)
            except UsageError as error:
                require("coda_keys" in str(error), f"refused for another reason than its coda keys: {error}")
            else:
                raise LawBroken(f"a trace with coda keys {mode} is replayed with {other}")


@torch.no_grad()
def check_replay(model: RecurrentLM, kinds: Collection[str] = ()) -> None:
    """One pass over the text, reading it token by token and reading it in chunks: tokens, depths and logits."""
    ids_BT, parts, mixed = tokens(B, T), Parts(), False
    for what, test in at_work(model, ids_BT, kinds):
        for mode in modes(test):
            found = replay(model, ids_BT, test, coda_keys=mode)
            mixed |= mixes(found)
            ways = [("token by token", [1] * T), ("in chunks", [2, 1, T - 3])]
            for how, cuts in ways[: 2 if mode == modes(test)[0] else 1]:
                with parts.part(f"{what}, coda keys {mode}, {how}"):
                    logits, depths_BT = token_by_token(model, ids_BT, test, mode, cuts)
                    same_depths(depths_BT, found.depths_BT, "replay is not reading")
                    close_logits(model.logits(found.y_BTD), logits, EXACT, "replay is not reading")
                    require(
                        (model.logits(found.y_BTD).argmax(-1) == logits.argmax(-1)).all(), "replay gives other tokens"
                    )
    require(mixed or (not parts.broken and bool(kinds)), "no rule makes tokens leave at several loops")
    parts.settle()


@torch.no_grad()
def check_causal(model: RecurrentLM, kinds: Collection[str] = ()) -> None:
    """A token changes neither depth nor logits of a token before it."""
    places = (1, T // 2, T - 1)
    ids_BT, changed_BT = changed_at(places, T, model.config.vocab_size)
    parts = Parts()
    for what, test in at_work(model, ids_BT, kinds):
        with parts.part(what):
            before, after = (replay(model, ids, test) for ids in (ids_BT, changed_BT))
            logits = [model.logits(one.y_BTD) for one in (before, after)]
            for row, t in enumerate(places):
                rows = slice(row, row + 1)
                same_depths(after.depths_BT[rows, :t], before.depths_BT[rows, :t], "a later token", [row])
                close_logits(logits[1][row, :t], logits[0][row, :t], bitwise(model.config), "a later token", row)
    parts.settle()


LENGTHS = (T, T - 2, 1)


@torch.no_grad()
def check_batches(model: RecurrentLM, kinds: Collection[str] = ()) -> None:
    """Rows of several lengths in one batch, padded on either side, are those rows alone."""
    rows = [tokens(1, n, seed=n)[0] for n in LENGTHS]
    parts = Parts()
    for what, test in at_work(model, torch.stack([rows[0], tokens(1, T, seed=9)[0]]), kinds):
        for side in ("left", "right"):
            ids_BT, live_BT = padded(rows, side == "left")
            found = replay(model, ids_BT, test, live_BT=live_BT)
            with parts.part(f"{what}, {side}"):
                same_depths((found.depths_BT == 0).long(), (~live_BT).long(), "padding runs loops")
                for row, ids in enumerate(rows):
                    alone, live_T = replay(model, ids[None], test), live_BT[row]
                    same_depths(found.depths_BT[row, live_T][None], alone.depths_BT, f"{side}-padded", [row])
                    logits = model.logits(found.y_BTD)[row, live_T], model.logits(alone.y_BTD)[0]
                    close_logits(*logits, EXACT, f"{side}-padded", row)
    parts.settle()


def padded(rows: Sequence[Tensor], left: bool) -> tuple[Tensor, Tensor]:
    """(ids, live) of rows of several lengths."""
    width = max(map(len, rows))
    ids_BT, live_BT = torch.full((len(rows), width), 5), torch.zeros(len(rows), width, dtype=torch.bool)
    for row, ids in enumerate(rows):
        at = slice(width - len(ids), None) if left else slice(len(ids))
        ids_BT[row, at], live_BT[row, at] = ids, True
    return ids_BT, live_BT


@torch.no_grad()
def check_frozen_keys(model: RecurrentLM, kinds: Collection[str] = ()) -> None:
    """Keys that loops do not make are the same whether those of tokens that are out are copied or made anew."""
    ids_BT, parts = tokens(B, T), Parts()
    for what, test in at_work(model, ids_BT, kinds):
        for mode in modes(test):
            with parts.part(f"{what}, coda keys {mode}"):
                copied, anew = (
                    replay(model, ids_BT, test, coda_keys=mode, recompute_keys=again) for again in (False, True)
                )
                same_depths(anew.depths_BT, copied.depths_BT, "keys made anew")
                logits = model.logits(anew.y_BTD), model.logits(copied.y_BTD)
                close_logits(*logits, bitwise(model.config), "keys made anew")
    parts.settle()


OF_A_MODEL = ("state", "kl")
"""Rules that are checked on a model, one of states and one of logits: any other differs in its score alone. All of them
are checked on the models of tests/laws."""


def _of(check: Callable[[RecurrentLM, Collection[str]], None]) -> Callable[[Subject], None]:
    return lambda subject: check(make_plain(subject.config, subject.seed), OF_A_MODEL)


never, trace, replayed, causal, batches, frozen_keys = (
    _of(check) for check in (check_never, check_trace, check_replay, check_causal, check_batches, check_frozen_keys)
)
