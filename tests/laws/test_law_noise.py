"""Where noise is drawn, it is new at each training pass, cut where it says, and never makes evaluation random."""

from __future__ import annotations

import pytest
import torch
from space import house, over_space

from alcoda.laws.law import close
from alcoda.laws.noise import check_deterministic
from alcoda.laws.subject import at_most, make, tokens
from alcoda.model.config import ModelConfig
from alcoda.model.keys import KeyStore
from alcoda.model.norms import RMSNorm
from alcoda.model.recurrence.inject import NoInject
from alcoda.model.recurrence.state_init import Noise
from alcoda.model.shape import Shape

SHAPE = Shape(d_model=32, n_heads=4, d_head=8, d_ff=64, seq_len=48, vocab_size=64, bias=False)
BY_POSITION = Noise(at_eval="by_position", seed=3)


def is_noisy(config: ModelConfig) -> bool:
    state, inject, update = config.state_init, config.inject, config.update
    return state.kind == "noise" or getattr(inject, "noise", 0) > 0 or getattr(update, "noise", 0) > 0


@over_space()
def test_evaluation_is_deterministic_and_training_draws_noise(config: ModelConfig) -> None:
    model, ids_BT, n_loops = make(config), tokens(2, 9), at_most(config, 3)
    check_deterministic(model, n_loops)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(ids_BT, n_loops), model(ids_BT, n_loops)) is not is_noisy(config)


@pytest.mark.parametrize("trains", [False, True])
def test_control_noise_of_a_generator_of_its_own_is_noticed(trains: bool) -> None:
    model, own = make(house()), torch.Generator()

    def noisy(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return out + torch.randn(out.shape, generator=own) if module.training is trains else out

    model.update.register_forward_hook(noisy)
    with pytest.raises(AssertionError, match="other noise" if trains else "two evaluations"):
        check_deterministic(model, 3)


def test_state_noise_without_an_injection() -> None:
    """GRT's third rung (papers.md 1.5): N(0, 0.1^2) on the state that the core reads, in training only."""
    inject, h = NoInject(noise=0.1).build(RMSNorm(), SHAPE), torch.zeros(50, 400, 32, dtype=torch.float64)
    assert inject.eval()(h, h) is h
    noise = inject.train()(h, h)
    # 640,000 draws: 4 sigma of their mean and variance.
    assert noise.mean().item() == pytest.approx(0, abs=0.0005) and noise.var().item() == pytest.approx(0.01, abs=0.0001)
    assert len(noise.unique()) == noise.numel() and not torch.equal(noise, inject(h, h))
    assert NoInject().build(RMSNorm(), SHAPE).train()(h, h) is h
    check_deterministic(make(house(inject=NoInject(noise=0.1))), 3)


@pytest.mark.parametrize("std", [0.4**0.5, 2.0])
def test_training_noise_is_a_normal_cut_at_three_std(std: float) -> None:
    start = Noise(std=std).build(SHAPE).train()
    h = start(torch.zeros(50, 400, 32, dtype=torch.float64), torch.arange(400))
    assert h.abs().max() <= 3 * std
    assert h.abs().max() > 2.9 * std  # 640,000 draws: P(none beyond 2.9 std) = (1 - 0.00103)^640000 < 1e-280
    # The variance of a normal cut at 3: 1 - 2 * 3 * phi(3) / (2 Phi(3) - 1) = 0.97334; 4 sigma of its estimate: 0.006.
    assert (h / std).var().item() == pytest.approx(0.97334, abs=0.006)
    assert h.mean().item() / std == pytest.approx(0, abs=0.006)


def test_each_loop_and_token_draws_its_own_noise() -> None:
    start = Noise().build(SHAPE).train()
    h = start(torch.zeros(2, 9, 32, dtype=torch.float64), torch.arange(9))
    assert len(h.unique()) == h.numel()


def test_zeros_at_evaluation() -> None:
    assert not Noise().build(SHAPE).eval()(torch.ones(2, 9, 32), torch.arange(9)).any()


def test_noise_by_position_is_a_function_of_the_position_alone() -> None:
    start = BY_POSITION.build(SHAPE).eval()
    e = torch.zeros(1, 1, 32, dtype=torch.float64)

    def at(pos: torch.Tensor) -> torch.Tensor:
        return start(e.expand(pos.size(0) if pos.dim() == 2 else 2, pos.size(-1), -1), pos)

    whole = at(torch.arange(300))
    assert torch.equal(whole[0], whole[1]), "rows differ"
    assert torch.equal(at(torch.arange(7)), whole[:, :7]), "the length of the context matters"
    for pos in (0, 63, 64, 65, 299):
        assert torch.equal(at(torch.tensor([pos]))[:, 0], whole[:, pos]), f"position {pos} alone"
    order = torch.stack([torch.randperm(300), torch.randperm(300)])
    assert torch.equal(at(order), whole[0][order]), "the order of the positions matters"
    assert len(whole[0].unique()) == whole[0].numel(), "positions share noise"
    std = BY_POSITION.std
    assert whole.abs().max() <= 3 * std
    assert (whole[0] / std).var().item() == pytest.approx(0.97334, abs=0.06)  # 9,600 draws, over 4 sigma
    other = Noise(at_eval="by_position", seed=4).build(SHAPE).eval()
    assert not torch.equal(other(e, torch.tensor([5])), start(e, torch.tensor([5]))), "the seed does not matter"


def test_noise_by_position_agrees_in_cached_decoding() -> None:
    # 100 tokens reach into the second block of positions.
    model = make(house(state_init=BY_POSITION, inject="concat", seq_len=128))
    ids_BT = tokens(2, 100)
    with torch.no_grad():
        store = KeyStore()
        cut = [model(chunk, 3, store=store) for chunk in ids_BT.split([60, 30, *[1] * 10], 1)]
        close(torch.cat(cut, 1), model(ids_BT, 3), 1e-10, "noise by position, chunked")


def test_control_training_noise_in_decoding_disagrees() -> None:
    model = make(house(state_init=BY_POSITION, inject="concat", seq_len=128)).train()
    ids_BT = tokens(2, 100)
    with torch.no_grad(), pytest.raises(AssertionError, match="chunked"):
        store = KeyStore()
        cut = [model(chunk, 3, store=store) for chunk in ids_BT.split([60, 40], 1)]
        close(torch.cat(cut, 1), model(ids_BT, 3), 1e-10, "noise by position, chunked")
