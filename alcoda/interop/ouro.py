"""Ouro's layout (arXiv 2510.25741; papers.md 5.4): model_type ``ouro``."""

from __future__ import annotations

from typing import Any, ClassVar

from alcoda.interop.layout import Layout, Take, Theirs, attention, layer_types, number, only, rope_base, size
from alcoda.model.config import ModelConfig

NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.keys.k": "self_attn.k_proj",
    "attention.keys.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "attention_post": "input_layernorm_2",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post": "post_attention_layernorm_2",
}


class Ouro(Layout):
    """All layers in the loop, the final norm after each loop, an exit gate."""

    name: ClassVar[str] = "ouro"
    source: ClassVar[str] = "Ouro, arXiv 2510.25741; papers.md 5.4"
    model_types: ClassVar[tuple[str, ...]] = ("ouro",)
    architectures: ClassVar[tuple[str, ...]] = ("OuroForCausalLM",)
    ignored: ClassVar[tuple[str, ...]] = (r".*\.rotary_emb\.inv_freq",)

    def model(self, config: Theirs) -> dict[str, Any]:
        only(config, "hidden_act", "silu")
        if config.get("use_sliding_window", True):  # a width may be named that is not used
            only(config, "sliding_window", None)
        n_heads, n_layers = size(config, "num_attention_heads"), size(config, "num_hidden_layers")
        for kind in layer_types(config, n_layers) or ():
            only({"layer_types": kind}, "layer_types", "full_attention")
        return {
            "vocab_size": size(config, "vocab_size"),
            "seq_len": size(config, "max_position_embeddings"),
            "d_model": size(config, "hidden_size"),
            "n_heads": n_heads,
            "d_head": size(config, "head_dim", None),
            "d_ff": size(config, "intermediate_size"),
            "n_prelude": 0,
            "n_core": n_layers,
            "n_coda": 0,
            "n_loops": size(config, "total_ut_steps", 4),
            "block": {
                "norm": {"kind": "rmsnorm", "eps": number(config, "rms_norm_eps", 1e-6)},
                "sandwich": "on_branch",
                "attention": attention(config, n_heads),
                "mlp": "swiglu",
            },
            "position": {"kind": "rope", "base": rope_base(config, 10_000.0), "pairs": "half"},
            "head": "tied" if only(config, "tie_word_embeddings", False, True) else "untied",
            "init_std": number(config, "initializer_range", 0.02),
            "state_init": "anchor",
            "loop_norm": "every_loop",
            "final_norm": "none",
            "exit_gate": "linear",
        }

    def takes(self, model: ModelConfig, config: Theirs) -> dict[str, Take]:
        found = {
            "embed.weight": Take("model.embed_tokens.weight"),
            "loop_norm.norm.weight": Take("model.norm.weight"),
            "exit_gate.proj.weight": Take("model.early_exit_gate.weight"),
            "exit_gate.proj.bias": Take("model.early_exit_gate.bias"),
        }
        if model.head.kind == "untied":
            found["head.weight"] = Take("lm_head.weight")
        for layer in range(model.n_core):
            for to, at in NAMES.items():
                found[f"core.stack.layers.{layer}.{to}.weight"] = Take(f"model.layers.{layer}.{at}.weight")
        return found

    def copies(self, model: ModelConfig, config: Theirs) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if model.head.kind == "tied" else {}

    def recipe(self, model: ModelConfig, config: Theirs) -> dict[str, Any]:
        return {"objective": {"kind": "per_loop", "beta": 0.1}}
