"""A run folder back in memory: model, tokenizer, recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alcoda.data.chat_template import find_template
from alcoda.data.tokenizer import Tokenizer
from alcoda.depth.rules import ExitRule
from alcoda.depth.tiers import Exit, find_exit
from alcoda.errors import RunError, UsageError, did_you_mean
from alcoda.model.cache_policy import CachePolicy, pick_cache
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Prefill, Reading, prefills
from alcoda.training import checkpoint
from alcoda.training.device import decode_dtype, keep_freed_memory, pick_device, pick_dtype
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with what it needs.

    Attributes:
        run: the folder.
        recipe: resolved.
        model: in evaluation mode; its linear maps in ``dtype``, everything else in fp32.
        tokenizer: the one that it was trained with.
        dtype: what its passes are computed in (autocast).
        decode_dtype: what those of the engine are, whose products have few rows.
        train_step: of the checkpoint that was loaded.
        chat_template: of its tokenizer (`alcoda.data.chat_template`), if it has one.
    """

    run: RunFolder
    recipe: Recipe
    model: RecurrentLM
    tokenizer: Tokenizer
    dtype: torch.dtype
    train_step: int
    decode_dtype: torch.dtype
    chat_template: str | None = None

    def prefill(self, choice: Prefill | str | None, otherwise: str) -> Prefill:
        """How rows are read where the model has a memory: a choice or its name; ``otherwise`` where None.

        Raises:
            UsageError: no such choice; or one named for a model without memory, other than exact and ``otherwise``.
        """
        found = choice if isinstance(choice, Prefill) else prefills().get(otherwise if choice is None else choice)
        if found is None:
            raise UsageError(f"prefill {choice!r}{did_you_mean(str(choice), prefills())}")
        if not self.recipe.model.memory.carries and not found.is_exact and found.kind != otherwise:
            raise UsageError(
                f"prefill {found.kind!r}: this model has no memory (model.memory), so one pass reads a text exactly; "
                "leave prefill out"
            )
        return found.resolve(self.recipe.passes.prefill_subsets())

    def reading(
        self, prefill: Prefill | str | None, chunk_tokens: int | None, cache: CachePolicy | str | None = None
    ) -> Reading | None:
        """How text is read to be scored, exactly and with cache `per_loop` where nothing is named; None where one pass
        over whole rows does it.

        Raises:
            UsageError: as `prefill` and `pick_cache`; a chunk of no tokens, or chunks named where they change nothing.
        """
        keeps = pick_cache(cache, self.recipe.model)
        found = Reading(self.prefill(prefill, "exact"), chunk_tokens, cache=keeps)
        if not keeps.is_parallel:
            if chunk_tokens is not None or not found.prefill.is_exact:
                raise UsageError(
                    f"cache {keeps.kind!r} with a prefill or chunks: it is filled token by token, which is exact "
                    "prefill; leave prefill and chunk out"
                )
            return found
        if self.recipe.model.memory.carries:
            return found
        if chunk_tokens is not None:
            raise UsageError(
                f"chunk of {chunk_tokens} tokens: this model has no memory (model.memory), so chunks would change "
                "nothing; leave the chunk out"
            )
        return None

    def exit(
        self,
        choice: ExitRule | str,
        loops: int | None = None,
        threshold: float | Sequence[float] | None = None,
    ) -> Exit:
        """When tokens leave: a rule, its name (``state:0.01``), or a tier that `alcoda calibrate` chose (``balanced``).

        A probe without a file of weights is the run's own. ``loops``: loops that run at most; None: the tier's, or the
        model's.

        Raises:
            UsageError: no such rule or tier; one that the model cannot be left by; a tier of other weights, another
                tokenizer, another depth.
        """
        return find_exit(choice, self.model, self.run.path, self.tokenizer.sha256, loops, threshold)


def load_run(path: str | Path, which: str = "best", device: str = "auto", dtype: str = "auto") -> LoadedRun:
    """Load the ``best`` (lowest validation loss at n_loops) or the ``last`` checkpoint of a run, or ``step_XXXXXXXX``.

    ``dtype`` auto is float32 for a run that asked for it, else bf16 where the hardware multiplies in it.

    Raises:
        UsageError: no run there (nor one of that name in the package), or no such checkpoint.
        RunError: a damaged checkpoint, or a tokenizer that is not the one it was trained with.
    """
    run = RunFolder.find(path)
    recipe = run.recipe()
    where = pick_checkpoint(run, which)
    manifest = checkpoint.check(where)
    tokenizer = run.load_tokenizer()
    check_tokenizer(run, where, tokenizer)
    on = pick_device(device)
    keep_freed_memory()
    if dtype == "auto" and recipe.train.dtype == "float32":
        dtype = "float32"
    picked = pick_dtype(dtype, on)
    model = checkpoint.build(recipe.model, on, picked)
    checkpoint.load_weights(where, model)
    decodes_in = decode_dtype(dtype, picked, on, recipe.model)
    template = find_template(run.path)
    return LoadedRun(run, recipe, model.eval(), tokenizer, picked, manifest["train_step"], decodes_in, template)


def check_tokenizer(run: RunFolder, path: Path, tokenizer: Tokenizer) -> None:
    """RunError where ``tokenizer``, of the run's folder, is not the one of the checkpoint in ``path``."""
    if tokenizer.sha256 != checkpoint.check(path)["tokenizer_sha256"]:
        raise RunError(
            f"{run.tokenizer} is not the tokenizer that {path.name} was trained with: put back the one of the run"
        )


def pick_checkpoint(run: RunFolder, which: str) -> Path:
    """The folder of a checkpoint: ``best``, ``last``, or its name."""
    saved = checkpoint.listed(run.checkpoints)
    if not saved:
        raise UsageError(f"{run.path} has no checkpoint yet: train on with --resume")
    if which == "last":
        return saved[-1]
    if which == "best":
        best: Any = checkpoint.check(saved[-1]).get("best")
        step = best["train_step"] if best else checkpoint.step_of(saved[-1])
        return next((p for p in saved if checkpoint.step_of(p) == step), saved[-1])
    names = [p.name for p in saved]
    if which not in names:
        raise UsageError(f"{run.path} has no checkpoint {which!r}: give best, last, or one of {', '.join(names)}")
    return run.checkpoints / which
