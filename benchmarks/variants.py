"""Speed of each variant of the loop, and memory of its keys, as ratios within one process. The last line is JSON.

    python benchmarks/variants.py [--repeats 9] [--width 256] [--rows 8] [--context 1024] [--only gate,lti]

a. useful training speed (tokens/s times the ledger's training FLOPs a token) of each variant over that of a plain
   weight-tied loop of equal training FLOPs (by the width of its MLP) on the same batch; the target is 0.85 for those
   of `REQUIRED`, the others are for information. In float32, and in bf16 where the CPU has it;
b. the same for decoding, one token at a time and without gradients;
c. bytes of keys a token, of anchor keys and of keys per loop, at several depths: by the ledger, as the key store counts
   them, and by what the resident memory of a process of its own grows.

Each comparison runs A B A B ... and takes the median over neighbouring pairs, with their quartiles beside it. On one
thread (--threads 1) it reads the time that the process had of the CPU, which other work on the machine disturbs less.
FLOPs are the ledger's; in training, ``executed`` is the same ratio by the matrix products that torch counts in a step
(a route does not choose evenly, and low-rank terms can be merged).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from train import CPU, LOOPS, stepper, timed

from alcoda.config import validate
from alcoda.model.config import ModelConfig
from alcoda.model.cost import KV_ITEM_BYTES, Ledger, ledger
from alcoda.model.keys import KeyStore
from alcoda.training import checkpoint
from alcoda.training.device import autocast, describe, has_fast_bf16, keep_freed_memory

VARIANTS: dict[str, dict[str, Any]] = {
    "gate": {"update": {"kind": "gate", "noise": 0.0}},
    "lti": {"update": "lti"},
    "anchor": {"keys": "anchor"},
    "diagonal": {"inject": "diagonal"},
    "hyper": {"carry": "hyper"},
    "lora": {"sharing": {"kind": "lora", "rank": 8}},
    "gate_noise": {"update": {"kind": "gate", "noise": 0.1}},
    "lti_delta": {"update": "lti_delta"},
    "loop_index": {"loop_index": "sinusoidal"},
    "untied": {"sharing": "untied"},
    "token_choice": {"route": "token_choice"},
    "expert_choice": {"route": "expert_choice"},
    "mla": {"block": {"attention": "mla"}},
    "value_table": {"block": {"value_embed": "table"}},
}
"""What each changes in the plain loop."""
REQUIRED = ("gate", "lti", "anchor", "diagonal", "hyper", "lora")
TARGET = 0.85
DECODED = ("gate", "diagonal", "lti", "anchor", "hyper", "lora")
FF_STEP = 16
"""The plain loop's d_ff is a multiple of it, as matrix products like; FLOPs that still differ are divided out."""
DECODE_TOKENS = 8
"""Tokens that are decoded in one timing."""
KEY_DEPTHS = (1, 4, 16)


def base(width: int) -> dict[str, Any]:
    """The plain loop of 1 + 2 x 8 + 1 blocks."""
    return {"vocab_size": 4096, "seq_len": 256, "d_model": width, "n_heads": max(width // 64, 1), "n_loops": LOOPS}


def matched(config: ModelConfig, width: int, flops: Callable[[Ledger], float]) -> ModelConfig:
    """The plain loop whose ``flops`` are those of ``config`` within 1%: by its d_ff, and where that would leave no MLP
    to speak of (routes skip whole blocks), by fewer loops too."""
    target, found = flops(ledger(config)), []
    for n_loops in range(LOOPS, 0, -1):
        for d_ff in range(max(2 * width // FF_STEP, 1) * FF_STEP, 8 * width, FF_STEP):
            plain = validate(ModelConfig, base(width) | {"d_ff": d_ff, "n_loops": n_loops})
            found.append((abs(flops(ledger(plain)) / target - 1), plain))
        best, plain = min(found, key=lambda pair: pair[0])
        if best < 0.01:
            return plain
    return min(found, key=lambda pair: pair[0])[1]


def training_flops(cost: Ledger) -> float:
    return cost.training_flops_per_token


def decode_flops(cost: Ledger) -> float:
    return cost.decode_flops_per_token


def compared(
    name: str,
    width: int,
    repeats: int,
    flops: Callable[[Ledger], float],
    make: Callable[[ModelConfig], Callable[[], None]],
) -> dict[str, float]:
    """Useful speed of a variant over that of its plain loop: median and quartiles over neighbouring pairs."""
    config = validate(ModelConfig, base(width) | VARIANTS[name])
    plain = matched(config, width, flops)
    steps = {"variant": make(config), "plain": make(plain)}
    share = flops(ledger(config)) / flops(ledger(plain))
    seconds = timed(steps, repeats, time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    ratios = [share * slow / fast for fast, slow in zip(seconds["variant"], seconds["plain"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    variant_s, plain_s, ratio = median(seconds["variant"]), median(seconds["plain"]), median(ratios)
    print(
        f"  {name:13} {variant_s:.4f} s, plain of {plain.n_loops} loops, d_ff {plain.shape.d_ff}, {1 / share:.3f} of "
        f"its FLOPs {plain_s:.4f} s: useful speed {ratio:.3f} of plain [{low:.3f}, {high:.3f}]",
        flush=True,
    )
    found = {"ratio": ratio, "low": low, "high": high, "flops_share": share}
    return found | {
        "variant_s": variant_s,
        "plain_s": plain_s,
        "plain_d_ff": plain.shape.d_ff,
        "plain_loops": plain.n_loops,
    }


def executed_share(name: str, width: int, rows: int) -> float:
    """Training FLOPs of a variant over those of its plain loop, as torch counts the matrix products of a step."""
    config, counts = validate(ModelConfig, base(width) | VARIANTS[name]), []
    for model in (config, matched(config, width, training_flops)):
        with FlopCounterMode(display=False) as counter:
            stepper(model, rows, torch.float32)()
        counts.append(counter.get_total_flops())
    return counts[0] / counts[1]


def decoder(config: ModelConfig, n_context: int, n_calls: int, dtype: torch.dtype) -> Callable[[], None]:
    """A function that decodes a few more tokens behind ``n_context`` others; it can be called ``n_calls`` times."""
    model = checkpoint.build(config, CPU).init(0).eval()
    store = KeyStore(n_context + n_calls * DECODE_TOKENS)
    ids = torch.randint(config.vocab_size, (1, n_context), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), autocast(CPU, dtype):
        model(ids, store=store)

    def decode() -> None:
        with torch.inference_mode(), autocast(CPU, dtype):
            for _ in range(DECODE_TOKENS):
                model(ids[:, :1], store=store)

    return decode


def key_bytes(width: int, n_tokens: int) -> list[dict[str, Any]]:
    """Bytes of keys a token, of each kind of keys at each depth, in float32, measured in a process of its own."""
    arguments = ["--width", str(width), "--context", str(n_tokens), "--threads", "1", "--keys"]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for row in found:
        print(
            f"  {row['keys']:8} keys, {row['loops']:2} loops: {row['ledger']} by the ledger, {row['store']:.0f} in the "
            f"store, {row['resident']:.0f} of resident memory",
            flush=True,
        )
    return found


def _keys_child(width: int, n_tokens: int) -> None:
    found = []
    for keys in ("anchor", "per_loop"):
        for n_loops in KEY_DEPTHS:
            config = validate(ModelConfig, base(width) | {"keys": keys, "n_loops": n_loops})
            # The ledger counts 2 bytes a number.
            row = {"ledger": ledger(config).kv_bytes_per_token * torch.float32.itemsize // KV_ITEM_BYTES}
            found.append({"keys": keys, "loops": n_loops, **row, **_measured_key_bytes(config, n_tokens)})
    print(json.dumps(found))


def _measured_key_bytes(config: ModelConfig, n_tokens: int) -> dict[str, float]:
    """Bytes a token after reading a text of ``n_tokens``: in parts, the last of them token by token."""
    part = max(n_tokens // 16, 1)
    model = checkpoint.build(config, CPU).init(0).eval()
    ids = torch.randint(config.vocab_size, (1, n_tokens), generator=torch.Generator().manual_seed(0))

    def read(store: KeyStore, n_tokens: int) -> None:
        for chunk in [*ids[:, : n_tokens - part].split(part, 1), *ids[:, -part:].split(1, 1)]:
            model(chunk, store=store)

    with torch.inference_mode():
        read(KeyStore(2 * part), 2 * part)  # what the first passes of a model allocate
        before, store = resident_bytes(), KeyStore(n_tokens)
        read(store, n_tokens)
        grown = resident_bytes() - before
    return {"store": store.n_bytes() / n_tokens, "resident": grown / n_tokens}


def resident_bytes(name: str = "VmRSS") -> int:
    """Memory that the process holds, without what it has freed, or at most held (VmHWM); 0 where the system does not
    say."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def names(text: str) -> list[str]:
    """The variants that ``--only`` names."""
    chosen = text.split(",")
    if unknown := set(chosen) - VARIANTS.keys():
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}. Allowed: {', '.join(VARIANTS)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens whose keys are measured")
    parser.add_argument("--threads", type=int, help="torch's threads (its own choice where not set)")
    parser.add_argument("--only", type=names, default=list(VARIANTS), help="some of the variants, with commas")
    parser.add_argument("--keys", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.keys:
        _keys_child(options.width, options.context)
        return
    keep_freed_memory()  # as alcoda train does
    dtypes = {"float32": torch.float32}
    if has_fast_bf16(CPU):
        dtypes["bfloat16"] = torch.bfloat16
    result: dict[str, Any] = {"machine": describe(CPU, torch.float32), "width": options.width, "rows": options.rows}
    training: dict[str, dict[str, dict[str, float]]] = {}
    executed = {variant: executed_share(variant, options.width, options.rows) for variant in options.only}
    for name, dtype in dtypes.items():
        print(f"a. training in {name}, equal training FLOPs, {LOOPS} loops", flush=True)

        def trains(config: ModelConfig, dtype: torch.dtype = dtype) -> Callable[[], None]:
            return stepper(config, options.rows, dtype)

        training[name] = {v: compared(v, options.width, options.repeats, training_flops, trains) for v in options.only}
        for variant, found in training[name].items():
            found["executed"] = found["ratio"] * executed[variant] / found["flops_share"]
    result["training_over_plain"] = training
    print("b. decoding in float32, one row", flush=True)

    def decodes(config: ModelConfig) -> Callable[[], None]:
        return decoder(config, config.seq_len, n_decodings + 1, torch.float32)

    n_decodings = 4 * options.repeats  # they are short
    decoded = [variant for variant in options.only if variant in DECODED]
    result["decoding_over_plain"] = {v: compared(v, options.width, n_decodings, decode_flops, decodes) for v in decoded}
    print(f"c. bytes of keys a token, in float32, after {options.context} tokens", flush=True)
    result["key_bytes_per_token"] = key_bytes(options.width, options.context)
    result["target"] = TARGET
    result["below_target"] = [
        f"{variant} in {dtype}: {found['ratio']:.3f}, {found['executed']:.3f} by executed FLOPs"
        for dtype, by_variant in training.items()
        for variant, found in by_variant.items()
        if variant in REQUIRED and min(found["ratio"], found["executed"]) < TARGET
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
