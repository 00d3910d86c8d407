"""What runs faster than its formula says: the same numbers, outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from alcoda.config import validate
from alcoda.model.recurrence.sharing import LoraLinear
from alcoda.model.recurrence.update import Gate
from alcoda.model.shape import Shape

D_IN, D_OUT, RANK, LOOPS = 12, 20, 3, 4
MANY, FEW = 64, 2
"""Tokens for which merging the low-rank term is less work, and more."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def low_rank(loop: int, bias: bool, dtype: torch.dtype = torch.float64) -> LoraLinear:
    module = LoraLinear(nn.Linear(D_IN, D_OUT, bias=bias), RANK, LOOPS).to(dtype)
    module.loop = loop
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def tokens(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, n // 2, D_IN, generator=generator, dtype=dtype).requires_grad_()


def by_formula(module: LoraLinear, x_BTD: Tensor, loop: int) -> Tensor:
    y_BTE = x_BTD @ module.weight.T + x_BTD @ module.down[loop].T @ module.up[loop].T
    return y_BTE if module.bias is None else y_BTE + module.bias


def gradients(y: Tensor, module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y.sin() * y).sum(), [x, *module.parameters()], create_graph=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_tokens", [MANY, FEW])
def test_low_rank_terms_are_their_formula_to_the_second_derivative(n_tokens: int, bias: bool) -> None:
    module, x = low_rank(2, bias), tokens(n_tokens)
    ours, plain = module(x), by_formula(module, x, 2)
    torch.testing.assert_close(ours, plain, atol=1e-11, rtol=0)
    firsts = gradients(ours, module, x), gradients(plain, module, x)
    seconds = []
    for first in firsts:
        loss = torch.stack([g.square().sum() for g in first]).sum()
        seconds.append(torch.autograd.grad(loss, [x, *module.parameters()], allow_unused=True))
    for ours_g, plain_g in zip([*firsts[0], *seconds[0]], [*firsts[1], *seconds[1]], strict=True):
        torch.testing.assert_close(ours_g, plain_g, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain, atol=1e-11, rtol=0)
    assert (ours - by_formula(module, x, 1)).abs().max() > 1, "the loops have different terms"


def counted(module: LoraLinear, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops()


def test_low_rank_terms_are_merged_only_in_training_and_only_where_that_is_less_work() -> None:
    module = low_rank(0, bias=False)
    two_steps = {n: 2 * n * (D_IN * D_OUT + RANK * (D_IN + D_OUT)) for n in (MANY, FEW)}
    assert counted(module, tokens(MANY)) == 2 * MANY * D_IN * D_OUT + 2 * RANK * D_IN * D_OUT < two_steps[MANY]
    assert counted(module, tokens(FEW)) == two_steps[FEW]
    with torch.no_grad():  # what a row gives must not depend on how many rows it is in with
        assert counted(module, tokens(MANY)) == two_steps[MANY]


def test_low_rank_terms_are_merged_before_the_weight_is_rounded_to_bf16() -> None:
    module, x = low_rank(3, bias=False, dtype=torch.float32), tokens(MANY, torch.float32)
    merged = module.weight + module.up[3] @ module.down[3]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = module(x)
        once = F.linear(x, merged)
        twice = F.linear(x, module.weight.bfloat16() + module.up[3] @ module.down[3])
    assert ours.dtype == torch.bfloat16

    def error(y: Tensor) -> float:
        return (y.double() - x.double() @ merged.double().T).square().mean().item()

    assert error(ours) <= 1.01 * error(once)
    assert error(twice) > 1.2 * error(once), "a merge in bf16 would show"


def test_the_meta_device_counts_low_rank_terms_by_their_formula() -> None:
    x = torch.empty(1, MANY, D_IN, device="meta", requires_grad=True)
    assert counted(low_rank(0, bias=True).to("meta"), x) > counted(low_rank(0, bias=True), tokens(MANY))


@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_the_gate_divides_its_logit_by_tau(tau: float) -> None:
    shape = Shape(d_model=8, n_heads=2, d_head=4, d_ff=16, seq_len=8, vocab_size=16, bias=False)
    values: dict[str, Any] = {"kind": "gate", "tau": tau, "noise": 0.0, "bias": 0.3}
    module = validate(Gate, values).build(shape).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    h, e = (torch.randn(2, 3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    normed = [F.layer_norm(x, (8,), norm.weight) for x, norm in ((h, module.state_norm), (e, module.anchor_norm))]
    logit = module.logit(F.silu(module.hidden(torch.cat(normed, -1))))
    torch.testing.assert_close(module.gate(h, e), torch.sigmoid(logit / tau), atol=1e-14, rtol=0)
    assert (torch.sigmoid(logit / 0.7) - torch.sigmoid(logit)).abs().max() > 0.01
