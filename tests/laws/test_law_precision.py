"""Law 7: a compiled pass equals an eager one, and bf16 equals fp32, within stated bounds."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from space import GRT, house, make, over_space, tokens
from torch import Tensor

from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM

B, T = 2, 24

# -- bf16 -------------------------------------------------------------------------------------------------------------

BF16 = 0.05
"""Root mean square of the difference over that of the logits. A rounding to bf16 is 2^-9 = 0.002 relative at most; the
deepest path here rounds some 60 times (3 loops of 2 blocks, 8 roundings each, and the rest), which add up like a random
walk to sqrt(60) * 0.002 = 0.015; the weights of these models are ten times those of a fresh one, so a factor of 3. The
worst case of the space measures 0.030."""


def bf16_error(model: RecurrentLM, n_loops: int) -> float:
    ids_BT = tokens(B, T)
    with torch.no_grad():
        exact = model(ids_BT, n_loops)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = model(ids_BT, n_loops).float()
    return ((rounded - exact).square().mean() / exact.square().mean()).sqrt().item()


@over_space()
def test_bf16_is_near_fp32(config: ModelConfig) -> None:
    error = bf16_error(make(config).float(), 3)
    assert 1e-4 < error < BF16, (
        f"bf16 is off by {error:.3g} of the logits, allowed {BF16}; 0 would mean it was not used"
    )


def test_control_three_bits_less_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear maps whose inputs keep 4 bits of mantissa in place of bf16's 8."""
    linear = F.linear

    def coarse(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"):
            x = x.to(torch.float8_e4m3fn).to(torch.bfloat16)
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", coarse)
    assert bf16_error(make(house(**GRT)).float(), 3) > BF16


# -- compiled ---------------------------------------------------------------------------------------------------------

COMPILED = 1e-4
"""Relative, in fp32, of logits, loss and gradients: fused kernels sum in another order (2^-24 a sum, some
hundreds of sums)."""


def outputs(model: RecurrentLM, n_loops: int, trains: bool) -> dict[str, Tensor]:
    """Logits, or the loss and every gradient."""
    ids_BT = tokens(B, T)
    torch.manual_seed(2)
    if not trains:
        with torch.no_grad():
            return {"logits": model(ids_BT, n_loops)}
    logits = model(ids_BT, n_loops)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def check_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, b in expected.items():
        off = ((actual[name] - b).norm() / b.norm()).item()
        assert off < COMPILED, f"compiled {name} is off by {off:.3g}, allowed {COMPILED}"


def compiler() -> str | None:
    names = ("c++", "g++", "clang++", "cc", "gcc", "clang")
    return next((name for name in names if shutil.which(name)), None)


ELASTIC: dict[str, Any] = {
    "state_init": "zeros",
    "inject": "concat",
    "block": {"sandwich": "after_add"},
    "loop_norm": "before_coda",
}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: torch.compile cannot build CPU kernels here")
@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize(
    ("fields", "trains"),
    [
        pytest.param({**GRT, "n_core": 1}, False, id="grt-infers"),
        # A backward pass takes the compiler a minute.
        pytest.param({**GRT, "n_core": 1}, True, id="grt-trains", marks=pytest.mark.slow),
        pytest.param(ELASTIC, True, id="elastic-trains", marks=pytest.mark.slow),
    ],
)
def test_compiled_equals_eager(fields: dict[str, Any], trains: bool) -> None:
    """The stacks are compiled, as training compiles them; the loop is not, so another depth compiles nothing new."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = (make(house(**fields)).float().train(trains) for _ in range(2))
    for stack in (compiled.prelude, compiled.core, compiled.coda):
        stack.compile()
    with torch._inductor.config.patch(compile_threads=1):  # a pool of compilers takes longer to start than to compile
        check_same(outputs(compiled, 2, trains), outputs(eager, 2, trains))
        n_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert n_graphs >= 1, "nothing was compiled"
        check_same(outputs(compiled, 5, trains), outputs(eager, 5, trains))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == n_graphs, "another number of loops compiles anew"
    # Positive control: a weight that is off by a thousandth is noticed.
    with torch.no_grad():
        eager.core.layers[0].mlp.down.weight.mul_(1.001)
    with pytest.raises(AssertionError, match="compiled"):
        check_same(outputs(compiled, 2, trains), outputs(eager, 2, trains))
    torch._dynamo.reset()
