"""Validation during training: bits per byte at each depth on the beginning of the validation text, and diagnostics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from alcoda import progress
from alcoda.data.splits import Stream
from alcoda.errors import UsageError
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reading
from alcoda.training.diagnose import diagnose
from alcoda.training.score import score

if TYPE_CHECKING:
    from alcoda.training.loop import Trainer


def validation(trainer: Trainer) -> tuple[list[dict[str, Any]], float]:
    """What there is to log, and the bits per byte at the model's n_loops (the mean over sources; may be not finite)."""
    config, at_nominal = trainer.recipe.eval, []
    streams = trainer.data.split("valid")
    shared, processes = trainer.shared, trainer.processes
    records = shared.measure(diagnose, next(iter(streams.values())), trainer.train_step, trainer.dtype)
    for name, stream in streams.items():
        mine = shared.measure(_sums, stream, trainer)
        n_bytes, n_scored, *nats_L = processes.sum(mine)
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


def _sums(model: RecurrentLM, stream: Stream, trainer: Trainer) -> list[float]:
    """Of this process's share of a stream: bytes, tokens, and the nats at each depth."""
    config, processes = trainer.recipe.eval, trainer.processes
    sums = np.zeros(2 + len(config.loops))
    for scored in score(
        model,
        stream,
        trainer.token_bytes_V,
        config.loops,
        batch_size=config.batch_size,
        max_tokens=config.tokens,
        dtype=trainer.dtype,
        reading=Reading(config.prefill),
        share=(processes.rank, processes.world_size),
    ):
        sums += [scored.bytes_N.sum(), (scored.bytes_N > 0).sum(), *scored.nats_LN.sum(1)]
    return sums.tolist()
