"""What a training pass keeps for its backward pass, a token, in pure arithmetic on the recipe.

Counted from the code: the tensors that autograd saves, each once, parameters left out. `tests/unit/test_footprint.py`
holds it against torch's own saved tensors. Not counted: indices and masks of tokens, the statistics of norms, masks of
windows.
"""

from __future__ import annotations

from typing import NamedTuple

from alcoda.model.attention import EXPLICIT_MAX_TOKENS
from alcoda.model.config import ModelConfig
from alcoda.model.shape import Kept
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


class KeptBytes(NamedTuple):
    """Bytes a token that one application keeps.

    Attributes:
        embedding, prelude, keys: once a pass.
        loop: once a loop with gradients, of a token that runs it, by part.
        route: for the router, at each loop that carries gradients: the whole sequence's mean.
        state: what is kept of a loop that is recomputed: what it starts from.
        readout: once a read-out, by part.
        logits: of one row of logits.
    """

    embedding: int
    prelude: int
    keys: int
    loop: dict[str, int]
    state: int
    readout: dict[str, int]
    logits: int


def kept_bytes(model: ModelConfig, kept: Kept) -> KeptBytes:
    """What each part of ``model`` keeps each time it is applied."""
    shape, block = model.shape, model.block
    in_core = kept._replace(stream=kept.product) if model.inject.gives_product else kept
    # Of what the loops give: the core's type, unless the update or a norm of the sum has another.
    state = kept if model.update.keeps_dtype or (block.sandwich == "after_add" and kept.fp32_norms) else in_core
    in_coda = state._replace(stream=kept.product) if model.readout_map.kept_bytes(shape, kept) else state

    def stack(stage: str, kept: Kept) -> int:
        return sum(block.kept_bytes(shape, place, kept) for place in model.places(stage))

    norm = model.loop_norm
    keys = 0
    if not model.keys.own_keys:
        keys = sum(block.key_kept_bytes(shape, place, kept) for place in model.places("core"))
        n_maps = block.attention.n_key_maps(shape.d_model) * model.n_core
        keys += shape.d_model * kept.product * (n_maps if kept.product != kept.stream else 0)
    return KeptBytes(
        embedding=model.embedding.kept_bytes(shape, kept),
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
