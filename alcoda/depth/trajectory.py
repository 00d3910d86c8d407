"""What each token goes through from loop to loop: how far its state moves, and what the coda would say of it there.

Every loop is read out through the coda and the head, as at a uniform depth. Logits are computed in fp32 or finer,
whatever the passes are in: rounded to bf16 they alone differ by more than a token that has converged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alcoda.depth.watch import relative
from alcoda.errors import UsageError, did_you_mean
from alcoda.model.keys import Store
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import at_least_fp32
from alcoda.model.prefill import EXACT_TOKENS, Reader, Tell
from alcoda.model.state import Readout

_CELLS = 1 << 20
"""Logits of one loop that exist at one time: 4 MiB, which stay in the cache of a core."""

OF_STATES = ("state_change", "second_order")
OF_LOGITS = ("kl_previous", "kl_final", "entropy", "argmax", "loss")
NUMBERS = (*OF_LOGITS, *OF_STATES)
"""A number a token and loop: the names that `trace` knows, with `TENSORS`."""
TENSORS = ("state", "logits")


@torch.no_grad()
def trace(
    model: RecurrentLM,
    ids_BT: Tensor,
    n_loops: int,
    targets_BT: Tensor | None = None,
    record: Sequence[str] = NUMBERS,
    tell: Tell = lambda n_tokens: None,
) -> dict[str, Tensor]:
    """Trajectories of whole rows. A model with a memory is read token by token, as it decodes at ``n_loops`` loops.

    Args:
        model: in evaluation mode.
        ids_BT: token ids.
        n_loops: loops that run, and that ``kl_final`` looks back from.
        targets_BT: what follows each token; for ``loss``.
        record: which of these, p_i the next-token distribution after loop i and h_i the state (after the loop and its
            norm), R = ``n_loops``:

            * ``kl_previous``: ``KL(p_i || p_i-1)`` in nats, at least 0; NaN at loop 1, which has none before it;
            * ``kl_final``: ``KL(p_R || p_i)`` in nats, at least 0: what stopping here costs if p_R is the truth;
            * ``entropy``: of p_i, nats; ``argmax``: its likeliest token; ``loss``: nats of the target;
            * ``state_change``: ``|h_i - h_i-1| / |h_i|``;
            * ``second_order``: ``|d_i - d_i-1| / |h_i|``, ``d_i = h_i - h_i-1``; NaN at loop 1;
            * ``state``: h_i, ``[B, T, R, D]``; ``logits``: ``[B, T, R, V]``.
        tell: is told how many more tokens of each row are read.

    Returns:
        By name ``[B, T, R]``, in fp32 or finer (``argmax``: ids).

    Raises:
        UsageError: a dense model, a depth that it does not have, or a name that there is not.
    """
    check_trace(model, n_loops, record)
    if "loss" in record and targets_BT is None:
        raise UsageError("record loss: targets are needed")
    if model.config.memory.carries:
        reader = _TraceReader(model, n_loops, ids_BT.size(1), "state" in record)
        for first in range(0, ids_BT.size(1), EXACT_TOKENS):
            part_BT = ids_BT[:, first : first + EXACT_TOKENS]
            reader.read(part_BT)
            tell(part_BT.size(1))
        seen = reader.seen()
    else:
        seen, _ = _run(model, ids_BT, n_loops, "state" in record)
        tell(ids_BT.size(1))
    found = {"state_change": seen.state_change_BTR, "second_order": seen.second_order_BTR}
    if seen.state_BTRD is not None:
        found["state"] = seen.state_BTRD
    of_logits = [name for name in record if name in OF_LOGITS or name == "logits"]
    if of_logits:
        found |= _of_logits(model, seen.y_BTRD, targets_BT, of_logits)
    return {name: found[name] for name in record}


def check_trace(model: RecurrentLM, n_loops: int, record: Sequence[str] = ()) -> None:
    """UsageError where a model, depth or name cannot be traced."""
    if not model.config.is_recurrent:
        raise UsageError(
            "this model is dense (n_core=0): it has no loop, and so no token that converges in it. Give a run of a "
            "recurrent model"
        )
    model.config.check_loops(n_loops)
    for name in record:
        if name not in (*NUMBERS, *TENSORS):
            raise UsageError(f"record {name!r}{did_you_mean(name, (*NUMBERS, *TENSORS))}")


class _Seen(NamedTuple):
    """Of the tokens of a pass (or of several), loop by loop."""

    y_BTRD: Tensor
    state_change_BTR: Tensor
    second_order_BTR: Tensor
    state_BTRD: Tensor | None


def _run(
    model: RecurrentLM, ids_BT: Tensor, n_loops: int, keep_states: bool, store: Store | None = None, **at: Tensor | None
) -> tuple[_Seen, Readout]:
    """One pass; ``at`` as of `RecurrentLM.begin`."""
    begun, state = model.begin(ids_BT, n_loops, store=store, **at)  # pyrefly: ignore
    ys, states, changes, seconds = [], [], [], []
    before_BTD = at_least_fp32(state.h_BTD)
    last_BTD: Tensor | None = None
    out: Readout | None = None
    for loop in range(n_loops):
        state = model.loop(begun, state, loop)
        out = model.read_out(begun, state, loop)
        h_BTD = at_least_fp32(state.h_BTD)
        change_BTD = h_BTD - before_BTD
        changes.append(relative(change_BTD, h_BTD))
        seconds.append(
            torch.full_like(changes[0], float("nan")) if last_BTD is None else relative(change_BTD - last_BTD, h_BTD)
        )
        before_BTD, last_BTD = h_BTD, change_BTD
        ys.append(out.y_BTD)
        states += [h_BTD] if keep_states else []
    assert out is not None
    kept = torch.stack(states, 2) if keep_states else None
    return _Seen(torch.stack(ys, 2), torch.stack(changes, 2), torch.stack(seconds, 2), kept), out


class _TraceReader(Reader):
    """A `Reader` that keeps what every loop of every token was."""

    def __init__(self, model: RecurrentLM, n_loops: int, capacity_tokens: int, keep_states: bool) -> None:
        super().__init__(model, n_loops, capacity_tokens)
        self.keep_states = keep_states
        self.parts: list[_Seen] = []
        self.sources: list[Tensor] = []

    def run(
        self,
        ids_BT: Tensor,
        store: Store,
        memory_BTD: Tensor | None,
        pos_BT: Tensor | None = None,
        live_BT: Tensor | None = None,
    ) -> Readout:
        seen, out = _run(
            self.model,
            ids_BT,
            self.n_loops,
            self.keep_states,
            store,
            memory_BTD=memory_BTD,
            pos_BT=pos_BT,
            live_BT=live_BT,
        )
        self.parts.append(seen)
        self.sources += [] if out.source_BTD is None else [out.source_BTD]
        return out

    def seen(self) -> _Seen:
        """Of all tokens that were read."""
        y, change, second, state = zip(*self.parts, strict=True)
        states = torch.cat(state, 1) if self.keep_states else None
        return _Seen(torch.cat(y, 1), torch.cat(change, 1), torch.cat(second, 1), states)


@torch.no_grad()
def memories(model: RecurrentLM, ids_BT: Tensor, n_loops: int) -> Tensor | None:
    """What each token of whole rows is told of those before it, read token by token at ``n_loops`` loops: one pass with
    these over all tokens is then exact. None of a model without memory."""
    if not model.config.memory.carries:
        return None
    reader = _TraceReader(model, n_loops, ids_BT.size(1), False)
    reader.read(ids_BT)
    sources_BTD = torch.cat(reader.sources, 1)
    before_BLD = sources_BTD.new_zeros(ids_BT.size(0), model.memory.n_carried, sources_BTD.size(2))
    return model.memory.recall(torch.cat([before_BLD, sources_BTD], 1))


def _of_logits(
    model: RecurrentLM, y_BTRD: Tensor, targets_BT: Tensor | None, record: Sequence[str]
) -> dict[str, Tensor]:
    """``record`` of what the head makes of ``y_BTRD``."""
    n_rows, n_tokens = y_BTRD.shape[:2]
    y_NRD = y_BTRD.flatten(0, 1)
    target_N = None if targets_BT is None else targets_BT.flatten()
    size = max(1, _CELLS // model.config.vocab_size)
    parts: dict[str, list[Tensor]] = {name: [] for name in record}
    with torch.autocast(y_NRD.device.type, enabled=False):
        for first in range(0, len(y_NRD), size):
            here = slice(first, first + size)
            found = _of_tokens(model.logits, y_NRD[here], None if target_N is None else target_N[here], record)
            for name, x_NR in found.items():
                parts[name].append(x_NR)
    return {name: torch.cat(xs).unflatten(0, (n_rows, n_tokens)) for name, xs in parts.items()}


def _of_tokens(
    head: Callable[[Tensor], Tensor], y_NRD: Tensor, target_N: Tensor | None, record: Sequence[str]
) -> dict[str, Tensor]:
    """Of few tokens, loop by loop, so that no more than the logits of three loops are held."""
    found: dict[str, list[Tensor]] = {name: [] for name in record}
    n_loops = y_NRD.size(1)

    def logits(loop: int) -> Tensor:
        return head(at_least_fp32(y_NRD[:, loop]))

    last_NV = torch.log_softmax(logits(n_loops - 1), -1) if "kl_final" in record else None
    p_last_NV = None if last_NV is None else last_NV.exp()
    before_NV: Tensor | None = None
    for loop in range(n_loops):
        logits_NV = logits(loop)
        log_p_NV = torch.log_softmax(logits_NV, -1)
        p_NV = log_p_NV.exp()
        for name, values in found.items():
            if name == "kl_previous" and before_NV is not None:
                values.append(_kl(p_NV, log_p_NV, before_NV))
            elif name == "kl_previous":
                values.append(torch.full_like(log_p_NV[:, 0], float("nan")))
            elif name == "kl_final" and last_NV is not None and p_last_NV is not None:
                values.append(_kl(p_last_NV, last_NV, log_p_NV))
            elif name == "entropy":
                values.append(-torch.linalg.vecdot(p_NV, log_p_NV))
            elif name == "argmax":
                values.append(log_p_NV.argmax(-1))
            elif name == "loss" and target_N is not None:
                values.append(-log_p_NV.gather(-1, target_N[:, None])[:, 0])
            elif name == "logits":
                values.append(logits_NV)
        before_NV = log_p_NV
    return {name: torch.stack(values, 1) for name, values in found.items()}


def _kl(p_NV: Tensor, log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """``KL(p || q)`` of each row; rounding may leave less than nothing."""
    return torch.linalg.vecdot(p_NV, log_p_NV - log_q_NV).clamp(min=0)


def settled_depth(kl_NR: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``min {i: KL_j < eps for all i <= j <= R}`` of each token, and which tokens have none (censored: depth R).

    Args:
        kl_NR: ``kl_previous``. That of loop 1 is never below ``eps``, so a depth is at least 2 where R is.
    """
    below_NR = kl_NR < eps  # of NaN, false
    tail_N = below_NR.flip(-1).long().cumprod(-1).sum(-1)
    n_loops = kl_NR.size(-1)
    return (n_loops + 1 - tail_N).clamp(max=n_loops), tail_N == 0


def first_crossing(kl_NR: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``min {i: KL_i < eps}`` of each token, where an exit rule would fire, and which tokens have none (depth R)."""
    below_NR = kl_NR < eps
    none_N = ~below_NR.any(-1)
    return torch.where(none_N, kl_NR.size(-1), below_NR.long().argmax(-1) + 1), none_N


def stable_loop(argmax_NR: Tensor) -> Tensor:
    """The loop from which on the likeliest token is that of the last loop: 1 to R."""
    same_NR = argmax_NR == argmax_NR[..., -1:]
    return argmax_NR.size(-1) + 1 - same_NR.flip(-1).long().cumprod(-1).sum(-1)
