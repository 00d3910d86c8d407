"""What one train step of a recipe needs of each rank: memory, communication and time, by named term.

An estimate in arithmetic: nothing is run, and the model is only laid out on the meta device to count its parameters.
Weights, gradients and optimizer state are exact; what the backward pass keeps is counted from the code
(`alcoda.training.activations`). Not counted: the allocator's unused blocks, workspaces of kernels, the gradients of the
block that is being differentiated, the CUDA context and NCCL's buffers, the batch itself.

Of the parallel kinds, N ranks (torch's DDP and FSDP2; weights are fp32, and autocast makes bf16 copies of them):

ddp     every rank holds all. Gradients are all-reduced once a step; the buckets are the gradients themselves.
fsdp    weights, gradients and optimizer state are split in N, by rows. In each micro-batch, the core and all that is in
        no block is gathered once and held, so that a loop costs no communication; blocks of prelude and coda are
        gathered one by one, one ahead, in the forward pass and again in the backward pass (once, and held, without
        `reshard_after_forward`). What runs several times is held with the core: a coda that is read out at several
        depths, every block of a model with a memory. Gradients are reduce-scattered once a step, and until then whole
        on every rank where there are several micro-batches. Muon gathers each update of a matrix.

In a ring each of N ranks sends (N - 1) / N of what is gathered or scattered, and twice that in an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from alcoda.depth.plan import Depth
from alcoda.errors import UsageError, did_you_mean
from alcoda.model.lm import RecurrentLM
from alcoda.model.shape import Kept
from alcoda.training.activations import MemoryTerm, activation_terms, kept_widths, runs
from alcoda.training.parallel import Parallel, blocks
from alcoda.training.recipe import Recipe
from alcoda.training.trainable import mark

WEIGHT_BYTES = 4
"""Weights and gradients are fp32."""

ASSUMPTIONS = (
    "estimates, not measurements: fp32 weights, gradients and optimizer state; activations when the backward pass "
    "begins, or, recomputed, in a loop, where that is more; the allocator's unused blocks, workspaces of kernels, "
    "gradients of activations and buffers of the communication library not counted; compute at the given share of the "
    "peak, no communication hidden behind it"
)


@dataclass(frozen=True)
class TrafficTerm:
    """Bytes that one rank sends in a step (it receives as many)."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """What a train step needs of each of ``ranks``.

    Attributes:
        rows: sequences of one micro-batch on one rank.
        flops: training FLOPs of the whole step by the ledger, all ranks together, at the mean depth.
        compute_s, communication_s, step_s, run_s: None where the peak or the bandwidth is not given. A step is the sum
            of the two.
    """

    ranks: int
    parallel: str
    dtype: str
    rows: int
    micro_batches: int
    mean_loops: float
    max_loops: int
    memory: tuple[MemoryTerm, ...]
    traffic: tuple[TrafficTerm, ...]
    flops: float
    n_steps: int
    compute_s: float | None
    communication_s: float | None
    assumptions: str = ASSUMPTIONS

    @property
    def memory_bytes(self) -> int:
        """On one rank, at the mean depth."""
        return sum(term.bytes for term in self.memory)

    @property
    def memory_bytes_at_max(self) -> int:
        """On one rank, at the largest depth that is drawn."""
        return sum(term.bytes_at_max for term in self.memory)

    @property
    def traffic_bytes(self) -> int:
        return sum(term.bytes for term in self.traffic)

    @property
    def step_s(self) -> float | None:
        if self.compute_s is None or self.communication_s is None:
            return None
        return self.compute_s + self.communication_s

    @property
    def run_s(self) -> float | None:
        return None if self.step_s is None else self.step_s * self.n_steps

    def to_json(self) -> dict[str, Any]:
        """Every field, and the totals."""
        totals = ("memory_bytes", "memory_bytes_at_max", "traffic_bytes", "step_s", "run_s")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}


def footprint(
    recipe: Recipe,
    ranks: int = 1,
    parallel: str | None = None,
    peak_tflops: float | None = None,
    utilisation: float = 0.4,
    bandwidth_gbps: float | None = None,
) -> Footprint:
    """What one train step of ``recipe`` needs of each of ``ranks`` ranks.

    Args:
        parallel: a kind, ``ddp`` or ``fsdp``; None: the recipe's own. Of one rank it makes no difference.
        peak_tflops: of one rank's device, in the recipe's dtype, 10^12 FLOP/s; None: no times.
        utilisation: the share of the peak that a step reaches, by the ledger's FLOPs.
        bandwidth_gbps: what one rank can send, 10^9 bits a second; None: no times of communication.

    Raises:
        UsageError: a value that makes no sense, or rows that do not divide among ranks and micro-batches.
    """
    _check(recipe, ranks, parallel, peak_tflops, utilisation, bandwidth_gbps)
    recipe = recipe.resolved()
    train, kept = recipe.train, kept_widths(recipe)
    kind = recipe.parallel.kind if parallel is None else parallel
    share = recipe.parallel if kind == recipe.parallel.kind else Parallel.parse(kind)
    weights = _Weights(recipe, ranks, share)
    traffic = weights.traffic()
    n_tokens = recipe.step_tokens // (ranks * train.micro_batches)
    memory = [*weights.memory(kept), *activation_terms(recipe, kept, n_tokens)]
    flops = recipe.ledger().training_flops_per_token * recipe.step_tokens
    sent = sum(term.bytes for term in traffic)
    return Footprint(
        ranks=ranks,
        parallel=kind if ranks > 1 else "none",
        dtype="bfloat16" if kept.product == 2 else "float32",
        rows=train.batch_size // (ranks * train.micro_batches),
        micro_batches=train.micro_batches,
        mean_loops=recipe.depth.mean_loops,
        max_loops=recipe.depth.max_loops,
        memory=tuple(term for term in memory if term.bytes_at_max),
        traffic=tuple(term for term in traffic if term.bytes),
        flops=flops,
        n_steps=recipe.n_steps,
        compute_s=None if peak_tflops is None else flops / (ranks * peak_tflops * 1e12 * utilisation),
        communication_s=_seconds(sent, bandwidth_gbps),
    )


def _seconds(sent_bytes: int, bandwidth_gbps: float | None) -> float | None:
    if sent_bytes == 0:
        return 0.0
    return None if bandwidth_gbps is None else sent_bytes * 8 / (bandwidth_gbps * 1e9)


def _check(
    recipe: Recipe,
    ranks: int,
    parallel: str | None,
    peak_tflops: float | None,
    utilisation: float,
    bandwidth_gbps: float | None,
) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"ranks={ranks!r}: a whole number of 1 or more is needed")
    if parallel is not None and parallel not in Parallel.choices:
        raise UsageError(f"parallel={parallel!r}: there is no such kind{did_you_mean(parallel, Parallel.choices)}")
    for name, value in (("peak_tflops", peak_tflops), ("bandwidth_gbps", bandwidth_gbps)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name}={value!r}: a number above 0 is needed")
    if not 0 < utilisation <= 1:
        raise UsageError(f"utilisation={utilisation!r}: the share of the peak that is reached, above 0 and at most 1")
    rows, parts = recipe.train.batch_size, recipe.train.micro_batches
    if rows % ranks:
        raise UsageError(
            f"ranks={ranks} must divide train.batch_size={rows}, the rows of all ranks together: one of "
            f"{_divisors(rows)}, or set train.batch_size"
        )
    if rows // ranks % parts:
        raise UsageError(
            f"train.micro_batches={parts} must divide the {rows // ranks} rows of each of {ranks} ranks: set it to one "
            f"of {_divisors(rows // ranks)}"
        )


def _divisors(n: int) -> str:
    found = [i for i in range(1, n + 1) if n % i == 0]
    return ", ".join(map(str, found))


class _Weights:
    """The parameters of a recipe's model, and how they lie on ranks.

    Attributes:
        all, held, blocks: all; those in no block that is gathered by itself; those of each such block.
        product: of linear maps and the head: autocast makes a copy of them.
        core_product: those of the core that each loop makes for itself (sharing).
    """

    def __init__(self, recipe: Recipe, ranks: int, parallel: Parallel) -> None:
        self.model = _unfilled(recipe)
        self.recipe, self.ranks, self.parallel = recipe, ranks, parallel
        self.blocks = [list(block.parameters()) for block in blocks(self.model, recipe.run_once)]
        in_blocks = {id(p) for block in self.blocks for p in block}
        self.all = list(self.model.parameters())
        self.held = [p for p in self.all if id(p) not in in_blocks]
        core = _matrices(self.model.core)
        own = recipe.model.sharing.kept_weight_bytes(1, Kept(1)) > 0
        self.core_product = _count(core)
        # One weight may be of several maps.
        product = {id(p): p for p in [*_matrices(self.model), self.model.head_weight_VD]}
        self.product = _count(product.values()) - (self.core_product if own else 0)

    def memory(self, kept: Kept) -> list[MemoryTerm]:
        """The terms of weights, gradients and optimizer."""
        train, depth, sharing = self.recipe.train, self.recipe.depth, self.recipe.model.sharing
        shards = self.parallel.splits and self.ranks > 1
        gathered, gathered_gradients = 0, 0
        if shards:
            largest = 2 * max(map(_count, self.blocks), default=0)
            gathered = _count(self.held) + (largest if self.parallel.lets_go else sum(map(_count, self.blocks)))
            gathered_gradients = _count(p for p in self.held if p.requires_grad) + largest
            if train.micro_batches > 1:
                gathered_gradients = _count(p for p in self.all if p.requires_grad)

        def own(grad_loops: float) -> int:
            loops = 1 if train.recompute else grad_loops * len(runs(self.recipe))
            return math.ceil(loops * sharing.kept_weight_bytes(self.core_product, kept))

        mine = _unfilled(self.recipe, self.ranks if shards else 1)
        learnt = [p for p in mine.parameters() if p.requires_grad]
        fixed = {
            "weights": WEIGHT_BYTES * _count(mine.parameters()),
            "weights.gathered": WEIGHT_BYTES * gathered,
            "weights.autocast": 2 * self.product if kept.product == 2 else 0,
            "gradients": WEIGHT_BYTES * _count(learnt),
            "gradients.gathered": WEIGHT_BYTES * gathered_gradients,
            "optimizer": train.optimizer.state_bytes(mine),
        }
        loops = MemoryTerm("weights.of_loops", own(depth.mean_grad_loops), own(_most_grad_loops(depth)))
        return [*(MemoryTerm(name, n_bytes, n_bytes) for name, n_bytes in fixed.items()), loops]

    def traffic(self) -> list[TrafficTerm]:
        """What one rank sends in a step."""
        if self.ranks == 1:
            return []
        train = self.recipe.train
        whole = train.optimizer.gathered(self.model)
        sent = self.parallel.communication(self.model, self.ranks, train.micro_batches, self.recipe.run_once, whole)
        return [TrafficTerm(name, math.ceil(n_bytes)) for name, n_bytes in sent.items()]


def _unfilled(recipe: Recipe, ranks: int = 1) -> RecurrentLM:
    """The model without its numbers, or the largest of what ``ranks`` ranks hold of it: each a part of the rows."""
    with torch.device("meta"):
        model = RecurrentLM(recipe.model)
    for p in model.parameters():
        p.data = p.data[: -(-p.size(0) // ranks)]
    mark(model, recipe.trainable)
    return model


def _matrices(module: nn.Module) -> list[torch.Tensor]:
    return [part.weight for part in module.modules() if isinstance(part, nn.Linear)]


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def _most_grad_loops(depth: Depth) -> int:
    return min(depth.max_loops, depth.last_k or depth.max_loops)
