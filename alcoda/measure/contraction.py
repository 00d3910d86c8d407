"""Does the loop contract? Two initial states followed side by side, and the Jacobian of one loop at the state.

Both are measured on a sample of rows in fp32 (or finer), because they are about small differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from alcoda.depth.trajectory import memories
from alcoda.model.lm import RecurrentLM
from alcoda.model.state import Begun, State
from alcoda.training.diagnose import QUANTILES

N_PRODUCTS = 20
"""Jacobian-vector products of one token's power iteration."""
_SETTLING = 10
"""The first of them turn the vector towards the largest direction, and are not counted."""


@dataclass(frozen=True)
class PathPoint:
    """Two paths after a loop (0: where they start), over tokens.

    Attributes:
        distance: ``|h_a - h_b| / ((|h_a| + |h_b|) / 2)``, mean and quantiles.
        kl: mean ``KL(p_a || p_b)``, nats.
        agree: the share of tokens whose likeliest next token is the same.
    """

    loop: int
    distance: dict[str, float]
    kl: float
    agree: float


@dataclass(frozen=True)
class Paths:
    """Path independence. ``how``: where the two initial states come from."""

    how: str
    n_tokens: int
    by_loop: tuple[PathPoint, ...]


@dataclass(frozen=True)
class Contraction:
    """The Jacobian of the next loop at the states after ``loop`` loops, of single tokens: d h_t / d h_t, the states of
    the other tokens held still.

    Attributes:
        radius: its spectral radius: growth per product, of the last of `N_PRODUCTS` Jacobian-vector products. Below 1
            small changes of the state die out.
        growth: of a random vector over all of them together.
        expanding: the share of tokens whose radius is 1 or more.
    """

    loop: int
    n_tokens: int
    radius: dict[str, float]
    growth: dict[str, float]
    expanding: float


def summary(x: np.ndarray) -> dict[str, float]:
    """Mean, 10%, 50% and 90%."""
    quantiles = np.quantile(x, list(QUANTILES.values())).tolist()
    return {"mean": float(x.mean())} | dict(zip(QUANTILES, quantiles, strict=True))


@torch.no_grad()
def path_independence(model: RecurrentLM, ids_BT: Tensor, n_loops: int, seed: int = 0) -> Paths:
    """Run rows from two initial states: two draws of the model's own noise, else its state with noise of its size.

    Args:
        ids_BT: few rows; the logits of all are held.
    """
    begun, state = model.begin(ids_BT, n_loops, memory_BTD=memories(model, ids_BT, n_loops))
    starts, how = _two_starts(model, begun, state, seed)
    points = []
    pair = [state._replace(h_BTD=h_BTD) for h_BTD in starts]
    for loop in range(n_loops + 1):
        if loop:
            pair = [model.loop(begun, one, loop - 1) for one in pair]
        # Before the first loop the coda's keys are those of its first slot: nothing is read out there otherwise.
        logits = [model.logits(model.read_out(begun, one, max(loop - 1, 0)).y_BTD).flatten(0, 1) for one in pair]
        points.append(_point(loop, *(one.h_BTD.flatten(0, 1) for one in pair), *logits))
    return Paths(how, ids_BT.numel(), tuple(points))


def _two_starts(model: RecurrentLM, begun: Begun, state: State, seed: int) -> tuple[list[Tensor], str]:
    device = begun.e_BTD.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.state_init.train()
        try:
            draws = [model.state_init(begun.e_BTD, begun.context.pos) for _ in range(2)]
        finally:
            model.state_init.eval()
        if not torch.equal(*draws):
            return draws, "two draws of the noise that the state starts from in training"
        noise = torch.randn(2, *begun.e_BTD.shape, dtype=begun.e_BTD.dtype).to(device)
    noise *= begun.e_BTD.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    how = "the model starts from no noise: its initial state, twice with noise as large as the anchor added"
    return [state.h_BTD + one for one in noise], how


def _point(loop: int, a_ND: Tensor, b_ND: Tensor, logits_a_NV: Tensor, logits_b_NV: Tensor) -> PathPoint:
    size_N = (a_ND.norm(dim=-1) + b_ND.norm(dim=-1)) / 2
    distance_N = (a_ND - b_ND).norm(dim=-1) / size_N.clamp(min=torch.finfo(a_ND.dtype).tiny)
    log_a_NV, log_b_NV = logits_a_NV.log_softmax(-1), logits_b_NV.log_softmax(-1)
    kl_N = torch.linalg.vecdot(log_a_NV.exp(), log_a_NV - log_b_NV).clamp(min=0)
    agree = float((log_a_NV.argmax(-1) == log_b_NV.argmax(-1)).double().mean())
    return PathPoint(loop, summary(distance_N.double().cpu().numpy()), float(kl_N.double().mean()), agree)


@torch.no_grad()
def contraction(
    model: RecurrentLM, ids_BT: Tensor, at: Sequence[int], n_loops: int, seed: int = 0
) -> tuple[Contraction, ...]:
    """`Contraction` of one token of each row, at the states after each of the increasing loops ``at`` < ``n_loops``.

    A token's keys are made anew from its state, so that what it reads of itself is part of its block.
    """
    generator = torch.Generator().manual_seed(seed)
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    place_B = torch.randint(ids_BT.size(1), (len(ids_BT),), generator=generator).to(ids_BT.device)
    found = []
    begun, state = model.begin(ids_BT, n_loops, memory_BTD=memories(model, ids_BT, n_loops))
    start_BD = torch.randn(len(ids_BT), state.h_BTD.size(-1), dtype=state.h_BTD.dtype, generator=generator)
    for loop in range(max(at)):
        state = model.loop(begun, state, loop)
        if loop + 1 not in at:
            continue

        def step(h_BD: Tensor, state: State = state, loop: int = loop) -> Tensor:
            h_BTD = state.h_BTD.index_put((rows_B, place_B), h_BD)
            return model.loop(begun, state._replace(h_BTD=h_BTD), loop + 1).h_BTD[rows_B, place_B]

        v_BD = (start_BD / start_BD.norm(dim=-1, keepdim=True)).to(state.h_BTD)
        logs = []
        # Of torch's attention kernels only the plain one has a forward derivative.
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(N_PRODUCTS):
                v_BD = torch.func.jvp(step, (state.h_BTD[rows_B, place_B],), (v_BD,))[1]
                size_B = v_BD.norm(dim=-1).clamp(min=torch.finfo(v_BD.dtype).tiny)
                v_BD = v_BD / size_B[:, None]
                logs.append(size_B.double().log().cpu())
        log_PB = torch.stack(logs).numpy()
        radius_B, growth_B = np.exp(log_PB[_SETTLING:].mean(0)), np.exp(log_PB.sum(0).clip(max=700))
        expanding = float((radius_B >= 1).mean())
        found.append(Contraction(loop + 1, len(ids_BT), summary(radius_B), summary(growth_B), expanding))
    return tuple(found)
