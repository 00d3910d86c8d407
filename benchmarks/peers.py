"""Decoding against what else there is for a model of this shape, as ratios within one process. The last line is JSON.

    make peers                                  # in a virtual environment of its own
    python benchmarks/peers.py [--batch 1,32] [--dtype bfloat16] [--budget-s 540] [--peers hf_llama,x_transformers]
        [--acceptance 0.8] [--draft-loops 2]

Random weights, greedy, prompts of 64 tokens and 64 new ones, of the recipe engine/d512:

* hf_llama: transformers' ``generate`` on a dense Llama of as many layers as the full unrolled depth;
* open_mythos, x_transformers: their own looped decoding, with as many blocks a token.

A package that is not there is reported as absent, one that fails with its error; the others are measured. Ours is the
engine, in modes of `alcoda bench engine`: fixed depth (all loops); and exits, on the depths that it draws in advance
(mean --mean-depth), refill, and refill_wavefront, which also drafts along the depth diagonal. Drafts of random weights
could not be right: tokens are scripted, and of the drafts a share is right by the script, by default that of the
shipped model after as many loops (`alcoda.bench.ACCEPTANCE`). The model runs for every one of them all the same. So
that all do the same work, no stop is known to any of them.

In a round a peer and the modes of ours decode side by side: after each eighth of its tokens the peer is held up, its
clock with it, and each mode of ours decodes as large a share, so that a machine whose speed wanders is as fast for one
as for another. A ratio is tokens/s of ours over the peer's in the same round; medians and quartiles over rounds.
Tokens/s are of the whole call, prompt included;
``decode_tokens_per_s`` are those behind the first new one of each row, over the time without prompts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from peer_models import PEERS, Peer
from torch import Tensor, nn
from train import CPU

from alcoda.bench import ACCEPTANCE, DRAFT_LOOPS
from alcoda.engine import packed, workload
from alcoda.engine.refusals import check_drafts, check_serves
from alcoda.engine.workload import Decoding, Mode, Script, Work
from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint
from alcoda.training.device import describe, pick_dtype
from alcoda.training.recipe import load_recipe

MODES: dict[str, Mode] = {
    mode.name: mode for mode in workload.MODES if mode.name in ("fixed", "refill", "refill_wavefront")
}
"""Of ours: all loops; exits, free width refilled; and drafts in spare width."""
OURS = "alcoda.engine: all prompts asked for at once, as many places; tokens and what drafts are right are scripted"
"""What `ours` runs."""
"""The share of drafts that are right."""
MEAN_DEPTH = 4.9
"""Loops a token with exits, of 8 (papers.md 3.1: 4.94 at the loss of uniform depth 8)."""
TARGETS: dict[str, dict[int, tuple[str, float]]] = {
    "hf_llama": {1: ("refill_wavefront", 2.5), 32: ("refill", 1.2)},
    "open_mythos": {1: ("refill_wavefront", 2.0), 32: ("refill", 2.0)},
    "x_transformers": {1: ("refill_wavefront", 2.0), 32: ("refill", 2.0)},
}
"""By peer and batch, which mode of ours is to be at least how many times as fast."""
MOST_WEIGHTS = 0.25
"""Bytes of our weights over the Llama's, at most."""
WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class Timing:
    """One call.

    Attributes:
        seconds: all of it.
        prompt_s: of them, those in which prompts were read.
        rows, n_new: rows, and new tokens of each.
    """

    seconds: float
    prompt_s: float
    rows: int
    n_new: int

    @property
    def tokens_per_s(self) -> float:
        """Of the whole call."""
        return self.rows * self.n_new / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Behind the first new token of each row."""
        return self.rows * (self.n_new - 1) / (self.seconds - self.prompt_s)


SLICES = 8
"""Into which a round is cut."""
Between = Callable[[int], None]
"""Is called when so many new tokens are there, and is on no clock."""
Run = Callable[[int, Between], Timing]
"""Continues prompts by so many tokens each."""
Start = Callable[[int], Decoding]
"""One mode of ours that is to do the same."""


def held(config: ModelConfig, dtype: torch.dtype) -> tuple[RecurrentLM, dict[str, int]]:
    """Ours with random weights, and what they are. In bf16 all of them are, and only the engine can read them."""
    model = checkpoint.build(config, CPU).init(0).eval().to(dtype)
    n_params = weights(model)["params"]
    released = packed.release(model, torch.float32)
    return released, {"params": n_params, "weight_bytes": packed.held_bytes(released, torch.float32)}


def scripted(
    config: ModelConfig,
    model: RecurrentLM,
    rows: int,
    n_prompt: int,
    n_new: int,
    mean_depth: float,
    acceptance: Sequence[float],
    draft_loops: int = DRAFT_LOOPS,
) -> Work:
    """What ours is timed on: random prompts, the tokens that follow, which drafts are right, depths of a mean."""
    script = Script.of(rows, n_prompt + n_new, config.vocab_size, acceptance)
    prompts = [tuple(row[:n_prompt]) for row in script.tokens]
    trace = workload.spread_depths(rows, n_prompt + n_new, config.n_loops, mean_depth)
    # Nothing is cast on the way: the weights' type is that of the passes.
    return Work(
        model,
        prompts,
        n_new,
        trace,
        config.n_loops,
        dtype=torch.float32,
        draft_loops=draft_loops,
        script=script,
    )


def ours(work: Work, rows: int, n_new: int, *, mode: str) -> Decoding:
    """The engine, ready to decode the first ``rows`` prompts."""
    return Decoding(replace(work, n_new=n_new), MODES[mode], rows, rows)


def timing_of(decoding: Decoding) -> Timing:
    """Of a run of ours that has ended. The time in which it read prompts is that of its launches."""
    found = decoding.timing()
    return Timing(found.seconds, found.stats.seconds["piece"], found.n_requests, decoding.n_tokens // found.n_requests)


def weights(model: nn.Module) -> dict[str, int]:
    """Parameters of a model, and their bytes; those that are shared count once."""
    found = list(model.parameters())
    return {
        "params": sum(p.numel() for p in found),
        "weight_bytes": sum(p.numel() * p.element_size() for p in found),
    }


def timed_by_call(
    called: nn.Module, decode: Callable[[Tensor, int], Tensor]
) -> Callable[[Tensor, int, Between], Timing]:
    """``decode`` on a clock: the first return of ``called`` in a call is that of the first new token."""
    returns: list[float] = []
    between: list[Between] = []
    held_s = 0.0

    def returned(*_: Any) -> None:
        nonlocal held_s
        now = time.perf_counter()
        returns.append(now - held_s)
        between[0](len(returns))
        held_s += time.perf_counter() - now

    called.register_forward_hook(returned)

    def run(prompts_BT: Tensor, n_new: int, meanwhile: Between) -> Timing:
        nonlocal held_s
        returns.clear()
        between[:], held_s = [meanwhile], 0.0
        began = time.perf_counter()
        with torch.inference_mode():
            out_BT = decode(prompts_BT, n_new)
        seconds = time.perf_counter() - began - held_s
        if len(returns) != n_new or out_BT.shape[1] not in (n_new, prompts_BT.size(1) + n_new):
            raise RuntimeError(
                f"{len(returns)} passes gave rows of {out_BT.shape[1]} tokens for {n_new} new ones: it does other work "
                "than it is compared for"
            )
        return Timing(seconds, returns[0] - began, out_BT.shape[0], n_new)

    return run


def built(
    peer: Peer, config: ModelConfig, dtype: torch.dtype, room: int
) -> tuple[Callable[[Tensor, int, Between], Timing] | None, dict[str, Any]]:
    """A peer that is ready to run (None: it is not), and what is said of it."""
    said: dict[str, Any] = {"package": peer.package.replace("_", "-"), "what": peer.what}
    try:
        importlib.import_module(peer.package)
        said["version"] = peer.version
    except ImportError as missing:
        return None, said | {"absent": f"{type(missing).__name__}: {missing}"}
    said |= {"cache": peer.cache, "max_rows": peer.max_rows}
    try:
        model, called, decode = peer.build(config, dtype, room)
        run = timed_by_call(called, decode)
        run(torch.ones(1, 2, dtype=torch.long), WARM_UP_TOKENS, lambda n: None)
    except Exception as failure:  # whatever another's code does, the others are measured
        return None, said | {"failed": f"{type(failure).__name__}: {failure}"}
    return run, said | weights(model)


def speedup(of: Sequence[Timing], over: Sequence[Timing]) -> dict[str, float]:
    """How many times as fast: median and quartiles over rounds, of tokens/s of the whole call."""
    ratios = [fast.tokens_per_s / slow.tokens_per_s for fast, slow in zip(of, over, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"ratio": median(ratios), "low": low, "high": high}


def compared(peer: str, run: Run, starts: dict[str, Start], n_new: int, rounds: int, until: float) -> dict[str, Any]:
    """A peer and modes of ours side by side, round after round; what ours are over the peer.

    Args:
        until: of `time.perf_counter`: a round that would end after it is not begun, but the first always is.
    """
    timings = dict[str, list[Timing]]()
    side_by_side(run, starts, WARM_UP_TOKENS)
    longest = 0.0
    for i in range(rounds):
        began = time.perf_counter()
        if i > 0 and began + longest > until:
            break
        theirs, ours = side_by_side(run, starts, n_new)
        for name, timing in {peer: theirs, **ours}.items():
            timings.setdefault(name, []).append(timing)
        longest = max(longest, time.perf_counter() - began)
        line = ", ".join(f"{name} {found[-1].tokens_per_s:.1f}" for name, found in timings.items())
        print(f"    round {i + 1}: tokens/s {line}", flush=True)
    return {
        "rounds": len(timings[peer]),
        "tokens_per_s": {name: median(one.tokens_per_s for one in found) for name, found in timings.items()},
        "decode_tokens_per_s": {
            name: median(one.decode_tokens_per_s for one in found) for name, found in timings.items()
        },
        "speedup": {mode: speedup(timings[mode], timings[peer]) for mode in starts},
    }


def side_by_side(run: Run, starts: dict[str, Start], n_new: int) -> tuple[Timing, dict[str, Timing]]:
    """One round."""
    runs = {mode: start(n_new) for mode, start in starts.items()}
    slices = 0

    def between(n: int) -> None:
        nonlocal slices
        if n * SLICES // n_new > slices:
            slices = n * SLICES // n_new
            for decoding in runs.values() if slices % 2 else reversed(runs.values()):
                decoding.go(n / n_new)

    theirs = run(n_new, between)
    return theirs, {mode: timing_of(decoding) for mode, decoding in runs.items()}


def below(cells: Sequence[dict[str, Any]], said: dict[str, dict[str, Any]]) -> list[str]:
    """The targets that were measured and missed."""
    found = []
    for cell in cells:
        mode, least = TARGETS.get(cell["peer"], {}).get(cell["batch"], ("fixed", 0.0))
        ratio = cell["speedup"][mode]["ratio"]
        found += [f"{mode} over {cell['peer']}, batch {cell['batch']}: {ratio:.3f}"] if ratio < least else []
    share = said.get("hf_llama", {}).get("our_weights_over_its", 0.0)
    return found + ([f"weights over hf_llama: {share:.3f}"] if share > MOST_WEIGHTS else [])


def asked(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, ModelConfig]:
    """The options and the shape; what cannot be is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="engine/d512", metavar="RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe; repeatable")
    parser.add_argument("--peers", default=",".join(PEERS), help="those to compare with, by comma")
    parser.add_argument("--batch", default="1,32", help="prompts at once, by comma")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--mean-depth", type=float, default=MEAN_DEPTH, help="loops a token, with exits")
    parser.add_argument("--acceptance", type=float, help="the share of drafts that are right")
    parser.add_argument("--draft-loops", type=int, default=DRAFT_LOOPS, help="drafts are drawn after so many")
    parser.add_argument("--rounds", type=int, default=7, help="at most, of each comparison")
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all comparisons")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--threads", type=int, help="torch's threads (its own choice where not set)")
    options = parser.parse_args(arguments)
    options.peers = options.peers.split(",")
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"unknown {', '.join(sorted(unknown))}. Allowed: {', '.join(PEERS)}")
    if not all(batch.isdecimal() and int(batch) for batch in options.batch.split(",")):
        parser.error(f"--batch {options.batch}: whole numbers from 1, by comma")
    options.batch = [int(batch) for batch in options.batch.split(",")]
    if options.prompt_tokens < 1 or options.new_tokens < 2 or options.rounds < 1:
        parser.error("--prompt-tokens and --rounds are at least 1, --new-tokens at least 2")
    try:
        config = load_recipe(options.shape, options.set).model
        options.dtype = pick_dtype(options.dtype, CPU)
    except UsageError as wrong:
        parser.error(str(wrong))
    if config.n_core == 0 or config.n_prelude or config.n_coda:
        parser.error(f"--shape {options.shape}: the looped peers are a core without prelude and coda, so must this be")
    try:
        with torch.device("meta"):
            model = RecurrentLM(config)
        check_serves(model)
        check_drafts(model)
    except UsageError as wrong:
        parser.error(str(wrong))
    room = options.prompt_tokens + options.new_tokens
    if room > config.seq_len:
        parser.error(
            f"{room} tokens do not fit the context of {config.seq_len}: fewer of --prompt-tokens, --new-tokens"
        )
    if not 1 <= options.mean_depth <= config.n_loops:
        parser.error(f"--mean-depth {options.mean_depth}: from 1 to n_loops={config.n_loops}")
    if options.acceptance is not None and not 0 <= options.acceptance <= 1:
        parser.error(f"--acceptance {options.acceptance}: a share, from 0 to 1")
    return options, config


def measured(
    options: argparse.Namespace, work: Work, ready: dict[str, Callable[[Tensor, int, Between], Timing]]
) -> list[dict[str, Any]]:
    """Every comparison: each batch with each peer. Those that are left share what is left of the time."""
    end, prompts_BT = time.perf_counter() + options.budget_s, torch.tensor(work.prompts)
    todo, cells = [(batch, name) for batch in options.batch for name in ready], []
    for i, (batch, name) in enumerate(todo):
        n_peer = min(batch, PEERS[name].max_rows or batch)
        print(f"batch {batch}, {name}" + (f", {n_peer} at once" if n_peer < batch else ""), flush=True)
        run = partial(ready[name], prompts_BT[:n_peer])
        starts: dict[str, Start] = {mode: partial(ours, work, batch, mode=mode) for mode in MODES}
        now = time.perf_counter()
        cell = compared(name, run, starts, options.new_tokens, options.rounds, now + (end - now) / (len(todo) - i))
        line = ", ".join(f"{mode} {cell['speedup'][mode]['ratio']:.2f}" for mode in MODES)
        print(f"  times as fast as {name}: {line}", flush=True)
        cells.append({"batch": batch, "peer": name, "peer_rows_at_once": n_peer, **cell})
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    options, config = asked(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    room = options.prompt_tokens + options.new_tokens
    model, own = held(config, options.dtype)
    ready, said = dict[str, Callable[[Tensor, int, Between], Timing]](), dict[str, dict[str, Any]]()
    for name in options.peers:
        print(f"{name}: {PEERS[name].what}", flush=True)
        run, said[name] = built(PEERS[name], config, options.dtype, room)
        if run is None:
            print(f"  left out: {said[name].get('absent') or said[name].get('failed')}", flush=True)
            continue
        ready[name] = run
        said[name]["our_weights_over_its"] = own["weight_bytes"] / said[name]["weight_bytes"]
    sizes = max(options.batch), options.prompt_tokens, options.new_tokens
    acceptance = ACCEPTANCE if options.acceptance is None else (options.acceptance,)
    work = scripted(config, model, *sizes, options.mean_depth, acceptance, options.draft_loops)
    cells = measured(options, work, ready)
    targets = {name: [{"batch": b, "mode": m, "ratio": r} for b, (m, r) in of.items()] for name, of in TARGETS.items()}
    result = {
        "machine": describe(CPU, options.dtype),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "shape": {
            "recipe": options.shape,
            **config.shape._asdict(),
            "n_core": config.n_core,
            "n_loops": config.n_loops,
        },
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "mean_depth": work.trace.depths_BT.double().mean().item(),
        "ours": {
            "how": OURS,
            "simulated": True,
            "acceptance": acceptance,
            "draft_loops": work.draft_loops,
            **own,
        },
        "peers": said,
        "cells": cells,
        "targets": targets | {"weights_over_hf_llama": MOST_WEIGHTS},
        "below_target": below(cells, said),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
