"""Exit rules at work (`alcoda.depth.rules` are their configs). They see rows, of any sequence at any loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.depth.record import CodaKeys, ProbeWeights, Trace, fingerprint
from alcoda.errors import UsageError
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import at_least_fp32

Kept = tuple[Tensor, ...]
"""What a test keeps from loop to loop, a row each."""

PROBE_EPS = 1e-6


class Seen(NamedTuple):
    """What a test is told of N rows that have run a loop.

    Attributes:
        loop: loops that they have run; [N] where rows are at different ones.
        before_ND, h_ND: the state before the loop, and after it.
        logits: gives ``[N, V]`` of the state after it, for rules that need them.
    """

    loop: int | Tensor
    before_ND: Tensor
    h_ND: Tensor
    logits: Callable[[], Tensor]


class Where(NamedTuple):
    """Which tokens rows are: sequence and place in it, [N] each."""

    row_N: Tensor
    token_N: Tensor


class Bounds(NamedTuple):
    """Between which loops a rule decides, how many loops later it acts, and its threshold at each loop."""

    min_loops: int
    max_loops: int
    horizon: int
    thresholds: tuple[float, ...]


class ExitTest:
    """A rule at work: what it keeps of each row, and which rows leave.

    Attributes:
        needs_logits: whether it asks for them at every loop.
        coda_keys: the only ones with which it makes sense; None: any.
    """

    needs_logits: bool = False
    coda_keys: CodaKeys | None = None

    def __init__(self, model: RecurrentLM, bounds: Bounds) -> None:
        self.model, self.bounds, self.n_loops = model, bounds, len(bounds.thresholds)
        self.threshold_R = torch.tensor(bounds.thresholds, dtype=torch.float64, device=model.embed.weight.device)
        self._rounded_R, self._is_one = self.threshold_R, len(set(bounds.thresholds)) == 1

    def of_rows(self, rows: Sequence[int]) -> ExitTest:
        """The test for texts that are these rows of what it was recorded on, in a pass of their own."""
        return self

    def within(self, min_loops: int | None = None, max_loops: int | None = None) -> Self:
        """The same test where no token leaves before ``min_loops`` loops, and every one after ``max_loops``; bounds of
        the rule's own that are narrower stay. UsageError where nothing is between them."""
        low, high = max(min_loops or 1, self.bounds.min_loops), min(max_loops or self.n_loops, self.bounds.max_loops)
        for name, loops in (("min_loops", min_loops), ("max_loops", max_loops)):
            if loops is not None and not 1 <= loops <= self.n_loops:
                raise UsageError(f"{name}={loops}: this exit runs 1 to {self.n_loops} loops")
        if low > high:
            raise UsageError(f"min_loops={low} is above max_loops={high}: lower the one, or raise the other")
        if (low, high) == (self.bounds.min_loops, self.bounds.max_loops):
            return self
        found = copy.copy(self)
        found.bounds = self.bounds._replace(min_loops=low, max_loops=high)
        return found

    def known(self, row: int, position: int) -> int | None:
        """After how many loops a token leaves, where no loop needs to be looked at for it; else None.

        Args:
            row, position: of the token, as `Where`.
        """
        return None

    def _bounded(self, depth: int) -> int:
        return min(max(depth, self.bounds.min_loops), self.bounds.max_loops)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept of rows from loop to loop."""
        return bool(self.bounds.horizon) or type(self).begin is not ExitTest.begin

    def start(self, h_ND: Tensor, where: Where) -> Kept:
        """What is kept of rows before their first loop: ``h_ND`` is their state, ``where`` what they are."""
        due_N = torch.zeros(len(h_ND), dtype=torch.bool, device=h_ND.device)
        return (*[due_N] * bool(self.bounds.horizon), *self.begin(at_least_fp32(h_ND), where))

    def exits(self, seen: Seen, kept: Kept) -> tuple[Tensor, Tensor, Kept]:
        """Which rows leave after this loop, [N]; their scores, [N]; and what is kept of each."""
        bounds, loop = self.bounds, seen.loop
        due, own = (kept[:1], kept[1:]) if bounds.horizon else ((), kept)
        score_N, own = self.score(seen, own)
        # The threshold is rounded as the score is, once: fp32 at least.
        fires_N = score_N < self._threshold(loop, score_N.dtype)
        if bounds.min_loops > 1:
            fires_N = fires_N & (torch.as_tensor(loop, device=fires_N.device) + bounds.horizon >= bounds.min_loops)
        leaves_N = due[0] if due else fires_N
        last = torch.as_tensor(loop, device=fires_N.device) >= bounds.max_loops
        return leaves_N | last, score_N, (*[fires_N] * len(due), *own)

    def _threshold(self, loop: int | Tensor, dtype: torch.dtype) -> Tensor:
        if self._rounded_R.dtype != dtype:
            self._rounded_R = self.threshold_R.to(dtype)
        return self._rounded_R[0] if self._is_one else self._rounded_R[loop - 1]

    def begin(self, h_ND: Tensor, where: Where) -> Kept:
        """What the score needs of the loop before the first."""
        return ()

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        """``score_N``, in fp32 or finer, infinite where the rule cannot say yet; and what the next loop's needs."""
        raise NotImplementedError


class FixedTest(ExitTest):
    def __init__(self, model: RecurrentLM, bounds: Bounds, loops: int) -> None:
        super().__init__(model, bounds)
        self.loops = loops

    def known(self, row: int, position: int) -> int:
        return self._bounded(self.loops)

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        left = torch.as_tensor(self.loops - seen.loop, device=seen.h_ND.device)
        return left.float().expand(len(seen.h_ND)), kept


class TraceTest(ExitTest):
    def __init__(self, model: RecurrentLM, bounds: Bounds, trace: Trace) -> None:
        super().__init__(model, bounds)
        n_loops, deepest = self.n_loops, int(trace.depths_BT.max()) if trace.depths_BT.numel() else 0
        if deepest > n_loops:
            raise UsageError(f"exit trace: it has depths up to {deepest}, and {n_loops} loops run; run {deepest}")
        self.depths_BT, self.coda_keys = trace.depths_BT.to(model.embed.weight.device), trace.coda_keys
        self._depths_BT = trace.depths_BT.numpy(force=True)

    def of_rows(self, rows: Sequence[int]) -> ExitTest:
        depths_BT = torch.cat([self.depths_BT[row : row + 1] for row in rows])
        trace = Trace(depths_BT, self.n_loops, self.coda_keys or "at_exit")
        return TraceTest(self.model, self.bounds, trace)

    def known(self, row: int, position: int) -> int:
        return self._bounded(int(self._depths_BT[row, position]))

    def begin(self, h_ND: Tensor, where: Where) -> Kept:
        n_rows, n_tokens = (int(at.max()) + 1 if len(at) else 0 for at in where)
        if n_rows > self.depths_BT.size(0) or n_tokens > self.depths_BT.size(1):
            held = " x ".join(map(str, self.depths_BT.shape))
            raise UsageError(
                f"exit trace: it holds {held} depths (rows x tokens), and {n_rows} x {n_tokens} are run; replay the "
                "text that it was recorded on"
            )
        return (self.depths_BT[where],)

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        return (kept[0] - seen.loop).float(), kept


class KlTest(ExitTest):
    needs_logits, coda_keys = True, "per_loop"

    def begin(self, h_ND: Tensor, where: Where) -> Kept:
        return (h_ND.new_zeros(1, 1).expand(len(h_ND), self.model.config.vocab_size),)

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        log_p_NV = self.log_p(at_least_fp32(seen.logits()))
        kl_N = self.divergence(log_p_NV, kept[0]).clamp(min=0)  # rounding may leave less than nothing
        return _not_in_first(kl_N, seen.loop), (log_p_NV,)

    def log_p(self, logits_NV: Tensor) -> Tensor:
        """Of the next token."""
        return torch.log_softmax(logits_NV, -1)

    def divergence(self, log_p_NV: Tensor, last_NV: Tensor) -> Tensor:
        """Of the distribution after this loop and after the last one, [N]."""
        return (log_p_NV.exp() * (log_p_NV - last_NV)).sum(-1)


class LastKlTest(KlTest):
    def divergence(self, log_p_NV: Tensor, last_NV: Tensor) -> Tensor:
        return (last_NV.exp() * (last_NV - log_p_NV)).sum(-1)


class MinPKlTest(LastKlTest):
    def __init__(self, model: RecurrentLM, bounds: Bounds, min_p: float) -> None:
        super().__init__(model, bounds)
        self.log_min_p = math.log(min_p)

    def log_p(self, logits_NV: Tensor) -> Tensor:
        log_p_NV = super().log_p(logits_NV)
        rare_NV = log_p_NV < log_p_NV.amax(-1, keepdim=True) + self.log_min_p
        return torch.log_softmax(log_p_NV.masked_fill(rare_NV, -math.log(log_p_NV.size(-1))), -1)


class EntropyTest(ExitTest):
    needs_logits, coda_keys = True, "per_loop"

    def begin(self, h_ND: Tensor, where: Where) -> Kept:
        return (h_ND.new_zeros(len(h_ND)),)

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        log_p_NV = torch.log_softmax(at_least_fp32(seen.logits()), -1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
        return _not_in_first((entropy_N - kept[0]).abs(), seen.loop), (entropy_N,)


class StateTest(ExitTest):
    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        before_ND, h_ND = at_least_fp32(seen.before_ND), at_least_fp32(seen.h_ND)
        return relative(h_ND - before_ND, h_ND), kept


class CosineTest(ExitTest):
    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        before_ND, h_ND = at_least_fp32(seen.before_ND), at_least_fp32(seen.h_ND)
        return (1 - F.cosine_similarity(before_ND, h_ND, dim=-1)).clamp(min=0), kept


class SecondOrderTest(ExitTest):
    def __init__(self, model: RecurrentLM, bounds: Bounds, hits: int) -> None:
        super().__init__(model, bounds)
        self.hits = hits

    def begin(self, h_ND: Tensor, where: Where) -> Kept:
        return torch.zeros_like(h_ND), h_ND.new_full((len(h_ND),), float("inf"))

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        before_ND, h_ND = at_least_fp32(seen.before_ND), at_least_fp32(seen.h_ND)
        change_ND, (last_ND, last_N) = h_ND - before_ND, kept
        score_N = _not_in_first(relative(change_ND - last_ND, h_ND), seen.loop)
        return score_N if self.hits == 1 else torch.maximum(score_N, last_N), (change_ND, score_N)


class ArgmaxTest(ExitTest):
    needs_logits, coda_keys = True, "per_loop"

    def __init__(self, model: RecurrentLM, bounds: Bounds, loops: int | None) -> None:
        super().__init__(model, bounds)
        self.loops = loops

    def begin(self, h_ND: Tensor, where: Where) -> Kept:
        none_N = torch.full((len(h_ND),), -1, device=h_ND.device)
        return none_N, none_N

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        argmax_N, (last_N, same_N) = seen.logits().argmax(-1), kept
        same_N = torch.where(argmax_N == last_N, same_N + 1, 0)
        return ((self.loops or float("inf")) - same_N).float(), (argmax_N, same_N)


class GateTest(ExitTest):
    def begin(self, h_ND: Tensor, where: Where) -> Kept:
        return (h_ND.new_zeros(len(h_ND)),)

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        log_stays_N = kept[0] + F.logsigmoid(-self.model.exit_gate(seen.h_ND))
        return log_stays_N.exp(), (log_stays_N,)


class ProbeTest(ExitTest):
    def __init__(self, model: RecurrentLM, bounds: Bounds, probe: ProbeWeights) -> None:
        super().__init__(model, bounds)
        d_model, n_loops = model.config.d_model, self.n_loops
        if probe.weight_D.shape != (d_model,) or probe.bias_R.dim() != 1 or len(probe.bias_R) < n_loops:
            raise UsageError(
                f"exit probe: weights of shape {tuple(probe.weight_D.shape)} with {probe.bias_R.numel()} biases; this "
                f"model needs ({d_model},) and a bias for each of {n_loops} loops: fit a probe to it"
            )
        if probe.model != fingerprint(model):
            raise UsageError("exit probe: it was fitted to other weights than this model's: fit one to this checkpoint")
        self.weight_D, self.bias_R = (x.to(model.embed.weight.device) for x in (probe.weight_D, probe.bias_R))

    def score(self, seen: Seen, kept: Kept) -> tuple[Tensor, Kept]:
        h_ND = at_least_fp32(seen.h_ND)
        normed_ND = F.rms_norm(h_ND, h_ND.shape[-1:], eps=PROBE_EPS)
        return torch.sigmoid(normed_ND @ self.weight_D.to(h_ND) + self.bias_R.to(h_ND)[seen.loop - 1]), kept


def relative(change_ND: Tensor, h_ND: Tensor) -> Tensor:
    """``|change| / |h|``; 0 where nothing has changed."""
    size_N = torch.linalg.vector_norm(h_ND, dim=-1).clamp(min=torch.finfo(h_ND.dtype).tiny)
    return torch.linalg.vector_norm(change_ND, dim=-1) / size_N


def _not_in_first(score_N: Tensor, loop: int | Tensor) -> Tensor:
    """Infinite in the first loop, before which there is nothing to compare with."""
    return score_N.masked_fill(torch.as_tensor(loop, device=score_N.device) == 1, float("inf"))
