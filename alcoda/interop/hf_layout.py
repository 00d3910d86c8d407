"""Our own models as folders of the transformers library: what `hf_save` writes, and `alcoda.load` reads.

config.json holds the whole `ModelConfig` under `OURS`, beside the fields that other tools look for; the weights have
our names behind `PREFIX`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from alcoda.errors import UsageError
from alcoda.interop.hf_config import ARCHITECTURE, MODEL_TYPE, OURS, PREFIX, read_model
from alcoda.interop.layout import Layout, Take, Theirs, entry
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM


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
