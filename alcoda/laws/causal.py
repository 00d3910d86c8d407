"""Law 1: no future leak. Logits before a changed token are the same bits; at the token they differ."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from alcoda.laws.law import LawBroken, Place, each, require
from alcoda.laws.subject import DEEP, Subject, at_most, bitwise, depths, long_text, tokens
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM

T = 12


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


def changed_at(places: Sequence[int], n_tokens: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Rows of ids, and the same with the token of row i at ``places[i]`` changed."""
    ids_BT = tokens(len(places), n_tokens)
    changed_BT = ids_BT.clone()
    for row, t in enumerate(places):
        changed_BT[row, t] = (changed_BT[row, t] + 1) % vocab_size
    return ids_BT, changed_BT


def check_no_leak(model: RecurrentLM, n_loops: int, trains: bool, n_tokens: int = T) -> None:
    """Training takes another attention kernel than inference (`attention._attend_explicit`), and draws noise."""
    places = (1, n_tokens // 2, n_tokens - 1)  # row i of the batch has its token changed at places[i]
    ids_BT, changed_BT = changed_at(places, n_tokens, model.config.vocab_size)
    before, after = logits(model, ids_BT, n_loops, trains), logits(model, changed_BT, n_loops, trains)
    off_BT = (before - after).abs().amax(-1)
    leaks: list[Place] = []
    sources: list[int] = []
    for row, t in enumerate(places):
        found = (~(off_BT[row, :t] <= bitwise(model.config))).nonzero().flatten().tolist()
        leaks += [(row, place) for place in found]
        sources += [t] if found else []
    if leaks:
        worst = max(off_BT[row, :t].max().item() for row, t in enumerate(places))
        which = ", ".join(map(str, sources))
        raise LawBroken(f"leak: the token at {which} changes logits before it, by up to {worst:.3g}", leaks)
    if model.config.route.gathers:  # a token that runs no loop may change nothing; not every one of them
        require(off_BT.max() > 1e-6, "no changed token changes anything at all", [*enumerate(places)])
        return
    reach = reach_of(model.config, n_loops)
    for row, t in enumerate(places):
        require(off_BT[row, t] > 1e-6, f"the token at {t} changes nothing at {t}", [(row, t)])
        last = n_tokens - 1 if reach is None else min(t + reach, n_tokens - 1)
        require(off_BT[row, last] > 1e-9, f"the token at {t} is not seen at {last}", [(row, last)])


def reach_of(config: ModelConfig, n_loops: int) -> int | None:
    """How many tokens back a token sees through its layers, where all of them have windows; None: all there are."""
    reach = 0
    for stage in ("prelude", "core", "coda"):
        steps = [config.block.window.at(place) for place in config.places(stage)]
        windows = [window for window in steps if window is not None]
        if len(windows) < len(steps):
            return None
        if stage == "core" and windows:
            # Frozen keys tell of no other token's state, however often they are read.
            reach += max(windows) - 1 if not config.keys.own_keys else n_loops * sum(w - 1 for w in windows)
        else:
            reach += sum(w - 1 for w in windows)
    return reach


def no_leak(subject: Subject) -> None:
    """At evaluation, at each depth, and in a longer text."""
    _each_way(subject, trains=False)


def no_leak_in_training(subject: Subject) -> None:
    """With gradients and noise, at each depth, and in a longer text."""
    _each_way(subject, trains=True)


def _each_way(subject: Subject, trains: bool) -> None:
    config = subject.config
    ways = [(n, T) for n in depths(config, DEEP)] + [(at_most(config, 3), long_text(config))]
    each(
        (f"{n} loops, {n_tokens} tokens", lambda n=n, k=n_tokens: check_no_leak(subject.model(), n, trains, k))
        for n, n_tokens in ways
    )
