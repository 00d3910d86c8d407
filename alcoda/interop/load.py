"""A checkpoint of another project as a loaded model, in memory, and as a run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alcoda import progress
from alcoda.config import validate
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import File, TokenizerConfig
from alcoda.errors import UsageError
from alcoda.files import whole_folder, write_json, write_text
from alcoda.interop.foreign import Foreign, open_foreign
from alcoda.interop.hub import find_folder
from alcoda.interop.layouts import LAYOUTS
from alcoda.interop.onefile import open_file
from alcoda.interop.text import TOKENIZER, template_of, tokenizer_of
from alcoda.model.config import ModelConfig
from alcoda.model.recurrence.state_init import Noise
from alcoda.training import checkpoint, shard
from alcoda.training.device import DTYPES, decode_dtype, keep_freed_memory, pick_device, pick_dtype
from alcoda.training.load import LoadedRun
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder, provenance


@dataclass(frozen=True)
class Imported:
    """What `import_model` wrote.

    Attributes:
        path: the folder, a run.
        layout: whose checkpoint it was.
        params: stored.
        dtype: of the weights.
        weights_bytes: of the file of weights.
        has_tokenizer: whether it reads text.
    """

    path: Path
    layout: str
    params: int
    dtype: str
    weights_bytes: int
    has_tokenizer: bool

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def open_any(path: str | Path) -> Foreign:
    """`open_foreign` of a folder, `open_file` of a file."""
    return open_file(Path(path)) if Path(path).is_file() else open_foreign(path, LAYOUTS)


def load_foreign(path: str | Path, device: str = "auto", dtype: str = "auto", noise: bool = False) -> LoadedRun:
    """The model in a folder (or file) of another project, or of the hub by its name; nothing is written but the hub's
    cache.

    No more memory is needed than the model takes and its largest tensor.

    Args:
        dtype: as of `load_run`; auto is float32 where the weights are.
        noise: as of `import_model`.

    Raises:
        UsageError, RunError: as `open_foreign`; noise of a model that has none.
    """
    found = _opened(path, noise)
    config, tokenizer = tokenizer_of(found)
    recipe = recipe_of(found, config, _is_fp32(found))
    on = pick_device(device)
    keep_freed_memory()
    dtype = "float32" if dtype == "auto" and recipe.train.dtype == "float32" else dtype
    picked = pick_dtype(dtype, on)
    model = checkpoint.build(found.model, on, picked)
    shard.fill(model, found.weights())
    decodes_in = decode_dtype(dtype, picked, on, found.model)
    run, template = RunFolder(found.folder), template_of(found)
    return LoadedRun(run, recipe, model.eval(), tokenizer, picked, 0, decodes_in, template)


def import_model(
    path: str | Path,
    out: str | Path | None = None,
    dtype: str | None = None,
    eot: str | None = None,
    noise: bool = False,
) -> Imported:
    """Write a run of a checkpoint of another project: everything works on it, but to be resumed.

    No more memory is needed than its largest tensor takes.

    Args:
        path: a folder with config.json and safetensors, a file (GGUF, llama2.c), or the name of a model of the Hugging
            Face hub (``org/name``).
        out: the run's folder; ``runs/NAME`` where None.
        dtype: of the weights: ``bfloat16`` or ``float32``; None: as they are (float16 as float32).
        eot: its end-of-text token, where the folder does not say it.
        noise: whether the state begins as noise at evaluation too (a function of seed and position), and not as zeros;
            of a model that was trained with noise.

    Raises:
        UsageError, RunError: as `open_foreign`; ``out`` is not empty; the hub cannot be reached.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}. Allowed: {', '.join(DTYPES)}")
    name = _run_name(path)
    out = Path("runs") / name if out is None else Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is there already and not empty: give another folder")
    found = _opened(path, noise)
    config, tokenizer = tokenizer_of(found, eot)
    like = {
        key: torch.empty_like(tensor, dtype=DTYPES[dtype] if dtype else _kept(found.dtype(key)), device="meta")
        for key, tensor in checkpoint.build(found.model, torch.device("meta")).state_dict().items()
    }
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in like.values()})
    if isinstance(config, File):  # beside the recipe
        config = config.model_copy(update={"path": TOKENIZER})
    recipe, template = recipe_of(found, config, "float32" in types, name), template_of(found)
    if out.exists():
        out.rmdir()
    with whole_folder(out) as folder:
        run = RunFolder(folder)
        write_text(run.recipe_yaml, recipe.to_yaml())
        if found.tokenizer is not None:
            found.tokenizer.save(run.tokenizer)
        elif isinstance(config, File):
            shutil.copyfile(found.folder / TOKENIZER, run.tokenizer)
        if template is not None:
            write_text(run.chat_template, template)
        _write_weights(run, found, like, tokenizer)
        source = found.folder.resolve().name if Path(path).exists() else str(path)
        write_json(run.run_json, _record(found, source, recipe, tokenizer, ", ".join(types)))
    (file,) = RunFolder(out).checkpoints.glob(f"*/{checkpoint.WEIGHTS}")
    params = sum(tensor.numel() for tensor in like.values())
    return Imported(out, found.layout.name, params, ", ".join(types), file.stat().st_size, isinstance(config, File))


def _opened(path: str | Path, noise: bool) -> Foreign:
    found = open_any(find_folder(path))
    return replace(found, model=_with_noise(found.model)) if noise else found


def _with_noise(model: ModelConfig) -> ModelConfig:
    if not isinstance(model.state_init, Noise):
        raise UsageError(
            f"noise: this model's state does not begin as noise (model.state_init {model.state_init.kind!r}), so there "
            "is none to ask for; leave it out"
        )
    return model.model_copy(update={"state_init": model.state_init.model_copy(update={"at_eval": "by_position"})})


def recipe_of(found: Foreign, tokenizer: TokenizerConfig, is_fp32: bool, name: str | None = None) -> Recipe:
    """The recipe, resolved, of a run that is such a checkpoint."""
    model = found.model
    depths = {1 << i for i in range(model.n_loops.bit_length())}
    fields = {
        "name": name or _run_name(found.folder),
        "description": f"imported: {found.layout.name}",
        "source": found.layout.source,
        "model": model,
        "data": {"tokenizer": tokenizer},
        "train": {"dtype": "float32" if is_fp32 else "auto"},
        "eval": {"loops": sorted({n for n in depths if n < model.n_loops} | {model.n_loops})},
        **found.layout.recipe(model, found.config),
    }
    return validate(Recipe, fields, f"the recipe of {found.folder}").resolved()


def _run_name(path: str | Path) -> str:
    """A name of a run (and of a folder) for a folder or a model of the hub."""
    last = Path(path).name or Path(path).resolve().name
    return re.sub(r"[^\w .+-]", "_", last).lstrip(" .+-") or "imported"


def _is_fp32(found: Foreign) -> bool:
    return any(found.dtype(name) in (torch.float32, torch.float64) for name in found.takes)


def _kept(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 stays; all others become float32, which holds every float16."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _write_weights(run: RunFolder, found: Foreign, like: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in found.weights():
            yield name, tensor.to(like[name].dtype)

    about = {"tokens": 0, "tokenizer_sha256": tokenizer.sha256}
    checkpoint.save_weights(run.checkpoints, 0, like, weights(), about)


def _record(found: Foreign, source: str, recipe: Recipe, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """run.json."""
    with progress.bar("hashing what was read", None):
        sha256 = found.tensors.sha256
    imported = {
        "layout": found.layout.name,
        "source": source,
        "files": [file.name for file in found.tensors.files],
        "weights": sha256,
        "dtype": dtype,
    }
    return {
        "name": recipe.name,
        "description": recipe.description,
        "status": "imported",
        "imported": imported,
        **{key: value for key, value in provenance().items() if key != "command"},  # it names folders of this machine
        "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.sha256},
        "ledger": recipe.ledger().to_json(),
    }
