"""Where a new run starts from: the weights of another run, where the recipe says ``init_from``."""

from __future__ import annotations

import json
from typing import Any

import torch

from alcoda import progress
from alcoda.data.chat_template import find_template
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import File
from alcoda.errors import UsageError
from alcoda.files import write_text
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint, shard
from alcoda.training.load import check_tokenizer, pick_checkpoint
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder
from alcoda.training.trainable import part_of


def start(recipe: Recipe, model: RecurrentLM, tokenizer: Tokenizer, run: RunFolder) -> dict[str, Any]:
    """Copy the weights that ``recipe.init_from`` names into ``model``, tensor by tensor of the same name.

    What only ``model`` has keeps its fresh values; what only the other has is left. Both are said.

    Args:
        model: with what learns marked (`alcoda.training.trainable.freeze`).
        run: the new run; what its record says of the source has to hold still (it died before its first checkpoint).

    Returns:
        For run.json: ``init_from`` with ``run``, ``checkpoint``, ``train_step``, ``sha256`` of the weights, and the
        names under ``fresh`` and ``left``; empty where the recipe starts from fresh weights.

    Raises:
        UsageError: no such run or checkpoint, another tokenizer, or a tensor of another shape.
        RunError: the checkpoint is damaged.
    """
    if recipe.init_from is None:
        return {}
    source = RunFolder.find(recipe.init_from.run)
    where = pick_checkpoint(source, recipe.init_from.checkpoint)
    what = f"init_from {source.path} ({where.name})"
    manifest = checkpoint.check(where)
    theirs = source.load_tokenizer()
    check_tokenizer(source, where, theirs)
    if theirs.sha256 != tokenizer.sha256:
        raise UsageError(
            f"{what}: its tokenizer is another one (sha256 {theirs.sha256[:12]}, and {tokenizer.sha256[:12]} here): "
            f"the ids would stand for other text. Set data.tokenizer to {_spelled(source)}"
        )
    digest = checkpoint.digest(manifest)
    before = run.record().get("init_from") if run.run_json.exists() else None
    if before is not None and before["sha256"] != digest:
        raise UsageError(
            f"{what}: its weights are others than when {run.path} was begun (it had no checkpoint yet): name the "
            f"checkpoint ({before['checkpoint']}), or begin anew with another --out"
        )
    have = checkpoint.read_weights(where)
    fresh, left = copy_weights(have, model, what, checkpoint.build(source.recipe().model, torch.device("meta")))
    named = part_of(model)
    stuck = sorted({named[name] for name, p in model.named_parameters() if name not in have and not p.requires_grad})
    if stuck:
        raise UsageError(
            f"{what} has no {', '.join(stuck)}, and trainable leaves it frozen: it would stay at its random start. Add "
            "it to trainable"
        )
    for names, words in ((fresh, "start fresh, the run has none"), (left, "are left out, the new model has none")):
        if names:
            progress.say(f"{what}: {', '.join(names)} {words}")
    found = {"run": str(source.path), "checkpoint": where.name, "train_step": manifest["train_step"], "sha256": digest}
    return {"init_from": {**found, "fresh": fresh, "left": left}}


def keep_template(recipe: Recipe, run: RunFolder) -> None:
    """The chat template of the run that ``recipe.init_from`` names, whose tokenizer this one has too, goes along."""
    if recipe.init_from is None:
        return
    template = find_template(RunFolder.find(recipe.init_from.run).path)
    if template is not None:
        write_text(run.chat_template, template)


def _spelled(source: RunFolder) -> str:
    """A run's tokenizer as another recipe may have it."""
    config = source.recipe().data.tokenizer
    named = {"eot": config.eot, "bos": config.bos} if isinstance(config, File) else {}
    more = "".join(f", {key}: {json.dumps(token)}" for key, token in named.items() if token is not None)
    return f"{{kind: file, path: {source.tokenizer}{more}}}"


def copy_weights(
    have: dict[str, torch.Tensor], model: RecurrentLM, what: str, source: RecurrentLM
) -> tuple[list[str], list[str]]:
    """Fill ``model`` with the tensors of ``have``, of the model ``source``, that it has too.

    Returns:
        What only the model has, and what only ``have`` has: a part of the model by its name where that holds of all of
        it, else tensor by tensor.
    """
    want = model.state_dict()
    wrong = [
        f"{name} is {tuple(have[name].shape)} there and {tuple(tensor.shape)} here"
        for name, tensor in want.items()
        if name in have and have[name].shape != tensor.shape
    ]
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise UsageError(
            f"{what}: {shown}. Give the model the sizes of that run, or another choice where it may differ"
        )
    shard.fill(model, ((name, tensor) for name, tensor in have.items() if name in want))
    return _only(want, have, part_of(model)), _only(have, want, part_of(source))


def _only(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], part_of: dict[str, str]) -> list[str]:
    named = {name: part_of.get(name, name) for name in ours}
    shared = {named[name] for name in ours if name in theirs}
    return list(dict.fromkeys(name if named[name] in shared else named[name] for name in ours if name not in theirs))
