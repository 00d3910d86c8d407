"""`alcoda retrofit`: a dense model in, a recurrent run out, with what it lost and a recipe that heals it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from alcoda.config import validate
from alcoda.data.prepare import prepare
from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import RunError, UsageError
from alcoda.files import read_json, whole_folder, write_json, write_text
from alcoda.interop.retrofit import (
    Identity,
    Split,
    build,
    check_dense,
    check_identity,
    dense_weights,
    recurrent,
    retrofit_weights,
    split,
    without,
)
from alcoda.interop.source import Source, open_source
from alcoda.measure.evaluate import DepthScore, EvalResult, evaluate
from alcoda.measure.text import streams_of
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint
from alcoda.training.load import LoadedRun, load_run
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder, provenance

HEAL_YAML, RETROFIT_JSON = "heal.yaml", "retrofit.json"
TOKENS, SEQ_LEN, STEPS = 20_000, 512, 1000


@dataclass(frozen=True)
class Loss:
    """Of one model at one depth: nats a token, and bits a byte with their 95% interval."""

    loss: float
    bits_per_byte: float
    low: float
    high: float

    @staticmethod
    def of(score: DepthScore) -> Loss:
        return Loss(score.loss, score.bits_per_byte, score.low, score.high)


@dataclass(frozen=True)
class Losses:
    """What source and retrofit lose on one text, and what the healed one does.

    Attributes:
        data: the corpus, whose valid split is read in rows of ``seq_len``.
        max_tokens: of the split that were asked for; None: all.
        split_tokens: that the split has.
        tokens: that were scored: of what was read, all but the first, and but end-of-text.
        source: of the dense model, whole.
        retrofit, healed: by loops; ``healed`` is empty before.
    """

    data: str
    seq_len: int
    max_tokens: int | None
    split_tokens: int
    tokens: int
    source: Loss
    retrofit: Mapping[int, Loss]
    healed: Mapping[int, Loss]

    @property
    def note(self) -> str | None:
        """What the reader should know of the numbers."""
        if self.max_tokens is None or self.split_tokens >= self.max_tokens:
            return None
        return (
            f"the valid split of {self.data} has {self.split_tokens:,} tokens, fewer than the {self.max_tokens:,} "
            "asked for (--tokens): all of it was scored; give more text for narrower intervals"
        )

    def rows(self) -> list[list[str]]:
        """For a table: loops, then nats a token and bits a byte of retrofit and healed; the source first."""
        rows = [["source", f"{self.source.loss:.4f}", f"{self.source.bits_per_byte:.4f}"]]
        rows += [[f"retrofit, {n}", f"{x.loss:.4f}", f"{x.bits_per_byte:.4f}"] for n, x in self.retrofit.items()]
        return rows + [[f"healed, {n}", f"{x.loss:.4f}", f"{x.bits_per_byte:.4f}"] for n, x in self.healed.items()]

    def to_json(self) -> dict[str, Any]:
        by_loops = {name: {str(n): vars(x) for n, x in getattr(self, name).items()} for name in ("retrofit", "healed")}
        return {**vars(self), "source": vars(self.source), **by_loops}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Losses:
        retrofit, healed = ({int(n): Loss(**x) for n, x in data[name].items()} for name in ("retrofit", "healed"))
        source = Loss(**data["source"])
        max_tokens, n_split, n = data["max_tokens"], data["split_tokens"], data["tokens"]
        return Losses(data["data"], data["seq_len"], max_tokens, n_split, n, source, retrofit, healed)


@dataclass(frozen=True)
class Retrofitted:
    """What `retrofit` made.

    Attributes:
        path: the run.
        split: which layers of the source went where.
        identity: at one loop against the source.
        losses: None where no corpus was named.
        recipe: the healing recipe; None likewise.
    """

    path: Path
    split: Split
    identity: Identity
    losses: Losses | None
    recipe: Path | None

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "split": self.split.to_json(),
            "identity": self.identity.to_json(),
            "losses": None if self.losses is None else self.losses.to_json(),
            "recipe": None if self.recipe is None else str(self.recipe),
        }


def retrofit(
    source: str | Path,
    out: str | Path,
    prelude: int,
    core: int,
    coda: int,
    loops: int = 4,
    *,
    core_from: int | None = None,
    data: str | None = None,
    max_bytes: int | None = None,
    seq_len: int | None = None,
    tokens: int | None = TOKENS,
    steps: int = STEPS,
) -> Retrofitted:
    """Make a dense model recurrent, and write it as a run to train on from, with a recipe that does so.

    Args:
        source: a run, a folder with config.json and safetensors, a GGUF file, or a llama2.c checkpoint.
        out: the run folder.
        prelude, core, coda: layers of each: the first, those right before the coda, the last.
        loops: of the core, that the model is to be healed for.
        core_from: the layer of the source that the core begins with.
        data: a corpus to heal on and to measure the losses with, on its valid split.
        max_bytes: of the corpus, from its beginning; None: all.
        seq_len: of the rows in healing and measuring; None: 512, or the source's where that is less.
        tokens: of the valid split that are scored, at most; None: all.
        steps: of healing.

    Raises:
        UsageError: layers that there are not, a source that is not dense or not known, ``out`` is not empty.
        RunError: a damaged source, or the identity check fails.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is there already and not empty: give another folder")
    if steps < 2:
        raise UsageError(f"--steps {steps}: at least 2")
    found = open_source(source)
    check_dense(found.config)
    if found.tokenizer.kind == "none":
        raise UsageError(
            f"{source} has no tokenizer, and a run is trained on text: put its tokenizer.json beside its weights"
        )
    layers = split(found.config.n_prelude + found.config.n_coda, prelude, core, coda, core_from)
    model = build(recurrent(found.config, layers, loops), retrofit_weights(found.config, found.weights, layers))
    dense = build(without(found.config, layers), dense_weights(found.config, found.weights, layers.kept))
    identity = check_identity(model, dense, not layers.dropped)
    del dense
    healing = None
    if data is not None:
        rows = _row_tokens(found.config, seq_len)
        healing = _healing(out, model.config, found.tokenizer, data, max_bytes, rows, steps)
        prepare(healing.data, found.tokenizer)  # before anything is written: the corpus may be none
    _write(out, found, model, layers, identity, healing)
    losses = None
    if healing is not None:
        losses = _losses(out, healing, found, model, tokens)
        write_json(out / RETROFIT_JSON, {"split": layers.to_json(), "losses": losses.to_json()})
    return Retrofitted(out, layers, identity, losses, None if healing is None else out / HEAL_YAML)


def _row_tokens(source: ModelConfig, seq_len: int | None) -> int:
    if source.position.cost(source.shape).params == 0:
        return min(SEQ_LEN, source.seq_len) if seq_len is None else seq_len
    if seq_len not in (None, source.seq_len):
        raise UsageError(
            f"--seq-len {seq_len}: positions of the source are learned, for rows of {source.seq_len}; leave it out"
        )
    return source.seq_len


def _healing(
    out: Path, model: ModelConfig, tokenizer: Tokenizer, data: str, max_bytes: int | None, seq_len: int, steps: int
) -> Recipe:
    """The recipe that trains a retrofit on: first at one loop, which it can do already, then at more and more."""
    name = f"{out.name}-healed"
    loops = model.n_loops
    fields: dict[str, Any] = {
        "name": name,
        "description": f"heals {out.name}: {model.n_prelude} + {model.n_core} x {loops} + {model.n_coda} layers",
        "source": "Retrofitted Recurrence, arXiv 2511.07384",
        "model": {**model.model_dump(mode="json"), "seq_len": seq_len},
        "depth": {
            "kind": "curriculum",
            "inner": {"kind": "poisson", "mean": loops, "max": 2 * loops},
            "start": 1.0,
            "steps": max(1, steps // 2),
        },
        "data": {"corpus": data, "max_bytes": max_bytes, "tokenizer": _tokenizer(out, tokenizer)},
        "train": {
            "steps": steps,
            "batch_size": 8,
            "optimizer": {"kind": "adamw", "lr": 2e-4, "weight_decay": 0.01},
            "schedule": {"warmup_steps": max(1, steps // 20)},
        },
        "eval": {"every": max(1, steps // 4), "loops": sorted({1, loops, 2 * loops})},
        "init_from": str(out.resolve()),
    }
    return validate(Recipe, fields, "the healing recipe")


def _tokenizer(out: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    bos = None if tokenizer.bos == tokenizer.eot else tokenizer.bos_text
    return {"kind": "file", "path": str((out / "tokenizer.json").resolve()), "eot": tokenizer.eot_text, "bos": bos}


def _write(
    out: Path, found: Source, model: RecurrentLM, layers: Split, identity: Identity, healing: Recipe | None
) -> None:
    fields: dict[str, Any] = {
        "name": out.name,
        "description": f"{found.about['name']} made recurrent: layers {layers}",
        "model": model.config.model_dump(mode="json"),
        "data": {"tokenizer": _tokenizer(out, found.tokenizer)},
        "eval": {"loops": sorted({1, model.config.n_loops})},
        "train": {"dtype": "float32"},  # as it is loaded: the source's logits to the bit at one loop
    }
    if healing is not None:
        fields["data"] = healing.data.model_dump(mode="json")
    recipe = validate(Recipe, fields, "the recipe").resolved()
    if out.exists():
        out.rmdir()
    with whole_folder(out) as folder:
        run = RunFolder(folder)
        found.tokenizer.save(run.tokenizer)
        if found.chat_template is not None:
            write_text(run.chat_template, found.chat_template)
        write_text(run.recipe_yaml, recipe.to_yaml())
        retrofitted = {"source": found.about, "split": layers.to_json(), "identity": identity.to_json()}
        record = {"name": recipe.name, "status": "retrofitted", **provenance(), "retrofit": retrofitted}
        write_json(run.run_json, {**record, "ledger": recipe.ledger().to_json()})
        about = {"tokens": 0, "tokenizer_sha256": _sha256(run, recipe)}
        checkpoint.save_weights(run.checkpoints, 0, model.state_dict(), model.state_dict().items(), about)
        if healing is not None:
            write_text(folder / HEAL_YAML, _commented(healing, out))


def _sha256(run: RunFolder, recipe: Recipe) -> str:
    # Of what will be read back, not of what was saved: a tokenizer is told by how the library writes it.
    return run.load_tokenizer().sha256


def _commented(healing: Recipe, out: Path) -> str:
    """The recipe, without what it leaves at its default."""
    head = (
        f"# Heals {out.name}: alcoda train {out / HEAL_YAML} --out {out}-healed; then alcoda healed {out}-healed\n"
        "# The mean depth rises from 1 loop, which the retrofit can do, to n_loops over the first half of the steps\n"
        "# (Retrofitted Recurrence, arXiv 2511.07384). Rates, sizes and lengths are a start of ours, not the paper's.\n"
    )
    data = healing.model_dump(mode="json", exclude_defaults=True)
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _losses(out: Path, healing: Recipe, found: Source, model: RecurrentLM, tokens: int | None) -> Losses:
    loaded = load_run(out, dtype="float32")
    dense = build(found.config, found.weights).to(loaded.model.embed.weight.device)
    rows = healing.model.seq_len
    depths = list(range(1, model.config.n_loops + 1))
    (source,) = _scores(loaded, dense, rows, [1], tokens).by_depth
    made = _scores(loaded, loaded.model, rows, depths, tokens)
    split_tokens = sum(stream.n_tokens for stream in streams_of(loaded, "valid").values())
    data = str(healing.data.corpus)
    return Losses(data, rows, tokens, split_tokens, made.n_tokens, Loss.of(source), _by_loops(made), {})


def _scores(loaded: LoadedRun, model: RecurrentLM, seq_len: int, depths: list[int], tokens: int | None) -> EvalResult:
    config = model.config.model_copy(update={"seq_len": seq_len})
    recipe = loaded.recipe.model_copy(update={"model": config, "depth": "fixed"})  # of the source: it has one depth
    one = replace(loaded, model=model, recipe=recipe)
    return evaluate(one, depths, "valid", max_tokens=tokens)


def _by_loops(found: EvalResult) -> dict[int, Loss]:
    return {score.loops: Loss.of(score) for score in found.by_depth}


def healed(run: str | Path) -> Losses:
    """What a run that was trained from a retrofit loses, beside its source and the retrofit as it was, on the same text
    at the same depths. Kept in the run's ``retrofit.json``.

    Raises:
        UsageError: a run that was not trained from a retrofit whose losses were measured (`retrofit` with ``data``).
        RunError: what was kept of them is damaged.
    """
    loaded = load_run(run, dtype="float32")
    begun = loaded.run.record().get("init_from") or {}
    before = Path(begun.get("run", "")) / RETROFIT_JSON
    if "run" not in begun or not before.is_file():
        raise UsageError(
            f"{run} was not trained from a retrofit whose losses were measured: alcoda retrofit SRC --data CORPUS "
            f"measures them, and writes a recipe ({HEAL_YAML}) that trains on from it"
        )
    kept = read_json(before)
    try:
        losses = Losses.from_json(kept["losses"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RunError(
            f"{before} is damaged, or of another version: make the retrofit anew to compare with it"
        ) from None
    found = _scores(loaded, loaded.model, losses.seq_len, sorted(losses.retrofit), losses.max_tokens)
    losses = replace(losses, healed=_by_loops(found))
    write_json(loaded.run.path / RETROFIT_JSON, {**kept, "losses": losses.to_json()})
    return losses
