"""Law 1: no future leak. Logits before a changed token are the same bits; at the token they differ."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from space import GRT, house, make, over_space, tokens
from torch import Tensor

from alcoda.model import attention
from alcoda.model.config import ModelConfig
from alcoda.model.keys import View
from alcoda.model.lm import RecurrentLM

T = 12
CHANGED = (1, T // 2, T - 1)
"""Row i of the batch has its token changed at CHANGED[i]."""


def logits(model: RecurrentLM, ids_BT: Tensor, n_loops: int, trains: bool) -> Tensor:
    if not trains:
        with torch.no_grad():
            return model.eval()(ids_BT, n_loops)
    torch.manual_seed(1)  # the same noise each time
    return model.train()(ids_BT, n_loops).detach()


def check_no_leak(model: RecurrentLM, n_loops: int, trains: bool) -> None:
    ids_BT = tokens(len(CHANGED), T)
    changed_BT = ids_BT.clone()
    for row, t in enumerate(CHANGED):
        changed_BT[row, t] = (changed_BT[row, t] + 1) % model.config.vocab_size
    before, after = logits(model, ids_BT, n_loops, trains), logits(model, changed_BT, n_loops, trains)
    for row, t in enumerate(CHANGED):
        assert torch.equal(before[row, :t], after[row, :t]), f"leak: the token at {t} changes logits before it"
        assert (before[row, t] - after[row, t]).abs().max() > 1e-6, f"the token at {t} changes nothing at {t}"
        assert (before[row, -1] - after[row, -1]).abs().max() > 1e-9, f"the token at {t} is not seen at {T - 1}"


# Training takes another attention kernel than inference (`attention._attend_explicit`), and draws noise.
@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
@pytest.mark.parametrize("n_loops", [1, 3])
@over_space()
def test_no_future_leak(config: ModelConfig, n_loops: int, trains: bool) -> None:
    check_no_leak(make(config), n_loops, trains)


@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
def test_control_attention_to_everything_leaks(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    def sees_all(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, view: View) -> Tensor:
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK)

    monkeypatch.setattr(attention, "attend", sees_all)
    with pytest.raises(AssertionError, match="leak"):
        check_no_leak(make(house(**GRT)), 3, trains)


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
