"""Law 1: no future leak. Logits before a changed token are the same bits; at the token they differ."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from alcoda.laws.law import LawBroken, Place, each, require
from alcoda.laws.subject import Subject, bitwise, depths, tokens
from alcoda.model.lm import RecurrentLM

T = 12
CHANGED = (1, T // 2, T - 1)
"""Row i of the batch has its token changed at CHANGED[i]."""


def logits(model: RecurrentLM, ids_BT: Tensor, n_loops: int, trains: bool) -> Tensor:
    """Of one pass; the noise of training is the same each time."""
    if not trains:
        with torch.no_grad():
            return model.eval()(ids_BT, n_loops)
    torch.manual_seed(1)
    # A route draws the noise of a loop for as many tokens as run it, and a changed token may change how many: others
    # would get other noise, which is no leak.
    silent = mock.patch.object(torch, "randn_like", torch.zeros_like) if model.config.route.gathers else nullcontext()
    with silent:
        return model.train()(ids_BT, n_loops).detach()


def check_no_leak(model: RecurrentLM, n_loops: int, trains: bool) -> None:
    """Training takes another attention kernel than inference (`attention._attend_explicit`), and draws noise."""
    ids_BT = tokens(len(CHANGED), T)
    changed_BT = ids_BT.clone()
    for row, t in enumerate(CHANGED):
        changed_BT[row, t] = (changed_BT[row, t] + 1) % model.config.vocab_size
    before, after = logits(model, ids_BT, n_loops, trains), logits(model, changed_BT, n_loops, trains)
    off_BT = (before - after).abs().amax(-1)
    leaks: list[Place] = []
    sources: list[int] = []
    for row, t in enumerate(CHANGED):
        found = (~(off_BT[row, :t] <= bitwise(model.config))).nonzero().flatten().tolist()
        leaks += [(row, place) for place in found]
        sources += [t] if found else []
    if leaks:
        worst = max(off_BT[row, :t].max().item() for row, t in enumerate(CHANGED))
        which = ", ".join(map(str, sources))
        raise LawBroken(f"leak: the token at {which} changes logits before it, by up to {worst:.3g}", leaks)
    if model.config.route.gathers:  # a token that runs no loop may change nothing; not every one of them
        require(off_BT.max() > 1e-6, "no changed token changes anything at all", [*enumerate(CHANGED)])
        return
    for row, t in enumerate(CHANGED):
        require(off_BT[row, t] > 1e-6, f"the token at {t} changes nothing at {t}", [(row, t)])
        # In any model: where layers have windows, the last one has none.
        require(off_BT[row, T - 1] > 1e-9, f"the token at {t} is not seen at {T - 1}", [(row, T - 1)])


def no_leak(subject: Subject) -> None:
    """At evaluation, at each depth."""
    each((f"{n} loops", lambda n=n: check_no_leak(subject.model(), n, trains=False)) for n in depths(subject.config))


def no_leak_in_training(subject: Subject) -> None:
    """With gradients and noise, at each depth."""
    each((f"{n} loops", lambda n=n: check_no_leak(subject.model(), n, trains=True)) for n in depths(subject.config))
