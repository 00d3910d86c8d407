"""What a memory costs in time, as ratios within one process. The last line is JSON.

    python benchmarks/lrt.py [--repeats 21] [--width 256] [--rows 16] [--decode-width 768]

Over the same backbone without memory, dense and recurrent (LRT-shared with what it has by default):

a. a training step in interleaved passes (S = 2) over the plain step on the same batch. Its ledger says 2 and what the
   memory itself costs; the target is at most 2.5. In float32, and in bf16 where the CPU has it;
b. decoding, one token at a time: at most 1.15 at width 768;
c. interleaved prefill (S = 2) of a whole context over plain prefill, at that width: at most 2.5.

Each comparison runs A B A B ... and takes the median over neighbouring pairs, with their quartiles beside it. On one
thread (--threads 1) it reads the time that the process had of the CPU, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch
from train import CPU, stepper, timed

from alcoda.config import validate
from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in
from alcoda.model.prefill import InterleavedPrefill, Reader
from alcoda.training import checkpoint
from alcoda.training.budget import StepFlops
from alcoda.training.device import autocast, describe, has_fast_bf16, keep_freed_memory
from alcoda.training.objective import NextToken
from alcoda.training.passes import Interleaved, OnePass

BACKBONES: dict[str, dict[str, Any]] = {
    "dense": {"n_prelude": 6, "n_core": 0, "n_coda": 0, "n_loops": 1},
    "recurrent": {"n_prelude": 1, "n_core": 1, "n_coda": 1, "n_loops": 4, "inject": "concat"},
}
DECODED: dict[str, dict[str, Any]] = {
    "dense": {"n_prelude": 12, "n_core": 0, "n_coda": 0, "n_loops": 1},
    "recurrent": {"n_prelude": 2, "n_core": 2, "n_coda": 2, "n_loops": 4, "inject": "concat"},
}
"""Of 12 blocks that a token passes."""
TARGETS = {"training": 2.5, "decoding": 1.15, "prefill": 2.5}
DECODE_TOKENS = 8
"""Tokens that are decoded in one timing."""


def pair(backbone: dict[str, Any], width: int) -> dict[str, ModelConfig]:
    """The backbone with a memory, and without."""
    base = {"vocab_size": 4096, "seq_len": 256, "d_model": width, "n_heads": max(width // 64, 1), **backbone}
    return {
        "memory": validate(ModelConfig, base | {"memory": "prev_token"}),
        "plain": validate(ModelConfig, base),
    }


def compared(name: str, steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds with a memory over those without: median and quartiles over neighbouring pairs."""
    seconds = timed(steps, repeats, time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    ratios = [slow / fast for slow, fast in zip(seconds["memory"], seconds["plain"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    found = {"ratio": median(ratios), "low": low, "high": high}
    found |= {f"{key}_s": median(value) for key, value in seconds.items()}
    print(
        f"  {name:20} {found['memory_s']:.4f} s, plain {found['plain_s']:.4f} s: {found['ratio']:.3f} times "
        f"[{low:.3f}, {high:.3f}]",
        flush=True,
    )
    return found


def training(backbone: dict[str, Any], width: int, rows: int, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """A step in interleaved passes over a plain step."""
    passes = {"memory": Interleaved(), "plain": OnePass()}
    configs = pair(backbone, width)
    flops = {
        key: ledger(
            config, None, StepFlops(config, NextToken(), False, passes[key]).at(config.n_loops, config.n_loops)
        ).training_flops_per_token
        for key, config in configs.items()
    }
    steps = {key: stepper(config, rows, dtype, passes=passes[key]) for key, config in configs.items()}
    found = compared(str(dtype).removeprefix("torch."), steps, repeats)
    return found | {"flops": flops["memory"] / flops["plain"]}


def loaded(config: ModelConfig, dtype: torch.dtype) -> RecurrentLM:
    """A model as `alcoda.load` holds it."""
    model = checkpoint.build(config, CPU).init(0).eval()
    if dtype != torch.float32:
        hold_in(model, dtype)
    return model


def decoder(config: ModelConfig, n_calls: int, dtype: torch.dtype) -> Callable[[], None]:
    """A function that decodes a few more tokens behind a context; it can be called ``n_calls`` times."""
    model = loaded(config, dtype)
    n_context = config.seq_len - n_calls * DECODE_TOKENS
    reader = Reader(model, config.n_loops, config.seq_len)
    ids = torch.randint(config.vocab_size, (1, n_context), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), autocast(CPU, dtype):
        reader.read(ids, InterleavedPrefill())

    def decode() -> None:
        with torch.inference_mode(), autocast(CPU, dtype):
            for _ in range(DECODE_TOKENS):
                model.logits(reader.read(ids[:, :1])[:, -1])

    return decode


def prefiller(config: ModelConfig, dtype: torch.dtype) -> Callable[[], None]:
    """A function that reads a whole context anew."""
    model = loaded(config, dtype)
    ids = torch.randint(config.vocab_size, (1, config.seq_len), generator=torch.Generator().manual_seed(0))

    def prefill() -> None:
        with torch.inference_mode(), autocast(CPU, dtype):
            Reader(model, config.n_loops, config.seq_len).read(ids, InterleavedPrefill())

    return prefill


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--width", type=int, default=256, help="of training")
    parser.add_argument("--rows", type=int, default=16, help="of a training step, as in recipes/mini")
    parser.add_argument("--decode-width", type=int, default=768, help="of decoding and prefill")
    parser.add_argument("--context", type=int, default=1024, help="tokens read, and at most decoded behind")
    parser.add_argument("--threads", type=int, help="torch's threads (its own choice where not set)")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()  # as alcoda train does
    dtypes = [torch.float32, *([torch.bfloat16] if has_fast_bf16(CPU) else [])]
    repeats, found = options.repeats, dict[str, dict[str, dict[str, dict[str, float]]]]()
    print("a. a training step, interleaved passes with S = 2", flush=True)
    for name, backbone in BACKBONES.items():
        print(f"  {name}, width {options.width}, {options.rows} rows of 256 tokens", flush=True)
        by_dtype = {
            str(dtype).removeprefix("torch."): training(backbone, options.width, options.rows, dtype, repeats)
            for dtype in dtypes
        }
        found.setdefault("training", {})[name] = by_dtype
    for what, title in (("decoding", "b. decoding, one row"), ("prefill", "c. interleaved prefill, S = 2, one row")):
        print(title, flush=True)
        for name, backbone in DECODED.items():
            configs = pair(backbone | {"seq_len": options.context}, options.decode_width)
            print(f"  {name}, width {options.decode_width}, context {options.context}", flush=True)
            for dtype in dtypes:
                if what == "decoding":
                    n_calls = min(4 * repeats, options.context // (2 * DECODE_TOKENS))  # they are short
                    steps = {key: decoder(config, n_calls + 1, dtype) for key, config in configs.items()}
                else:
                    n_calls, steps = repeats, {key: prefiller(config, dtype) for key, config in configs.items()}
                kind = str(dtype).removeprefix("torch.")
                found.setdefault(what, {}).setdefault(name, {})[kind] = compared(kind, steps, n_calls)
    above = [
        f"{what}, {name}, {dtype}: {one['ratio']:.3f}"
        for what, by_name in found.items()
        for name, by_dtype in by_name.items()
        for dtype, one in by_dtype.items()
        if one["ratio"] > TARGETS[what]
    ]
    machine = describe(CPU, torch.float32)
    sizes = {"width": options.width, "rows": options.rows, "decode_width": options.decode_width}
    print(json.dumps({"machine": machine, **sizes, **found, "targets": TARGETS, "above_target": above}))


if __name__ == "__main__":
    main()
