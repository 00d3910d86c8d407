"""Law 5: gradients reach every parameter, from the loops that should carry them, recomputed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from space import GRT, house, over_space
from torch import Tensor

from alcoda.laws.gradients import (
    B,
    R,
    T,
    check_derivative,
    check_every_parameter,
    check_free_loops,
    check_recompute,
    is_dead_by_nature,
    run,
    size,
)
from alcoda.laws.law import LawBroken
from alcoda.laws.ledger import on_meta
from alcoda.laws.subject import at_most, make, tokens
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.recurrence.route import RoutedModule
from alcoda.model.state import State

# -- every parameter --------------------------------------------------------------------------------------------------


@over_space()
def test_gradients_reach_every_parameter(config: ModelConfig) -> None:
    check_every_parameter(make(config).train())


def dead_by_nature(config: ModelConfig) -> list[str]:
    return [name for name, _ in on_meta(config).named_parameters() if is_dead_by_nature(name, config)]


def check_dead_key_bias(config: ModelConfig) -> None:
    _, grads = run(make(config).train())
    sizes = [size(grad) for name, grad in grads.items() if name.endswith(".k.bias")]
    assert sizes
    assert max(sizes) < 1e-12, "the bias of keys has a gradient"


@over_space(lambda config: bool(dead_by_nature(config)))
def test_a_keys_bias_without_rotary_positions_is_dead(config: ModelConfig) -> None:
    _, grads = run(make(config).train())
    assert max(size(grads[name]) for name in dead_by_nature(config)) < 1e-12


def test_qk_bias_without_rotary_positions_is_dead_on_keys() -> None:
    check_dead_key_bias(house(position="none", block={"attention": {"kind": "mha", "qk_bias": True}}))


@pytest.mark.parametrize("fields", [{"position": "rope"}, {"position": "none", "qk_norm": "after_rope"}])
def test_control_a_keys_bias_that_is_turned_or_normed_is_not_dead(fields: dict[str, str]) -> None:
    attention = {"kind": "mha", "qk_bias": True, "qk_norm": fields.get("qk_norm", "none")}
    with pytest.raises(AssertionError, match="has a gradient"):
        check_dead_key_bias(house(position=fields["position"], block={"attention": attention}))


def test_control_a_parameter_out_of_use_is_noticed() -> None:
    model = make(house(**GRT)).train()
    model.inject.forward = lambda h, e: h + e  # the adapter is left out
    with pytest.raises(AssertionError, match=r"no gradient: \['inject"):
        check_every_parameter(model)


def test_control_an_anchor_cut_off_from_the_graph_is_noticed() -> None:
    model = make(house(state_init="zeros", inject="concat")).train()
    forward = model.inject.forward
    model.inject.forward = lambda h, e: forward(h, e.detach())
    with pytest.raises(AssertionError, match=r"no gradient: \['prelude"):
        check_every_parameter(model)


# -- loops without gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_free", [1, 2])
@over_space()
def test_free_loops_carry_no_gradient(config: ModelConfig, n_free: int) -> None:
    if at_most(config, n_free + 1) <= n_free:
        pytest.skip("no more loops than those that are free")
    check_free_loops(make(config).train(), n_free)


def test_control_free_loops_that_carry_gradients_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    readouts = RecurrentLM.readouts
    monkeypatch.setattr(RecurrentLM, "readouts", lambda self, *args, n_free, **kw: readouts(self, *args, **kw))
    with pytest.raises(LawBroken, match="gradients are not those of the detached state") as broken:
        check_free_loops(make(house(**GRT)).train(), 1)
    assert any(str(name).startswith("core.stack.layers.0") for name in broken.value.positions)


def test_a_router_before_the_first_loop_learns_though_loops_are_free() -> None:
    """All but the last of them: its g weighs that one, and its auxiliary loss is of no loop."""
    model = make(house(route="token_choice", inject="none")).train()
    _, grads = run(model, n_free=R - 1)
    _, whole = run(model)
    assert size(grads["route.router.weight"]) > 1e-3 * size(whole["route.router.weight"]) > 0


def test_control_a_router_that_free_loops_cut_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = RoutedModule.run

    def puts_all_back(self: RoutedModule, *args: Any, **how: Any) -> State:
        state = put_back(self, *args, **how)
        return state if torch.is_grad_enabled() else state.map(Tensor.detach)

    monkeypatch.setattr(RoutedModule, "run", puts_all_back)
    with pytest.raises(LawBroken, match="gradients that should be there") as broken:
        check_free_loops(make(house(route="token_choice", inject="none")).train(), 1)
    assert "route.router.weight" in broken.value.positions


def test_with_every_loop_free_only_the_coda_learns() -> None:
    _, grads = run(make(house(**GRT)).train(), n_free=R)
    alive = {name.split(".")[0] for name, grad in grads.items() if grad is not None}
    assert alive == {"embed", "coda", "final_norm"}  # the embedding through the tied head


# -- recomputed loops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_free", [0, 1])
@over_space()
def test_recompute_changes_no_bit(config: ModelConfig, n_free: int) -> None:
    check_recompute(make(config).train(), n_free)


def test_control_noise_drawn_anew_in_the_backward_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import checkpoint

    def forgets(function, *args, **kwargs):
        return checkpoint(function, *args, **kwargs, preserve_rng_state=False)

    monkeypatch.setattr("alcoda.model.lm.checkpoint", forgets)
    with pytest.raises(AssertionError, match="recompute changes the gradient"):
        check_recompute(make(house(**GRT)).train(), 0)


def test_recompute_keeps_less() -> None:
    """The point of it: one state a loop is kept between the passes, and nothing else."""
    model, ids_BT = make(house(**GRT)).train(), tokens(B, T)

    def kept(n_loops: int, recompute: bool) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids_BT, n_loops, recompute=recompute)
        return total

    state = B * T * model.config.d_model
    assert kept(6, True) - kept(3, True) == 3 * state
    assert kept(6, False) - kept(3, False) > 3 * 10 * state


# -- the derivative ---------------------------------------------------------------------------------------------------


@over_space()
def test_the_loss_changes_as_its_gradient_says(config: ModelConfig) -> None:
    check_derivative(make(config).train())


@pytest.mark.parametrize("fault", [lambda g: 0.5 * g, lambda g: -g, lambda g: g.flip(1)], ids=["half", "sign", "other"])
def test_control_a_wrong_gradient_is_noticed(fault: Callable[[Tensor], Tensor]) -> None:
    model = make(house(**GRT)).train()

    def hook(module: torch.nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, Tensor]) -> None:
        if out[0].requires_grad:
            out[0].register_hook(fault)

    model.core.stack.register_forward_hook(hook)
    with pytest.raises(AssertionError, match="derivative: the gradient says"):
        check_derivative(model)
