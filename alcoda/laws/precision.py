"""Law 7: a compiled pass equals an eager one, and bf16 equals fp32, within stated bounds."""

from __future__ import annotations

import shutil
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.laws.law import Place, each, require
from alcoda.laws.subject import Subject, at_most, depths, tokens
from alcoda.model.blocks import Stack
from alcoda.model.lm import RecurrentLM

B, T = 2, 24

# -- bf16 -------------------------------------------------------------------------------------------------------------

BF16 = 0.05
"""Root mean square of the difference over that of the logits. A rounding to bf16 is 2^-9 = 0.002 relative at most; the
deepest path here rounds some 60 times (3 loops of 2 blocks, 8 roundings each, and the rest), which add up like a random
walk to sqrt(60) * 0.002 = 0.015; the weights of these models are ten times those of a fresh one, so a factor of 3. The
worst case of the space measures 0.030."""


@torch.no_grad()
def bf16_error(model: RecurrentLM, n_loops: int) -> float:
    """Of an fp32 model's logits, relative."""
    ids_BT = tokens(B, T)
    exact = model(ids_BT, n_loops)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(ids_BT, n_loops).float()
    return ((rounded - exact).square().mean() / exact.square().mean()).sqrt().item()


def check_bf16(model: RecurrentLM, n_loops: int) -> None:
    """Within `BF16`; an error of 0 would mean that bf16 was not used."""
    error = bf16_error(model.float(), n_loops)
    require(
        1e-4 < error < BF16,
        f"bf16 is off by {error:.3g} of the logits, allowed {BF16}; 0 would mean it was not used",
    )


def bf16(subject: Subject) -> None:
    """At the deepest."""
    check_bf16(subject.model(), depths(subject.config)[-1])


def rounding_moves_tokens(subject: Subject) -> str | None:
    """The exception of the law on bf16."""
    route = subject.config.route
    return f"route {route.kind}: a rounding can move a token to another depth" if route.gathers else None


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
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def check_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within `COMPILED`, each by its own norm."""
    require(actual.keys() == expected.keys(), "compiled: other parameters have gradients")
    off = {name: ((actual[name] - b).norm() / b.norm()).item() for name, b in expected.items() if b.any()}
    wrong: list[Place] = [name for name, value in off.items() if not value < COMPILED]
    worst = max(off, key=lambda name: off[name])
    require(not wrong, f"compiled {worst} is off by {off[worst]:.3g}, allowed {COMPILED}", wrong)


def compiler() -> str | None:
    """A C++ compiler of this machine."""
    names = ("c++", "g++", "clang++", "cc", "gcc", "clang")
    return next((name for name in names if shutil.which(name)), None)


def eager_and_compiled(model: RecurrentLM, other: RecurrentLM, trains: bool) -> tuple[RecurrentLM, RecurrentLM]:
    """Two models of the same weights in fp32, the second with its stacks compiled, as training compiles them."""
    import torch._dynamo  # the compiler, where it is asked for: it takes as long to load as half of torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = (m.float().train(trains) for m in (model, other))
    for module in compiled.modules():
        if isinstance(module, Stack):
            module.compile()
    return eager, compiled


def check_compiled(eager: RecurrentLM, compiled: RecurrentLM, trains: bool) -> None:
    """The loop is not compiled, so another depth compiles nothing new."""
    import torch._dynamo
    import torch._inductor.config

    few, more = at_most(eager.config, 2), at_most(eager.config, 5)
    with warnings.catch_warnings(), torch._inductor.config.patch(compile_threads=1):  # a pool takes longer to start
        warnings.simplefilter("ignore")  # of the compiler's own making
        check_same(outputs(compiled, few, trains), outputs(eager, few, trains))
        n_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        require(n_graphs >= 1, "nothing was compiled")
        check_same(outputs(compiled, more, trains), outputs(eager, more, trains))
    n_again = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    require(n_again == n_graphs, f"compiled: another number of loops compiles {n_again - n_graphs} graphs anew")


def compiled(subject: Subject) -> None:
    """Inference, and training."""
    import torch._dynamo

    def check(trains: bool) -> None:
        check_compiled(*eager_and_compiled(subject.model(), subject.model(), trains), trains)
        torch._dynamo.reset()

    each([("inference", lambda: check(False)), ("training", lambda: check(True))])


def cannot_compile(subject: Subject) -> str | None:
    """The exception of the law of the compiler."""
    if not subject.compiled:
        return "takes a minute; asked for with --compile"
    return None if compiler() else "no C++ compiler: torch.compile cannot build CPU kernels here"
