"""Packing: what inference needs of a run and no more, to be handed on: weights, recipe, tokenizer, a model card.

A packed run is a run: it can be read, evaluated, measured and started from (``--init``), but not resumed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from alcoda.data.chat_template import find_template
from alcoda.data.prepare import prepare
from alcoda.data.tokenizer import Tokenizer
from alcoda.depth.record import fingerprint
from alcoda.errors import UsageError, did_you_mean
from alcoda.files import read_json, whole_folder, write_json, write_text
from alcoda.training import checkpoint
from alcoda.training.device import DTYPES
from alcoda.training.load import check_tokenizer, pick_checkpoint
from alcoda.training.run import RunFolder

KEPT = (
    "created",
    "versions",
    "commit",
    "dirty",
    "seeds",
    "plugins",
    "machine",
    "data",
    "ledger",
    "init_from",
    "imported",
    "retrofit",
)
"""Of run.json: what tells where the weights come from. Its command names folders of the machine that trained them."""
_PATHS = re.compile(r"^(text|jsonl|parquet|bin):(.*)$")


@dataclass(frozen=True)
class Packed:
    """What `pack` wrote.

    Attributes:
        path: the folder, a run.
        train_step: of the weights.
        params: stored.
        weights_bytes, total_bytes: of the file of weights, and of the folder.
    """

    path: Path
    train_step: int
    params: int
    weights_bytes: int
    total_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def pack(
    run: str | Path,
    out: str | Path,
    which: str = "best",
    dtype: str = "bfloat16",
    about: str | Path | None = None,
    keep: Mapping[str, int] | None = None,
) -> Packed:
    """Write a run that holds one checkpoint's weights and nothing that only training needs.

    Args:
        which: the checkpoint: ``best``, ``last``, or its name.
        dtype: of the weights: ``bfloat16`` or ``float32``.
        about: a Markdown file that the card quotes: what the data are, what the model is for, its limits.
        keep: splits whose text goes along, at most so many tokens of each source (``{"valid": 200_000}``): then it can
            be measured where its corpora are not; ``"valid/NAME"``: of that source alone.

    Raises:
        UsageError: no run, no such checkpoint, ``out`` is not empty, an unknown dtype or split.
        RunError: a damaged checkpoint.
    """
    source, out = RunFolder.find(run), Path(out)
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}. Allowed: {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is there already and not empty: give another folder")
    text = _read_about(about)
    where = pick_checkpoint(source, which)
    before = checkpoint.check(where)
    tokenizer = source.load_tokenizer()
    check_tokenizer(source, where, tokenizer)
    texts, template = _texts(source, tokenizer, keep or {}), find_template(source.path)
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in checkpoint.read_weights(where).items()}
    step = before["train_step"]
    if out.exists():
        out.rmdir()
    with whole_folder(out) as folder:
        new = RunFolder(folder)
        if source.tokenizer.exists():  # an imported run may have none
            shutil.copyfile(source.tokenizer, new.tokenizer)
        if template is not None:
            write_text(new.chat_template, template)
        recipe = _without_folders(yaml.safe_load(source.recipe_yaml.read_text()))
        write_text(new.recipe_yaml, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
        packed = {"checkpoint": where.name, "weights": checkpoint.digest(before), "dtype": dtype}
        record = {key: value for key, value in source.record().items() if key in KEPT}
        record = {"name": recipe.get("name"), "status": "packed", "packed": packed, **_without_folders(record)}
        write_json(new.run_json, record)
        kept = {key: before[key] for key in ("tokens", "tokenizer_sha256")}
        checkpoint.save_weights(new.checkpoints, step, weights, weights.items(), kept)
        for name, lines in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(folder / name, lines)
        for path in _measured(source, step, weights):
            shutil.copyfile(path, folder / path.name)
        write_text(folder / "README.md", card(new, text))
    made = RunFolder(out)
    file = made.checkpoints / where.name / checkpoint.WEIGHTS
    return Packed(
        out,
        step,
        sum(tensor.numel() for tensor in weights.values()),
        file.stat().st_size,
        sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
    )


def _texts(run: RunFolder, tokenizer: Tokenizer, keep: Mapping[str, int]) -> dict[str, str]:
    """Files of JSON lines, a document each, by their names in a run folder."""
    if not keep:
        return {}
    data, found = prepare(run.recipe().data, tokenizer), {}
    run.check_corpora(data)
    for key, max_tokens in keep.items():
        split, slash, only = key.partition("/")
        streams = data.split(split)
        if slash and only not in streams:
            raise UsageError(
                f"keep {key!r}: of the split {split!r} there is no source {only!r}{did_you_mean(only, streams)}"
            )
        for source, stream in streams.items():
            if slash and source != only:
                continue
            lines, left = [], max_tokens
            for ids_T in stream.documents():
                raw = tokenizer.decode_bytes(ids_T[ids_T != tokenizer.bos][:left])
                lines.append(json.dumps({"text": raw.decode(errors="ignore")}, ensure_ascii=False) + "\n")
                left -= len(ids_T)
                if left <= 0:
                    break
            found[f"{run.texts.name}/{split}/{source}.jsonl"] = "".join(lines)
    return found


def _measured(run: RunFolder, step: int, weights: Mapping[str, Tensor]) -> list[Path]:
    """The measurements of a run that are of these weights."""
    found: list[Path] = []
    if run.eval_json.exists() and read_json(run.eval_json).get("train_step") == step:
        found += [run.eval_json, run.samples_json]
    if run.exits_json.exists() and read_json(run.exits_json).get("model") == fingerprint(weights):
        found += [run.exits_json, run.probe]
    return [path for path in found if path.exists()]


def _read_about(about: str | Path | None) -> str:
    if about is None:
        return ""
    try:
        return Path(about).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--about {about} cannot be read ({error}): give a Markdown file") from None


def _without_folders(value: Any) -> Any:
    """Files by their names only: where they lay on one machine is of no use on another."""
    if isinstance(value, dict):
        return {
            key: _name_of(item) if key in ("path", "run") else _without_folders(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    found = _PATHS.match(value) if isinstance(value, str) else None
    return value if found is None else f"{found[1]}:{Path(found[2]).name}"


def _name_of(path: Any) -> Any:
    return Path(path).name if isinstance(path, str) else _without_folders(path)


def card(run: RunFolder, about: str = "") -> str:
    """The model card of a packed run, in Markdown: what it is, what it was trained on and how, and what it reaches."""
    recipe, record = run.recipe(), run.record()
    ledger, model = recipe.ledger(), recipe.model
    manifest = checkpoint.check(pick_checkpoint(run, "last"))
    lines = [
        f"# {recipe.name}",
        "",
        *([recipe.description, ""] if recipe.description else []),
        f"{ledger.params:,} parameters, held in {record['packed']['dtype']}; {model.n_loops} loops of the core where",
        f"no other number is asked for, a context of {model.seq_len} tokens, a vocabulary of {model.vocab_size:,}.",
        "",
        "```python",
        "import alcoda",
        "",
        'lm = alcoda.load("PATH")  # of this folder',
        f'print(lm.generate("Once upon a time", loops={model.n_loops}, temperature=0.7))',
        "```",
        "",
        *([about, ""] if about else []),
        "## Data",
        "",
        "| source | share | documents | tokens | bytes | SHA-256 |",
        "|---|---|---|---|---|---|",
    ]
    for part in record.get("data", {}).get("sources", []):
        train = part.get("splits", {}).get("train", {})
        size = " | ".join(f"{train.get(key, 0):,}" for key in ("documents", "tokens", "bytes"))
        lines.append(f"| {part['corpus']} | {part.get('weight', 1):.3g} | {size} | {part['content_hash'][:16]} |")
    lines += ["", "Documents, tokens and bytes are of the part that was trained on.", "", "## Training", ""]
    versions = record.get("versions", {})
    begun, imported, retrofit = (record.get(key) for key in ("init_from", "imported", "retrofit"))
    lines += [
        *(
            [f"* Imported, not trained here: the {imported['layout']} checkpoint {imported['source']}."]
            if imported
            else []
        ),
        *([f"* A dense model made recurrent, not trained here: {retrofit['source']['name']}."] if retrofit else []),
        *([f"* From the weights of {begun['run']} ({begun['checkpoint']})."] if begun else []),
        f"* {manifest['train_step']:,} train steps, {manifest['tokens']:,} tokens; depth {recipe.depth.kind}, "
        f"optimizer {recipe.train.optimizer.kind}. `recipe.yaml` has every setting.",
        f"* {ledger.training_flops_per_token:.4g} training FLOPs a token at its mean depth, by the ledger.",
        f"* Seeds: {', '.join(f'{key} {value}' for key, value in record.get('seeds', {}).items())}. Commit "
        f"{record.get('commit')}{', changed' if record.get('dirty') else ''}. "
        f"{', '.join(f'{key} {value}' for key, value in versions.items() if value)}.",
        "",
    ]
    if run.eval_json.exists():
        scores = read_json(run.eval_json)
        lines += ["## Bits per byte by depth", "", f"On the split {scores.get('data', 'valid')}, 95% intervals.", ""]
        lines += ["| loops | bits per byte | |", "|---|---|---|"]
        lines += [
            f"| {row['loops']} | {row['bits_per_byte']:.4f} | {row['low']:.4f} to {row['high']:.4f} |"
            for row in scores.get("by_depth", [])
        ]
        lines += ["", "`alcoda eval PATH` measures it again, where the data are.", ""]
    return "\n".join(lines)
