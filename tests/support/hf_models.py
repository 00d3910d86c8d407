"""Small models of ours with random weights, as loaded runs, for the tests of the transformers side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from alcoda.config import validate
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import Byte
from alcoda.engine.llm import LM
from alcoda.model.lm import RecurrentLM
from alcoda.training.load import LoadedRun
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder

SIZES: dict[str, Any] = {
    "vocab_size": 261,  # more than the tokenizer's 257
    "seq_len": 64,
    "d_model": 32,
    "n_heads": 4,
    "n_core": 2,
    "n_loops": 3,
    "init_std": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "grt": {"inject": "concat", "update": {"kind": "gate", "bias": 0.0}, "head": "untied"},
    "huginn": {
        "block": {"sandwich": "after_add", "attention": {"kind": "mha", "qk_bias": True}},
        "position": {"kind": "rope", "pairs": "interleaved"},
        "embedding": "scale",
        "state_init": "noise",
        "inject": "concat",
        "loop_norm": "before_coda",
        "final_norm": "shared",
    },
    "ouro": {"n_prelude": 0, "n_coda": 0, "exit_gate": "linear", "loop_norm": "every_loop", "head": "untied"},
    "anchor_keys": {
        "block": {"attention": "mla"},
        "keys": "anchor",
        "carry": {"kind": "hyper", "states": 3},
        "loop_index": "sinusoidal",
        "update": {"kind": "lti", "start": 0.9},
    },
    "windows": {"block": {"attention": {"kind": "gqa", "n_kv_heads": 2}, "window": {"kind": "pattern", "tokens": 3}}},
    "learned": {"position": "learned"},
    "lora": {"sharing": {"kind": "lora", "rank": 2}},
    "dense": {"n_core": 0, "n_loops": 1, "state_init": "anchor", "inject": "none"},
}


def small(folder: Path, seed: int = 0, **changes: Any) -> LM:
    """A model of `SIZES` with these changes, in fp32."""
    fields = {"name": "small", "model": {**SIZES, **changes}, "train": {"dtype": "float32"}}
    recipe = validate(Recipe, fields | ({"objective": "per_loop"} if "exit_gate" in changes else {}))
    model = RecurrentLM(recipe.model).init(seed).eval()
    tokenizer: Tokenizer = Byte().build()
    return LM(LoadedRun(RunFolder(folder), recipe, model, tokenizer, torch.float32, 0, torch.float32))
