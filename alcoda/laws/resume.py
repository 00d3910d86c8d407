"""Law 6: a run that was stopped and resumed is the run that was not, to the bit."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from alcoda.config import validate
from alcoda.errors import UsageError
from alcoda.laws.law import Place, require
from alcoda.laws.subject import Subject
from alcoda.training import checkpoint
from alcoda.training.loop import train
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder

BYTES = 257
"""Ids of the byte tokenizer."""
STEPS, STOP = 6, 3
BATCH_SIZE = 2
MOST_FLOPS = 1e12
"""Of the steps of both runs: some ten seconds of one core."""
CLOCK = "wall_s"


def write_corpus(path: Path, seed: int) -> Path:
    """Documents of random words."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    documents = [" ".join(rng.choices(words, k=40)) + "\n" for _ in range(40)]
    path.write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


def small_recipe(subject: Subject, corpus: str) -> Recipe:
    """A few steps of the model on ``corpus``, with the optimizer, the objective, the depths and the passes of the
    recipe where they fit the size that is checked."""
    model = subject.config
    if model.vocab_size < BYTES:
        model = model.model_copy(update={"vocab_size": BYTES})
    data: dict[str, Any] = {
        "name": "resume",
        "model": model.model_dump(mode="json"),
        "data": {"corpus": corpus, "tokenizer": "byte"},
        "train": {
            "steps": STEPS,
            "batch_size": BATCH_SIZE,
            "device": "cpu",
            "dtype": "float32",
            "seed": subject.seed,
            "schedule": {"warmup_steps": 2},
            "checkpoint_every": STOP,
            "log_every": 1,
        },
        "eval": {"every": STEPS, "tokens": 200},
    }
    if subject.recipe is None:
        return validate(Recipe, data)
    given = subject.recipe.model_dump(mode="json")
    data["objective"], data["train"]["optimizer"] = given["objective"], given["train"]["optimizer"]
    fixed, auto = {"kind": "fixed"}, {"kind": "auto"}
    for depth, passes in itertools.product((given["depth"], fixed), (given["passes"], auto)):
        with contextlib.suppress(UsageError):
            return validate(Recipe, {**data, "depth": depth, "passes": passes}).resolved()
    return validate(Recipe, {**data, "depth": fixed})


@contextlib.contextmanager
def _quietly(cache: Path) -> Generator[None]:
    """With a cache of its own, and nothing said: the user asked for a law, not for a training."""
    before = os.environ.get("ALCODA_CACHE")
    os.environ["ALCODA_CACHE"] = str(cache)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["ALCODA_CACHE"]
        else:
            os.environ["ALCODA_CACHE"] = before


def differences(a: Any, b: Any, where: str = "") -> list[Place]:
    """The places at which two nested states are not equal to the bit; the clock aside."""
    if type(a) is not type(b):
        return [where]
    if isinstance(a, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [where]
        return [
            place for key in a if key != CLOCK for place in differences(a[key], b[key], f"{where}.{key}".lstrip("."))
        ]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [where]
        return [
            place for i, (x, y) in enumerate(zip(a, b, strict=True)) for place in differences(x, y, f"{where}[{i}]")
        ]
    return [] if a == b else [where]


def _train(recipe: Recipe, run: Path, resume: bool) -> None:
    if train(recipe, run, resume).status == "stopped":  # a signal, which training takes to mean: save, and end
        raise KeyboardInterrupt


def check_resume(subject: Subject) -> None:
    """Weights, optimizer, random state and the place in the data, after the last step."""
    with tempfile.TemporaryDirectory(prefix="alcoda-laws-") as name:
        folder = Path(name)
        recipe = small_recipe(subject, f"text:{write_corpus(folder / 'corpus.txt', subject.seed)}")
        straight, stopped = folder / "straight", folder / "stopped"
        with _quietly(folder / "cache"):
            _train(recipe, straight, resume=False)
            # What a process leaves that was killed after its first checkpoint.
            shutil.copytree(straight, stopped)
            shutil.rmtree(checkpoint.listed(RunFolder(stopped).checkpoints)[-1])
            _train(recipe, stopped, resume=True)
        ends = [checkpoint.listed(RunFolder(run).checkpoints)[-1] for run in (stopped, straight)]
        after, expected = (
            {"model": load_file(end / checkpoint.WEIGHTS), "train_state": checkpoint.load_train_state(end)}
            for end in ends
        )
    wrong = differences(after, expected)
    require(not wrong, f"stopped after step {STOP} of {STEPS} and resumed, the run ends otherwise", wrong)


def too_long(subject: Subject) -> str | None:
    """The exception: a model whose steps take minutes."""
    recipe = small_recipe(subject, "text:")
    steps = 2 * STEPS - STOP
    flops = recipe.ledger().training_flops_per_token * steps * BATCH_SIZE * recipe.model.seq_len
    if flops <= MOST_FLOPS:
        return None
    return f"{steps} train steps of this size are {flops:.2g} FLOPs, over {MOST_FLOPS:.0e}; leave --full-size out"
