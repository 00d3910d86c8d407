"""A model with its tokenizer, and no run folder: small, fp64, random weights, bytes as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from alcoda.config import validate
from alcoda.data.vocabulary import Byte
from alcoda.engine.llm import LM
from alcoda.laws.subject import make_plain
from alcoda.training.load import LoadedRun
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder

MODEL: dict[str, Any] = {
    "vocab_size": 257,
    "seq_len": 32,
    "d_model": 16,
    "n_heads": 2,
    "n_prelude": 1,
    "n_core": 1,
    "n_coda": 1,
    "n_loops": 4,
    "inject": "concat",
    "head": "untied",
    "init_std": 0.2,
}


def loaded(seed: int = 0, **fields: Any) -> LM:
    """A model of `MODEL` with other ``fields``; two of one seed are alike."""
    recipe = validate(Recipe, {"model": {**MODEL, **fields}, "data": {"tokenizer": "byte"}, "eval": {"loops": [1]}})
    model = make_plain(recipe.model, seed)
    run = RunFolder(Path("nowhere"))
    return LM(LoadedRun(run, recipe, model, Byte().build(), torch.float32, 7, torch.float32))
