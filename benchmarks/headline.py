"""GRT's headline in our hands: its large isoFLOP model against dense GPT-2 large, on one engine. The last line is JSON.

    python benchmarks/headline.py [--rounds 5] [--tokens 256] [--prompt-tokens 16] [--batch 32] [--batch-rounds 1]

Random weights in bf16, greedy, all loops of every token; the recipes are papers/grt_large_isoflop and papers/gpt2_large
(papers.md 1.3, 1.4: 63% fewer parameters, 639 MB for 1570 MB at its peak, 3.67 ms a token for 3.33).

a. parameters; bytes of the weights that the engine holds, and of the keys of one request of --tokens tokens, prompt
   included. Each design also runs such a request in a process of its own: what that holds afterwards, and at most
   meanwhile, above what it held before there was a model;
b. seconds a token at batch 1, without the prompt's: GRT and GPT-2 in turn, a ratio in each round;
c. at --batch, tokens/s behind the first one of each request and bytes of keys: GRT with its caches per_loop and mean,
   the same shape with anchor keys, and GPT-2. Another cache than per_loop reads prompts token by token.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

import torch
from peers import Timing
from torch import nn
from train import CPU
from variants import resident_bytes

from alcoda.engine import packed
from alcoda.engine.bench import Spread
from alcoda.engine.cache import bytes_per_token
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.request import Request
from alcoda.engine.workload import check_all_ran
from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, pick_cache
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint
from alcoda.training.device import describe, forget_peak_memory
from alcoda.training.recipe import load_recipe

DTYPE = torch.bfloat16
GRT, GPT2, ANCHOR = "grt", "gpt2", "grt_anchor"
RECIPES = {GRT: "papers/grt_large_isoflop", GPT2: "papers/gpt2_large", ANCHOR: "papers/grt_large_isoflop"}
SETTINGS = {ANCHOR: ["model.keys=anchor"]}
PARAMS = {GRT: 290_196_480, GPT2: 773_582_080}
"""Those of the papers, exactly: 62.5% fewer."""
BYTES_LOWER, MOST_LATENCY = 0.59, 1.10
"""Than GPT-2's, at least: bytes of weights and keys, counted and resident; of its seconds a token, at most."""
LOWER = ("params", "weights_bytes", "cache_bytes", "weights_and_cache_bytes", "resident_bytes", "peak_bytes")
"""Of which it is said how much lower they are."""
TOY = ("model.d_model=64", "model.n_heads=2", "model.vocab_size=64", "model.seq_len=16")
WARM_UP_TOKENS = 3
TABLE = ((GPT2, "per_loop"), (GRT, "per_loop"), (GRT, "mean"), (ANCHOR, "per_loop"))
"""Of c: designs and caches."""


class Size(NamedTuple):
    """Of a run: requests, all at one time, and tokens of each."""

    rows: int
    n_prompt: int
    n_new: int


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random weights of about the size that a start has, faster than a draw for each: windows of one drawn block, whose
    length no row divides."""
    block = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for name, p in model.named_parameters():
        if p.dim() < 2:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        for part in p.view(-1).split(len(block)):
            part.copy_(block[: len(part)])


def shape(design: str, settings: Sequence[str]) -> ModelConfig:
    """Of a design, with settings of the recipe; UsageError where they cannot be."""
    return load_recipe(RECIPES[design], [*SETTINGS.get(design, []), *settings]).model


def held(config: ModelConfig) -> tuple[RecurrentLM, dict[str, int]]:
    """A model that only the engine can read, and what it is: parameters, bytes of the weights."""
    model = checkpoint.build(config, CPU).to(DTYPE).eval()
    fill(model)
    n_params = sum(p.numel() for p in model.parameters())
    released = packed.release(model, torch.float32)
    return released, {"params": n_params, "weights_bytes": packed.held_bytes(released, torch.float32)}


def cache_bytes(config: ModelConfig, cache: str, n_tokens: int) -> int:
    """Of keys that are written for so many tokens."""
    return n_tokens * bytes_per_token(config, config.n_loops, DTYPE, False, pick_cache(cache, config))


def ready(model: RecurrentLM, size: Size, cache: str = PER_LOOP.kind) -> tuple[Engine, list[Request]]:
    """An engine that has done nothing yet, and random prompts for it."""
    rows, n_prompt, n_new = size
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (rows, n_prompt), generator=generator).tolist()
    options = Options(
        width=max(Options.width, rows),
        places=rows,
        cache_tokens=rows * (n_prompt + n_new - 1),
        cache=pick_cache(cache, model.config),
    )
    return Engine(model, options), [Request(tuple(prompt), n_new) for prompt in prompts]


def decode(engine: Engine, requests: Sequence[Request]) -> Timing:
    """Decode all requests; RunError where one fails."""
    began = time.perf_counter()
    completions = [one for (one,) in engine.run(requests)]
    seconds = time.perf_counter() - began
    check_all_ran(completions, f"cache {engine.options.cache.kind}")
    return Timing(seconds, engine.stats.seconds["piece"], len(requests), requests[0].max_tokens)


def memory(design: str, settings: Sequence[str], size: Size) -> dict[str, int]:
    """Bytes that this process holds above what it held before there was a model: with the weights; with a request that
    has been decoded besides; and at most, while it was. Nothing where the system does not say.

    What libraries take for themselves is there before: a toy of the same design has been decoded.
    """
    decode(*ready(held(shape(design, [*settings, *TOY]))[0], Size(1, 2, WARM_UP_TOKENS)))
    before = resident_bytes()
    model, _ = held(shape(design, settings))
    found = {"baseline_bytes": before, "weights_resident_bytes": resident_bytes() - before}
    forget_peak_memory(CPU)
    engine, requests = ready(model, size)
    decode(engine, requests)
    found |= {"peak_bytes": resident_bytes("VmHWM") - before, "resident_bytes": resident_bytes() - before}
    return found if before else {}


def in_turn(sides: dict[str, Any], size: Size, rounds: int) -> dict[str, list[Timing]]:
    """Each of ``sides`` (a model and its cache, by name) in turn, round after round."""
    found: dict[str, list[Timing]] = {name: [] for name in sides}
    for model, cache in sides.values():
        decode(*ready(model, size._replace(n_prompt=2, n_new=WARM_UP_TOKENS), cache))
    for i in range(rounds):
        for name, (model, cache) in sides.items():
            found[name].append(decode(*ready(model, size, cache)))
        line = ", ".join(f"{name} {timings[-1].decode_tokens_per_s:.2f}" for name, timings in found.items())
        print(f"  round {i + 1}: tokens/s {line}", flush=True)
    return found


def latency(timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """Seconds a token of GRT over those of GPT-2, in the same round."""
    seconds = {name: [1 / one.decode_tokens_per_s for one in found] for name, found in timings.items()}
    ratios = [grt / gpt2 for grt, gpt2 in zip(seconds[GRT], seconds[GPT2], strict=True)]
    return asdict(Spread.of(ratios)) | {"seconds_a_token": {name: median(found) for name, found in seconds.items()}}


def missed(designs: dict[str, dict[str, Any]], latency: float) -> list[str]:
    """The targets that are not met."""
    found = [
        f"parameters of {name}: {designs[name]['params']:,}, not {n:,}"
        for name, n in PARAMS.items()
        if designs[name]["params"] != n
    ]
    for what in [key for key in ("weights_and_cache_bytes", "resident_bytes") if key in designs[GRT]]:
        share = designs[GRT][what] / designs[GPT2][what]
        found += [f"{what}: {share:.3f} of GPT-2's"] if 1 - share < BYTES_LOWER else []
    return found + ([f"latency: {latency:.3f} of GPT-2's"] if latency > MOST_LATENCY else [])


def asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what cannot be is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of a request, prompt included")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="at batch 1")
    parser.add_argument("--batch", type=int, default=32, help="requests at one time, of the table")
    parser.add_argument("--batch-rounds", type=int, default=1, help="of the table")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all recipes; repeatable")
    parser.add_argument("--threads", type=int, help="torch's threads (its own choice where not set)")
    parser.add_argument("--memory", choices=PARAMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.prompt_tokens, options.rounds, options.batch, options.batch_rounds) < 1:
        parser.error("--prompt-tokens, --rounds, --batch and --batch-rounds are at least 1")
    if options.tokens < options.prompt_tokens + 2:
        parser.error(f"--tokens {options.tokens}: at least 2 more than --prompt-tokens {options.prompt_tokens}")
    try:
        for design in RECIPES:
            if (seq_len := shape(design, options.set).seq_len) < options.tokens:
                parser.error(f"--tokens {options.tokens}: the context holds {seq_len}")
    except UsageError as wrong:
        parser.error(str(wrong))
    return options


def measured_apart(options: argparse.Namespace, design: str) -> dict[str, int]:
    """`memory` in a process of its own."""
    words = ["--memory", design, "--tokens", str(options.tokens), "--prompt-tokens", str(options.prompt_tokens)]
    words += [word for setting in options.set for word in ("--set", setting)]
    words += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    options = asked(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    size = Size(1, options.prompt_tokens, options.tokens - options.prompt_tokens)
    if options.memory is not None:
        print(json.dumps(memory(options.memory, options.set, size)))
        return
    models, designs = dict[str, RecurrentLM](), dict[str, dict[str, Any]]()
    print("a. parameters and bytes", flush=True)
    for name, recipe in RECIPES.items():
        apart = measured_apart(options, name) if name in PARAMS else {}
        config = shape(name, options.set)
        models[name], own = held(config)
        keys = cache_bytes(config, PER_LOOP.kind, options.tokens)
        both = {"cache_bytes": keys, "weights_and_cache_bytes": own["weights_bytes"] + keys}
        designs[name] = {"recipe": recipe, "settings": SETTINGS.get(name, []), **own, **both, **apart}
        line = ", ".join(
            f"{key.removesuffix('_bytes')} {designs[name][key] / 1e6:.1f}" for key in [*own, *both, *apart]
        )
        print(f"  {name}: in millions, {line}", flush=True)
    print("b. batch 1", flush=True)
    of_one = latency(in_turn({name: (models[name], PER_LOOP.kind) for name in PARAMS}, size, options.rounds))
    print(f"  seconds a token over GPT-2's: {of_one['median']:.3f}", flush=True)
    print(f"c. batch {options.batch}", flush=True)
    sides = {f"{name} {cache}": (models[name], cache) for name, cache in TABLE}
    timings = in_turn(sides, size._replace(rows=options.batch), options.batch_rounds)
    table = [
        {
            "design": name,
            "cache": cache,
            "tokens_per_s": asdict(Spread.of([one.decode_tokens_per_s for one in timings[f"{name} {cache}"]])),
            "seconds": median(one.seconds for one in timings[f"{name} {cache}"]),
            "cache_bytes": cache_bytes(models[name].config, cache, options.batch * options.tokens),
        }
        for name, cache in TABLE
    ]
    grt, gpt2 = designs[GRT], designs[GPT2]
    lower = {key: 1 - grt[key] / gpt2[key] for key in grt if key in LOWER}
    targets = {"params": PARAMS, "bytes_lower": BYTES_LOWER, "latency": MOST_LATENCY}
    result = {
        "machine": describe(CPU, DTYPE),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
        "designs": designs,
        "lower": lower,
        "latency": of_one | {"rounds": options.rounds},
        "batch": {"rows": options.batch, "rounds": options.batch_rounds, "table": table},
        "targets": targets,
        "missed": missed(designs, of_one["median"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
