"""Tiny random checkpoints in Huginn's and Ouro's own layouts, and what their equations (papers.md 5.4) make of them.

Written from the equations, without a line of alcoda: the reference that imported models are held against.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

VOCAB, D, HEADS, FF, T = 300, 32, 4, 48, 40

HUGINN: dict[str, Any] = {
    "model_type": "huginn_raven",
    "architectures": ["RavenForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "raven_modeling_minimal.RavenForCausalLM"},
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
    "qk_bias": True,
    "tie_embeddings": True,
    "n_embd": D,
    "n_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": FF,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 1,
    "mean_recurrence": 3,
    "block_size": T,
    "padded_vocab_size": VOCAB,
    "vocab_size": VOCAB,
    "norm_eps": 1e-6,
    "rope_base": 50000,
    "test_time_noise": 0,
    "init_values": {"std": math.sqrt(2 / (5 * D)), "embed_scale": math.sqrt(D)},
}

OURO: dict[str, Any] = {
    "model_type": "ouro",
    "architectures": ["OuroForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": FF,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": D // HEADS,
    "total_ut_steps": 4,
    "max_position_embeddings": T,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}

Weights = dict[str, Tensor]


def _normal(seed: int, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Norms near 1, everything else of a size that makes each part matter."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=g)
        found[name] = 1 + 0.3 * noise if len(shape) == 1 and "bias" not in name else 0.2 * noise
    return found


def huginn_weights(seed: int = 0) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, D),
        "transformer.adapter.weight": (D, 2 * D),
        "transformer.ln_f.weight": (D,),
    }
    for block, n in (("prelude", 2), ("core_block", 2), ("coda", 1)):
        for i in range(n):
            at = f"transformer.{block}.{i}"
            shapes |= {f"{at}.norm_{k}.weight": (D,) for k in (1, 2, 3, 4)}
            shapes |= {
                f"{at}.attn.Wqkv.weight": (3 * D, D),
                f"{at}.attn.qk_bias": (2, 1, HEADS, D // HEADS),
                f"{at}.attn.proj.weight": (D, D),
                f"{at}.mlp.fc.weight": (2 * FF, D),
                f"{at}.mlp.proj.weight": (D, FF),
            }
    found = _normal(seed, shapes)
    return found | {"lm_head.weight": found["transformer.wte.weight"].clone(), "freqs_cis": torch.zeros(1, T, 1, 4, 2)}


def ouro_weights(seed: int = 0) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, D),
        "lm_head.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "model.early_exit_gate.weight": (1, D),
        "model.early_exit_gate.bias": (1,),
    }
    for i in range(2):
        at = f"model.layers.{i}"
        for norm in (
            "input_layernorm",
            "input_layernorm_2",
            "post_attention_layernorm",
            "post_attention_layernorm_2",
        ):
            shapes[f"{at}.{norm}.weight"] = (D,)
        shapes |= {f"{at}.self_attn.{k}_proj.weight": (D, D) for k in "qkvo"}
        shapes |= {f"{at}.mlp.{k}_proj.weight": (FF, D) for k in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (D, FF)
    return _normal(seed, shapes)


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def _attend(q: Tensor, k: Tensor, v: Tensor, base: float, interleaved: bool) -> Tensor:
    """Causal attention of ``[B, T, D]``, heads side by side, with rotary positions."""
    B, n, _ = q.shape
    q, k, v = (x.view(B, n, HEADS, D // HEADS).transpose(1, 2) for x in (q, k, v))
    half = D // HEADS // 2
    angle = torch.arange(n)[:, None].double() * base ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos().to(q), angle.sin().to(q)

    def turn(x: Tensor) -> Tensor:
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        a, b = a * cos - b * sin, a * sin + b * cos
        return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)

    scores = turn(q) @ turn(k).transpose(-1, -2) / math.sqrt(D // HEADS)
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, n, D)


def huginn_logits(w: Weights, ids: Tensor, loops: int) -> Tensor:
    """Zero initial state."""

    def block(x: Tensor, at: str) -> Tensor:
        n = [w[f"{at}.norm_{k}.weight"] for k in (1, 2, 3, 4)]
        q, k, v = (_rms(x, n[0]) @ w[f"{at}.attn.Wqkv.weight"].T).chunk(3, -1)
        q_bias, k_bias = w[f"{at}.attn.qk_bias"].flatten(1)
        y = _attend(q + q_bias, k + k_bias, v, 50000, True) @ w[f"{at}.attn.proj.weight"].T
        x = _rms(x + y, n[1])
        a, b = (_rms(x, n[2]) @ w[f"{at}.mlp.fc.weight"].T).chunk(2, -1)
        return _rms(x + (F.silu(a) * b) @ w[f"{at}.mlp.proj.weight"].T, n[3])

    e = w["transformer.wte.weight"][ids] * math.sqrt(D)
    for i in range(2):
        e = block(e, f"transformer.prelude.{i}")
    h = torch.zeros_like(e)
    for _ in range(loops):
        h = torch.cat((h, e), -1) @ w["transformer.adapter.weight"].T
        for i in range(2):
            h = block(h, f"transformer.core_block.{i}")
    y = block(_rms(h, w["transformer.ln_f.weight"]), "transformer.coda.0")
    return _rms(y, w["transformer.ln_f.weight"]) @ w["transformer.wte.weight"].T


def ouro_logits(w: Weights, ids: Tensor, loops: int) -> tuple[Tensor, Tensor]:
    """Logits, and the exit gate's lambda of each loop ``[loops, B, T]``."""
    x, gates = w["model.embed_tokens.weight"][ids], []
    for _ in range(loops):
        for i in range(2):
            at = f"model.layers.{i}"
            y = _rms(x, w[f"{at}.input_layernorm.weight"])
            q, k, v = (y @ w[f"{at}.self_attn.{n}_proj.weight"].T for n in "qkv")
            y = _attend(q, k, v, 10000, False) @ w[f"{at}.self_attn.o_proj.weight"].T
            x = x + _rms(y, w[f"{at}.input_layernorm_2.weight"])
            y = _rms(x, w[f"{at}.post_attention_layernorm.weight"])
            y = F.silu(y @ w[f"{at}.mlp.gate_proj.weight"].T) * (y @ w[f"{at}.mlp.up_proj.weight"].T)
            y = y @ w[f"{at}.mlp.down_proj.weight"].T
            x = x + _rms(y, w[f"{at}.post_attention_layernorm_2.weight"])
        x = _rms(x, w["model.norm.weight"])
        gate = x @ w["model.early_exit_gate.weight"].T + w["model.early_exit_gate.bias"]
        gates.append(torch.sigmoid(gate)[..., 0])
    return x @ w["lm_head.weight"].T, torch.stack(gates)


def write_folder(
    folder: Path, config: dict[str, Any], weights: Weights, shards: int = 1, tokenizer: bool = False, **said: Any
) -> Path:
    """A checkpoint as it would be published; ``said`` changes entries of config.json (None takes one out)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**config, **said}.items() if key not in said or value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "raven_modeling_minimal.py").write_text("raise SystemExit('their code was run')\n")
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        names = sorted(weights)
        files = {name: f"model-{1 + i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: weights[n] for n in names if files[n] == file}, folder / file, {"format": "pt"})
        index = {"metadata": {"total_size": 0}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, template: bool = True) -> None:
    """Bytes with ``<|begin|>`` put before a text and ``<|end|>`` behind it."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<|begin|>": 256, "<|end|>": 257}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|begin|>", "<|end|>"])
    if template:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            "<|begin|> $A", "<|begin|> $A $B", [("<|begin|>", 256)]
        )
    inner.save(str(folder / "tokenizer.json"))
    said = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
