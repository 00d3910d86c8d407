"""One pass of a model whose tokens leave the loop when a rule says so: copy-on-exit (docs/design, section 3).

A token that leaves after loop d keeps its state, and its keys of loop d stand for all deeper loops. The pass runs whole
rows, loop by loop, and freezes what is out: exact, and no faster than the full depth until all are out; or, compact, it
runs those that are still in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alcoda.depth.record import CodaKeys
from alcoda.depth.watch import ExitTest, Kept, Seen, Where
from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.exit_keys import CODA, CopiedKeys, LastKeys
from alcoda.model.gather import put_tokens, tokens_at
from alcoda.model.keys import CORE
from alcoda.model.lm import RecurrentLM
from alcoda.model.state import Begun, Readout, State


class Exits(NamedTuple):
    """How tokens leave.

    Attributes:
        test: when.
        coda_keys: with which keys the coda reads them.
        recompute_keys: a control: tokens that are out make keys anew at each deeper loop, from the state that they
            keep, where copy-on-exit copies.
        readout_only: no token leaves: all run all loops, and where one would have left, that loop's output is its own.
            An upper bound of quality, not what can be served.
        keep_scores: whether the scores are wanted.
        cache: what they leave in the core's slots of the cache.
        compact: whether tokens that are out are left out of a loop's work, once they are so many that it pays. Equal
            but for rounding, which then is of what else is in the pass.
    """

    test: ExitTest
    coda_keys: CodaKeys
    recompute_keys: bool = False
    readout_only: bool = False
    keep_scores: bool = False
    cache: CachePolicy = PER_LOOP
    compact: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        """Those of which tokens that are out keep their keys."""
        core = () if self.recompute_keys else (CORE,)
        return (*core, CODA) if self.coda_keys == "per_loop" else core

    def n_slots(self) -> dict[str, int]:
        """By stage, how many loops have slots, for `CopiedKeys`."""
        n_loops = self.test.n_loops
        core = self.test.model.config.keys.n_slots(n_loops)
        return {stage: core if stage == CORE else n_loops for stage in self.stages}


def pick_coda_keys(test: ExitTest, asked: CodaKeys | None) -> CodaKeys:
    """The coda keys that are asked for, or those that the rule takes; UsageError where they do not fit."""
    if asked not in (None, "at_exit", "per_loop"):
        raise UsageError(f"coda_keys={asked!r}: at_exit or per_loop")
    if asked is None or test.coda_keys in (None, asked):
        return asked or test.coda_keys or "at_exit"
    why = "looks at logits after every loop" if test.needs_logits else f"was recorded with coda keys {test.coda_keys}"
    raise UsageError(f"coda_keys {asked!r}: this exit rule {why}; set coda_keys to {test.coda_keys}, or leave it out")


class Ran(NamedTuple):
    """What came of a pass.

    Attributes:
        out: the model at the depth of each token.
        depths_BT: loops that each ran; 0 for padding.
        scores_BTR: of the rule after each loop, if they are kept: NaN where it was not asked.
    """

    out: Readout
    depths_BT: Tensor
    scores_BTR: Tensor | None


@torch.no_grad()
def run_exits(
    model: RecurrentLM,
    ids_BT: Tensor,
    exits: Exits,
    store: LastKeys | CopiedKeys,
    memory_BTD: Tensor | None = None,
    pos_BT: Tensor | None = None,
    live_BT: Tensor | None = None,
) -> Ran:
    """One pass of a model in evaluation mode; arguments as `RecurrentLM.begin`."""
    first, n_loops = store.n_tokens, exits.test.n_loops
    begun, state = model.begin(ids_BT, n_loops, memory_BTD=memory_BTD, pos_BT=pos_BT, live_BT=live_BT, store=store)
    rows = _Rows(model, exits, ids_BT, live_BT, state, first)
    reads_loops = exits.coda_keys == "per_loop" or exits.readout_only
    out: Readout | None = None
    for loop in range(n_loops):
        before, state = state, _loop(model, begun, state, loop, store.active_BT, exits.compact)
        here = model.read_out(begun, state, loop) if reads_loops else None
        leaves_BT = rows.look(loop + 1, before, state, here)
        if here is not None:
            out = _picked(out, here, leaves_BT)
        if not exits.readout_only:
            # What is padding is out after the first loop, which gives it keys of the right form.
            store.leave(loop, leaves_BT if loop or live_BT is None else leaves_BT | ~live_BT)
            store.active_BT = rows.active_BT()
        if rows.all_left and not exits.recompute_keys:
            break
    store.active_BT = None
    out = model.read_out(begun, state, n_loops - 1) if out is None else out
    return Ran(out, rows.depths_BT, rows.scores_BTR)


COMPACT = 0.75
"""Below this share of tokens that are in, it pays to gather them: keys are read through a mask then."""


def _loop(model: RecurrentLM, begun: Begun, state: State, loop: int, active_BT: Tensor | None, compact: bool) -> State:
    """The state after a loop that only some tokens run; None: all."""
    if active_BT is None:
        return model.loop(begun, state, loop)
    if compact and active_BT.size(1) > 1:
        n_most = int(active_BT.sum(1).max())
        if n_most < COMPACT * active_BT.size(1):
            # Those that run first, in their order; behind them, where a row has fewer, others to fill it up.
            index_BK = (~active_BT).to(torch.int8).argsort(dim=1, stable=True)[:, :n_most]
            here = begun.core.at_loop(model.config.keys.slot_loop(loop)).these(index_BK)
            some = state.map(lambda x: tokens_at(x, index_BK))
            new = model.run_loop(some, tokens_at(begun.e_BTD, index_BK), loop, here)
            after = _frozen(some, new, active_BT.gather(1, index_BK))
            return state.merge(after, lambda x, x_new: put_tokens(x.to(x_new.dtype), index_BK, x_new))
    return _frozen(state, model.loop(begun, state, loop), active_BT)


class _Rows:
    """The tokens of a pass as rows, and which of them are still in the loop."""

    def __init__(
        self, model: RecurrentLM, exits: Exits, ids_BT: Tensor, live_BT: Tensor | None, state: State, first: int
    ) -> None:
        self.model, self.test, (n_rows, n_tokens) = model, exits.test, ids_BT.shape
        self.depths_BT = torch.zeros_like(ids_BT)
        self.scores_BTR: Tensor | None = None
        if exits.keep_scores:
            self.scores_BTR = torch.full((n_rows, n_tokens, self.test.n_loops), float("nan"), device=ids_BT.device)
        self.in_N: Tensor | None = None if live_BT is None else live_BT.flatten().nonzero()[:, 0]
        """Which are still in; None: all."""
        index_N = torch.arange(ids_BT.numel(), device=ids_BT.device) if self.in_N is None else self.in_N
        where = Where(index_N // n_tokens, first + index_N % n_tokens)
        self.kept: Kept = self.test.start(self._rows(state.h_BTD), where)

    @property
    def all_left(self) -> bool:
        return self.in_N is not None and not len(self.in_N)

    def active_BT(self) -> Tensor | None:
        """Which are still in; None: all."""
        if self.in_N is None:
            return None
        return (
            torch.zeros_like(self.depths_BT, dtype=torch.bool)
            .view(-1)
            .index_fill(0, self.in_N, True)
            .view_as(self.depths_BT)
        )

    def look(self, loop: int, before: State, after: State, here: Readout | None) -> Tensor:
        """Which tokens leave after ``loop`` loops, [B, T]."""
        leaves_BT = torch.zeros_like(self.depths_BT, dtype=torch.bool)
        if self.all_left:
            return leaves_BT

        def logits() -> Tensor:
            assert here is not None, "a rule that looks at logits has coda keys per_loop"
            return self.model.logits(self._rows(here.y_BTD))

        seen = Seen(loop, self._rows(before.h_BTD), self._rows(after.h_BTD), logits)
        leaves_N, score_N, self.kept = self.test.exits(seen, self.kept)
        if self.scores_BTR is not None:
            self.scores_BTR = self.scores_BTR.to(torch.promote_types(self.scores_BTR.dtype, score_N.dtype))
            scores_N = self.scores_BTR[..., loop - 1].flatten()
            scores_N[slice(None) if self.in_N is None else self.in_N] = score_N.to(scores_N.dtype)
            self.scores_BTR[..., loop - 1] = scores_N.view_as(self.depths_BT)
        if bool(leaves_N.any()):
            at_N = torch.arange(leaves_BT.numel(), device=leaves_BT.device) if self.in_N is None else self.in_N
            leaves_BT.view(-1)[at_N[leaves_N]] = True
            self.depths_BT = self.depths_BT.masked_fill(leaves_BT, loop)
            self.in_N, self.kept = at_N[~leaves_N], tuple(x[~leaves_N] for x in self.kept)
        return leaves_BT

    def _rows(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        return x_ND if self.in_N is None else x_ND[self.in_N]


def _frozen(before: State, after: State, active_BT: Tensor) -> State:
    """The state after a loop that only some tokens ran."""

    def merged(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(active_BT.view(*active_BT.shape, *[1] * (new.dim() - 2)), new, old.to(new.dtype))

    return before.merge(after, merged)


def _picked(out: Readout | None, here: Readout, leaves_BT: Tensor) -> Readout:
    """``here`` at the tokens that leave, and what was found before at the others."""
    if out is None:
        return here
    at_BT1 = leaves_BT[..., None]
    source_BTD = here.source_BTD
    if source_BTD is not None and out.source_BTD is not None:
        source_BTD = torch.where(at_BT1, source_BTD, out.source_BTD)
    return Readout(torch.where(at_BT1, here.y_BTD, out.y_BTD), here.state, source_BTD)
