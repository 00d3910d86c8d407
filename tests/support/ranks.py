"""Runs of two processes: what is trained, by which commands, and how it is compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("ranks_worker.py")
ROOT = Path(__file__).parents[2]

MODEL = {
    "vocab_size": 257,
    "seq_len": 16,
    "d_model": 16,
    "n_heads": 2,
    "n_prelude": 1,
    "n_core": 1,
    "n_coda": 1,
    "n_loops": 3,
}
ELASTIC = {
    "model": {"inject": "concat", "state_init": "zeros", "block": {"sandwich": "after_add"}},
    "depth": {"kind": "lognormal", "mean": 2, "max": 6},
}


def grt(noise: float) -> dict[str, Any]:
    inject, update = {"kind": "concat", "bias": True, "noise": noise}, {"kind": "gate", "noise": noise}
    return {"model": {"inject": inject, "update": update}, "depth": {"kind": "uniform"}}


ROUTED = {"inject": "add", "route": {"kind": "token_choice"}}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"n_prelude": 2, "n_core": 0, "n_loops": 1}},
    "grt": grt(noise=0.0),
    "elastic": ELASTIC,
    # Rows of each process have depths of their own, so that the processes loop another number of times.
    "elastic_rows": {**ELASTIC, "depth": {"kind": "lognormal", "mean": 2, "max": 6, "per": "sequence"}},
    "truncated": {**ELASTIC, "depth": {"kind": "lognormal", "mean": 3, "max": 6, "per": "sequence", "last_k": 2}},
    "cart": {
        "model": {
            "block": {"attention": "mla"},
            "carry": {"kind": "hyper", "states": 2},
            "loop_index": "sinusoidal",
            "keys": "anchor",
            "update": {"kind": "lti", "start": 0.9},
        }
    },
    # Depths below n_loops: some stacks run on no process.
    "untied": {"model": {"inject": "add", "sharing": "untied"}, "depth": {"kind": "uniform"}},
    "lora": {"model": {"inject": "add", "sharing": {"kind": "lora", "rank": 2}}, "depth": {"kind": "uniform"}},
    "expert_choice": {"model": {"inject": "add", "route": {"kind": "expert_choice", "auxiliary": "router"}}},
    # Its balance is that of the micro-batch, so one process has to have two.
    "token_choice": {"model": ROUTED, "train": {"micro_batches": 2}},
    "token_choice_untied": {"model": {**ROUTED, "sharing": "untied", "n_loops": 5}, "train": {"micro_batches": 2}},
    "lrt": {"model": {"n_prelude": 2, "n_core": 0, "n_loops": 1, "memory": {"kind": "prev_token", "beta": 0.1}}},
    # Passes, each with the loops of its rows; blocks that run several times in a step.
    "lrt_elastic_rows": {
        "model": {**ELASTIC["model"], "memory": "prev_token"},
        "depth": {"kind": "lognormal", "mean": 2, "max": 6, "per": "sequence"},
        "passes": {"kind": "interleaved", "subsets": 3},
        "eval": {"prefill": {"kind": "iterated", "tolerance": 1e-9, "max_passes": 3}},
    },
    "lrt_chunked": {
        "model": {"inject": "add", "memory": {"kind": "prev_token", "share": "per_layer"}},
        "passes": {"kind": "chunked", "tokens": 5},
        "train": {"recompute": True},
    },
    "per_loop": {
        "model": {"inject": "add", "loop_norm": "every_loop", "final_norm": "none", "exit_gate": "linear"},
        "objective": "per_loop",
        "depth": {"kind": "uniform"},
    },
    "self_distill": {"model": {"inject": "add"}, "objective": "self_distill", "depth": {"kind": "uniform"}},
    "frozen": {"model": {"inject": "add", "head": "untied"}, "trainable": ["core", "head"]},
    "micro": {**ELASTIC, "train": {"micro_batches": 2}},
}
NOISY = {"grt_noise": grt(noise=0.1)}
"""What two processes do not train as one does: each draws noise of its own."""
ROUTED_KINDS = ("token_choice", "token_choice_untied")


def write_lines(path: Path) -> Path:
    """A text of a few hundred documents."""
    path.write_text("".join(f"line {i * i} of it, and {i % 7} more <|endoftext|>\n" for i in range(300)))
    return path


def recipe(text: Path, kind: str, **train: Any) -> dict[str, Any]:
    """A recipe of one of the kinds, which trains in a second."""
    chosen = {**KINDS, **NOISY}[kind]
    return {
        "name": kind,
        "model": {**MODEL, **chosen.get("model", {})},
        "depth": chosen.get("depth", "fixed"),
        "objective": chosen.get("objective", "next_token"),
        "passes": chosen.get("passes", "auto"),
        "trainable": chosen.get("trainable"),
        "data": {"corpus": f"text:{text}", "tokenizer": "byte"},
        "train": {
            "steps": 4,
            "batch_size": 8,
            "dtype": "float32",
            "device": "cpu",
            "optimizer": {"kind": "adamw", "lr": 0.003},
            "schedule": {"warmup_steps": 1},
            "checkpoint_every": 4,
            "log_every": 1,
            **chosen.get("train", {}),
            **train,
        },
        "eval": {"every": 4, "tokens": 700, "batch_size": 3, **chosen.get("eval", {})},
    }


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def torchrun(*arguments: Any, n: int = 2) -> list[str]:
    """The command that starts ``n`` processes of what follows, on a free port."""
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    return [*module, *map(str, arguments)]


def work(jobs: list[dict[str, Any]], folder: Path, n: int = 2, timeout_s: float = 240.0) -> None:
    """``alcoda.train(**job)``, one after the other, in ``n`` processes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = torchrun(WORKER, folder / "jobs.json", n=n)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-6000:]


def logged(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == kind]
