"""What a config.json of ours says, in transformers' words and in our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alcoda.config import validate
from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig

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


def read_model(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a config.json of ours.

    Raises:
        UsageError: it says nothing of one, or what we cannot build; or its other fields are of another model.
    """
    ours = config.get(OURS)
    if not isinstance(ours, dict):
        raise UsageError(f"config.json has no {OURS}, or no mapping there: a folder that save_pretrained wrote has it")
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


def check_exports(model: ModelConfig) -> None:
    """UsageError where transformers could not run such a model."""
    if model.memory.carries:
        raise UsageError(
            f"this model has a memory (model.memory {model.memory.kind!r}): what a token is told depends on how the "
            "text before it was read (docs/design/axes/prefill.md), for which transformers' forward and generate have "
            "no argument. alcoda pack hands it on as a run"
        )
