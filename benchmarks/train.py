"""Training speed and memory, as ratios within one process. The last line is JSON.

    python benchmarks/train.py [--repeats 5] [--width 256] [--rows 8]

Each comparison runs A B A B ... on the same batch and takes the median over neighbouring pairs.

a. useful speed (tokens/s times the ledger's training FLOPs a token) of the elastic model, and of GRT with its noise off
   and on, over that of a dense GPT of equal training FLOPs;
b. bf16 autocast over float32, where the CPU has it;
c. peak memory of a step with per-loop checkpointing (recompute) over one without, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from alcoda.config import validate
from alcoda.depth.sample import LoopPlan
from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger
from alcoda.quickstart import peak_rss_bytes
from alcoda.training import checkpoint
from alcoda.training.device import autocast, describe, has_fast_bf16, keep_freed_memory
from alcoda.training.objective import NextToken
from alcoda.training.optim import AdamW
from alcoda.training.passes import OnePass, Passes, step_loss

CPU = torch.device("cpu")
LOOPS = 8


def models(width: int) -> dict[str, ModelConfig]:
    """The designs at 1 + 2 x 8 + 1 blocks, and a dense GPT with as many blocks as give it their training FLOPs."""
    base = {"vocab_size": 4096, "seq_len": 256, "d_model": width, "n_heads": width // 64, "n_loops": LOOPS}
    elastic = {"state_init": "noise", "inject": "concat", "block": {"sandwich": "after_add"}}
    gate = {"kind": "gate", "noise": 0.0}
    found = {
        "elastic": validate(ModelConfig, base | elastic),
        "grt": validate(ModelConfig, base | {"inject": {"kind": "concat", "bias": True}, "update": gate}),
        "grt_noise": validate(
            ModelConfig, base | {"inject": {"kind": "concat", "bias": True, "noise": 0.1}, "update": "gate"}
        ),
    }
    for name, model in list(found.items()):
        target = ledger(model).training_flops_per_token
        dense = (
            validate(ModelConfig, base | {"n_prelude": n, "n_core": 0, "n_coda": 0, "n_loops": 1}) for n in range(1, 65)
        )
        found[f"dense for {name}"] = min(dense, key=lambda m: abs(ledger(m).training_flops_per_token - target))
    return found


def stepper(
    config: ModelConfig, rows: int, dtype: torch.dtype, recompute: bool = False, passes: Passes | None = None
) -> Callable[[], None]:
    """A function that does one training step."""
    model = checkpoint.build(config, CPU).init(0).train()
    optimizers = AdamW().build(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, config.seq_len + 1), generator=generator)
    plan, scored_T = LoopPlan(0, config.n_loops), [rows] * config.seq_len
    passes = passes or OnePass()

    def step() -> None:
        with autocast(CPU, dtype):
            loss = step_loss(NextToken(), passes, model, ids[:, :-1], ids[:, 1:], scored_T, plan, recompute)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def timed(
    steps: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each step of each, measured in turn: A B A B ..."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            began = clock()
            step()
            seconds[name].append(clock() - began)
    return seconds


def speedup(seconds: dict[str, list[float]], over: str, of: str) -> float:
    """How many times as fast ``of`` is as ``over``: the median over neighbouring pairs."""
    return median(slow / fast for slow, fast in zip(seconds[over], seconds[of], strict=True))


def useful_speed(width: int, rows: int, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """tokens/s x FLOPs/token of each design, over that of its dense GPT."""
    found, all_models = {}, models(width)
    for name in ("elastic", "grt", "grt_noise"):
        pair = {name: all_models[name], "dense": all_models[f"dense for {name}"]}
        seconds = timed({key: stepper(model, rows, dtype) for key, model in pair.items()}, repeats)
        flops = ledger(pair["dense"]).training_flops_per_token / ledger(pair[name]).training_flops_per_token
        found[name] = speedup(seconds, over="dense", of=name) / flops
        print(
            f"  {name:10} {median(seconds[name]):.3f} s, dense of {pair['dense'].n_prelude} blocks ({flops:.3f} of "
            f"its FLOPs) {median(seconds['dense']):.3f} s: useful speed {found[name]:.3f} of dense",
            flush=True,
        )
    return found


def peak_memory(width: int, rows: int, recompute: bool) -> int:
    """Bytes that steps add to a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--width", str(width), "--rows", str(rows), "--memory", str(int(recompute))],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def _memory_child(width: int, rows: int, recompute: bool) -> None:
    step = stepper(models(width)["elastic"], rows, torch.float32, recompute)
    before = peak_rss_bytes()
    step()
    step()
    print(peak_rss_bytes() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_freed_memory()  # as alcoda train does
    if options.memory is not None:
        _memory_child(options.width, options.rows, bool(options.memory))
        return
    dtypes = {"float32": torch.float32}
    if has_fast_bf16(CPU):
        dtypes["bfloat16"] = torch.bfloat16
    result: dict[str, object] = {"machine": describe(CPU, torch.float32), "width": options.width, "rows": options.rows}
    useful = {}
    for name, dtype in dtypes.items():
        print(f"a. useful speed in {name}, equal training FLOPs, {LOOPS} loops", flush=True)
        useful[name] = useful_speed(options.width, options.rows, dtype, options.repeats)
    result["useful_speed_over_dense"] = useful
    if "bfloat16" in dtypes:
        elastic = models(options.width)["elastic"]
        steps = {name: stepper(elastic, options.rows, dtype) for name, dtype in dtypes.items()}
        seconds = timed(steps, options.repeats)
        result["bf16_over_fp32_speed"] = speedup(seconds, over="float32", of="bfloat16")
        print(
            f"b. bf16 steps of the elastic model are {result['bf16_over_fp32_speed']:.2f} times as fast as fp32",
            flush=True,
        )
    memory = {recompute: peak_memory(options.width, options.rows, recompute) for recompute in (False, True)}
    result["recompute_over_kept_memory"] = memory[True] / memory[False]
    result["peak_step_bytes"] = {"kept": memory[False], "recompute": memory[True]}
    print(
        f"c. peak memory of a step: {memory[True] / 1e6:.0f} MB recomputed, {memory[False] / 1e6:.0f} MB kept",
        flush=True,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
