"""The ledger: what a model costs, by named term, in pure arithmetic on its config.

Convention: 2 FLOPs a multiply-add of a matrix product, attention scores over the full context of ``seq_len`` keys
(causal masking saves nothing), the head counted, elementwise work (norms, activations, softmax, look-ups) not counted.
A backward pass costs twice its forward pass; loops that run without gradients cost one forward pass; recomputed
loops (activation checkpointing) one more. KV bytes are of the keys and values that decoding keeps, in bf16 (2 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy, caches
from alcoda.model.config import ModelConfig
from alcoda.model.recurrence.route import Route
from alcoda.model.shape import Cost, Shape, total

KV_ITEM_BYTES = 2

CONVENTION = (
    "2 FLOPs a multiply-add; attention over the full context of seq_len keys; head counted; norms, activations and "
    "look-ups not counted; backward = 2 forward; KV cache in bf16"
)


@dataclass(frozen=True)
class Term:
    """One named part of the ledger. All numbers are a token, except ``params``.

    Attributes:
        name: ``stage.part``, for example ``core.mlp``.
        params: stored parameters.
        forward_flops: one forward pass at the ledger's ``loops``.
        training_flops: one training step's share, at the mean of the training depths.
        kv_bytes: keys and values kept at the ledger's ``loops``.
        latent_kv_bytes: what they shrink to where latents are kept and expanded when they are read (MLA).
        effective_params: ``params``, times the loops where one set of weights serves them all.
    """

    name: str
    params: int
    forward_flops: int | float
    training_flops: int | float
    kv_bytes: int
    latent_kv_bytes: int
    effective_params: int


@dataclass(frozen=True)
class TrainingDepth:
    """One kind of training pass: how many loops run, how many of them with gradients, whether those are recomputed,
    how many depths are read out (through coda and head), how often the head runs beside them without gradients, at
    which train step (None: after any warm-up), how many times a step runs a token, and in how many of these it
    has a memory (`alcoda.training.passes`)."""

    loops: int
    grad_loops: int
    recompute: bool = False
    readouts: float = 1.0
    more_heads: float = 0.0
    train_step: int | None = None
    passes: float = 1.0
    remembered: float = 1.0


Mixture = Sequence[tuple[float, TrainingDepth]]
"""Training passes with their probabilities."""


@dataclass(frozen=True)
class Ledger:
    """What one model costs at ``loops`` loops and a context of ``seq_len`` tokens.

    Attributes:
        kv_bytes_by_cache: `kv_bytes_per_token` with each decode cache that the model can have, by name.
    """

    loops: int
    seq_len: int
    training_loops: float
    training_grad_loops: float
    terms: tuple[Term, ...]
    kv_bytes_by_cache: dict[str, int]
    convention: str = CONVENTION

    @property
    def params(self) -> int:
        """Stored parameters, embeddings included."""
        return sum(term.params for term in self.terms)

    @property
    def effective_params(self) -> int:
        """Parameters as if every loop had its own (CART's N_eff)."""
        return sum(term.effective_params for term in self.terms)

    @property
    def forward_flops_per_token(self) -> int | float:
        return sum(term.forward_flops for term in self.terms)

    @property
    def decode_flops_per_token(self) -> int | float:
        """One decoding step against a cache of ``seq_len`` tokens: with every key cached, one forward pass a token."""
        return self.forward_flops_per_token

    @property
    def training_flops_per_token(self) -> int | float:
        return sum(term.training_flops for term in self.terms)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(term.kv_bytes for term in self.terms)

    @property
    def latent_kv_bytes_per_token(self) -> int:
        """What `kv_bytes_per_token` shrinks to where latents are kept (MLA)."""
        return sum(term.latent_kv_bytes for term in self.terms)

    def to_json(self) -> dict[str, Any]:
        """Totals first, then the terms."""
        return {
            "params": self.params,
            "effective_params": self.effective_params,
            "loops": self.loops,
            "training_loops": self.training_loops,
            "training_grad_loops": self.training_grad_loops,
            "seq_len": self.seq_len,
            "forward_flops_per_token": self.forward_flops_per_token,
            "training_flops_per_token": self.training_flops_per_token,
            "decode_flops_per_token": self.decode_flops_per_token,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "latent_kv_bytes_per_token": self.latent_kv_bytes_per_token,
            "kv_bytes_by_cache": self.kv_bytes_by_cache,
            "convention": self.convention,
            "terms": [asdict(term) for term in self.terms],
        }


def ledger(model: ModelConfig, loops: int | None = None, training: TrainingDepth | Mixture | None = None) -> Ledger:
    """The ledger of ``model`` at ``loops`` loops (``n_loops`` where None), training at the depths of ``training``."""
    loops = model.check_loops(model.n_loops if loops is None else loops)
    training = training or TrainingDepth(loops, loops)
    mixture = [(1.0, training)] if isinstance(training, TrainingDepth) else training
    parts, terms = _parts(model, model.shape), []
    for part in parts:
        terms.append(
            Term(
                part.name,
                params=part.cost.params,
                forward_flops=_whole(part.flops * part.times(model, 0, loops, None) * part.runs_forward),
                training_flops=_whole(sum(share * _training_flops(model, part, depth) for share, depth in mixture)),
                kv_bytes=part.cost.kv * part.slots(model, loops, PER_LOOP) * KV_ITEM_BYTES,
                latent_kv_bytes=part.cost.latent * part.slots(model, loops, PER_LOOP) * KV_ITEM_BYTES,
                effective_params=part.cost.params * (loops if part.shared else 1),
            )
        )
    mean_loops = sum(share * depth.loops for share, depth in mixture)
    mean_grad_loops = sum(share * depth.grad_loops for share, depth in mixture)
    by_cache = {
        name: sum(part.cost.kv * part.slots(model, loops, cache) for part in parts) * KV_ITEM_BYTES
        for name, cache in caches().items()
        if _can_have(model, cache)
    }
    return Ledger(loops, model.seq_len, mean_loops, mean_grad_loops, tuple(terms), by_cache)


def _can_have(model: ModelConfig, cache: CachePolicy) -> bool:
    try:
        cache.check(model)
    except UsageError:
        return False
    return True


def readout_flops(model: ModelConfig) -> int:
    """FLOPs a token of one read-out: all between the loop and the logits, over a context of ``seq_len`` keys."""
    parts = _parts(model, model.shape)
    return sum(part.flops * part.runs_forward for part in parts if part.per == "readout")


def _whole(flops: float) -> int | float:
    return int(flops) if flops == int(flops) else flops


def _training_flops(model: ModelConfig, part: Part, depth: TrainingDepth) -> float:
    run = part.times(model, 0, depth.loops, depth.train_step)
    grad = part.times(model, depth.loops - depth.grad_loops, depth.loops, depth.train_step)
    if part.per == "readout":
        run, grad = run * depth.readouts, grad * depth.readouts
        run += depth.more_heads if part.name == "head" else 0
    recomputed = grad if depth.recompute and part.in_loop else 0
    forward_passes = run + 2 * grad + recomputed
    return forward_passes * (part.cost.flops * depth.passes + part.cost.memory_flops * depth.remembered)


@dataclass(frozen=True)
class Part:
    """A part of the model and how often it is applied.

    Attributes:
        per: ``pass``; ``readout`` (after the loop); ``loop`` (all tokens, at each loop); ``step`` (tokens that the
            route lets run, at each loop); ``scores`` (the same, where keys too are only theirs).
        shared: one set of weights serves all loops.
        runs_forward: 0 for what a plain forward pass does not ask.
    """

    name: str
    cost: Cost
    per: Literal["pass", "readout", "loop", "step", "scores"] = "pass"
    shared: bool = False
    runs_forward: int = 1

    @property
    def flops(self) -> int:
        """Of a token with its memory."""
        return self.cost.flops + self.cost.memory_flops

    @property
    def in_loop(self) -> bool:
        return self.per in ("loop", "step", "scores")

    def times(self, model: ModelConfig, first: int, last: int, train_step: int | None) -> float:
        """Applications a token in loops ``first`` .. ``last - 1``; of what is in no loop, in one pass."""
        if not self.in_loop:
            return 1
        if self.per == "loop" or not model.route.gathers:
            return last - first
        power = 2 if self.per == "scores" else 1
        sums = _shares(model.route, model.n_loops, model.seq_len, train_step, power)
        first, last = (min(loop, model.n_loops) for loop in (first, last))  # no loop of a route lies beyond
        return sums[last] - sums[first]

    def slots(self, model: ModelConfig, loops: int, cache: CachePolicy) -> int:
        """Keys kept a token, at ``loops`` loops."""
        return cache.n_slots(model.keys.n_slots(loops)) if self.in_loop else 1


@lru_cache(maxsize=64)
def _shares(route: Route, n_loops: int, n_tokens: int, train_step: int | None, power: int) -> tuple[float, ...]:
    """Sums of the shares of tokens that run loops 0 .. r - 1, to a power, for each r."""
    shares = (route.n_run(loop, n_loops, n_tokens, train_step) / n_tokens for loop in range(n_loops))
    return tuple(accumulate((share**power for share in shares), initial=0.0))


def _parts(model: ModelConfig, shape: Shape) -> list[Part]:
    norm = model.block.norm
    parts = [
        Part("embed", Cost(params=shape.vocab_size * shape.d_model)),
        Part("embedding", model.embedding.cost(norm, shape)),
        Part("position", model.position.cost(shape)),
        *_blocks(model, shape, "prelude"),
        Part("memory", model.memory.cost(shape, model.block.d_kv(shape))),
        Part("keys", model.keys.cost(model.block, shape, model.places("core"), model.memory)),
        Part("route", model.route.cost(shape, model.n_loops)),
        Part("route.loop", Cost(flops=model.route.loop_flops(shape)), "loop"),
        Part("carry", model.carry.cost(shape), "step", shared=True),
        Part("loop_index", model.loop_index.cost(shape), "step", shared=True),
        Part("inject", model.inject.cost(norm, shape), "step", shared=True),
        *_core(model, shape),
        Part("update", model.update.cost(shape), "step", shared=True),
        Part("loop_norm", model.loop_norm.cost(norm, shape), "step", shared=True),
        Part("exit_gate", model.exit_gate.cost(shape), "readout", runs_forward=0),
        Part("readout_map", model.readout_map.cost(shape), "readout"),
        *(replace(part, per="readout") for part in _blocks(model, shape, "coda")),
        Part("final_norm", model.final_norm.cost(norm, shape), "readout"),
        Part("head", model.head.cost(shape), "readout"),
    ]
    return [part for part in parts if any(part.cost)]


def _blocks(model: ModelConfig, shape: Shape, stage: str) -> list[Part]:
    blocks = [model.block.cost(shape, place, model.memory) for place in model.places(stage)]
    names = list(dict.fromkeys(name for block in blocks for name in block))
    return [Part(f"{stage}.{name}", total(*(block.get(name, Cost()) for block in blocks))) for name in names]


def _core(model: ModelConfig, shape: Shape) -> list[Part]:
    """The core's parts, and what the loops have of their own beside them."""
    stack, parts = _blocks(model, shape, "core"), []
    for part in stack:
        own_scores = model.keys.own_keys and part.name.endswith(".scores")
        parts.append(replace(part, per="scores" if own_scores else "step", shared=model.sharing.shares_stack))
    own = model.sharing.cost(total(*(part.cost for part in stack)), model.n_loops)
    return [*parts, Part("core.own", own, "step", shared=model.sharing.is_tied)]
