"""What replaying exits costs in time, as ratios within one process, and the lab of one model. The last line is JSON.

    python benchmarks/replay.py [--repeats 9] [--width 256] [--rows 8] [--lab mini] [--data text:FILE]

A pass with exits over the plain pass of the same rows at 8 loops, logits included, with the elastic model and with
anchor keys:

a. never: the state rule at threshold 0, so that it looks at each loop and no token leaves: at most 1.15;
b. leaving: at thresholds under which a quarter of all scores lie at each loop, so that tokens leave from the first loop
   to the last, and states and keys are frozen all the way: at most 1.15;
c. kl: the KL rule at threshold 0, which takes coda and head after each loop. No target: the ledger's ratio beside it.

Then `alcoda lab` as anyone would run it, page included: trajectories of at most 200,000 tokens of each source to 16
loops, and the frontier of every rule on 20,000: within 600 s and 3 GB on two cores (--lab "" leaves it out; --data: of
another text than the model's own).

Each comparison runs A B A B ... and takes the median over neighbouring pairs, with their quartiles beside it. On one
thread (--threads 1) it reads the time that the process had of the CPU, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from train import CPU, timed

from alcoda.config import validate
from alcoda.depth.replay import replay
from alcoda.depth.rules import Kl, StateChange
from alcoda.depth.watch import ExitTest
from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint
from alcoda.training.device import autocast, describe, has_fast_bf16

LOOPS = 8
DESIGNS: dict[str, dict[str, Any]] = {
    "elastic": {"state_init": "noise", "inject": "concat", "block": {"sandwich": "after_add"}},
    "anchor": {"keys": "anchor", "inject": "concat"},
}
TARGETS = {"never": 1.15, "leaving": 1.15}
LAB_TARGETS = {"seconds": 600.0, "peak_rss_mb": 3000.0}


def leaving(model: RecurrentLM, ids_BT: Tensor) -> StateChange:
    """The state rule at thresholds under which a quarter of the scores lie at each loop where no token leaves."""
    scores_BTR = replay(model, ids_BT, StateChange(), LOOPS, scores=True).scores_BTR
    assert scores_BTR is not None
    return StateChange(threshold=tuple(scores_BTR.flatten(0, 1).quantile(1 / 4, 0).tolist()))


def compared(name: str, steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds with exits over those without: median and quartiles over neighbouring pairs."""
    seconds = timed(steps, repeats, time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    ratios = [slow / fast for slow, fast in zip(seconds["exits"], seconds["plain"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    found = {"ratio": median(ratios), "low": low, "high": high}
    found |= {f"{key}_s": median(value) for key, value in seconds.items()}
    print(
        f"  {name:16} {found['exits_s']:.4f} s, plain {found['plain_s']:.4f} s: {found['ratio']:.3f} times "
        f"[{low:.3f}, {high:.3f}]",
        flush=True,
    )
    return found


def measured(config: ModelConfig, rows: int, dtype: torch.dtype, repeats: int) -> dict[str, dict[str, float]]:
    """Every comparison on one design."""
    model = checkpoint.build(config, CPU).init(0).eval()
    ids_BT = torch.randint(config.vocab_size, (rows, config.seq_len), generator=torch.Generator().manual_seed(0))
    with autocast(CPU, dtype):
        some = leaving(model, ids_BT).build(model, LOOPS)
        left = replay(model, ids_BT, some).depths_BT
    assert left.max() == LOOPS, "all tokens have left before the last loop"

    def plain() -> None:
        with torch.no_grad(), autocast(CPU, dtype):
            model(ids_BT, LOOPS)

    def with_exits(test: ExitTest) -> Callable[[], None]:
        def step() -> None:
            with torch.no_grad(), autocast(CPU, dtype):
                model.logits(replay(model, ids_BT, test).y_BTD)

        return step

    tests = {"never": StateChange(threshold=0.0).build(model, LOOPS), "leaving": some}
    tests |= {"kl": Kl(threshold=0.0).build(model, LOOPS)}
    found = {name: compared(name, {"exits": with_exits(test), "plain": plain}, repeats) for name, test in tests.items()}
    found["leaving"]["mean_loops"] = left.double().mean().item()
    whole = ledger(config, LOOPS).forward_flops_per_token
    found["kl"]["flops"] = 1 + (LOOPS - 1) * Kl().flops(config) / whole
    return found


def lab(run: str, data: str | None) -> dict[str, Any]:
    """Seconds and the largest resident memory of ``alcoda lab RUN`` in a process and a folder of its own."""
    run = str(Path(run).resolve()) if Path(run).exists() else run
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "alcoda", "lab", run, "--json", *(("--data", data) if data else ())],
            cwd=folder,
            stdout=subprocess.PIPE,
            check=True,
        )
    seconds = time.perf_counter() - began
    said = json.loads(done.stdout.splitlines()[-1])
    return {
        "run": Path(run).name,
        "tokens": said["n_tokens"],
        "loops": said["loops"],
        "frontier_tokens": said["frontier"] and said["frontier"]["n_tokens"],
        "seconds": round(seconds, 1),
        # The largest child so far: nothing else has been started here.
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--threads", type=int, help="torch's threads (its own choice where not set)")
    parser.add_argument("--lab", default="mini", metavar="RUN", help="a run, or the name of a model of the package")
    parser.add_argument("--data", help="what the lab reads, as text:FILE; its validation split where not set")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    base = {"vocab_size": 4096, "seq_len": 256, "d_model": options.width, "n_heads": max(options.width // 64, 1)}
    base |= {"n_loops": LOOPS}
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, design in DESIGNS.items():
        for dtype in (torch.float32, *([torch.bfloat16] if has_fast_bf16(CPU) else [])):
            kind = str(dtype).removeprefix("torch.")
            print(f"{name}, width {options.width}, {options.rows} rows of 256 tokens, {kind}", flush=True)
            config = validate(ModelConfig, base | design)
            found.setdefault(name, {})[kind] = measured(config, options.rows, dtype, options.repeats)
    above = [
        f"{name}, {kind}, {what}: {by_what[what]['ratio']:.3f}"
        for name, by_kind in found.items()
        for kind, by_what in by_kind.items()
        for what, target in TARGETS.items()
        if by_what[what]["ratio"] > target
    ]
    studied = lab(options.lab, options.data) if options.lab else {}
    if studied:
        print(
            f"lab of {studied['run']}: {studied['seconds']} s, {studied['peak_rss_mb']} MB at its largest", flush=True
        )
    above += [f"lab, {name}: {studied[name]}" for name, top in LAB_TARGETS.items() if studied and studied[name] > top]
    machine, sizes = describe(CPU, torch.float32), {"width": options.width, "rows": options.rows, "loops": LOOPS}
    print(
        json.dumps(
            {
                "machine": machine,
                **sizes,
                **found,
                "lab": studied,
                "targets": TARGETS | LAB_TARGETS,
                "above_target": above,
            }
        )
    )


if __name__ == "__main__":
    main()
