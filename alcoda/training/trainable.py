"""Which parts of a model learn, and which run its weights come from: the entries ``trainable`` and ``init_from``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import model_validator
from torch import nn

from alcoda import progress
from alcoda.config import Config
from alcoda.errors import did_you_mean
from alcoda.model.attention import KeyProjection
from alcoda.model.blocks import Block
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.recurrence.sharing import LoraLinear


class InitFrom(Config):
    """A run whose weights a new run starts from. It is read when the run begins, and not when it is resumed."""

    run: str
    """The run folder."""
    checkpoint: str = "best"
    """best, last, or a checkpoint's name (step_00000500)."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"run": data} if isinstance(data, str) else data


def parts(model: RecurrentLM) -> dict[str, set[nn.Parameter]]:
    """What ``trainable`` may name, with its parameters: every child of the model. What a block has of the memory is of
    ``memory`` and of the block's stack; terms of low rank (`model.sharing`) are of ``lora`` and of the core.
    """
    found = {name: set(child.parameters()) for name, child in model.named_children()}
    for module in model.modules():
        if isinstance(module, Block):
            found["memory"] |= set(module.memory.parameters())
        if isinstance(module, KeyProjection):
            found["memory"] |= set(module.recall.parameters())
        if isinstance(module, LoraLinear):
            found.setdefault("lora", set()).update((module.down, module.up))
    return found


def part_of(model: RecurrentLM) -> dict[str, str]:
    """The part that each parameter is of, by name; of memory (or ``lora``) and block: the former."""
    found = parts(model)
    inner = {p: part for part in ("memory", "lora") for p in found.get(part, ())}
    return {name: inner.get(p, name.split(".")[0]) for name, p in model.named_parameters()}


def check_trainable(config: ModelConfig, trainable: Sequence[str]) -> None:
    """ValueError where ``trainable`` names what the model does not have, or nothing that could learn."""
    with torch.device("meta"):
        model = RecurrentLM(config)
    n_params = {name: sum(p.numel() for p in found) for name, found in parts(model).items()}
    for name in trainable:
        if name not in n_params:
            raise ValueError(f"trainable: this model has no part {name!r}{did_you_mean(name, n_params)}")
    if not any(n_params[name] for name in trainable):
        with_params = ", ".join(name for name, n in n_params.items() if n)
        raise ValueError(
            f"trainable={list(trainable)} leaves nothing to train: no part with parameters is named. Those with "
            f"parameters are {with_params}; null trains all"
        )


def mark(model: RecurrentLM, trainable: Sequence[str] | None) -> None:
    """Set which parameters ask for gradients: those of the named parts; all where None."""
    named = parts(model)
    learn = set(model.parameters()) if trainable is None else set().union(*(named[name] for name in trainable))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in learn)


def freeze(model: RecurrentLM, trainable: Sequence[str] | None) -> None:
    """Let only the named parts learn; all where None. Before the optimizer is built, so that it owns no other."""
    mark(model, trainable)
    if trainable is not None:
        learn, of = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
        progress.say(f"trainable: {learn:,} of {of:,} parameters learn ({', '.join(trainable)})")
