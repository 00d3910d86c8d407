"""The main job: show the model that comes with alcoda (where one does), then train a small elastic one on text that is
always there, measure it at several depths, show it.

Every part of the training leaves a file in the run folder; a second run does only what is missing.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alcoda import api
from alcoda.data.prepare import Data, prepare
from alcoda.engine.options import Options
from alcoda.errors import UsageError
from alcoda.files import read_json
from alcoda.measure.bigram import Bigram
from alcoda.measure.frontier import FrontierResult, Point, UniformPoint
from alcoda.stderr import STDERR
from alcoda.training.recipe import Recipe, load_recipe
from alcoda.training.run import RUN_FILES, RunFolder, shipped

RECIPE = Path(__file__).with_name("quickstart.yaml")


def quickstart(
    out: str | Path = "runs/quickstart", fresh: bool = False, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Train, evaluate, generate, report; returns what the command prints as its last line.

    Args:
        out: the run folder; what is done there already is used again.
        fresh: delete the run first.
        settings: ``"a.b=c"`` over the recipe.

    Returns:
        ``shipped`` (of `show_shipped`; None where no model comes along), ``run``, ``report``, ``tokens``, ``params``,
        ``bits_per_byte`` (loops -> value), ``gain_8_over_1`` with its interval, ``bigram_bits_per_byte``, ``wall_s``
        and ``peak_rss_mb``; ``status`` is ``stopped`` where a signal ended the training.
    """
    began = time.perf_counter()
    console = Console(file=STDERR, highlight=False, soft_wrap=True)
    say = console.print
    recipe = load_recipe(RECIPE, settings).resolved()
    run = RunFolder(out)
    _refuse(run, recipe, fresh)
    shown = show_shipped(console) if SHOWN in shipped() else None
    aside = _set_aside(run) if fresh else None
    ledger = recipe.ledger()
    say(
        f"[bold]1/4[/] training: {ledger.params:,} parameters, {recipe.n_steps} steps, "
        f"loops drawn from {recipe.depth.kind} of mean {recipe.depth.mean_loops:.1f}"
    )
    try:
        trained = api.train(recipe, run.path, resume=run.exists)
    except BaseException:
        if aside and not run.path.exists():
            aside.rename(run.path)
        elif aside:
            say(f"the old run is kept at {aside}")
        raise
    if aside:
        shutil.rmtree(aside)
    if trained.status == "stopped":
        say(f"stopped at step {trained.train_step}; the same command goes on from there")
        return {"run": str(run.path), "status": "stopped", "tokens": trained.tokens, "params": ledger.params}
    say(
        f"[bold]2/4[/] bits per byte at {', '.join(map(str, recipe.eval.loops))} loops, on text that was not trained on"
    )
    scores = _evaluate(recipe, run)
    for row in scores["by_depth"]:
        say(f"      {row['loops']:>3} loops  {row['bits_per_byte']:.4f}  [{row['low']:.4f}, {row['high']:.4f}]")
    say(f"      bigram   {scores['bigram_bits_per_byte']:.4f}")
    say("[bold]3/4[/] the same prompt at two depths")
    api.measure_missing(run)
    for sample in read_json(run.samples_json)[:2]:
        say(f"      [bold]{sample['loops']} loops[/]")
        say(sample["prompt"] + sample["text"].rstrip(), markup=False)
    say("[bold]4/4[/] report")
    page = api.write_report([run.path], run.report)
    say(
        f"report: {page}\n"
        f"next:   {program()} generate {run.path} --prompt 'def main(' --loops 8 --temperature 0.7\n"
        f"        {program()} eval {run.path} --loops 1,3,6,12\n"
        f"        {program()} train {run.path / 'recipe.yaml'} --set model.update=gate --out runs/gated"
    )
    gain = next((g for g in scores["gain"] if (g["from_loops"], g["to_loops"]) == (1, 8)), None)
    return {
        "run": str(run.path),
        "report": str(page),
        "status": "finished",
        "shipped": shown,
        "tokens": trained.tokens,
        "params": ledger.params,
        "bits_per_byte": scores["bits_per_byte"],
        "gain_8_over_1": gain and {name: gain[name] for name in ("bits_per_byte", "low", "high")},
        "bigram_bits_per_byte": scores["bigram_bits_per_byte"],
        "train_s": round(trained.wall_s, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "peak_rss_mb": round(peak_rss_bytes() / 1e6),
    }


SHOWN, PROMPT, TIER = "mini", "Once upon a time", "balanced"
COMPLETIONS, DRAFT_LOOPS = 8, 2
SHADES = ("#0b3c5d", "#14507a", "#1f6699", "#4a7f86", "#8a8a55", "#b98b3a", "#c96f2b", "#b5442a")
"""Grounds of a token, from the fewest loops to the most."""


def show_shipped(console: Console) -> dict[str, Any]:
    """A passage that the model of the package writes, each token coloured by its loops, and what leaving early costs.

    Returns:
        ``name``, ``exit``, ``mean_loops`` and ``tokens_per_s`` of the passage, ``engine_tokens_per_s`` of several texts
        at one time, ``sufficient_loops`` of the frontier.
    """
    say, lm = console.print, api.load(SHOWN)
    say(
        f"[bold]{SHOWN}[/], which comes with alcoda: {sum(p.numel() for p in lm.model.parameters()):,} parameters, "
        f"at most {lm.n_loops} loops a token; --exit {TIER}: a token leaves the loop when its state has settled"
    )
    began = time.perf_counter()
    written, ran = Text(PROMPT), []
    pieces = lm.stream(PROMPT, exit=TIER, max_tokens=100, temperature=0.7)
    for piece in pieces:
        ran.append(pieces.completion.tokens[-1].loops)
        written.append(piece, style=f"white on {_shade(ran[-1], lm.n_loops)}")
    seconds = time.perf_counter() - began
    say(written)
    legend = Text("loops ")
    for loop in range(1, lm.n_loops + 1):
        legend.append(f" {loop} ", style=f"white on {_shade(loop, lm.n_loops)}")
    legend.append(
        f"  {sum(ran) / max(len(ran), 1):.2f} a token; " + ", ".join(f"{n}: {ran.count(n)}" for n in sorted({*ran}))
    )
    say(legend)
    speeds = _speeds(lm)
    fixed = speeds["fixed"]
    say(
        f"{COMPLETIONS} texts at one time, tokens/s: "
        + ", ".join(f"{name} {speed:,.0f} ({speed / fixed:.2f} times)" for name, speed in speeds.items())
    )
    found = api.frontier(lm, ["state"], points=4, max_tokens=4096)
    table = Table(
        "", "loops", "bits/byte", "of the loss", "FLOPs", title="what leaving early costs", title_justify="left"
    )
    for one in found.uniform:
        table.add_row("all tokens at", str(one.loops), *_cells(one, found))
    for point in found.curves[0].points:
        table.add_row("state rule, mean", f"{point.mean_loops:.2f}", *_cells(point, found))
    say(table)
    say(
        f"      next: {program()} generate {SHOWN} --prompt '{PROMPT}' --exit {TIER} --temperature 0.7\n"
        f"            {program()} lab {SHOWN}"
    )
    return {
        "name": SHOWN,
        "exit": TIER,
        "mean_loops": sum(ran) / max(len(ran), 1),
        "tokens_per_s": round(len(ran) / seconds, 1),
        "engine_tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "sufficient_loops": found.sufficient_loops,
    }


def _speeds(lm: api.LM) -> dict[str, float]:
    """Tokens/s of the engine on the same prompts: at fixed depth, leaving early, and with drafts as well; the better of
    two turns each."""
    ways: dict[str, dict[str, Any]] = {
        "fixed": {},
        "adaptive": {"exit": TIER},
        "adaptive with drafts": {"exit": TIER, "engine": Options(draft_loops=DRAFT_LOOPS)},
    }
    found = dict.fromkeys(ways, 0.0)
    for _ in range(2):
        for name, how in ways.items():
            lm.generate([PROMPT] * COMPLETIONS, max_tokens=48, temperature=0.7, ignore_eot=True, **how)
            assert lm.stats is not None
            found[name] = max(found[name], lm.stats["tokens_per_s"])
    return found


def _shade(loop: int, n_loops: int) -> str:
    return SHADES[round((len(SHADES) - 1) * (loop - 1) / max(n_loops - 1, 1))]


def _cells(point: UniformPoint | Point, found: FrontierResult) -> list[str]:
    share = point.flops_per_token / found.uniform[-1].flops_per_token
    return [f"{point.bits_per_byte:.4f}", f"{point.excess:+.2%}", f"{share:.0%}"]


def program() -> str:
    """What the user types to run alcoda here: its name, or its path where the shell would not find it."""
    found, started = shutil.which("alcoda"), Path(sys.argv[0])
    if started.name != "alcoda" or (found and Path(found).resolve() == started.resolve()):
        return "alcoda"
    here = started.absolute()
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def peak_rss_bytes() -> int:
    """The most memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent held when it started this process
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _refuse(run: RunFolder, recipe: Recipe, fresh: bool) -> None:
    """What cannot be is refused before the first thing that takes time. It is looked at again when it is done."""
    if fresh:
        _check_fresh(run)
    else:
        run.check_begin(recipe, run.exists)
    if run.exists:
        with run.locked():
            pass


def _check_fresh(run: RunFolder) -> None:
    """Refuse to delete what is not a run alone."""
    if not run.path.exists():
        return
    foreign = sorted(p.name for p in run.path.iterdir() if p.name not in RUN_FILES and not p.name.startswith("."))
    if run.path.is_symlink() or foreign or not run.run_json.exists():
        what = (
            f"it holds {foreign[0]}" if foreign else "it is a link" if run.path.is_symlink() else "it has no run.json"
        )
        raise UsageError(f"--fresh deletes {run.path}, which is not a run and nothing else: {what}. Give another --out")


def _set_aside(run: RunFolder) -> Path | None:
    """Rename an old run, so that it is deleted only once the new one has begun."""
    if not run.path.exists():
        return None
    _check_fresh(run)
    aside = run.path.with_name(f".{run.path.name}.{os.getpid()}.old")
    with run.locked():
        run.path.rename(aside)
    return aside


def _evaluate(recipe: Recipe, run: RunFolder) -> dict[str, Any]:
    if api.is_measured(run):
        scores = read_json(run.eval_json)
        if scores.get("bigram_bits_per_byte") is not None:
            return {**scores, "bits_per_byte": {int(n): v for n, v in scores["bits_per_byte"].items()}}
    lm = api.load(run.path)
    scores = api.evaluate(lm).to_json()
    scores["bigram_bits_per_byte"] = bigram_bits_per_byte(prepare(recipe.data, lm.tokenizer))
    api.keep_scores(run, scores)
    return scores


def bigram_bits_per_byte(data: Data) -> float:
    """A bigram model fitted on the training tokens, on the validation tokens: what a model must beat to have learnt
    anything beyond neighbours."""
    train = np.concatenate([s.read(0, s.n_tokens) for s in data.split("train").values()])
    bigram = Bigram.fit(train, data.tokenizer.vocab_size)
    nats, n_bytes = 0.0, 0
    for stream in data.split("valid").values():
        tokens = stream.read(0, stream.n_tokens)
        bytes_N = data.tokenizer.token_bytes_V[tokens[1:]]
        nats += float((bigram.nats(tokens[:-1], tokens[1:]) * (bytes_N > 0)).sum())
        n_bytes += int(bytes_N.sum())
    return nats / float(np.log(2)) / n_bytes
