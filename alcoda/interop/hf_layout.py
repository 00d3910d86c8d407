"""Our own models as folders of the transformers library: what `hf_save` writes, and `alcoda.load` reads.

config.json holds the whole `ModelConfig` under `OURS`, beside the fields that other tools look for; the weights have
our names behind `PREFIX`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from alcoda.config import validate
from alcoda.errors import UsageError
from alcoda.interop.layout import Layout, Take, Theirs, entry
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM

MODEL_TYPE, ARCHITECTURE = "alcoda", "AlcodaForCausalLM"
OURS = "alcoda"
"""The entry of config.json that says what the model is: ``{"model": ModelConfig, "recipe": fields of the Recipe}``."""
PREFIX = "model."
"""Of the weights' names: `ARCHITECTURE` has the model under this name."""


def tool_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that other tools look for, in their words."""
    shape = model.shape
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_attention_heads": shape.n_heads,
        "num_hidden_layers": model.n_prelude + model.n_core + model.n_coda,
        "max_position_embeddings": shape.seq_len,
        "tie_word_embeddings": model.head.kind == "tied",
    }


def read_model(config: Theirs) -> ModelConfig:
    """The model of a config.json of ours.

    Raises:
        UsageError: it says nothing of one, or what we cannot build; or its other fields are of another model.
    """
    ours = entry(config, OURS, dict)
    if not isinstance(ours.get("model"), dict):
        raise UsageError(f"config.json: {OURS}.model is missing: a folder that save_pretrained wrote has it")
    model = validate(ModelConfig, ours["model"], f"config.json: {OURS}.model")
    wrong = [
        f"{name} is {config[name]!r}, and {value!r} by {OURS}.model"
        for name, value in tool_fields(model).items()
        if config.get(name, value) != value
    ]
    if wrong:
        raise UsageError(f"config.json contradicts itself: {'; '.join(wrong)}. Write the folder anew (save_pretrained)")
    return model


class Alcoda(Layout):
    """What `save_pretrained` wrote."""

    name: ClassVar[str] = "alcoda"
    model_types: ClassVar[tuple[str, ...]] = (MODEL_TYPE,)
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)

    def model(self, config: Theirs) -> dict[str, Any]:
        return read_model(config).model_dump(mode="json")

    def takes(self, model: ModelConfig, config: Theirs) -> dict[str, Take]:
        with torch.device("meta"):
            return {name: Take(f"{PREFIX}{name}") for name in RecurrentLM(model).state_dict()}

    def recipe(self, model: ModelConfig, config: Theirs) -> dict[str, Any]:
        kept = entry(config, OURS, dict).get("recipe", {})
        if not isinstance(kept, dict):
            raise UsageError(f"config.json: {OURS}.recipe is {kept!r}: fields of a recipe are needed")
        return kept
