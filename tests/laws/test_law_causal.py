"""Law 1: no future leak. Logits before a changed token are the same bits; at the token they differ."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from space import GRT, house, over_space
from torch import Tensor

from alcoda.laws.causal import T, check_no_leak, reach_of
from alcoda.laws.law import LawBroken
from alcoda.laws.subject import at_most, is_causal, make
from alcoda.model import attention
from alcoda.model.config import ModelConfig
from alcoda.model.keys import View


# Training takes another attention kernel than inference (`attention._attend_explicit`), and draws noise.
@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
@pytest.mark.parametrize("n_loops", [1, 3])
@over_space()
def test_no_future_leak(config: ModelConfig, n_loops: int, trains: bool) -> None:
    if not is_causal(config, trains):
        pytest.skip("declared")
    check_no_leak(make(config), at_most(config, n_loops), trains)


@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
def test_control_attention_to_everything_leaks(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    def sees_all(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, view: View) -> Tensor:
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK)

    monkeypatch.setattr(attention, "attend", sees_all)
    with pytest.raises(LawBroken, match="leak") as broken:
        check_no_leak(make(house(**GRT)), 3, trains)
    # Every token before the changed one, in every row.
    places = [(row, t) for row, changed in enumerate((1, T // 2, T - 1)) for t in range(changed)]
    assert broken.value.positions == tuple(places) and broken.value.n_positions == len(places) == 1 + 6 + T - 1


def test_control_a_mask_off_by_one_in_the_training_kernel_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    triu = Tensor.triu
    monkeypatch.setattr(Tensor, "triu", lambda self, diagonal=0: triu(self, diagonal + 1))
    with pytest.raises(AssertionError, match="leak"):
        check_no_leak(make(house(**GRT)), 3, True)


def test_control_a_state_that_looks_ahead_leaks() -> None:
    model = make(house(**GRT))
    model.inject.register_forward_hook(lambda module, args, out: out + 1e-12 * out.mean(1, keepdim=True))
    with pytest.raises(AssertionError, match="leak"):
        check_no_leak(model, 3, False)


def test_control_a_model_that_reads_no_token_is_noticed() -> None:
    model = make(house())
    model.embed.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    with pytest.raises(AssertionError, match="changes nothing"):
        check_no_leak(model, 1, False)


def test_control_attention_that_reads_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", lambda q, k, v, view: torch.zeros_like(q))
    with pytest.raises(AssertionError, match="is not seen"):
        check_no_leak(make(house()), 1, False)


@pytest.mark.parametrize(
    ("fields", "reach"),
    [({}, 2 + 3 * 2 * 2 + 2), ({"keys": "anchor"}, 2 + 2 + 2), ({"block": {}}, None)],
    ids=["per_loop", "anchor", "no window"],
)
def test_what_windows_let_a_token_see(fields: dict[str, object], reach: int | None) -> None:
    """1 + 2 x 3 + 1 layers that each see two tokens back; frozen keys are read at one of them."""
    windows = {"block": {"window": {"kind": "everywhere", "tokens": 3}}}
    config = house(**{"n_prelude": 1, "n_core": 2, "n_coda": 1, **windows, **fields})
    assert reach_of(config, 3) == reach
