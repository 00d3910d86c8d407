"""Laws 2 and 7 rest on it: noise never makes evaluation random, and in training it comes from the seed alone."""

from __future__ import annotations

import torch

from alcoda.laws.law import close_logits
from alcoda.laws.subject import Subject, depths, tokens
from alcoda.model.lm import RecurrentLM


@torch.no_grad()
def check_deterministic(model: RecurrentLM, n_loops: int) -> None:
    """Twice the same bits: at evaluation always, in training from the same seed."""
    ids_BT = tokens(2, 9)
    model.eval()
    close_logits(model(ids_BT, n_loops), model(ids_BT, n_loops), 0.0, "two evaluations differ")
    model.train()
    torch.manual_seed(1)
    first = model(ids_BT, n_loops)
    torch.manual_seed(1)
    close_logits(model(ids_BT, n_loops), first, 0.0, "the same seed draws other noise")


def deterministic(subject: Subject) -> None:
    """At the deepest."""
    check_deterministic(subject.model(), depths(subject.config)[-1])
