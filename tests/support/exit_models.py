"""A model of a few numbers with an exit gate, for rules known by hand."""

from __future__ import annotations

from typing import Any

import torch

from alcoda.config import validate
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM

R = 4
SMALL: dict[str, Any] = {
    "vocab_size": 3,
    "seq_len": 16,
    "d_model": 2,
    "n_heads": 1,
    "n_loops": R,
    "exit_gate": "linear",
}


def lm(**fields: Any) -> RecurrentLM:
    return RecurrentLM(validate(ModelConfig, SMALL | {"init_std": 0.5} | fields)).double().init(0).eval()


IDS = torch.tensor([[0, 1, 2, 1, 0]])
