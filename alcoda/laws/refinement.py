"""Law 4 of a memory, its gradients: a step in interleaved passes is one that keeps every version of every key.

`Kept` is the slow store of it: a list of keys a slot, one a token, stacked anew in each pass, its mask written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.data.batches import NOT_SCORED
from alcoda.depth.plan import LoopPlan
from alcoda.laws.gradients import Grads, size
from alcoda.laws.law import Parts, Place, close, require
from alcoda.laws.memory import loops_of
from alcoda.laws.subject import EXACT, Subject, make_plain, tokens
from alcoda.model.keys import Keys, Slot, View
from alcoda.model.lm import RecurrentLM
from alcoda.training.objective import NextToken
from alcoda.training.passes import Interleaved, step_loss

B, T, SUBSETS = 2, 6, 2


class Kept:
    """Keys and values of every token by slot and position, of the newest pass that ran it."""

    decodes: ClassVar[bool] = False

    def __init__(self) -> None:
        self.n_tokens = T
        self.at: list[int] = []
        self.slots: dict[Slot, dict[int, Keys]] = {}
        self.has_run: dict[int, dict[int, Tensor]] = {}

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `alcoda.model.keys.KeyStore.open`, at the positions that were set."""
        mask_TS = torch.tensor([[key <= query for key in range(T)] for query in self.at])
        return View(torch.tensor(self.at), torch.arange(T), None, mask_TS, False)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """As `KeyStore.ran`."""
        ran = self.has_run.setdefault(loop, {})
        for column, position in enumerate(self.at):
            ran[position] = ran_BT[:, column]
        return torch.stack([ran.get(at, torch.zeros_like(ran_BT[:, 0])) for at in range(T)], 1)

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`."""
        kept = self.slots.setdefault(slot, {})
        for column, position in enumerate(self.at):
            kept[position] = k_BGTK[:, :, column], v_BGTK[:, :, column]
        none = torch.zeros_like(k_BGTK[:, :, 0]), torch.zeros_like(v_BGTK[:, :, 0])
        k_BGSK, v_BGSK = (torch.stack(part, 2) for part in zip(*(kept.get(at, none) for at in range(T)), strict=True))
        return k_BGSK, v_BGSK


def remembered(model: RecurrentLM, sources: Sequence[Tensor | None], at: Sequence[int]) -> Tensor:
    """The memory of each token, found on its own from those before it."""
    found = []
    for position in at:
        window = [sources[i] if i >= 0 else None for i in range(position - model.memory.n_carried, position)]
        zero_BD = next(x for x in sources if x is not None).new_zeros(B, model.config.d_model)
        # What the token itself has become is not read.
        known = [x if x is not None else zero_BD for x in window] + [torch.full_like(zero_BD, float("nan"))]
        found.append(model.memory.recall(torch.stack(known, 1))[:, 0])
    return torch.stack(found, 1)


def reference(model: RecurrentLM, ids_BT: Tensor, targets_BT: Tensor, n_free: int) -> Tensor:
    """The loss of a step: the mean over the passes, each a mean over what it scores."""
    store, losses = Kept(), []
    sources: list[Tensor | None] = [None] * T
    for at in ([*range(T)], *([*range(first, T, SUBSETS)] for first in range(SUBSETS))):
        store.at = at
        memory_BTD = remembered(model, sources, at) if losses else torch.zeros(B, T, model.config.d_model).double()
        how = {"n_free": n_free, "store": store, "memory_BTD": memory_BTD}
        readout = next(model.readouts(ids_BT[:, at], [loops_of(model.config)], **how))
        assert readout.source_BTD is not None
        for column, position in enumerate(at):
            sources[position] = readout.source_BTD[:, column]
        target_N, logits_BTV = targets_BT[:, at].flatten(), model.logits(readout.y_BTD)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), target_N, ignore_index=NOT_SCORED)
        if readout.state.aux_BT is not None:
            loss = loss + readout.state.aux_BT.flatten()[target_N != NOT_SCORED].mean()
        losses.append(loss)
    return torch.stack(losses).mean()


def _grads(model: RecurrentLM, loss: Tensor) -> tuple[Tensor, Grads]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_refinement_gradients(model: RecurrentLM) -> None:
    """Loss and gradients of `step_loss`, with loops that are recomputed, and with loops without gradients."""
    n_loops, parts = loops_of(model.config), Parts()
    ids_BT, targets_BT = tokens(B, T), tokens(B, T, seed=5)
    targets_BT[0, 2] = NOT_SCORED
    scored_T = (targets_BT != NOT_SCORED).sum(0).tolist()
    for n_free in range(n_loops):
        torch.manual_seed(3)
        expected_loss, expected = _grads(model, reference(model, ids_BT, targets_BT, n_free))
        for recompute in (False, True):
            torch.manual_seed(3)
            plan, how = LoopPlan(n_free, n_loops - n_free), Interleaved(subsets=SUBSETS)
            loss = step_loss(NextToken(), how, model, ids_BT, targets_BT, scored_T, plan, recompute)
            loss, grads = _grads(model, loss)
            with parts.part(f"{n_free} free loops" + ", recomputed" * recompute):
                close(loss, expected_loss, EXACT, "the loss of the passes")
                wrong = list(_off(grads, expected))
                require(not wrong, f"gradients are not those of passes that keep everything: {wrong}", wrong)
    parts.settle()


def _off(grads: Grads, expected: Grads) -> Iterator[Place]:
    """A weight that nothing read has no gradient, which is zero (as in training, `alcoda.training.parallel`). So a
    memory's, where a route lets no token that has one into a loop with gradients; `reference` reads zero memories."""
    for name, grad in grads.items():
        other = expected[name]
        difference = grad - other if grad is not None and other is not None else other if grad is None else grad
        if not size(difference) <= EXACT * max(1.0, size(other)):
            yield name


def refinement_gradients(subject: Subject) -> None:
    """In training mode, with its noise, at two loops; next token, in two subsets."""
    check_refinement_gradients(make_plain(subject.config, subject.seed).train())
