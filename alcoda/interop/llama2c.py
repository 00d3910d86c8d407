"""llama2.c's checkpoints (version 0): seven int32 of header, then every tensor in float32, and their tokenizers.

    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len      (vocab_size < 0: a head of its own)

Each kind of tensor is one array over all layers. The model is a Llama whose rotary pairs are (2i, 2i + 1).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from alcoda.errors import RunError, UsageError
from alcoda.interop.layout import Layout, Take, Theirs
from alcoda.interop.llama import DENSE, parameter_names
from alcoda.model.config import ModelConfig

HEADER = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
MODEL_TYPE = "llama2.c"
_MOST = 1 << 24
"""No size in a header is above it: another kind of file is told by its first bytes."""
_NEWER = 0x616B3432
"""The first word ("ak42") of versions 1 and 2."""

_KINDS = {
    "attention.q": "wq",
    "attention.keys.k": "wk",
    "attention.keys.v": "wv",
    "attention.out": "wo",
    "mlp.gate": "w1",
    "mlp.down": "w2",
    "mlp.up": "w3",
    "attention_norm": "rms_att",
    "mlp_norm": "rms_ffn",
}
_TOP = {"embed.weight": "tok_embeddings", "final_norm.weight": "rms_final", "head.weight": "output"}


class Llama2C(Layout):
    """A version-0 checkpoint of llama2.c, its tensors taken apart by layer (`read`)."""

    name: ClassVar[str] = MODEL_TYPE
    source: ClassVar[str] = "llama2.c, export.py version 0"
    model_types: ClassVar[tuple[str, ...]] = (MODEL_TYPE,)
    ignored: ClassVar[tuple[str, ...]] = ("freq_real", "freq_imag")

    def model(self, config: Theirs) -> dict[str, Any]:
        n_heads, n_kv_heads = config["n_heads"], config["n_kv_heads"]
        attention = {"kind": "mha"} if n_kv_heads == n_heads else {"kind": "gqa", "n_kv_heads": n_kv_heads}
        return {
            "vocab_size": abs(config["vocab_size"]),
            "seq_len": config["max_seq_len"],
            "d_model": config["dim"],
            "n_heads": n_heads,
            "d_ff": config["hidden_dim"],
            **DENSE,
            "n_prelude": config["n_layers"],
            "block": {"norm": {"kind": "rmsnorm", "eps": 1e-5}, "attention": attention, "mlp": "swiglu"},
            "position": {"kind": "rope", "base": 10_000.0, "pairs": "interleaved"},
            "head": "tied" if config["vocab_size"] > 0 else "untied",
        }

    def takes(self, model: ModelConfig, config: Theirs) -> dict[str, Take]:
        return {name: Take(_theirs(name)) for name in parameter_names(model)}


def _theirs(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *path, _ = name.split(".")  # prelude.layers.N.attention.q.weight
    return f"{_KINDS['.'.join(path)]}.{layer}"


def is_llama2c(path: Path) -> bool:
    """Whether the file begins like a version-0 checkpoint."""
    try:
        with path.open("rb") as file:
            head = file.read(4 * len(HEADER))
    except OSError:
        return False
    return _header(head) is not None


def _header(head: bytes) -> dict[str, int] | None:
    if len(head) < 4 * len(HEADER):
        return None
    found = dict(zip(HEADER, struct.unpack(f"<{len(HEADER)}i", head), strict=True))
    sizes = [abs(n) if name == "vocab_size" else n for name, n in found.items()]
    if not all(0 < n < _MOST for n in sizes) or found["dim"] % found["n_heads"]:
        return None
    return found


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header as a config, and the tensors by name, views of the mapped file.

    Raises:
        UsageError: another kind of file.
        RunError: its size is not that of its header.
    """
    with path.open("rb") as file:
        head = file.read(4 * len(HEADER))
    if len(head) >= 4 and struct.unpack("<I", head[:4])[0] == _NEWER:
        raise UsageError(
            f"{path} is a llama2.c checkpoint of version 1 or 2: version 0 is read (python export.py --version 0)"
        )
    config = _header(head)
    if config is None:
        raise UsageError(
            f"{path} is no llama2.c checkpoint of version 0: it does not begin with seven int32 ({', '.join(HEADER)})"
        )
    shapes = _shapes(config)
    n_numbers = sum(math.prod(shape) for shape in shapes.values())
    n_bytes = 4 * (len(HEADER) + n_numbers)
    if path.stat().st_size != n_bytes:
        raise RunError(
            f"{path} has {path.stat().st_size:,} bytes, and by its header {n_bytes:,}: "
            + ", ".join(f"{name} {n}" for name, n in config.items())
        )
    numbers = np.memmap(path, dtype="<f4", mode="c", offset=4 * len(HEADER), shape=(n_numbers,))
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        whole = torch.from_numpy(numbers[start : start + size]).view(*shape)
        start += size
        by_layer = {name: whole} if name in _WHOLE else {f"{name}.{i}": layer for i, layer in enumerate(whole)}
        tensors |= by_layer
    return {"model_type": MODEL_TYPE, **config}, tensors


_WHOLE = {"tok_embeddings", "rms_final", "freq_real", "freq_imag", "output"}


def _shapes(config: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Of every array, in the order of the file."""
    d, d_ff, n = config["dim"], config["hidden_dim"], config["n_layers"]
    d_head = d // config["n_heads"]
    d_kv, vocab, seq = config["n_kv_heads"] * d_head, abs(config["vocab_size"]), config["max_seq_len"]
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings": (vocab, d),
        "rms_att": (n, d),
        "wq": (n, d, d),
        "wk": (n, d_kv, d),
        "wv": (n, d_kv, d),
        "wo": (n, d, d),
        "rms_ffn": (n, d),
        "w1": (n, d_ff, d),
        "w2": (n, d, d_ff),
        "w3": (n, d_ff, d),
        "rms_final": (d,),
        "freq_real": (seq, d_head // 2),
        "freq_imag": (seq, d_head // 2),
    }
    if config["vocab_size"] < 0:
        shapes["output"] = (vocab, d)
    return shapes
