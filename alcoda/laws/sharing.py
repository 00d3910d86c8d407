"""Weights that are said to be tied are one set of weights: every loop is the same function."""

from __future__ import annotations

from typing import Any

import torch

from alcoda.laws.law import close_logits, require
from alcoda.laws.ledger import on_meta
from alcoda.laws.subject import Subject, needs_loops, tokens
from alcoda.model.cost import ledger
from alcoda.model.lm import RecurrentLM

T = 12


def core_arguments(model: RecurrentLM) -> tuple[Any, ...]:
    """What a training pass calls the core with at its first loop: at evaluation a route may let every token out."""
    seen: list[tuple[Any, ...]] = []
    hook = model.core.at(0).register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    try:
        model.train()(tokens(2, T), 1)
    finally:
        hook.remove()
        model.eval()
    return seen[0]


@torch.no_grad()
def check_tied(model: RecurrentLM) -> None:
    """The core makes the same of the same input at the first loop and at the second, to the bit; and its weights are
    counted once."""
    arguments = core_arguments(model)
    first, second = (model.core.at(loop)(*arguments)[0] for loop in (0, 1))
    close_logits(second, first, 0.0, "tied: the core is another function at loop 1 than at loop 0")
    said, there = ledger(model.config).params, sum(p.numel() for p in on_meta(model.config).parameters())
    require(said == there, f"tied: the ledger counts {said:,} parameters, the model has {there:,}")


def tied(subject: Subject) -> None:
    """Of a fresh model."""
    check_tied(subject.model())


def not_tied(subject: Subject) -> str | None:
    """The exception: a model without a second loop, or one that says that its loops differ."""
    sharing = subject.config.sharing
    if not sharing.is_tied:
        return f"declared: sharing {sharing.kind} gives loops weights of their own"
    return needs_loops(subject)
