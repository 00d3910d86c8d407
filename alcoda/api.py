"""The Python API: config objects in, typed results out. The command line only calls these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alcoda.bench import bench_engine
from alcoda.depth.tiers import Tiers
from alcoda.downstream.results import HarnessResult
from alcoda.engine.bench import BenchResult
from alcoda.engine.capacity import CapacityResult
from alcoda.engine.capacity import capacity as _capacity
from alcoda.engine.llm import LM, load
from alcoda.errors import UsageError, did_you_mean
from alcoda.files import disk, read_json, write_json
from alcoda.interop.hf_save import MAX_SHARD_BYTES, Saved
from alcoda.interop.load import Imported, import_model
from alcoda.laws.run import LawReport, check_laws
from alcoda.measure.caches import CachesResult
from alcoda.measure.evaluate import EvalResult
from alcoda.measure.exits import ExitResult
from alcoda.measure.frontier import FrontierResult
from alcoda.measure.lab import LabResult
from alcoda.measure.prefills import PrefillsResult
from alcoda.measure.probe import ProbeResult
from alcoda.measuring import (
    calibrate,
    evaluate,
    evaluate_caches,
    evaluate_exit,
    evaluate_prefills,
    fit_probe,
    frontier,
    harness,
    lab,
)
from alcoda.model.config import ModelConfig
from alcoda.model.cost import Ledger, ledger
from alcoda.plugins import load as load_plugin
from alcoda.retrofitting import Losses, Retrofitted, healed, retrofit
from alcoda.serve.load.bench import bench_serve
from alcoda.serve.load.score import LoadResult
from alcoda.training.catalogue import Catalogue
from alcoda.training.catalogue import catalogue as recipes
from alcoda.training.checkpoint import listed, step_of
from alcoda.training.device import DTYPES, decode_dtype, pick_device, pick_dtype
from alcoda.training.folders import find_recipe
from alcoda.training.footprint import Footprint, footprint
from alcoda.training.load import pick_checkpoint
from alcoda.training.loop import TrainResult, train
from alcoda.training.match import MatchResult, match
from alcoda.training.pack import Packed, pack
from alcoda.training.recipe import Recipe, load_recipe, named
from alcoda.training.run import RunFolder, shipped

__all__ = [
    "LM",
    "BenchResult",
    "CachesResult",
    "CapacityResult",
    "Catalogue",
    "EvalResult",
    "ExitResult",
    "Footprint",
    "FrontierResult",
    "HarnessResult",
    "Imported",
    "LabResult",
    "LawReport",
    "Ledger",
    "LoadResult",
    "Losses",
    "MatchResult",
    "ModelConfig",
    "Packed",
    "PrefillsResult",
    "ProbeResult",
    "Recipe",
    "Retrofitted",
    "Sample",
    "Saved",
    "Tiers",
    "TrainResult",
    "bench_engine",
    "bench_serve",
    "calibrate",
    "capacity",
    "check_laws",
    "cost",
    "evaluate",
    "evaluate_caches",
    "evaluate_exit",
    "evaluate_prefills",
    "export",
    "fit_probe",
    "footprint",
    "frontier",
    "harness",
    "healed",
    "import_model",
    "lab",
    "load",
    "load_plugin",
    "load_recipe",
    "match",
    "measured_in",
    "pack",
    "recipes",
    "retrofit",
    "samples",
    "train",
    "write_report",
]


@dataclass(frozen=True)
class Sample:
    """One generated text."""

    prompt: str
    loops: int
    temperature: float
    seed: int
    text: str


def cost(config: Recipe | ModelConfig, loops: int | None = None) -> Ledger:
    """What a recipe (or a bare model, trained at its ``n_loops``) costs, by named term.

    Args:
        config: a recipe or its model.
        loops: the depth of the forward pass, of decoding and of the cache; ``n_loops`` where None.
    """
    if isinstance(config, Recipe):
        return config.ledger(loops)
    if isinstance(config, ModelConfig):
        return ledger(config, loops)
    raise UsageError(f"cost takes a Recipe or a ModelConfig, not {config!r}: alcoda.load_recipe(PATH) reads one")


def capacity(
    model: str | Path | LM | Recipe | ModelConfig,
    memory_bytes: int,
    loops: int | None = None,
    lengths: Sequence[int] = (),
    dtype: str = "auto",
    settings: Sequence[str] = (),
    overlays: Sequence[str | Path] = (),
) -> CapacityResult:
    """How many requests fit into a memory beside the weights, with each decode cache.

    Args:
        model: a run, a recipe (or its name), or a bare model.
        loops: that a token may run; ``n_loops`` where None.
        lengths: tokens of a request, prompt and new ones; the whole context where empty.
        dtype: of weights and cache: bfloat16, float32, or auto: what the engine decodes in on this machine. The cache
            is that of the device at hand.
        settings, overlays: of a recipe that is named, as of `load_recipe`.

    Raises:
        UsageError: no such run or recipe; and as `alcoda.engine.capacity.capacity`.
    """
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int):
        raise UsageError(f"memory_bytes={memory_bytes!r}: a whole number of bytes: 24 * 10**9")
    if dtype not in (allowed := ("auto", *DTYPES)):
        raise UsageError(f"dtype {dtype!r}{did_you_mean(dtype, allowed)}")
    what = named(str(model) if isinstance(model, str | Path) else "model", settings, overlays)
    if isinstance(model, str | Path):
        is_run = Path(model).is_dir() or str(model) in shipped()
        try:
            file = RunFolder.find(model).recipe_yaml if is_run else find_recipe(model)
        except UsageError as error:
            neither = (
                f"{model} is neither a run (a folder that alcoda train, pack or import wrote) nor a recipe: {error}"
            )
            raise error if is_run else UsageError(neither) from None
        model = load_recipe(file, settings, overlays)
    on = pick_device()
    if isinstance(model, LM):
        decodes_in = model.loaded.decode_dtype if dtype == "auto" else DTYPES[dtype]
        what = model.loaded.run.path.resolve().name
        return _capacity(model.recipe.model, memory_bytes, loops, lengths, decodes_in, on, what)
    config = model.model if isinstance(model, Recipe) else model
    if isinstance(model, Recipe) and dtype == "auto" and model.train.dtype == "float32":
        dtype = "float32"
    decodes_in = decode_dtype(dtype, pick_dtype(dtype, on), on, config)
    return _capacity(config, memory_bytes, loops, lengths, decodes_in, on, what)


def export(
    run: str | Path | LM,
    out: str | Path,
    checkpoint: str = "best",
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> Saved:
    """Write a folder for Hugging Face's transformers, which `load` reads too (docs/huggingface.md).

    Args:
        run: a run folder, whose weights are read in float32; or a loaded model, as it is held.
        out: new, or empty.
        checkpoint: ``best``, ``last``, or a checkpoint's name, where ``run`` is a folder.
        dtype: of the weights: ``bfloat16`` or ``float32``; None: as read, or bfloat16 where that loses nothing.
        max_shard_bytes: of one file of weights; 5 GB where None.
    """
    lm = run if isinstance(run, LM) else load(run, checkpoint, "cpu", "float32")
    return lm.save_pretrained(out, dtype, MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes)


def samples(
    lm: LM, prompts: Sequence[str], loops: Sequence[int], max_tokens: int = 64, temperature: float = 0.7, seed: int = 0
) -> list[Sample]:
    """The same prompts continued at each depth."""
    return [
        Sample(
            prompt,
            n,
            temperature,
            seed,
            lm.generate(prompt, loops=n, max_tokens=max_tokens, temperature=temperature, seed=seed),
        )
        for prompt in prompts
        for n in loops
    ]


DEFAULT_PROMPTS = ("def main(", "import os\n", "The ")
"""The same for every run, so that a page can compare them."""


def write_report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path,
    prompts: Sequence[str] = DEFAULT_PROMPTS,
    *,
    figures: str | None = None,
    tables: Sequence[str] = (),
) -> Path:
    """One self-contained HTML page of one or more runs.

    What a run has not been asked for yet is measured first and kept in its folder: ``eval.json`` on its validation
    split at the recipe's depths, ``samples.json`` of ``prompts`` at the shallowest, nominal and deepest of them.

    Args:
        figures: ``pdf``: also write every figure of the page, into a folder beside it (``report_parts``).
        tables: ``csv``, ``latex``: also its tables.
    """
    from alcoda.report.export import check_forms
    from alcoda.report.page import write_report as write_page

    check_forms(figures, tables)

    if isinstance(runs, str | Path):
        runs = [runs]
    if not runs:
        raise UsageError("report: name at least one run")
    folders = [RunFolder.find(run).writable() for run in runs]
    for run in folders:
        measure_missing(run, prompts)
    return write_page([run.path for run in folders], Path(out), figures, tables)


def is_measured(run: RunFolder) -> bool:
    """Whether ``eval.json`` is there and of the best checkpoint: a run may have been trained on since."""
    best = step_of(pick_checkpoint(run, "best"))
    return run.eval_json.exists() and read_json(run.eval_json).get("train_step") == best


def keep_scores(run: RunFolder, scores: dict[str, Any]) -> None:
    """Write ``eval.json``; samples of an earlier checkpoint go with the scores of that one."""
    with disk(run.samples_json):
        run.samples_json.unlink(missing_ok=True)
    write_json(run.eval_json, scores)


def measured_in(run: str | Path) -> Path:
    """The folder that measurements of a run go to: its own; of a model that comes with the package, its copy here."""
    return RunFolder.find(run).writable().path


def keep_prefills(run: str | Path, found: PrefillsResult) -> None:
    """Write ``prefills.json``, which the report shows."""
    write_json(RunFolder(measured_in(run)).prefills_json, found.to_json())


def keep_caches(run: str | Path, found: CachesResult) -> None:
    """Write ``caches.json``, which the report shows."""
    write_json(RunFolder(measured_in(run)).caches_json, found.to_json())


def keep_frontier(run: str | Path, found: FrontierResult) -> None:
    """Write ``frontier.json``, which the report shows."""
    write_json(RunFolder(measured_in(run)).frontier_json, found.to_json())


def measure_missing(run: RunFolder, prompts: Sequence[str] = DEFAULT_PROMPTS) -> None:
    """Write ``eval.json`` and ``samples.json`` of a run that has a checkpoint, where they are not of its best one."""
    if not listed(run.checkpoints) or (is_measured(run) and run.samples_json.exists()):
        return
    lm = load(run.path)
    if not is_measured(run):
        keep_scores(run, evaluate(lm).to_json())
    if not run.samples_json.exists():
        depths = sorted({1, lm.n_loops, lm.recipe.eval.loops[-1]})
        write_json(run.samples_json, [asdict(sample) for sample in samples(lm, prompts, depths)])
