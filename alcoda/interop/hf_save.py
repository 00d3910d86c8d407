"""A model of ours as a folder of the transformers library; transformers itself is not needed to write it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import processors
from torch import Tensor

from alcoda import progress
from alcoda.data.chat_template import TEMPLATE
from alcoda.data.tokenizer import Tokenizer
from alcoda.depth.record import fingerprint
from alcoda.depth.tiers import Tiers
from alcoda.errors import UsageError
from alcoda.files import whole_folder, write_json, write_text
from alcoda.interop.foreign import CONFIG
from alcoda.interop.hf_code import AUTO_MAP, outside, write_code
from alcoda.interop.hf_config import ARCHITECTURE, MODEL_TYPE, OURS, PREFIX, check_exports, tool_fields
from alcoda.interop.tensors import INDEX, WEIGHTS
from alcoda.interop.text import TOKENIZER, build_tokenizer, find_tokenizer
from alcoda.model.config import ModelConfig
from alcoda.model.merge import merged
from alcoda.training import stream
from alcoda.training.device import DTYPES
from alcoda.training.load import LoadedRun

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Saved:
    """What `save_pretrained` wrote.

    Attributes:
        path: the folder.
        params: stored.
        dtype: of the weights.
        weights_bytes: of their files.
        n_shards: of those.
        has_tokenizer, has_exits: whether it reads text, and has calibrated exits.
        has_code: whether transformers runs it without alcoda: not where the model has choices of a plugin.
    """

    path: Path
    params: int
    dtype: str
    weights_bytes: int
    n_shards: int
    has_tokenizer: bool
    has_exits: bool
    has_code: bool

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def save_pretrained(
    loaded: LoadedRun, folder: str | Path, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Saved:
    """Write a folder that transformers (with alcoda, and with the code that goes along) and `alcoda.load` read.

    Args:
        folder: new, or empty.
        dtype: of the weights: ``bfloat16`` or ``float32``; None: as they are held, or bfloat16 where that loses
            nothing, as of a packed run.
        max_shard_bytes: of one file of weights; a tensor that is larger has a file of its own.

    Raises:
        UsageError: a model with a memory, an unknown dtype, a folder that is not empty.
    """
    has_exits = _has_exits(loaded)  # of the model as it was calibrated
    loaded = _merged(loaded)
    out, model = Path(folder), loaded.recipe.model
    check_exports(model)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}. Allowed: {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes={max_shard_bytes}: at least 1")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already and not empty: give another folder")
    weights = loaded.model.state_dict()
    types = _types(weights, dtype)
    widest = "float32" if torch.float32 in types.values() else "bfloat16"
    params = sum(tensor.numel() for tensor in weights.values())
    tokenizer = None if loaded.tokenizer.kind == "none" else loaded.tokenizer
    if out.exists():
        out.rmdir()
    with whole_folder(out) as new:
        shards = _write_weights(new, weights, types, max_shard_bytes)
        ids = {} if tokenizer is None else _ids(tokenizer)
        has_code = write_code(new, model)
        write_json(new / CONFIG, _config(loaded, widest, ids, has_code))
        write_json(new / "generation_config.json", _generation(model, tokenizer, ids))
        if tokenizer is not None:
            _write_tokenizer(new, tokenizer, model)
            if loaded.chat_template is not None:
                write_text(new / TEMPLATE, loaded.chat_template)
        if has_exits:
            _write_exits(new, loaded)
        write_text(new / "README.md", card(loaded, params, widest, has_exits, has_code))
    size = sum((out / name).stat().st_size for name in shards)
    return Saved(out, params, widest, size, len(shards), tokenizer is not None, has_exits, has_code)


def _merged(loaded: LoadedRun) -> LoadedRun:
    """The same model with its adapter, if it has one, in its weights."""
    model = merged(loaded.model)
    if model is loaded.model:
        return loaded
    recipe = loaded.recipe.model_copy(update={"model": model.config, "trainable": None})
    return replace(loaded, model=model, recipe=recipe)


def _types(weights: Mapping[str, Tensor], dtype: str | None) -> dict[str, torch.dtype]:
    """What each tensor is written in."""
    if dtype is not None:
        return dict.fromkeys(weights, DTYPES[dtype])
    if all(torch.equal(x.to(torch.bfloat16).to(x.dtype), x) for x in weights.values()):
        return dict.fromkeys(weights, torch.bfloat16)
    return {name: x.dtype for name, x in weights.items()}


def _write_weights(
    folder: Path, weights: Mapping[str, Tensor], types: Mapping[str, torch.dtype], max_bytes: int
) -> list[str]:
    """The names of the files that were written: one, or shards with an index."""
    like = {name: torch.empty_like(x, dtype=types[name], device="meta") for name, x in weights.items()}
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, x in like.items():
        size = x.numel() * x.element_size()
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    n = len(shards)
    files = [WEIGHTS] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    with progress.bar(f"writing {folder.name}", len(like)) as advance:
        for file, names in zip(files, shards, strict=True):

            def cast(names: list[str] = names) -> Iterator[tuple[str, Tensor]]:
                for name in names:
                    yield PREFIX + name, weights[name].to(types[name])
                    advance()

            stream.write(folder / file, {PREFIX + name: like[name] for name in names}, cast(), {"format": "pt"})
    if n > 1:
        where = {PREFIX + name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(x.numel() * x.element_size() for x in like.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return files


def _config(loaded: LoadedRun, dtype: str, ids: Mapping[str, int], has_code: bool) -> dict[str, Any]:
    """config.json."""
    recipe = loaded.recipe
    # What goes with a model besides: without it, some models make no valid recipe.
    kept = recipe.model_dump(
        mode="json", include={"depth": True, "objective": True, "passes": True, "train": {"dtype"}}
    )
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        **({"auto_map": AUTO_MAP} if has_code else {}),
        "dtype": dtype,
        **tool_fields(recipe.model),
        "num_loops": recipe.model.n_loops,
        "use_cache": True,
        **ids,
        OURS: {"model": recipe.model.model_dump(mode="json"), "recipe": kept},
    }


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    # No token is for padding alone: the end-of-text token is taken, which attention masks tell from the text's own.
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot}


def _generation(model: ModelConfig, tokenizer: Tokenizer | None, ids: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"do_sample": False, **ids}
    if tokenizer is not None and tokenizer.vocab_size < model.vocab_size:
        # An embedding padded beyond the tokenizer is never drawn from there, as in our own decoding.
        found["suppress_tokens"] = list(range(tokenizer.vocab_size, model.vocab_size))
    return found


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> None:
    tokenizer.save(folder / TOKENIZER)
    inner = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    if not inner.encode("").ids:
        # Documents begin with this token in training. transformers reads it from here, not from tokenizer_config.json.
        begins, special = f"{tokenizer.bos_text}:0", [(tokenizer.bos_text, tokenizer.bos)]
        template = processors.TemplateProcessing(f"{begins} $A:0", f"{begins} $A:0 $B:1", special)
        before = inner.post_processor
        inner.post_processor = template if before is None else processors.Sequence([before, template])
        write_text(folder / TOKENIZER, inner.to_str(pretty=True))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_text,
        "eos_token": tokenizer.eot_text,
        "pad_token": tokenizer.eot_text,
        "split_special_tokens": True,  # nothing in a text is a special token
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.seq_len,
    }
    write_json(folder / "tokenizer_config.json", said)


def _write_exits(folder: Path, loaded: LoadedRun) -> None:
    tiers = Tiers.load(loaded.run.exits_json)
    # The same tokens by another file: it says which one a text begins with.
    vocab_size = loaded.recipe.model.vocab_size
    there = build_tokenizer(find_tokenizer(folder, vocab_size), vocab_size, folder)
    now = {"tokenizer": there.sha256, "model": fingerprint(loaded.model)}
    tiers.model_copy(update=now).save(folder / loaded.run.exits_json.name)
    if loaded.run.probe.exists():
        shutil.copyfile(loaded.run.probe, folder / loaded.run.probe.name)


def _has_exits(loaded: LoadedRun) -> bool:
    """Whether the run has calibrated exits, and they are of these weights and this tokenizer."""
    path = loaded.run.exits_json
    if not path.is_file():
        return False
    tiers = Tiers.load(path)
    return tiers.model == fingerprint(loaded.model) and tiers.tokenizer == loaded.tokenizer.sha256


def _without(has_code: bool, axes: set[str]) -> list[str]:
    """How to do without alcoda, for the card."""
    if not has_code:
        return [f"It needs alcoda: its {', '.join(sorted(axes))} is of a plugin, which has to be loaded too.", ""]
    return [
        "Without alcoda (`pip install transformers torch pydantic safetensors`) the same model runs by the code in "
        "this folder, which is alcoda's own. Read it, or trust who gave you the folder, before you let it run:",
        "",
        "```python",
        'tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)',
        'model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)',
        "```",
        "",
    ]


def card(loaded: LoadedRun, params: int, dtype: str, has_exits: bool, has_code: bool) -> str:
    """The model card, in Markdown, with the front matter that the hub reads. Licence and language are for whoever
    publishes it: the run does not know them."""
    recipe, model = loaded.recipe, loaded.recipe.model
    how = ', exit="balanced"' if has_exits else f", num_loops={model.n_loops}"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [alcoda, recurrent-depth, looped-transformer]",
        "---",
        "",
        f"# {recipe.name}",
        "",
        *([recipe.description, ""] if recipe.description else []),
        f"A recurrent-depth language model: {model.n_prelude} blocks, a core of {model.n_core} that loops "
        f"{model.n_loops} times where no other number is asked for, and {model.n_coda} more. {params:,} parameters, "
        f"held in {dtype}; a context of {model.seq_len} tokens, a vocabulary of {model.vocab_size:,}.",
        "",
        "With transformers 5 (`pip install alcoda transformers`):",
        "",
        "```python",
        "import alcoda.interop.hf  # tells transformers what the model is",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
        'inputs = tokenizer(["Once upon a time"], return_tensors="pt", padding=True)',
        f"print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=32{how})))",
        "```",
        "",
        *_without(has_code, {one.partition(":")[0] for one in outside(model)}),
        "With alcoda alone:",
        "",
        "```python",
        "import alcoda",
        "",
        'lm = alcoda.load("PATH")',
        f'print(lm.generate("Once upon a time", loops={model.n_loops}))',
        "```",
        "",
        "`config.json` has the whole architecture under `alcoda.model`:",
        "",
        "```json",
        json.dumps(model.model_dump(mode="json", exclude_defaults=True)),
        "```",
        "",
    ]
    return "\n".join(lines)
