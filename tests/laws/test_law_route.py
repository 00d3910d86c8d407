"""Law 4, of routes (Mixture-of-Recursions): tokens that run, tokens that are out, and what a router learns from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import textbook as tb
import torch
from space import house
from test_law_recurrence import EXACT, NOPE, B, T, changed, check, core, loop, weights_of
from torch import Tensor

from alcoda.errors import UsageError
from alcoda.laws.law import close
from alcoda.laws.subject import make, tokens
from alcoda.model.keys import KeyStore
from alcoda.model.lm import RecurrentLM
from alcoda.model.recurrence import route


def subset(w: tb.Weights, h_TD: Tensor, runs_T: Tensor) -> Tensor:
    """The core on some tokens of one sequence, which see each other only. (NoPE: positions do not matter.)"""
    h_TD = h_TD.clone()
    if runs_T.any():
        h_TD[runs_T] = core(w, h_TD[runs_T][None], NOPE)[0]
    return h_TD


@pytest.mark.parametrize("apply", ["add", "blend"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_token_choice_is_its_equations(apply: str, score: str) -> None:
    """papers.md 5.4: the likeliest number of loops, h + g f(h) for those that run, the rest keep h."""

    def step(w: tb.Weights, h: Tensor, e: Tensor, r: int) -> Tensor:
        logits = e @ w["route.router.weight"].T
        scores = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
        scores = scores if score == "softmax" else tb.sigmoid(logits)
        depth, g = scores.argmax(-1) + 1, scores.max(-1).values[..., None]
        runs = depth > r
        f = torch.stack([subset(w, row, on) for row, on in zip(h, runs, strict=True)])
        new = h + g * f if apply == "add" else h + g * (f - h)
        return torch.where(runs[..., None], new, h)

    fields = {"kind": "token_choice", "apply": apply, "score": score}
    check(make(house(route=fields, position="none")), loop(step, NOPE))
    other = {**fields, "apply": "blend" if apply == "add" else "add"}
    with pytest.raises(AssertionError, match="inference"):
        check(make(house(route=other, position="none")), loop(step, NOPE))


def test_expert_choice_is_its_equations_in_training() -> None:
    def reference(w: tb.Weights, ids_BT: Tensor, n_loops: int) -> Tensor:
        h = tb.stack(w, "prelude", tb.embed(w, ids_BT), NOPE)
        here = torch.ones(h.shape[:2], dtype=torch.bool)
        for r in range(n_loops):
            g = tb.sigmoid(h @ w["route.router.weight"][r])
            k = round((3 - r) / 3 * T)
            top = torch.where(here, g, -1.0).argsort(-1, descending=True)[:, :k]
            here = torch.zeros_like(here).scatter(1, top, True)
            f = torch.stack([subset(w, row, on) for row, on in zip(h, here, strict=True)])
            h = torch.where(here[..., None], h + g[..., None] * f, h)
        return tb.read_out(w, tb.rmsnorm(w, "final_norm", tb.stack(w, "coda", h, NOPE)))

    model = make(house(route="expert_choice", position="none")).train()
    ids_BT = tokens(B, T)
    actual = model(ids_BT, 3).detach()
    close(actual, reference(weights_of(model), ids_BT, 3), EXACT, "expert choice")
    with pytest.raises(AssertionError, match="expert choice"):
        close(actual, reference(changed(model, "route.router.weight"), ids_BT, 3), EXACT, "expert choice")


def test_expert_choice_decides_by_its_threshold_at_evaluation() -> None:
    def step(column: str) -> Callable[[tb.Weights, Tensor, int], tuple[Tensor, Tensor]]:
        return lambda w, h, r: (tb.sigmoid(h @ w["route.router.weight"][r]), h @ w[column][r] > 0)

    for auxiliary, column in (("loss", "route.router.weight"), ("router", "route.second.weight")):

        def reference(w: tb.Weights, ids_BT: Tensor, n_loops: int, decide: Any = step(column)) -> Tensor:
            h = tb.stack(w, "prelude", tb.embed(w, ids_BT), NOPE)
            here = torch.ones(h.shape[:2], dtype=torch.bool)
            for r in range(n_loops):
                g, runs = decide(w, h, r)
                here = here & (runs | (r == 0))
                f = torch.stack([subset(w, row, on) for row, on in zip(h, here, strict=True)])
                h = torch.where(here[..., None], h + g[..., None] * f, h)
            return tb.read_out(w, tb.rmsnorm(w, "final_norm", tb.stack(w, "coda", h, NOPE)))

        model = make(house(route={"kind": "expert_choice", "auxiliary": auxiliary}, position="none"))
        with torch.no_grad():
            ids_BT = tokens(B, T)
            close(model(ids_BT, 3), reference(weights_of(model), ids_BT, 3), EXACT, auxiliary)


def influence(model: RecurrentLM) -> float:
    """How far the last token moves logits before it."""
    ids_BT = tokens(B, T)
    other_BT = ids_BT.clone()
    other_BT[:, -1] = (other_BT[:, -1] + 1) % 64
    with torch.no_grad():
        return (model(ids_BT, 3) - model(other_BT, 3))[:, :-1].abs().max().item()


def test_expert_choice_leaks_in_training_and_says_so() -> None:
    config = house(route="expert_choice")
    assert not config.route.causal_in_training
    assert config.route.causal_at_eval
    assert influence(make(config).train()) > 1e-3
    assert influence(make(config)) < EXACT
    bare = house(route={"kind": "expert_choice", "auxiliary": "none"})
    assert not bare.route.causal_at_eval
    assert influence(make(bare)) > 1e-3
    with pytest.raises(UsageError, match="cannot decode"):
        make(bare)(tokens(B, T), 3, store=KeyStore())


def test_token_choice_does_not_leak() -> None:
    config = house(route="token_choice")
    assert config.route.causal_in_training
    assert config.route.causal_at_eval
    assert influence(make(config).train()) < EXACT
    assert influence(make(config)) < EXACT


def force_depths(monkeypatch: pytest.MonkeyPatch, n_loops: int) -> None:
    """Every token chooses ``n_loops``."""

    def constant(router: torch.nn.Linear, e_BTD: Tensor) -> Tensor:
        logits_BTR = e_BTD.new_zeros(*e_BTD.shape[:2], 3)
        logits_BTR[..., n_loops - 1] += 5
        return logits_BTR

    monkeypatch.setattr(route, "in_fp32", constant)


def test_tokens_that_are_out_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that reach the core, counted: those of the tokens that run, and no others."""
    for n_chosen in (1, 2, 3):
        model = make(house(route="token_choice"))
        force_depths(monkeypatch, n_chosen)
        rows: list[int] = []
        model.core.stack.register_forward_hook(lambda module, args, out, rows=rows: rows.append(out[0][..., 0].numel()))
        with torch.no_grad():
            model(tokens(B, T), 3)
        assert rows == [B * T] * n_chosen


def test_the_balancing_loss_is_least_when_choices_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(house(route="token_choice")).train()
    weight, n = model.config.route.weight, 3
    e = torch.randn(B, T, 32, dtype=torch.float64)
    model.route.router.weight.data.zero_()
    _, aux_BT = model.route.start(e)
    assert aux_BT.mean().item() == pytest.approx(weight)  # p = 1/R for each, whatever is chosen: R * sum f_i / R = 1
    force_depths(monkeypatch, 2)
    _, aux_BT = model.route.start(e)
    p = math.exp(5) / (math.exp(5) + 2)
    assert aux_BT.mean().item() == pytest.approx(weight * n * p)


def test_capacity_warms_up() -> None:
    config = house(route={"kind": "expert_choice", "warmup_steps": 10}).route
    assert [config.n_run(r, 3, 90, 0) for r in range(3)] == [90, 90, 90]
    assert [config.n_run(r, 3, 90, 5) for r in range(3)] == [90, 75, 60]
    assert [config.n_run(r, 3, 90, 10) for r in range(3)] == [config.n_run(r, 3, 90) for r in range(3)] == [90, 60, 30]
    model = make(house(route={"kind": "expert_choice", "warmup_steps": 10})).train()
    rows: list[int] = []
    model.core.stack.register_forward_hook(lambda module, args, out: rows.append(out[0].shape[1]))
    for train_step, expected in ((0, [9, 9, 9]), (4, [9, 8, 7]), (10, [9, 6, 3]), (None, [9, 6, 3])):
        rows.clear()
        model.route.train_step = train_step
        model(tokens(B, T), 3)
        assert rows == expected


def test_the_auxiliary_router_moves_nothing_else() -> None:
    model = make(house(route={"kind": "expert_choice", "auxiliary": "router"})).train()
    state = next(model.readouts(tokens(B, T), [3])).state
    assert state.aux_BT is not None
    state.aux_BT.sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"route.second.weight"}


@pytest.mark.parametrize("kind", ["token_choice", "expert_choice"])
@pytest.mark.parametrize("inject", ["none", "concat"])
def test_routes_in_bf16_are_near_fp32(kind: str, inject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same tokens in every loop: a decision that falls otherwise is no error of rounding. Routers themselves
    are in fp32 under autocast."""
    model = make(house(route={"kind": kind, "apply": "blend"}, inject=inject)).float()
    ids_BT = tokens(B, T)
    seen: list[torch.dtype] = []

    def fixed(router: torch.nn.Linear, x_BTD: Tensor, rows: slice = slice(None)) -> Tensor:
        seen.append(in_fp32(router, x_BTD, rows).dtype)
        index_T = torch.arange(T, dtype=torch.float32)
        logits_TR = torch.stack([torch.sin(index_T * (r + 1)) for r in range(3)], -1)[:, rows]
        return logits_TR.expand(x_BTD.size(0), -1, -1)

    in_fp32 = route.in_fp32
    monkeypatch.setattr(route, "in_fp32", fixed)
    with torch.no_grad():
        exact = model(ids_BT, 3)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(ids_BT, 3).float()
    error = ((rounded - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert 1e-4 < error < 0.05  # as of the other designs (alcoda/laws/precision.py)
    assert set(seen) == {torch.float32}
