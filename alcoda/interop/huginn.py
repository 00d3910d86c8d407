"""Huginn's layout (arXiv 2502.05171; papers.md 5.4): model_type ``huginn_raven``."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from alcoda.errors import UsageError
from alcoda.interop.layout import Layout, Take, Theirs, agrees, mapping, number, only, size
from alcoda.model.config import ModelConfig


class Huginn(Layout):
    """Prelude, core block and coda of sandwich blocks, a concat adapter, one norm before the coda and after it."""

    name: ClassVar[str] = "huginn"
    source: ClassVar[str] = "Huginn, arXiv 2502.05171; papers.md 5.4"
    model_types: ClassVar[tuple[str, ...]] = ("huginn_raven",)
    architectures: ClassVar[tuple[str, ...]] = ("RavenForCausalLM",)
    ignored: ClassVar[tuple[str, ...]] = ("freqs_cis",)

    def model(self, config: Theirs) -> dict[str, Any]:
        only(config, "architecture_class_name", "RecurrentGPT")
        only(config, "block_class_name", "SandwichBlock")
        only(config, "norm_class_name", "RMSNorm_llama")
        only(config, "mlp_class_name", "GatedMLP")
        only(config, "nonlin_name", "SiLU")
        only(config, "injection_type", "linear")
        only(config, "bias", False)
        only(config, "test_time_noise", 0)
        only(config, "tie_embeddings", True)
        d_model, n_heads = size(config, "n_embd"), size(config, "n_heads")
        std, scale = _starts(config, d_model)
        n_layers = [size(config, f"n_layers_in_{block}", least=0) for block in ("prelude", "recurrent_block", "coda")]
        vocab_size = size(config, "padded_vocab_size")
        _check_said_twice(config, d_model, n_heads, vocab_size, n_layers)
        return {
            "vocab_size": vocab_size,
            "seq_len": size(config, "block_size"),
            "d_model": d_model,
            "n_heads": n_heads,
            "d_ff": size(config, "intermediate_size"),
            **dict(zip(("n_prelude", "n_core", "n_coda"), n_layers, strict=True)),
            "n_loops": size(config, "mean_recurrence"),
            "block": {
                "norm": {"kind": "rmsnorm", "eps": number(config, "norm_eps", 1e-6)},
                "sandwich": "after_add",
                "attention": self._attention(config, n_heads),
                "mlp": "swiglu",
            },
            "position": {"kind": "rope", "base": number(config, "rope_base", 50_000), "pairs": "interleaved"},
            "embedding": "scale" if scale != 1 else "none",
            "head": "tied",
            "init_std": std,
            "state_init": {"kind": "noise", "std": std * scale},
            "inject": "concat",
            "loop_norm": "before_coda",
            "final_norm": "shared",
        }

    def _attention(self, config: Theirs, n_heads: int) -> dict[str, Any]:
        only(config, "num_key_value_heads", n_heads, None)
        return {"kind": "mha", "qk_bias": only(config, "qk_bias", True, False)}

    def takes(self, model: ModelConfig, config: Theirs) -> dict[str, Take]:
        found = {
            "embed.weight": Take("transformer.wte.weight"),
            "inject.proj.weight": Take("transformer.adapter.weight"),
            "loop_norm.norm.weight": Take("transformer.ln_f.weight"),
        }
        stages = {
            "prelude": ("prelude", model.n_prelude),
            "core.stack": ("core_block", model.n_core),
            "coda": ("coda", model.n_coda),
        }
        for stage, (block, n_layers) in stages.items():
            for layer in range(n_layers):
                found |= _block(
                    f"{stage}.layers.{layer}", f"transformer.{block}.{layer}", bool(config.get("qk_bias", True))
                )
        return found

    def copies(self, model: ModelConfig, config: Theirs) -> dict[str, str]:
        return {"lm_head.weight": "transformer.wte.weight"}

    def recipe(self, model: ModelConfig, config: Theirs) -> dict[str, Any]:
        # How it was trained, for whoever trains on: its depths vary, and early loops get no gradients.
        return {"depth": {"kind": "lognormal_poisson", "mean": model.n_loops, "sigma": 0.5, "last_k": 8}}


def _starts(config: Theirs, d_model: int) -> tuple[float, float]:
    """The std of fresh weights, and what embeddings (and the initial state) are multiplied by."""
    said = mapping(config, "init_values")
    std = number(said, "std", math.sqrt(2 / (5 * d_model)))
    scale = number(said, "embed_scale", math.sqrt(d_model))
    if scale != 1 and not math.isclose(scale, math.sqrt(d_model), rel_tol=1e-6):
        raise UsageError(
            f"config.json: init_values.embed_scale is {scale}, which has no counterpart here. Allowed: 1, or "
            f"sqrt(n_embd) = {math.sqrt(d_model)}"
        )
    return std, scale


def _check_said_twice(config: Theirs, d_model: int, n_heads: int, vocab_size: int, n_layers: list[int]) -> None:
    """UsageError where entries that no parameter of ours is made by contradict those that are."""
    agrees(config, "n_layers", sum(n_layers), "n_layers_in_prelude, n_layers_in_recurrent_block and n_layers_in_coda")
    if d_model % n_heads == 0:
        agrees(config, "head_dim", d_model // n_heads, "n_embd and n_heads")
    said, multiple = size(config, "vocab_size", None), size(config, "padding_multiple", 4096)
    if said is not None and not vocab_size - multiple < said <= vocab_size:
        raise UsageError(
            f"config.json: vocab_size is {said}, and padded_vocab_size {vocab_size}, which is to be vocab_size or the "
            f"next multiple of padding_multiple ({multiple}): one of them is of another model"
        )


def _block(ours: str, theirs: str, qk_bias: bool) -> dict[str, Take]:
    """A sandwich block: query, key and value are one map of theirs, and so are gate and up."""
    found = {
        "attention.out.weight": Take("attn.proj.weight"),
        "mlp.down.weight": Take("mlp.proj.weight"),
        "attention_norm.weight": Take("norm_1.weight"),
        "attention_post.weight": Take("norm_2.weight"),
        "mlp_norm.weight": Take("norm_3.weight"),
        "mlp_post.weight": Take("norm_4.weight"),
    }
    for i, name in enumerate(("attention.q", "attention.keys.k", "attention.keys.v")):
        found[f"{name}.weight"] = Take("attn.Wqkv.weight", partial(_part, n=3, i=i))
    for i, name in enumerate(("mlp.gate", "mlp.up")):
        found[f"{name}.weight"] = Take("mlp.fc.weight", partial(_part, n=2, i=i))
    for i, name in enumerate(("attention.q", "attention.keys.k") if qk_bias else ()):
        found[f"{name}.bias"] = Take("attn.qk_bias", partial(_bias, i=i))
    return {f"{ours}.{to}": Take(f"{theirs}.{take.name}", take.change) for to, take in found.items()}


def _part(whole: Tensor, n: int, i: int) -> Tensor:
    """Rows ``i`` of ``n`` equal parts."""
    if whole.size(0) % n:
        raise ValueError(f"its {whole.size(0)} rows are not {n} equal parts")
    return whole.chunk(n)[i]


def _bias(whole: Tensor, i: int) -> Tensor:
    """Of queries (0) or keys (1), all heads in a row."""
    return whole[i].flatten()
