"""Law 5: the attention kernels of this model equal their naive reference, in outputs and gradients."""

from __future__ import annotations

from unittest import mock

import torch

from alcoda.laws.gradients import Grads, run, size
from alcoda.laws.law import close, close_logits, require
from alcoda.laws.subject import EXACT, Subject, depths, tokens
from alcoda.model import attention
from alcoda.model.lm import RecurrentLM


def check_kernels(model: RecurrentLM, n_loops: int) -> None:
    """A pass for inference, and one with gradients, against `attention.attend_naive`."""

    def both() -> tuple[torch.Tensor, torch.Tensor, Grads]:
        with torch.no_grad():
            logits = model.eval()(tokens(2, 12), n_loops)
        return logits, *run(model.train(), n_loops)

    logits, loss, grads = both()
    with mock.patch.object(attention, "attend", attention.attend_naive):
        expected_logits, expected_loss, expected = both()
    close_logits(logits, expected_logits, EXACT, "attention at evaluation is not its reference")
    close(loss, expected_loss, EXACT, "attention in training is not its reference")
    off = {}
    for name, grad in grads.items():
        reference = expected[name]
        off[name] = size(grad if reference is None else reference if grad is None else grad - reference)
    wrong = [name for name, value in off.items() if not value <= EXACT]
    require(not wrong, f"gradients through attention are off by {max(off.values()):.3g}, allowed {EXACT}", wrong)


def kernels(subject: Subject) -> None:
    """At the deepest."""
    check_kernels(subject.model(), depths(subject.config)[-1])
