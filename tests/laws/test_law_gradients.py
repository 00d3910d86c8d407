"""Law 5: gradients reach every parameter, from the loops that should carry them, recomputed or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from space import GRT, close, house, make, over_space, tokens
from torch import Tensor

from alcoda.model.config import ModelConfig
from alcoda.model.keys import open_context
from alcoda.model.lm import RecurrentLM

B, T, R = 2, 12, 3

Grads = dict[str, Tensor | None]


def loss_and_grads(model: RecurrentLM, logits_BTV: Tensor, ids_BT: Tensor) -> tuple[Tensor, Grads]:
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def run(model: RecurrentLM, n_loops: int = R, **kwargs) -> tuple[Tensor, Grads]:
    ids_BT = tokens(B, T)
    torch.manual_seed(3)
    return loss_and_grads(model, model(ids_BT, n_loops, **kwargs), ids_BT)


def size(grad: Tensor | None) -> float:
    return 0.0 if grad is None else grad.abs().max().item()


# -- every parameter --------------------------------------------------------------------------------------------------


def is_dead_by_nature(name: str, config: ModelConfig) -> bool:
    """A key's bias adds q . b to all scores of a query, which softmax ignores, unless rotary positions turn it."""
    return name.endswith("attention.keys.k.bias") and config.position.kind != "rope"


def check_every_parameter(model: RecurrentLM) -> None:
    _, grads = run(model)
    dead = [name for name, grad in grads.items() if size(grad) < 1e-9 and not is_dead_by_nature(name, model.config)]
    assert not dead, f"no gradient: {dead}"
    assert all(grad is None or grad.isfinite().all() for grad in grads.values()), "a gradient is not a number"


@over_space()
def test_gradients_reach_every_parameter(config: ModelConfig) -> None:
    check_every_parameter(make(config).train())


@over_space(lambda config: config.block.bias and config.position.kind != "rope")
def test_a_keys_bias_without_rotary_positions_is_dead(config: ModelConfig) -> None:
    _, grads = run(make(config).train())
    assert max(size(grad) for name, grad in grads.items() if name.endswith("attention.keys.k.bias")) < 1e-12


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


def detached(model: RecurrentLM, n_free: int) -> tuple[Tensor, Grads]:
    """The loop with its state detached by hand after ``n_free`` loops. Nothing else is: the anchor stays attached."""
    ids_BT = tokens(B, T)
    torch.manual_seed(3)
    context = open_context(ids_BT, R, model.position, (), None, None, None, torch.float64)
    e = model.prelude(model.position.embed(model.embed(ids_BT), context.pos), context)
    h = model.state_init(e, context.pos)
    for loop in range(R):
        if loop == n_free:
            h = h.detach()
        h = model.loop_norm.after_loop(model.update(h, model.core(model.inject(h, e), context), e))
    y = model.coda(model.loop_norm.before_coda(h), context)
    norm = model.loop_norm.norm if model.config.final_norm == "shared" else model.final_norm
    return loss_and_grads(model, F.linear(norm(y), model.head_weight_VD), ids_BT)


def reads_the_anchor(config: ModelConfig) -> bool:
    """Whether the prelude's output enters each loop, and so the loops that carry gradients."""
    return config.inject.carries_anchor or config.update.kind == "gate"


def differ(a: Grads, b: Grads) -> float:
    return max(size(x if y is None else y if x is None else x - y) for x, y in zip(a.values(), b.values(), strict=True))


@pytest.mark.parametrize("n_free", [1, 2])
@over_space()
def test_free_loops_carry_no_gradient(config: ModelConfig, n_free: int) -> None:
    model = make(config).train()
    loss, grads = run(model, n_free=n_free)
    expected_loss, expected = detached(model, n_free)
    # Not to the bit: without gradients a CPU takes another attention kernel, which rounds otherwise.
    close(loss, expected_loss, 1e-12, "the loss")
    for name, grad in grads.items():
        if expected[name] is None:
            assert grad is None, name
        else:
            close(grad, expected[name], 1e-10, name)
    in_prelude = [
        size(grad) for name, grad in grads.items() if name.startswith("prelude.") and not name.endswith("bias")
    ]
    assert all((s > 1e-9) is reads_the_anchor(config) for s in in_prelude), (
        "the prelude's gradient comes through inject"
    )
    whole_loss, whole = run(model)
    close(loss, whole_loss, 1e-12, "the loss with every loop's gradient")
    assert differ(grads, whole) > 1e-6, "positive control: the first loops do carry gradients when they are not free"


def test_with_every_loop_free_only_the_coda_learns() -> None:
    _, grads = run(make(house(**GRT)).train(), n_free=R)
    alive = {name.split(".")[0] for name, grad in grads.items() if grad is not None}
    assert alive == {"embed", "coda", "final_norm"}  # the embedding through the tied head


# -- recomputed loops -------------------------------------------------------------------------------------------------


def check_recompute(model: RecurrentLM, n_free: int) -> None:
    loss, grads = run(model, n_free=n_free)
    again, recomputed = run(model, n_free=n_free, recompute=True)
    assert torch.equal(loss, again), "recompute changes the loss"
    for name, grad in grads.items():
        same = recomputed[name] is None if grad is None else torch.equal(grad, recomputed[name])
        assert same, f"recompute changes the gradient of {name}"


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
