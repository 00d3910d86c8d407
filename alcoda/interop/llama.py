"""Dense checkpoints of the Llama family: Llama (SmolLM, SmolLM2), Mistral, Qwen2 and Qwen3, as dense models of ours.

Each is pre-norm blocks of RMSNorm, rotary attention (turned by halves) with grouped keys, and SwiGLU: our block. What
tells them apart are fields of ``config.json``, and those that no axis of ours expresses are refused by name.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from alcoda.errors import UsageError
from alcoda.interop.layout import Layout, Take, Theirs, attention, layer_types, mapping, number, only, rope_base, size
from alcoda.model.attention import QK_NORM_EPS
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM


class Family(NamedTuple):
    """What an architecture is besides the fields of its config."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    d_head: int | None = None
    """Where the config names none; None: d_model / n_heads."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, d_head=128),
}
"""By ``model_type``."""

_MAPS = {
    "attention.q": "self_attn.q_proj",
    "attention.keys.k": "self_attn.k_proj",
    "attention.keys.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.keys.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOP = {"embed.weight": _EMBEDDING, "final_norm.weight": "model.norm.weight", "head.weight": _HEAD}


class Llama(Layout):
    """Llama, Mistral, Qwen2 and Qwen3 as transformers writes them."""

    name: ClassVar[str] = "llama"
    source: ClassVar[str] = "Llama 2, arXiv 2307.09288, and what has its shape"
    model_types: ClassVar[tuple[str, ...]] = tuple(FAMILIES)
    architectures: ClassVar[tuple[str, ...]] = tuple(family.architecture for family in FAMILIES.values())
    ignored: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq",)

    def recognises(self, config: Theirs) -> bool:
        # By its type where it has one: another architecture may go by the name of a class of these.
        return config["model_type"] in FAMILIES if config.get("model_type") else super().recognises(config)

    def model(self, config: Theirs) -> dict[str, Any]:
        kind = _kind(config)
        family, n_heads, n_layers = FAMILIES[kind], *(size(config, f"num_{of}") for of in _COUNTS)
        eps = number(config, "rms_norm_eps", 1e-6)
        if family.qk_norm:
            only({"rms_norm_eps": eps}, "rms_norm_eps", QK_NORM_EPS)  # that of the norms of queries and keys here
        only(config, "hidden_act", "silu")
        for said in (config, mapping(config, "rope_parameters")):
            only(said, "partial_rotary_factor", 1.0, None)
        axis = attention(config, n_heads)
        axis |= {"qk_norm": "before_rope"} if family.qk_norm else {}
        axis |= {"qk_bias": True, "v_bias": True} if family.qkv_bias else {}
        window = _window(config, kind, n_layers)
        return {
            "vocab_size": size(config, "vocab_size"),
            "seq_len": size(config, "max_position_embeddings"),
            "d_model": size(config, "hidden_size"),
            "n_heads": n_heads,
            "d_head": size(config, "head_dim", None) or family.d_head,
            "d_ff": size(config, "intermediate_size"),
            **DENSE,
            "n_prelude": n_layers,
            "block": {
                "norm": {"kind": "rmsnorm", "eps": eps},
                "attention": axis,
                "window": "none" if window is None else {"kind": "everywhere", "tokens": window},
                "mlp": "swiglu",
                "bias": _bias(config),
            },
            "position": {"kind": "rope", "base": rope_base(config, 10_000.0), "pairs": "half"},
            "head": "tied" if only(config, "tie_word_embeddings", False, True) else "untied",
            "init_std": number(config, "initializer_range", 0.02),
        }

    def takes(self, model: ModelConfig, config: Theirs) -> dict[str, Take]:
        return {name: Take(_theirs(name)) for name in parameter_names(model)}

    def copies(self, model: ModelConfig, config: Theirs) -> dict[str, str]:
        return {_HEAD: _EMBEDDING} if model.head.kind == "tied" else {}


_COUNTS = ("attention_heads", "hidden_layers")
DENSE = {"n_core": 0, "n_coda": 0, "n_loops": 1}
"""Fields of a model without a loop, whose blocks are all of the prelude."""


def parameter_names(model: ModelConfig) -> list[str]:
    """Every parameter of ours."""
    with torch.device("meta"):
        built: nn.Module = RecurrentLM(model)
    return list(built.state_dict())


def _kind(config: Theirs) -> str:
    named = config.get("architectures") or ()
    of_class = {family.architecture: kind for kind, family in FAMILIES.items()}
    return config.get("model_type") or next(of_class[name] for name in named if name in of_class)


def _theirs(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *path, kind = name.split(".")  # prelude.layers.N.attention.q.weight
    return f"model.layers.{layer}.{_MAPS['.'.join(path)]}.{kind}"


def _bias(config: Theirs) -> bool:
    of_attention, of_mlp = (bool(only(config, f"{name}_bias", False, True, None)) for name in ("attention", "mlp"))
    if of_attention != of_mlp:
        raise UsageError(
            f"config.json: attention_bias is {of_attention} and mlp_bias {of_mlp}, which has no counterpart here. "
            "Allowed: both, or none (queries, keys and values alone have one in Qwen2)"
        )
    return of_mlp


def _window(config: Theirs, kind: str, n_layers: int) -> int | None:
    """The sliding window of all layers; None: they look at everything."""
    window = size(config, "sliding_window", None)
    if window is None or (kind != "mistral" and not config.get("use_sliding_window")):
        return None
    kinds = layer_types(config, n_layers) if kind != "mistral" else ["sliding_attention"] * n_layers
    if kinds is None:
        first = size(config, "max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(n_layers)]
    n_sliding = sum(one == "sliding_attention" for one in kinds)
    if n_sliding not in (0, n_layers):
        raise UsageError(
            f"config.json: {n_sliding} of {n_layers} layers have a sliding window (layer_types, max_window_layers), "
            "which has no counterpart here. Allowed: all or none of them"
        )
    return window if n_sliding else None
