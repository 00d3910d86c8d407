"""Law 7: a compiled pass equals an eager one, and bf16 equals fp32, within stated bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from space import GRT, house, over_space
from torch import Tensor

from alcoda.laws.precision import check_bf16, check_compiled, check_same, compiler, eager_and_compiled, outputs
from alcoda.laws.subject import at_most, make
from alcoda.model.config import ModelConfig

# -- bf16 -------------------------------------------------------------------------------------------------------------


@over_space(lambda config: not config.route.gathers)
def test_bf16_is_near_fp32(config: ModelConfig) -> None:
    check_bf16(make(config), at_most(config, 3))


def test_control_three_bits_less_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear maps whose inputs keep 4 bits of mantissa in place of bf16's 8."""
    linear = F.linear

    def coarse(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"):
            x = x.to(torch.float8_e4m3fn).to(torch.bfloat16)
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", coarse)
    with pytest.raises(AssertionError, match="bf16 is off"):
        check_bf16(make(house(**GRT)), 3)


def test_control_bf16_that_is_not_used_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: torch.no_grad())
    with pytest.raises(AssertionError, match="bf16 is off by 0 "):
        check_bf16(make(house(**GRT)), 3)


# -- compiled ---------------------------------------------------------------------------------------------------------

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
    eager, compiled = eager_and_compiled(make(house(**fields)), make(house(**fields)), trains)
    check_compiled(eager, compiled, trains)
    # Positive control: a weight that is off by a thousandth is noticed.
    with torch.no_grad():
        eager.core.stack.layers[0].mlp.down.weight.mul_(1.001)
    with pytest.raises(AssertionError, match="compiled"):
        check_same(outputs(compiled, 2, trains), outputs(eager, 2, trains))
    torch._dynamo.reset()
