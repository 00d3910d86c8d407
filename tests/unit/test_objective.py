"""Objectives: each is its formula, computed here from the logits of every depth."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from alcoda.config import validate
from alcoda.data.batches import NOT_SCORED
from alcoda.depth.plan import LoopPlan
from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.cost import TrainingDepth, ledger
from alcoda.model.head import SoftCapModule
from alcoda.model.lm import RecurrentLM
from alcoda.model.recurrence.exit_gate import log_exit_prior
from alcoda.training.budget import StepFlops
from alcoda.training.objective import NextToken, Objective, PerLoop, SelfDistill
from alcoda.training.passes import Interleaved, OnePass, Refined, step_loss
from alcoda.training.recipe import Recipe

SIZES: dict[str, Any] = {"vocab_size": 40, "seq_len": 16, "d_model": 16, "n_heads": 2, "n_core": 1, "n_loops": 3}
B, T = 3, 7
PLAN = LoopPlan(0, 3)


def model(**fields: Any) -> RecurrentLM:
    config = validate(ModelConfig, {**SIZES, "init_std": 0.3, **fields})
    return RecurrentLM(config).double().init(0)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (B, T + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, 2] = targets[2, 5] = NOT_SCORED
    return ids[:, :-1], targets


def loss_of(objective: Objective, lm: RecurrentLM, plan: LoopPlan = PLAN) -> Tensor:
    inputs, targets = batch()
    readouts = list(lm.readouts(inputs, objective.loops(plan), n_free=plan.n_free, rows=plan.rows))
    return objective.loss_sum(lm, readouts, targets)


def by_loop(lm: RecurrentLM, n_loops: int = 3) -> list[tuple[Tensor, Tensor]]:
    """(log-probabilities, state) at each depth."""
    found = lm.readouts(batch()[0], range(1, n_loops + 1))
    return [(lm.logits(r.y_BTD).log_softmax(-1), r.state.h_BTD) for r in found]


def nats(log_p: Tensor) -> Tensor:
    """By target, 0 where it is not scored."""
    targets = batch()[1]
    scored = targets != NOT_SCORED
    return -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * scored


@pytest.mark.parametrize("fields", [{}, {"soft_cap": {"kind": "tanh", "cap": 2.0}}, {"head": "untied"}])
def test_next_token_is_cross_entropy_after_the_last_loop(fields: dict[str, Any]) -> None:
    lm = model(**fields)
    expected = nats(by_loop(lm)[-1][0]).sum().item()
    assert loss_of(NextToken(), lm).item() == pytest.approx(expected, rel=1e-12)
    assert nats(by_loop(lm)[0][0]).sum().item() != pytest.approx(expected, rel=1e-3)


def test_the_exit_prior_is_a_distribution() -> None:
    half = torch.tensor(0.0)  # the logit of 1/2
    assert log_exit_prior([half, half, half]).exp().tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert log_exit_prior([torch.tensor(-0.8)]).tolist() == [0.0]
    sure = torch.tensor(1e4)
    assert log_exit_prior([sure, half]).tolist() == [0.0, -1e4]
    logits = list(torch.randn(5, 11, dtype=torch.float64))
    assert torch.allclose(log_exit_prior(logits).exp().sum(0), torch.ones(11, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("bias", [8.0, -8.0, 30.0])
def test_a_gate_that_is_nearly_sure_can_change_its_mind_in_bf16(bias: float) -> None:
    """In bf16 sigmoid(8) is 1, whose gradient is 0."""
    lm = model(exit_gate="linear").float()
    with torch.no_grad():
        lm.exit_gate.proj.bias.fill_(bias)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(PerLoop(), lm).backward()
    assert lm.exit_gate.proj.bias.grad.abs().max() > 1e-14
    assert torch.sigmoid(torch.tensor(8.0, dtype=torch.bfloat16)) == 1


@pytest.mark.parametrize("beta", [0.0, 0.1, 2.0])
def test_per_loop_losses_are_weighed_by_the_exit_prior(beta: float) -> None:
    """papers.md 5.4: sum_t p_t CE_t - beta H(p)."""
    lm = model(exit_gate="linear")
    with torch.no_grad():
        lm.exit_gate.proj.bias.fill_(-0.7)
    scored, total = batch()[1] != NOT_SCORED, 0.0
    loops = by_loop(lm)
    gates = [torch.sigmoid(h @ lm.exit_gate.proj.weight[0] + lm.exit_gate.proj.bias) for _, h in loops]
    for row, token in scored.nonzero().tolist():
        l1, l2 = gates[0][row, token].item(), gates[1][row, token].item()
        p = [l1, l2 * (1 - l1), (1 - l1) * (1 - l2)]
        losses = [nats(log_p)[row, token].item() for log_p, _ in loops]
        total += sum(a * b for a, b in zip(p, losses, strict=True)) + beta * sum(a * math.log(a) for a in p)
    assert loss_of(PerLoop(beta=beta), lm).item() == pytest.approx(total, rel=1e-10)


def test_per_loop_teaches_the_gate_and_survives_a_gate_that_is_sure() -> None:
    lm = model(exit_gate="linear")
    loss_of(PerLoop(), lm).backward()
    assert lm.exit_gate.proj.weight.grad is not None
    assert lm.exit_gate.proj.weight.grad.abs().max() > 1e-6
    with torch.no_grad():
        lm.exit_gate.proj.bias.fill_(1e4)
    loss = loss_of(PerLoop(), lm)
    assert loss.item() == pytest.approx(nats(by_loop(lm)[0][0]).sum().item(), rel=1e-6)  # it leaves after loop 1
    lm.zero_grad()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in lm.parameters())


def test_self_distillation_teaches_a_shallow_loop() -> None:
    lm, weight = model(), 0.7
    loops = by_loop(lm)
    log_p, scored = loops[-1][0], batch()[1] != NOT_SCORED
    for draw, student in ((0.0, 1), (0.49, 1), (0.5, 2), (0.99, 2)):
        kl = (log_p.exp() * (log_p - loops[student - 1][0])).sum(-1)
        expected = nats(log_p).sum() + weight * (kl * scored).sum()
        actual = loss_of(SelfDistill(weight=weight), lm, LoopPlan(0, 3, draw=draw))
        assert actual.item() == pytest.approx(expected.item(), rel=1e-10)


def test_the_teacher_learns_nothing_from_its_student() -> None:
    lm = model(n_prelude=0, n_coda=0, sharing="untied", head="untied", n_loops=2)
    loss_of(SelfDistill(weight=3.0), lm, LoopPlan(0, 2)).backward()
    taught = lm.core.at(1).layers[0].mlp.down.weight.grad.clone()  # of the last loop only
    lm.zero_grad()
    loss_of(NextToken(), lm, LoopPlan(0, 2)).backward()
    assert torch.allclose(taught, lm.core.at(1).layers[0].mlp.down.weight.grad, atol=1e-12)


def test_one_loop_has_no_student() -> None:
    lm = model()
    expected = loss_of(NextToken(), lm, LoopPlan(0, 1)).item()
    assert loss_of(SelfDistill(), lm, LoopPlan(0, 1)).item() == expected


@pytest.mark.parametrize("route", ["token_choice", "expert_choice"])
def test_a_router_s_own_loss_is_added(route: str) -> None:
    lm = model(route=route).train()
    readout = next(lm.readouts(batch()[0], [3]))
    assert readout.state.aux_BT is not None
    scored = batch()[1] != NOT_SCORED
    expected = nats(lm.logits(readout.y_BTD).log_softmax(-1)).sum() + (readout.state.aux_BT * scored).sum()
    assert loss_of(NextToken(), lm).item() == pytest.approx(expected.item(), rel=1e-12)
    assert (readout.state.aux_BT * scored).sum() > 1e-3


@pytest.mark.parametrize("n_free", [0, 1])
@pytest.mark.parametrize("objective", [PerLoop(), SelfDistill(), NextToken()], ids=lambda o: o.kind)
def test_the_ledger_counts_every_read_out(objective: Objective, n_free: int) -> None:
    fields = {"exit_gate": "linear"} if objective.needs_exit_gate else {}
    config = validate(ModelConfig, {**SIZES, **fields, "inject": "concat"})
    with torch.device("meta"):
        lm = RecurrentLM(config)
    loops = {"per_loop": [1, 2, 3], "self_distill": [2, 3], "next_token": [3]}[objective.kind]
    assert objective.n_readouts(3) == len(loops)
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        total = torch.zeros(())
        readout = None
        for readout in lm.readouts(ids, loops, n_free=n_free):
            total = total + lm.logits(readout.y_BTD).sum() + lm.exit_gate(readout.state.h_BTD).sum()
        with torch.no_grad():
            for _ in range(round(objective.n_more_heads(3))):  # the teacher's logits
                lm.logits(readout.y_BTD)
        total.backward()
    depth = TrainingDepth(3, 3 - n_free, readouts=objective.n_readouts(3), more_heads=objective.n_more_heads(3))
    counted = counter.get_total_flops() / 32
    # A read-out of a free loop hands no gradient into it: the first maps of the coda need none of their input.
    assert ledger(config, 3, depth).training_flops_per_token == pytest.approx(counted, rel=0.02 if n_free else 1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "per_loop"}, "weighs the loops by an exit gate and the model has none: set model.exit_gate"),
        ({"model": {**SIZES, "exit_gate": "linear"}}, "learns nothing from objective 'next_token'"),
        ({"objective": "self_distill", "depth": {"kind": "poisson", "per": "sequence"}}, "which compares loops"),
        ({"model": {**SIZES, "sharing": "lora"}, "depth": {"kind": "poisson", "per": "sequence"}}, "weights for each"),
        *(
            (
                {"model": {**SIZES, "inject": "add", **fields}, "depth": {"kind": "fixed", "last_k": 2}},
                "would not learn. Set last_k to null",
            )
            for fields in ({"sharing": "untied"}, {"sharing": "lora"}, {"route": "expert_choice"})
        ),
    ],
)
def test_objectives_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate(Recipe, {"model": SIZES, **fields}, "the recipe")


def test_the_ledger_counts_what_an_objective_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loss, on the meta device, where the fused cross-entropy is a product like any other."""

    def nats(
        self: SoftCapModule, y: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduction: str
    ) -> Tensor:
        logits = nn.functional.linear(y, weight)
        return nn.functional.cross_entropy(logits, target, reduction=reduction, ignore_index=ignore_index)

    monkeypatch.setattr(SoftCapModule, "nats", nats)
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    every = itertools.product(
        (NextToken(), PerLoop(), SelfDistill()), (OnePass(), Interleaved(subsets=2), Refined(passes=2))
    )
    for objective, passes in every:
        fields: dict[str, Any] = {"exit_gate": "linear"} if objective.needs_exit_gate else {}
        fields |= {"memory": {"kind": "prev_token", "source": "prelude.0"}} if passes.fills_memory else {}
        config = validate(ModelConfig, {**SIZES, **fields, "inject": "concat"})
        with torch.device("meta"):
            lm = RecurrentLM(config)
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            step_loss(objective, passes, lm, ids, ids, [2] * 16, LoopPlan(0, 3, draw=0.6), False).backward()
        said = ledger(config, 3, StepFlops(config, objective, False, passes).at(3, 3)).training_flops_per_token
        counted = counter.get_total_flops() / 32
        assert said == counted, objective.kind
