"""What the passes of a training step keep for the backward pass, in pure arithmetic on the recipe.

Counted from the code: the tensors that autograd saves, each once, parameters left out. `tests/unit/test_footprint.py`
holds it against torch's own saved tensors. Not counted: indices and masks of tokens, the statistics of norms, masks of
windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from alcoda.model.attention import EXPLICIT_MAX_TOKENS
from alcoda.model.config import ModelConfig
from alcoda.model.passes import has_pages, keys_held
from alcoda.model.shape import Kept
from alcoda.training.objective import LOSS_ROWS
from alcoda.training.recipe import Recipe


def kept_widths(recipe: Recipe) -> Kept:
    """The types of a pass of ``recipe``: those of a GPU, but with ``train.device: cpu`` those of a CPU.

    ``train.dtype: auto`` is taken for bf16 on a GPU and fp32 on a CPU.
    """
    on_cpu = recipe.train.device == "cpu"
    dtype = recipe.train.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    explicit = on_cpu and recipe.model.seq_len <= EXPLICIT_MAX_TOKENS
    return Kept(2 if dtype == "bfloat16" else 4, fp32_norms=not on_cpu, fused_attention=not explicit)


@dataclass(frozen=True)
class MemoryTerm:
    """Bytes on one rank.

    Attributes:
        bytes: at the mean training depth.
        bytes_at_max: at the largest depth that is drawn.
    """

    name: str
    bytes: int
    bytes_at_max: int


class Run(NamedTuple):
    """What one pass of a training step runs of a row of T tokens.

    Attributes:
        tokens: how many of them.
        keys: how many keys each layer holds.
        is_first: its memories are zeros; later passes hold those of all tokens.
        has_pages: its keys are kept for the pass after it.
    """

    tokens: int
    keys: int
    is_first: bool
    has_pages: bool


def runs(recipe: Recipe) -> list[Run]:
    """The passes of one train step of ``recipe``, in order."""
    n_tokens = recipe.model.seq_len
    passes = recipe.passes.resolve(recipe.model.memory.carries).of(n_tokens)
    pages = has_pages(passes, n_tokens)
    held = keys_held(passes)
    return [Run(len(one.tokens), keys, i == 0, pages) for i, (one, keys) in enumerate(zip(passes, held, strict=True))]


class KeptBytes(NamedTuple):
    """Bytes a token of the row that some passes keep.

    Attributes:
        tokens: how many times a token is run.
        embedding, memory, prelude, keys: once a pass.
        loop: once a loop with gradients, of a token that runs it, by part.
        state: what is kept of a loop that is recomputed: what it starts from.
        page: and its keys, where they are kept for a later pass, with gradients or without.
        readout: once a read-out, by part.
        logits: of one row of logits.
    """

    tokens: float
    embedding: float
    memory: float
    prelude: float
    keys: float
    loop: dict[str, float]
    state: float
    page: float
    readout: dict[str, float]
    logits: float


def kept_bytes(model: ModelConfig, kept: Kept, passes: Sequence[Run]) -> KeptBytes:
    """What each part of ``model`` keeps each time it is applied, in these passes together."""
    row, parts = model.seq_len, []
    for is_first in (True, False):
        some = [one for one in passes if one.is_first == is_first]
        n_tokens = sum(one.tokens for one in some)
        if not n_tokens:
            continue
        # All that is kept is linear in what a pass holds of other tokens: passes of one kind are as their mean.
        mean = kept._replace(
            keys=sum(one.keys for one in some) / n_tokens,
            reach=sum(one.tokens * one.keys for one in some) / (n_tokens * row),
            memories=0.0 if is_first else len(some) * row / n_tokens,
        )
        parts.append((n_tokens / row, _of_pass(model, mean, some[0].has_pages)))
    return _weighed(parts)


def _weighed(parts: Sequence[tuple[float, KeptBytes]]) -> KeptBytes:
    def add(values: Sequence[Any]) -> Any:
        if values and isinstance(values[0], dict):
            return {name: add([one[name] for one in values]) for name in values[0]}
        return sum(weight * value for (weight, _), value in zip(parts, values, strict=True))

    return KeptBytes(*(add(values) for values in zip(*(part for _, part in parts), strict=True)))


def _of_pass(model: ModelConfig, kept: Kept, has_pages: bool) -> KeptBytes:
    """Of a pass, a token that it runs."""
    shape, block, memory = model.shape, model.block, model.memory
    in_core = kept._replace(stream=kept.product) if model.inject.gives_product else kept
    # Of what the loops give: the core's type, unless the update or a norm of the sum has another.
    keeps_fp32 = model.update.keeps_dtype or (block.sandwich == "after_add" and kept.fp32_norms)
    state = kept if keeps_fp32 else in_core
    in_coda = state._replace(stream=kept.product) if model.readout_map.kept_bytes(shape, kept) else state

    def stack(stage: str, kept: Kept) -> float:
        return sum(block.kept_bytes(shape, place, memory, kept) for place in model.places(stage))

    norm, d_kv = model.loop_norm, block.d_kv(shape)
    keys = 0.0
    if not model.keys.own_keys:
        keys = sum(block.key_kept_bytes(shape, place, memory, kept) for place in model.places("core"))
        n_maps = block.attention.n_key_maps(shape.d_model) * model.n_core
        keys += shape.d_model * kept.product * (n_maps if kept.product != kept.stream else 0)
    page = 2 * d_kv * kept.product * kept.keys * model.n_core if has_pages and model.keys.own_keys else 0
    at_source = {"prelude": kept, "core": state}.get((model.memory_source or ("final", 0))[0], in_coda)
    return KeptBytes(
        tokens=1,
        embedding=model.embedding.kept_bytes(shape, kept),
        memory=memory.kept_bytes(shape, d_kv, model.memory_source, at_source),
        prelude=stack("prelude", kept) + 4 * shape.d_model,  # and its output e, which every loop reads
        keys=keys,
        loop={
            "carry": model.carry.kept_bytes(shape, state),
            "inject": model.inject.kept_bytes(shape, state),
            "core": stack("core", in_core),
            "update": model.update.kept_bytes(shape, kept),
            "loop_norm": norm.kept_bytes(shape, state) if norm.every_loop else 0,
        },
        state=shape.d_model * state.stream,
        page=page,
        readout={
            "loop_norm": 0 if norm.every_loop else norm.kept_bytes(shape, state),
            "readout_map": model.readout_map.kept_bytes(shape, kept),
            "exit_gate": 4 * shape.d_model if model.exit_gate.has_gate and state.stream != 4 else 0,
            "coda": stack("coda", in_coda),
            "final_norm": model.final_norm.kept_bytes(shape, in_coda),
            "head": shape.d_model * kept.product,
        },
        logits=4 * shape.vocab_size * model.soft_cap.kept_logits,
    )


def activation_terms(recipe: Recipe, kept: Kept, n_tokens: int) -> list[MemoryTerm]:
    """What is kept of a micro-batch of ``n_tokens`` on one rank, at the moment at which it is most."""
    passes = runs(recipe)
    moments = [_terms(recipe, kept, n_tokens, passes, False)]
    if recipe.train.recompute and recipe.model.is_recurrent:
        most = 0
        for i in reversed(range(len(passes))):
            # Once those after it are differentiated and gone, only a pass of more tokens may need more.
            if passes[i].tokens > most:
                most = passes[i].tokens
                moments.append(_terms(recipe, kept, n_tokens, passes[: i + 1], True))
    return max(moments, key=lambda terms: sum(one.bytes_at_max for one in terms))


def _terms(recipe: Recipe, kept: Kept, n_tokens: int, passes: Sequence[Run], again: bool) -> list[MemoryTerm]:
    """What is kept when the backward pass of ``passes`` begins; or, ``again``, when a loop of the last of them is run
    again: no loop is before the last read-out of its pass is differentiated, and gone."""
    model, depth, objective, pmf = recipe.model, recipe.depth, recipe.objective, recipe.depth.pmf()
    recomputes, n_readouts = recipe.train.recompute, objective.n_readouts
    each, last = kept_bytes(model, kept, passes), kept_bytes(model, kept, passes[-1:])

    def term(name: str, of: Callable[[int], float]) -> MemoryTerm:
        """``of`` a depth, bytes a token."""
        mean = sum(share * of(n) for n, share in pmf.items())
        return MemoryTerm(name, math.ceil(n_tokens * mean), math.ceil(n_tokens * of(depth.max_loops)))

    def loops(part: str, n_loops: int) -> float:
        """Of all loops with gradients, or of the one that is run again."""
        n_grad = min(n_loops, depth.last_k or n_loops)
        some = range(n_loops - n_grad, n_loops)
        if not recomputes:
            return sum(_of_loop(model, kept, each, part, loop) for loop in some)
        return max(_of_loop(model, kept, last, part, loop) for loop in some) if again else 0

    def left(count: Callable[[int], float], of_all: float, of_last: float) -> Callable[[int], float]:
        """So many at each depth, but for those of the read-out that is gone."""
        return lambda n: count(n) * max(of_all - (of_last / n_readouts(n) if again else 0), 0)

    # The gradients of one part of the logits, in fp32 and as the product takes them.
    n_rows = min(LOSS_ROWS, n_tokens * max(one.tokens for one in passes) // model.seq_len)
    gradients = 0 if again else n_rows * model.vocab_size * (4 + kept.product)
    return [
        term("activations.memory", lambda n: each.memory),
        term("activations.prelude", lambda n: each.embedding + each.prelude),
        term("activations.keys", lambda n: each.keys),
        term("activations.states", lambda n: each.state * min(n, depth.last_k or n) if recomputes else 0),
        term("activations.pages", lambda n: each.page * n if recomputes else 0),
        *(
            term(f"activations.{part}", lambda n, part=part: loops(part, n))
            for part in ([*each.loop, "route"] if model.is_recurrent else [])
        ),
        *(
            term(f"activations.readout.{part}", left(n_readouts, size, last.readout[part]))
            for part, size in each.readout.items()
        ),
        term("logits", left(objective.n_kept_logits, each.logits, last.logits)),
        MemoryTerm("logits.gradients", gradients, gradients),
    ]


def _of_loop(model: ModelConfig, kept: Kept, each: KeptBytes, part: str, loop: int) -> float:
    """Bytes a token that a part of loop ``loop`` keeps."""
    if not model.route.gathers:
        return each.loop.get(part, 0)
    share = model.route.n_run(loop, model.n_loops, model.seq_len) / model.seq_len
    if part == "route":
        return each.tokens * model.route.kept_bytes(model.shape, kept, share)
    return each.loop[part] * share
