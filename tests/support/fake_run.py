"""A realistic run folder without training, for the tests of the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

DEPTHS = (1, 2, 4, 8, 16, 24)
HOSTILE = '<script>alert("x")</script> & \x00 \ud800 "quoted"'

RECIPE = """\
name: {name}
description: {description}
model:
  vocab_size: 4096
  d_model: 256
  n_prelude: 2
  n_core: 2
  n_coda: 2
  block: {{norm: rmsnorm, attention: {{n_heads: 4, n_kv_heads: 2}}, mlp: {{kind: swiglu, d_ff: 704}}}}
  recurrence: {{inject: {inject}, update: overwrite, keys: self}}
depth: {{kind: lognormal, mean: {mean}, max: 24}}
data:
  seq_len: 256
  sources: [{{name: pystdlib, weight: 0.7}}, {{name: manuals, weight: 0.3}}]
train: {{train_steps: {steps}, batch_size: 16, lr: 0.003, warmup: 100, seed: {seed}}}
eval: {{loops: [1, 2, 4, 8, 16, 24]}}
"""


def ledger(loops: float, d_model: int = 256) -> dict[str, Any]:
    """A ledger whose terms sum to its totals."""
    square = d_model * d_model
    shapes = [  # name, params, times used, attended
        ("embedding", 4096 * d_model, 0, False),
        ("prelude.attention.projections", 2 * 3 * square, 2, False),
        ("prelude.attention.scores", 0, 2, True),
        ("prelude.mlp", 2 * 8 * square, 2, False),
        ("core.inject", 2 * square, loops, False),
        ("core.attention.projections", 2 * 3 * square, loops, False),
        ("core.attention.scores", 0, 2 * loops, True),
        ("core.mlp", 2 * 8 * square, loops, False),
        ("coda.attention.projections", 2 * 3 * square, 2, False),
        ("coda.attention.scores", 0, 2, True),
        ("coda.mlp", 2 * 8 * square, 2, False),
        ("norms", 13 * d_model, 0, False),
        ("head", 4096 * d_model, 1, False),
    ]
    terms = []
    for name, params, times, attended in shapes:
        stage_times = times if name.startswith("core") else min(times, 1)
        forward = 2 * params * stage_times + (2 * 2 * 256 * d_model * times if attended else 0)
        kv_bytes = int(2 * 2 * 2 * 64 * times) if attended else 0
        terms.append(
            {
                "name": name,
                "params": params,
                "forward_flops": forward,
                "training_flops": 3 * forward,
                "kv_bytes": kv_bytes,
            }
        )
    forward_flops = sum(term["forward_flops"] for term in terms)
    return {
        "loops": loops,
        "seq_len": 256,
        "params": sum(term["params"] for term in terms),
        "effective_params": sum(term["params"] * (loops if "core" in term["name"] else 1) for term in terms),
        "terms": terms,
        "forward_flops_per_token": forward_flops,
        "training_flops_per_token": 3 * forward_flops,
        "decode_flops_per_token": forward_flops,
        "kv_bytes_per_token": sum(term["kv_bytes"] for term in terms),
        "convention": "2 FLOPs a multiply-add; attention over the full context of seq_len keys; training: 3 x forward.",
    }


def make_run(
    folder: Path, name: str = "elastic-10m", seed: int = 0, steps: int = 400, better: float = 0.0, **changed: Any
) -> Path:
    """A realistic run folder; ``changed`` replaces keys of run.json, ``better`` is taken off each bits per byte."""
    rng = np.random.default_rng(seed)
    mean = 8.0
    description = "A recurrent-depth model: two layers around a shared core that loops"
    inject = "concat" if seed == 0 else "add"
    folder.mkdir(parents=True)
    recipe = RECIPE.format(name=name, description=description, mean=mean, steps=steps, seed=seed, inject=inject)
    (folder / "recipe.yaml").write_text(recipe)
    tokens_a_step = 16 * 256
    lines = []
    for step in range(1, steps + 1):
        loops = int(min(24, max(1, round(rng.lognormal(math.log(mean) - 0.125, 0.5)))))
        loss = (
            2.6 + 5.5 * math.exp(-step / (0.06 * steps)) + 1.4 * math.exp(-step / (0.3 * steps)) + rng.normal(0, 0.09)
        )
        lines.append(
            {
                "type": "train",
                "train_step": step,
                "loss": round(loss, 4),
                "lr": 3e-3,
                "grad_norm": round(float(rng.lognormal(-0.3, 0.3)), 3),
                "loops": loops,
                "tokens": step * tokens_a_step,
                "tokens_per_s": round(21000 / (1 + 0.12 * loops) * rng.uniform(0.93, 1.03), 1),
                "executed_flops": step * 1.6e11,
                "elapsed_s": round(step * 0.41, 2),
            }
        )
        if step % max(1, steps // 10) == 0:
            for source in ("pystdlib", "manuals"):
                for loops_now in (1, 4, 8, 16):
                    bits = (
                        1.62 + 1.5 * math.exp(-step / (0.25 * steps)) + 0.22 / loops_now + (source == "manuals") * 0.4
                    )
                    entry = {"type": "eval", "train_step": step, "source": source, "loops": loops_now, "loss": 2.9}
                    lines.append(entry | {"bits_per_byte": round(bits - better, 4)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    splits = {
        "train": {"tokens": 9_412_345, "documents": 1412, "bytes": 31_234_567},
        "valid": {"tokens": 301_277, "documents": 31, "bytes": 1_001_234},
    }
    info = {
        "name": name,
        "description": description,
        "created": "2026-01-02T03:04:05Z",
        "status": "finished",
        "command": "alcoda train recipes/elastic-10m.yaml --set train.seed=0",
        "versions": {"alcoda": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "numpy": "2.3.1"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": True,
        "seeds": {"train": seed, "data": 1},
        "machine": {"device": "cpu", "threads": 2, "cpu": "Example CPU at 2.5 GHz", "dtype": "bfloat16"},
        "parallel": {
            "kind": "fsdp",
            "processes": 2,
            "hosts": 1,
            "backend": "gloo",
            "all_gather_bytes_per_step": 47_428.0,
            "reduce_scatter_bytes_per_step": 32_196.0,
            "peak_memory_bytes": [375_250_944, 372_838_400],
        },
        "data": {
            "sources": [
                {"name": "pystdlib", "weight": 0.7, "splits": splits},
                {"name": "manuals", "weight": 0.3, "splits": splits},
            ],
            "tokenizer": {"kind": "bpe", "vocab_size": 4096, "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b"},
            "notes": [
                "The source code of the Python standard library, split by file.",
                "Near duplicates were removed.",
            ],
        },
        "ledger": ledger(mean),
        "depth": {"kind": "lognormal", "mean": mean, "max": 24},
        "result": {
            "train_step": steps,
            "tokens": steps * tokens_a_step,
            "wall_s": steps * 0.41,
            "executed_flops": steps * 1.6e11,
        },
    }
    (folder / "run.json").write_text(json.dumps(info | changed))
    by_depth = []
    for loops in DEPTHS:
        bits = 1.71 + 0.24 / loops**1.3 + (0.012 if loops == 24 else 0) - better
        width = 0.021 + 0.01 * rng.uniform()
        point = {"loops": loops, "loss": bits * 2.1, "bits_per_byte": bits, "low": bits - width, "high": bits + width}
        by_depth.append(point)
    gain = by_depth[0]["bits_per_byte"] - by_depth[3]["bits_per_byte"]
    by_position = [
        {
            "start": 32 * part,
            "stop": 32 * part + 32,
            "n_tokens": 37_659,
            "n_bytes": 125_154,
            "bits_per_byte": {str(p["loops"]): p["bits_per_byte"] + 0.3 * 0.5**part - 0.075 for p in by_depth},
        }
        for part in range(8)
    ]
    evaluation = {
        "data": "valid",
        "train_step": steps,
        "prefill": None,
        "unit": "documents",
        "n_units": 31,
        "n_tokens": 301_277,
        "n_bytes": 1_001_234,
        "note": None,
        "by_depth": by_depth,
        "gain": [
            {"from_loops": 1, "to_loops": 8, "bits_per_byte": gain, "low": gain - 0.011, "high": gain + 0.012},
            {"from_loops": 8, "to_loops": 24, "bits_per_byte": -0.006, "low": -0.011, "high": -0.001},
        ],
        "by_position": by_position,
        "bigram_bits_per_byte": 2.874,
    }
    (folder / "eval.json").write_text(json.dumps(evaluation))
    prompts = ["def read_lines(path):\n", "import os\n"]
    texts = {
        1: "    return path.read(path, path)\n    return path\n\n\ndef path(path):\n    return self.path\n",
        4: '    """Read the lines of a file."""\n    with open(path) as file:\n        return file.read()\n',
        8: '    """Return the lines of path as a list."""\n    with open(path) as f:\n        return f.readlines()\n',
        16: '    """Return the lines of path."""\n    with open(path) as f:\n        return [line for line in f]\n',
    }
    samples = [
        {"prompt": prompt, "loops": loops, "temperature": 0.7, "seed": 3, "text": prompt + text}
        for prompt in prompts
        for loops, text in texts.items()
    ]
    (folder / "samples.json").write_text(json.dumps(samples))
    return folder


def add_prefills(folder: Path, **changed: Any) -> Path:
    """What ``alcoda eval --prefill all`` leaves in a run folder."""
    gaps = {"exact": None, "zero": 0.031, "interleaved": 0.004, "iterated": -0.0002}
    fields: dict[str, dict[str, Any]] = {
        "interleaved": {"subsets": 2},
        "iterated": {"tolerance": 0.01, "max_passes": 8},
    }

    def bits(gap: float | None) -> dict[str, Any]:
        value = 1.7 + (gap or 0)
        ends = {"gap_low": None, "gap_high": None} if gap is None else {"gap_low": gap - 1e-3, "gap_high": gap + 1e-3}
        return {"bits_per_byte": value, "low": value - 0.02, "high": value + 0.02, "gap": gap, **ends}

    found = {
        "data": "valid",
        "train_step": json.loads((folder / "eval.json").read_text())["train_step"],
        "loops": 8,
        "chunk_tokens": None,
        "prompt_tokens": 128,
        "batch_size": 64,
        "n_tokens": 301_277,
        "note": None,
        "by_prefill": [
            {
                "name": name,
                "prefill": {"kind": name, **fields.get(name, {})},
                "whole": bits(gap),
                "continuation": bits(gap and gap / 4),
                "read_s": 40.0 if gap is None else 2.5,
                "tokens_per_s": 7_500.0 if gap is None else 120_000.0,
            }
            for name, gap in gaps.items()
        ],
    }
    (folder / "prefills.json").write_text(json.dumps(found | changed))
    return folder


def add_caches(folder: Path, **changed: Any) -> Path:
    """What ``alcoda eval --cache all`` leaves in a run folder."""

    def of(name: str, gap: float | None, kept: int) -> dict[str, Any]:
        value = 1.7 + (gap or 0)
        ends = {"gap_low": None, "gap_high": None} if gap is None else {"gap_low": gap - 1e-3, "gap_high": gap + 1e-3}
        bits = {"bits_per_byte": value, "low": value - 0.02, "high": value + 0.02, "gap": gap, **ends}
        times = {"bytes_per_token": kept, "read_s": 15.0, "s_per_token": 0.00075}
        return {"name": name, "cache": {"kind": name}, "loss": 2.5 + (gap or 0), "bits": bits, **times}

    found = {
        "data": "valid",
        "train_step": json.loads((folder / "eval.json").read_text())["train_step"],
        "loops": 8,
        "batch_size": 64,
        "n_tokens": 20_000,
        "note": None,
        "by_cache": [of("per_loop", None, 6912), of("mean", 0.012, 1536), of("last", 0.25, 1536)],
    }
    (folder / "caches.json").write_text(json.dumps(found | changed))
    return folder


def add_frontier(folder: Path, **changed: Any) -> Path:
    """What ``alcoda frontier`` leaves in a run folder."""

    def saved(bits: float) -> dict[str, float]:
        return {"bits_per_byte": bits, "low": bits - 1e-3, "high": bits + 1e-3}

    def around(bits: float) -> dict[str, float]:
        return {"bits_per_byte": bits, "low": bits - 0.02, "high": bits + 0.02}

    def point(loops: float, bits: float, flops: float) -> dict[str, Any]:
        differences = {"at_equal_loops": saved(0.004), "at_equal_flops": saved(-0.001), "over_sufficient": saved(0.002)}
        return {"rule": {"kind": "state"}, "mean_loops": loops, "flops_per_token": flops, **around(bits), **differences}

    def curve(rule: str, is_bound: bool, best: int | None, rate: float) -> dict[str, Any]:
        points = [point(loops, 1.7 + 0.1 / loops, rate * loops) for loops in (6.5, 3.2, 1.5)]
        return {"rule": rule, "is_upper_bound": is_bound, "coda_keys": "at_exit", "points": points, "best": best}

    found = {
        "data": "valid",
        "train_step": json.loads((folder / "eval.json").read_text())["train_step"],
        "n_loops": 8,
        "tolerance": 0.005,
        "sufficient_loops": 4,
        "n_tokens": 20_000,
        "note": None,
        "uniform": [{"loops": n, "flops_per_token": 1e7 * n, **around(1.7 + 0.12 / n)} for n in range(1, 9)],
        "curves": [curve("kl", False, None, 2e7), curve("state", False, 1, 1e7), curve("state", True, 1, 1e7)],
    }
    (folder / "frontier.json").write_text(json.dumps(found | changed))
    return folder
