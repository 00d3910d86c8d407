"""What a dense model comes in: a run of ours, a folder of another project, or one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alcoda.data.tokenizer import Tokenizer
from alcoda.interop.foreign import is_foreign
from alcoda.interop.hub import find_folder
from alcoda.interop.load import open_any
from alcoda.interop.text import template_of, tokenizer_of
from alcoda.model.config import ModelConfig
from alcoda.training import checkpoint
from alcoda.training.load import load_run, pick_checkpoint


@dataclass(frozen=True)
class Source:
    """A model in memory.

    Attributes:
        config: as a point of our design space.
        weights: by our names, in float32 on the CPU.
        tokenizer: of kind ``none`` where none lies with it.
        chat_template: of the tokenizer, if it has one.
        about: for the record of a run: name, layout, and sha256 of its weights.
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    chat_template: str | None
    about: dict[str, Any]


def open_source(path: str | Path) -> Source:
    """A run, a folder with config.json and safetensors, or a file (GGUF, llama2.c).

    Raises:
        UsageError: none of these, or one that we cannot express.
        RunError: damaged files.
    """
    is_other = is_foreign(path)
    path = find_folder(path) if is_other else Path(path)
    if is_other:
        found = open_any(path)
        weights = {name: tensor.to(torch.float32, copy=True).contiguous() for name, tensor in found.weights()}
        about = {"name": path.name, "layout": found.layout.name, "sha256": found.tensors.sha256}
        return Source(found.model, weights, tokenizer_of(found)[1], template_of(found), about)
    run = load_run(path, device="cpu", dtype="float32")
    where = pick_checkpoint(run.run, "best")
    about = {"name": path.name, "layout": "alcoda", "sha256": checkpoint.digest(checkpoint.check(where))}
    return Source(run.recipe.model, run.model.state_dict(), run.tokenizer, run.chat_template, about)
