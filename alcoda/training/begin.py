"""The beginning of a run: what it refuses, what it tells, and what its record says before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alcoda import plugins, progress
from alcoda.data.prepare import Data
from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import UsageError
from alcoda.training.device import describe
from alcoda.training.recipe import Recipe
from alcoda.training.run import provenance

if TYPE_CHECKING:
    from alcoda.training.loop import Trainer

SMALL_VALID_BYTES = 20_000


def notes(recipe: Recipe, data: Data) -> list[str]:
    """What the user should know before the first step."""
    found = list(data.notes)
    schedule, steps = recipe.train.schedule, recipe.n_steps
    if schedule.warmup_steps >= steps:
        found.append(
            f"the warm-up of {schedule.warmup_steps} steps (train.schedule.warmup_steps) is not over after {steps} "
            "steps: the learning rate never reaches its peak"
        )
    for name, stream in data.split("valid").items():
        if stream.n_bytes < SMALL_VALID_BYTES:
            found.append(
                f"{name}: only {stream.n_bytes:,} bytes to validate on; figures on so little text say little "
                "(data.splits.valid, or data.valid: a corpus of its own)"
            )
    return found


def check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose ids the embedding does not hold."""
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens and model.vocab_size is {recipe.model.vocab_size:,}: "
            f"raise model.vocab_size to {tokenizer.vocab_size} or more, or take a smaller tokenizer"
        )


def first_record(trainer: Trainer) -> dict[str, Any]:
    """What run.json says of a run that begins, or that is gone on with."""
    recipe, run = trainer.recipe, trainer.run
    record = {
        "name": recipe.name,
        "description": recipe.description,
        "status": "running",
        **provenance(),
        "seeds": {"train": recipe.train.seed, "data": recipe.data.seed},
        "plugins": plugins.used(),
        **trainer.started,
        "machine": describe(trainer.device, trainer.dtype),
        "parallel": parallel_record(trainer),
        "data": trainer.data.describe(),
        "ledger": recipe.ledger().to_json(),
        "depth": {
            "kind": recipe.depth.kind,
            "mean": round(recipe.depth.mean_loops, 3),
            "max": recipe.depth.max_loops,
        },
        "result": None,
    }
    if trainer.processes.is_main and run.run_json.exists():
        before = run.record()
        for name in plugins.changed(before.get("plugins", [])):
            progress.say(f"the plugin {name} is not the one that the run was begun with")
        record["created"] = before["created"]
        record["sessions"] = [*before.get("sessions", []), {k: before[k] for k in ("commit", "command", "machine")}]
    return record


def parallel_record(trainer: Trainer) -> dict[str, Any]:
    """How many processes share the run, and what each of them sends in a step."""
    recipe, world_size = trainer.recipe, trainer.processes.world_size
    n_micro, whole = recipe.train.micro_batches, recipe.train.optimizer.gathered(trainer.model)
    sent: dict[str, float] = {}
    if world_size > 1:
        sent = recipe.parallel.communication(trainer.model, world_size, n_micro, recipe.run_once, whole)
    return {
        "kind": recipe.parallel.kind,
        "processes": world_size,
        "hosts": trainer.processes.hosts,
        "backend": trainer.processes.backend,
        **{f"{collective}_bytes_per_step": n_bytes for collective, n_bytes in sent.items()},
    }
