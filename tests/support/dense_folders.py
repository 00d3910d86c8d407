"""Tiny checkpoints of other projects' dense models, with random weights, as their own tools write them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, D, FF, LAYERS, HEADS, KV_HEADS, SEQ = 97, 32, 48, 4, 4, 2, 64
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": FF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": SEQ,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 50_000.0, "rms_norm_eps": 1e-5},
    "llama-new": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": HEADS},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 5},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}
"""config.json of each, over `SIZES`."""
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def config(kind: str, **changes: Any) -> dict[str, Any]:
    of_kind = KINDS[kind]
    return {**SIZES, "architectures": [f"{CLASSES[of_kind['model_type']]}ForCausalLM"], **of_kind, **changes}


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random ones, large enough that every part shows in the logits."""
    d_head = config.get("head_dim") or D // HEADS
    n_kv, n_layers = config["num_key_value_heads"] * d_head, config["num_hidden_layers"]
    maps = {
        "self_attn.q_proj": (HEADS * d_head, D),
        "self_attn.k_proj": (n_kv, D),
        "self_attn.v_proj": (n_kv, D),
        "self_attn.o_proj": (D, HEADS * d_head),
        "mlp.gate_proj": (FF, D),
        "mlp.up_proj": (FF, D),
        "mlp.down_proj": (D, FF),
    }
    biased = set(maps) if config.get("mlp_bias") else set()
    if config["model_type"] == "qwen2":
        biased = {f"self_attn.{x}_proj" for x in "qkv"}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(n_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in maps.items()}
        shapes |= {f"{at}.{name}.bias": maps[name][:1] for name in maps if name in biased}
        shapes |= {f"{at}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}.self_attn.{x}_norm.weight": (d_head,) for x in "qk"}
    shapes["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    generator = torch.Generator().manual_seed(seed)

    def fill(name: str, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=generator)
        return 1 + 0.2 * x if "norm" in name else 0.3 * x

    return {name: fill(name, shape) for name, shape in shapes.items()}


def write(folder: Path, kind: str, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A folder with config.json and model.safetensors; ``tensors`` in place of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    said = config(kind, **changes)
    (folder / "config.json").write_text(json.dumps(said))
    found = weights(said) if tensors is None else tensors
    save_file({name: x.contiguous() for name, x in found.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def llama2c(path: Path, shares_head: bool = True, n_kv_heads: int = KV_HEADS, seed: int = 0) -> dict[str, Tensor]:
    """Write a llama2.c checkpoint; returns its tensors, a row a layer."""
    generator = torch.Generator().manual_seed(seed)
    d_kv = D // HEADS * n_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings": (V, D),
        "rms_att": (LAYERS, D),
        "wq": (LAYERS, D, D),
        "wk": (LAYERS, d_kv, D),
        "wv": (LAYERS, d_kv, D),
        "wo": (LAYERS, D, D),
        "rms_ffn": (LAYERS, D),
        "w1": (LAYERS, FF, D),
        "w2": (LAYERS, D, FF),
        "w3": (LAYERS, FF, D),
        "rms_final": (D,),
        "freq_real": (SEQ, D // HEADS // 2),
        "freq_imag": (SEQ, D // HEADS // 2),
        **({} if shares_head else {"output": (V, D)}),
    }
    found = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found |= {name: 1 + x for name, x in found.items() if "rms" in name}
    head = struct.pack("<7i", D, FF, LAYERS, HEADS, n_kv_heads, V if shares_head else -V, SEQ)
    path.write_bytes(head + b"".join(x.numpy().astype("<f4").tobytes() for x in found.values()))
    return found


def vocabulary(with_bytes: bool = True) -> list[tuple[str, float]]:
    """Pieces of a SentencePiece BPE: specials, bytes, characters, and merges in the order of their scores."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)] if with_bytes else []
    words = ["he", "▁t", "▁the", "re", "in", "▁a", "an", "▁and", "ing", "er", "here", "▁there", "ther"]
    letters = ["▁", *"abcdefghinorst.", "é"]
    return pieces + [(piece, -float(i)) for i, piece in enumerate([*words, *letters])]


def tokenizer_bin(path: Path, pieces: list[tuple[str, float]]) -> None:
    """As llama2.c writes it: <s> and </s> in line breaks, spaces for ▁."""
    data = struct.pack("<i", max(len(piece.encode()) for piece, _ in pieces))
    for i, (piece, score) in enumerate(pieces):
        raw = (f"\n{piece}\n" if i in (1, 2) else piece.replace("▁", " ")).encode()
        data += struct.pack("<fi", score, len(raw)) + raw
    path.write_bytes(data)


def tokenizer_model(path: Path, pieces: list[tuple[str, float]]) -> None:
    """As SentencePiece writes it, with a message of settings behind the pieces."""
    data = b""
    for piece, score in pieces:
        raw = piece.encode()
        one = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", score)
        data += b"\x0a" + bytes([len(one)]) + one
    path.write_bytes(data + b"\x12\x04\x18\x02\x20\x69")
