"""Validation during training: bits per byte at each depth on the beginning of the validation text, and diagnostics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from alcoda import progress
from alcoda.errors import UsageError
from alcoda.model.prefill import Reading
from alcoda.training.diagnose import diagnose
from alcoda.training.score import score

if TYPE_CHECKING:
    from alcoda.training.loop import Trainer


def validation(trainer: Trainer) -> tuple[list[dict[str, Any]], float]:
    """What there is to log, and the bits per byte at the model's n_loops (the mean over sources; may be not finite)."""
    config, at_nominal = trainer.recipe.eval, []
    streams = trainer.data.split("valid")
    records = diagnose(trainer.model, next(iter(streams.values())), trainer.train_step, trainer.dtype)
    for name, stream in streams.items():
        nats_L, n_bytes, n_scored = np.zeros(len(config.loops)), 0, 0
        for scored in score(
            trainer.model,
            stream,
            trainer.token_bytes_V,
            config.loops,
            batch_size=config.batch_size,
            max_tokens=config.tokens,
            dtype=trainer.dtype,
            reading=Reading(config.prefill),
        ):
            nats_L += scored.nats_LN.sum(1)
            n_bytes += int(scored.bytes_N.sum())
            n_scored += int((scored.bytes_N > 0).sum())
        if not n_bytes:
            raise UsageError(f"{name}: its first {config.tokens} tokens stand for no text; raise eval.tokens")
        for loops, nats in zip(config.loops, nats_L, strict=True):
            bits = float(nats) / math.log(2) / n_bytes
            if loops == trainer.recipe.model.n_loops:
                at_nominal.append(bits)
            if not math.isfinite(bits):
                progress.say(f"{name}: the loss at {loops} loops is not finite at train step {trainer.train_step}")
                continue
            records.append(
                {
                    "type": "eval",
                    "train_step": trainer.train_step,
                    "source": name,
                    "loops": loops,
                    "loss": float(nats) / n_scored,
                    "bits_per_byte": bits,
                }
            )
    return records, sum(at_nominal) / len(at_nominal)
