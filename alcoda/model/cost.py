"""The ledger: what a model costs, by named term, in pure arithmetic on its config.

Convention: 2 FLOPs a multiply-add of a matrix product, attention scores over the full context of ``seq_len`` keys
(causal masking saves nothing), the head counted, elementwise work (norms, activations, softmax, look-ups) not counted.
A backward pass costs twice its forward pass; loops that run without gradients cost one forward pass; recomputed
loops (activation checkpointing) one more. KV bytes are of the keys and values that decoding keeps, in bf16 (2 bytes).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from alcoda.model.config import ModelConfig
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
    """

    name: str
    params: int
    forward_flops: int
    training_flops: float
    kv_bytes: int


@dataclass(frozen=True)
class TrainingDepth:
    """Means over the training depths: loops that run, and loops with gradients; and whether those are recomputed."""

    loops: float
    grad_loops: float
    recompute: bool = False


@dataclass(frozen=True)
class Ledger:
    """What one model costs at ``loops`` loops and a context of ``seq_len`` tokens."""

    loops: int
    seq_len: int
    training_loops: float
    training_grad_loops: float
    terms: tuple[Term, ...]
    convention: str = CONVENTION

    @property
    def params(self) -> int:
        """Stored parameters, embeddings included."""
        return sum(term.params for term in self.terms)

    @property
    def effective_params(self) -> int:
        """Parameters as if every loop had its own (CART's N_eff)."""
        return sum(term.params * (self.loops if _loops(term.name) else 1) for term in self.terms)

    @property
    def forward_flops_per_token(self) -> int:
        return sum(term.forward_flops for term in self.terms)

    @property
    def decode_flops_per_token(self) -> int:
        """One decoding step against a cache of ``seq_len`` tokens: with every key cached, one forward pass a token."""
        return self.forward_flops_per_token

    @property
    def training_flops_per_token(self) -> float:
        return sum(term.training_flops for term in self.terms)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(term.kv_bytes for term in self.terms)

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
            "convention": self.convention,
            "terms": [asdict(term) for term in self.terms],
        }


_LOOPED = ("inject", "core", "update", "loop_norm")


def _loops(name: str) -> bool:
    return name.split(".")[0] in _LOOPED


def ledger(model: ModelConfig, loops: int | None = None, training: TrainingDepth | None = None) -> Ledger:
    """The ledger of ``model`` at ``loops`` loops (``n_loops`` where None), training at the depths of ``training``."""
    loops = model.check_loops(model.n_loops if loops is None else loops)
    training = training or TrainingDepth(loops, loops)
    terms = []
    for name, cost, count in _parts(model, model.shape):
        looped = _loops(name)
        run, run_grad = (training.loops, training.grad_loops) if looped else (1, 1)
        passes = run + 2 * run_grad + (run_grad if looped and training.recompute else 0)
        slots = model.keys.n_slots(loops) if looped else 1
        terms.append(
            Term(
                name,
                params=cost.params * count,
                forward_flops=cost.flops * count * (loops if looped else 1),
                training_flops=cost.flops * count * passes,
                kv_bytes=cost.kv * count * slots * KV_ITEM_BYTES,
            )
        )
    return Ledger(loops, model.seq_len, training.loops, training.grad_loops, tuple(terms))


def _parts(model: ModelConfig, shape: Shape) -> list[tuple[str, Cost, int]]:
    """(name, cost of one application, how many there are in one pass or one loop)."""
    norm = model.block.norm
    d, v = shape.d_model, shape.vocab_size
    parts: list[tuple[str, Cost, int]] = [("embed", Cost(params=v * d), 1), ("position", model.position.cost(shape), 1)]
    for stage in ("prelude", "core", "coda"):
        if stage == "core":
            parts.append(("inject", model.inject.cost(shape), 1))
        blocks = [model.block.cost(shape, place) for place in model.places(stage)]
        parts += [(f"{stage}.{name}", total(*(block[name] for block in blocks)), 1) for name in (blocks or [{}])[0]]
        if stage == "core":
            parts.append(("update", model.update.cost(shape), 1))
            parts.append(("loop_norm", model.loop_norm.cost(norm, shape), 1))
    final = norm.cost(shape) if model.final_norm == "own" else Cost()
    head = Cost(params=v * d if model.head == "untied" else 0, flops=2 * v * d)
    return [part for part in [*parts, ("final_norm", final, 1), ("head", head, 1)] if any(part[1]) and part[2]]
