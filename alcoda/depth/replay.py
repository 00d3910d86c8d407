"""Exact replay of exits: in one pass over whole texts, what decoding with exits computes (docs/design, section 3).

So the quality of an exit rule is measured on what an engine computes, tokens, depths and logits, at the price of a
forward pass. A model with a memory has no parallel form, nor has a cache of one slot for all loops: they are read token
by token (`alcoda.depth.sequential`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alcoda.depth.exiting import Exits, pick_coda_keys, run_exits
from alcoda.depth.record import CodaKeys, Trace
from alcoda.depth.rules import ExitRule, at_work
from alcoda.depth.sequential import ExitReader
from alcoda.depth.watch import ExitTest
from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.exit_keys import LastKeys
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import EXACT_TOKENS, Tell


@dataclass(frozen=True)
class Replayed:
    """A text whose tokens left the loop early.

    Attributes:
        y_BTD: what the head reads (`RecurrentLM.logits` makes logits of it), at each token's depth.
        depths_BT: loops that each ran; 0 for padding.
        n_loops: that could have run.
        coda_keys: the mode: equalities hold within one.
        is_upper_bound: whether all tokens ran all loops, and the rule only chose which output is each one's.
        scores_BTR: of the rule after each loop, if they were asked for: NaN where it was not.
    """

    y_BTD: Tensor
    depths_BT: Tensor
    n_loops: int
    coda_keys: CodaKeys
    is_upper_bound: bool
    scores_BTR: Tensor | None = None

    @property
    def executed_loops(self) -> int:
        """Loops of all tokens together: those that an engine would run."""
        return int(self.depths_BT.sum())

    def trace(self) -> Trace:
        """The depths, to be replayed or saved."""
        return Trace(self.depths_BT, self.n_loops, self.coda_keys)


@torch.no_grad()
def replay(
    model: RecurrentLM,
    ids_BT: Tensor,
    rule: ExitRule | ExitTest,
    n_loops: int | None = None,
    *,
    coda_keys: CodaKeys | None = None,
    recompute_keys: bool = False,
    readout_only: bool = False,
    live_BT: Tensor | None = None,
    scores: bool = False,
    cache: CachePolicy = PER_LOOP,
    tell: Tell = lambda n_tokens: None,
) -> Replayed:
    """Run a text with exits.

    Args:
        model: in evaluation mode.
        ids_BT: token ids.
        rule: when tokens leave; or it at work, where it was given what it reads (`ExitRule.build`).
        n_loops: loops that run at most; the model's where None.
        coda_keys: ``at_exit``: the coda runs once, over the states that tokens left with. ``per_loop``: after a loop,
            a token that is out keeping its coda keys of its last loop; rules that look at logits need it. None: what
            the rule takes, else at_exit.
        recompute_keys: a control (`Exits`).
        readout_only: an upper bound (`Exits`), with the coda after each loop.
        live_BT: False for padding, at either end; rows are positions 0, 1, ... without it.
        scores: whether to keep the rule's.
        cache: what tokens leave in the cache.
        tell: is told of progress.

    Raises:
        UsageError: the rule cannot be used on this model (`ExitRule.check`), or not with these coda keys.
    """
    test = at_work(rule, model, n_loops)
    if readout_only and recompute_keys:
        raise UsageError("readout_only with recompute_keys: where no token leaves there are no keys to recompute")
    exits = Exits(test, pick_coda_keys(test, coda_keys), recompute_keys, readout_only, scores, cache)
    pos_BT = None if live_BT is None else (live_BT.cumsum(1) - 1).clamp(min=0)
    if model.config.memory.carries or not cache.is_parallel:
        reader, parts = ExitReader(model, exits, ids_BT.size(1)), []
        for first in range(0, ids_BT.size(1), EXACT_TOKENS):
            at = slice(first, first + EXACT_TOKENS)
            pos, live = (None if x is None else x[:, at] for x in (pos_BT, live_BT))
            parts.append(reader.read(ids_BT[:, at], None, pos, live))
            tell(parts[-1].size(1))
        y_BTD = torch.cat(parts, 1)
        depths_BT, found = reader.depths_BT(), torch.cat(reader.scores, 1) if scores else None
    else:
        ran = run_exits(model, ids_BT, exits, LastKeys(exits.stages), None, pos_BT, live_BT)
        y_BTD, depths_BT, found = ran.out.y_BTD, ran.depths_BT, ran.scores_BTR
        tell(ids_BT.size(1))
    return Replayed(y_BTD, depths_BT, test.n_loops, exits.coda_keys, readout_only, found)
