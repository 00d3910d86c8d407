"""Law 5: gradients reach every parameter, from the loops that should carry them, recomputed or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.laws.law import close, each, require
from alcoda.laws.subject import Subject, at_most, needs_loops, tokens
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.state import Readout

B, T, R = 2, 12, 3

Grads = dict[str, Tensor | None]


def loss_and_grads(model: RecurrentLM, readout: Readout, ids_BT: Tensor) -> tuple[Tensor, Grads]:
    """Of the next token, and of what only an auxiliary loss or an exit rule reads."""
    logits_BTV, state = model.logits(readout.y_BTD), readout.state
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    if state.aux_BT is not None:
        loss = loss + state.aux_BT.mean()
    if model.config.exit_gate.has_gate:
        loss = loss + model.exit_gate(state.h_BTD).mean()
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def run(model: RecurrentLM, n_loops: int = R, n_free: int = 0, recompute: bool = False) -> tuple[Tensor, Grads]:
    """Loss and gradients of one pass; the noise is the same each time."""
    ids_BT, loops = tokens(B, T), [at_most(model.config, n_loops)]
    torch.manual_seed(3)
    return loss_and_grads(model, next(model.readouts(ids_BT, loops, n_free=n_free, recompute=recompute)), ids_BT)


def size(grad: Tensor | None) -> float:
    """The largest entry; 0 where there is no gradient."""
    return 0.0 if grad is None else grad.abs().max().item()


# -- the derivative ---------------------------------------------------------------------------------------------------

STEP = 1e-6
RELATIVE = 1e-5
"""A central difference is off by a part in 1e-6^2 of the third derivative and by 1e-16 / 1e-6 of the loss."""


def check_derivative(model: RecurrentLM) -> None:
    """Along a random direction of all parameters, the loss changes as its gradient says."""
    named = dict(model.named_parameters())
    grads = dict(
        zip(named, torch.autograd.grad(_next_token(model), list(named.values()), allow_unused=True), strict=True)
    )
    generator = torch.Generator().manual_seed(11)
    along = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in named.items()}
    said = sum(float((grad * along[name]).sum()) for name, grad in grads.items() if grad is not None)

    def moved(by: float) -> float:
        with torch.no_grad():
            for name, p in named.items():
                p.add_(along[name], alpha=by)
            return float(_next_token(model))

    counted = (moved(STEP) - moved(-2 * STEP)) / (2 * STEP)
    moved(STEP)
    off = abs(said - counted) / max(abs(counted), 1e-3)
    require(off < RELATIVE, f"derivative: the gradient says {said:.8g} along a direction, the loss {counted:.8g}")


def _next_token(model: RecurrentLM) -> Tensor:
    """Without what a router learns from beside it, through which no gradient may pass on into the state."""
    ids_BT = tokens(B, T)
    torch.manual_seed(3)
    logits_BTV = model(ids_BT, at_most(model.config, R))
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


def derivative(subject: Subject) -> None:
    """In training mode, in fp64."""
    check_derivative(subject.model().train())


# -- every parameter --------------------------------------------------------------------------------------------------


def is_dead_by_nature(name: str, config: ModelConfig) -> bool:
    """A key's bias adds q . b to all scores of a query, which softmax ignores, unless rotary positions turn it, a norm
    follows, or each token has a gate on it."""
    alive = config.block.attention.qk_norm != "none" or config.memory.gates_keys
    if not name.endswith(".k.bias") or alive:
        return False
    if ".attention.keys." in name:
        return not config.position.rotates
    return not config.keys.rotates(config.position.rotates)


def check_every_parameter(model: RecurrentLM) -> None:
    """With every loop's gradient, each parameter gets some, and all of it is a number."""
    _, grads = run(model)
    dead = [name for name, grad in grads.items() if size(grad) < 1e-9 and not is_dead_by_nature(name, model.config)]
    require(not dead, f"no gradient: {dead}", dead)
    bad = [name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()]
    require(not bad, f"a gradient is not a number: {bad}", bad)


def every_parameter(subject: Subject) -> None:
    """In training mode, at three loops."""
    check_every_parameter(subject.model().train())


# -- loops without gradients ------------------------------------------------------------------------------------------


def detached(model: RecurrentLM, n_loops: int, n_free: int) -> tuple[Tensor, Grads]:
    """The loop, with what each of ``n_free`` loops makes detached by hand. Nothing else is: the anchor stays,
    and what a router knew before the first loop."""
    config, ids_BT = model.config, tokens(B, T)
    torch.manual_seed(3)
    begun, state = model.begin(ids_BT, n_loops)
    for loop in range(n_loops):
        state = model.loop(begun, state, loop)
        if loop < n_free:
            # A route puts states back, and so makes them anew; else what is kept of earlier ones is handed on as it is,
            # the anchor too.
            made = state.map(Tensor.detach)
            state = state._replace(h_BTD=made.h_BTD, kept=made.kept if config.route.gathers else state.kept)
            if not config.route.reads_anchor:
                state = state._replace(aux_BT=made.aux_BT)
    return loss_and_grads(model, model.read_out(begun, state, n_loops - 1), ids_BT)


def differ(a: Grads, b: Grads) -> float:
    """The largest difference of two sets of gradients."""
    return max(size(x if y is None else y if x is None else x - y) for x, y in zip(a.values(), b.values(), strict=True))


def check_free_loops(model: RecurrentLM, n_free: int) -> None:
    """Loops without gradients change no value, carry none, and leave the others theirs."""
    n_loops = at_most(model.config, R)
    loss, grads = run(model, n_loops, n_free)
    expected_loss, expected = detached(model, n_loops, n_free)
    # Not to the bit: without gradients a CPU takes another attention kernel, which rounds otherwise.
    close(loss, expected_loss, 1e-12, "the loss")
    wrong = [name for name, grad in grads.items() if (grad is None) is not (expected[name] is None)]
    require(not wrong, f"gradients that should be there, or should not: {wrong}", wrong)
    off = {name: size(_minus(grad, expected[name])) for name, grad in grads.items()}
    wrong = [name for name, value in off.items() if not value <= 1e-10]
    worst = max(off.values())
    require(not wrong, f"gradients are not those of the detached state: off by {worst:.3g}, allowed 1e-10", wrong)
    in_prelude = {
        name: size(grad) > 1e-9
        for name, grad in grads.items()
        if name.startswith("prelude.") and not name.endswith("bias")
    }
    reaches = model.config.anchor_reaches_loop
    # States that the carry keeps may be the anchor itself, for as many loops as it keeps them.
    may = reaches or model.config.carry.carries_anchor
    wrong = [name for name, alive in in_prelude.items() if not (reaches <= alive <= may)]
    require(not wrong, "the prelude's gradient comes through what reads the anchor at each loop, and only so", wrong)
    whole_loss, whole = run(model, n_loops)
    close(loss, whole_loss, 1e-12, "the loss with every loop's gradient")
    require(differ(grads, whole) > 1e-6, "positive control: the first loops carry gradients when they are not free")


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a - b


def free_loops(subject: Subject) -> None:
    """One free loop, and all but the last."""
    n_free = range(1, at_most(subject.config, R))
    each((f"{n} free loops", lambda n=n: check_free_loops(subject.model().train(), n)) for n in n_free)


# -- recomputed loops -------------------------------------------------------------------------------------------------


def check_recompute(model: RecurrentLM, n_free: int) -> None:
    """Activation checkpointing changes no bit of the loss or of a gradient."""
    loss, grads = run(model, n_free=n_free)
    again, recomputed = run(model, n_free=n_free, recompute=True)
    close(again, loss, 0.0, "recompute changes the loss")
    wrong = [name for name, grad in grads.items() if not _same(grad, recomputed[name])]
    require(not wrong, f"recompute changes the gradient of {', '.join(wrong)}", wrong)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def recompute(subject: Subject) -> None:
    """With every loop's gradient, and with one free loop."""
    n_free = (0,) if needs_loops(subject) else (0, 1)
    each((f"{n} free loops", lambda n=n: check_recompute(subject.model().train(), n)) for n in n_free)
