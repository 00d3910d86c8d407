"""Thousands of random requests through one engine: is any lost, is any wrong? The last line is JSON.

    python benchmarks/engine_many.py RUN [--requests 10000] [--seed 0]

Requests are of all lengths, rules (each with one of its own, as a server's are), fixed depths, seeds and penalties.
They arrive at random; some are cancelled, and exceptions are raised inside launches. What each is to be, it was alone
before, token by token (`alcoda.engine.decode`, fp64): a request that ends has just these tokens and loops, one that was
cancelled or failed the first of them. In the end everything is free again, and memory has not grown.

* lost: asked for, and never ended. duplicated: ended more than once.
* wrong: other tokens, other loops, or failed for another reason than a planted exception.
* growth_mb: resident memory at the end over that when a fifth had ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_replay import between_scores, held_out
from torch import Tensor

from alcoda.depth.rules import ExitRule, read_rule
from alcoda.engine.decode import decode
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.paged import room
from alcoda.engine.refusals import check_drafts
from alcoda.engine.request import Completion, Request
from alcoda.engine.sampling import Sampling
from alcoda.errors import UsageError
from alcoda.model.lm import RecurrentLM
from alcoda.training.load import load_run

PLANTED = "planted"
PARTS = ("open", "read", "begin", "loop", "read_out")
"""Of the runner: an exception in any of them is one inside a launch."""


class Known(NamedTuple):
    """A request, and what it is alone."""

    request: Request
    rule: ExitRule | None
    tokens: list[int]
    loops: list[int]


def known(
    model: RecurrentLM,
    prompts: Sequence[Sequence[int]],
    rules: Sequence[ExitRule | None],
    n_loops: int,
    most_new: int,
    seed: int = 0,
    n_vocab: int | None = None,
) -> list[Known]:
    """One request for each prompt, decoded alone."""
    rng, found = random.Random(seed), []
    for i, prompt in enumerate(prompts):
        rule = rules[i % len(rules)]
        sampling = Sampling()
        if i % 3:
            sampling = Sampling(temperature=rng.uniform(0.3, 1.2), seed=i, top_p=0.95)
        if i % 4 == 0:
            sampling = sampling.model_copy(update={"repetition_penalty": 1.2, "frequency_penalty": 0.3})
        loops = n_loops if rule is not None else rng.randint(1, n_loops)
        request = Request(tuple(prompt), rng.randint(1, most_new), sampling, loops, name=i)
        depths: list[Tensor] = []
        tokens = decode(
            model,
            prompt,
            loops=loops,
            max_tokens=request.max_tokens,
            sampling=sampling,
            n_vocab=n_vocab,
            dtype=torch.float64,
            rule=rule,
            depths=depths,
        )
        ids = list(tokens)
        ran = torch.cat(depths, 1)[0, len(prompt) - 1 :].tolist() if rule is not None else [loops] * len(ids)
        if rng.random() < 0.3:  # a token that is drawn ends it
            end = rng.choice(ids)
            request = replace(request, stop_ids=frozenset({end}))
            ids = ids[: ids.index(end)]
        found.append(Known(request, rule, ids, ran[: len(ids)]))
    return found


def plant(engine: Engine, rng: random.Random, rate: float) -> Counter[str]:
    """Make parts of the runner raise at this rate; how often each did."""
    raised: Counter[str] = Counter()

    def failing(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if rng.random() < rate:
                raised[name] += 1
                raise RuntimeError(PLANTED)
            found = part(*args)
            if rng.random() < rate:  # what it has done is done
                raised[name] += 1
                raise RuntimeError(PLANTED)
            return found

        return run

    for name in PARTS:
        setattr(engine.runner, name, failing(name, getattr(engine.runner, name)))
    return raised


def many(
    engine: Engine,
    pool: Sequence[Known],
    n_requests: int,
    seed: int = 0,
    fault_rate: float = 0.001,
    cancel_rate: float = 0.05,
    tell: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Run so many requests of a pool, at random, and count what went wrong."""
    rng = random.Random(seed)
    raised = plant(engine, rng, fault_rate)
    asked: dict[Completion, Known] = {}
    ended: Counter[str] = Counter()
    found: dict[str, Any] = {"requests": 0, "lost": 0, "duplicated": 0, "wrong": 0}
    start_mb = 0.0
    while True:
        while len(asked) < 3 * engine.places and found["requests"] < n_requests and rng.random() < 0.7:
            one = rng.choice(pool)
            loops = one.request.loops
            test = None if one.rule is None else one.rule.build(engine.model, loops or engine.n_loops)
            for completion in engine.submit(replace(one.request, test=test)):
                asked[completion] = one
            found["requests"] += 1
        if asked and rng.random() < cancel_rate:
            engine.cancel(rng.choice(list(asked)))
        changed = engine.step()
        if changed is None and found["requests"] >= n_requests:
            break
        for completion in changed or []:
            if completion.finish is None:
                continue
            known_one = asked.pop(completion, None)
            if known_one is None:
                found["duplicated"] += 1
                continue
            ended[completion.finish] += 1
            found["wrong"] += is_wrong(completion, known_one)
            tell(ended.total())
        if not start_mb and ended.total() >= n_requests // 5:
            start_mb = resident_mb()
    found["lost"] = len(asked)
    engine.check_idle()
    arena = engine.runner.arena
    found |= {"free_slots": arena.n_free, "slots": arena.n_tokens, "ended": dict(ended), "raised": dict(raised)}
    found |= {"growth_mb": resident_mb() - start_mb, "kept_banks": len(engine.runner.kept)}
    found |= {"tokens": engine.stats.tokens, "drafts": engine.stats.drafts, "accepted": engine.stats.accepted}
    found["good"] = not (found["lost"] or found["duplicated"] or found["wrong"] or found["kept_banks"])
    return found


def is_wrong(completion: Completion, one: Known) -> bool:
    """Whether a completion is not what it was alone, as far as it went."""
    tokens, loops = [t.token for t in completion.tokens], [t.loops for t in completion.tokens]
    if completion.finish in ("cancelled", "error"):
        one = one._replace(tokens=one.tokens[: len(tokens)], loops=one.loops[: len(loops)])
        if completion.finish == "error" and PLANTED not in str(completion.error):
            return True
    return tokens != one.tokens or loops != one.loops


def resident_mb() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run, or the name of a model of the package")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pool", type=int, default=64, help="different ones among them")
    parser.add_argument("--prompt", type=int, default=24, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    loaded = load_run(options.run, device="cpu", dtype="float32")
    model, n_vocab = loaded.model.double(), loaded.tokenizer.vocab_size
    n_loops = model.config.n_loops
    rows = held_out(loaded, options.pool, options.prompt)
    prompts = [row[: 1 + i % options.prompt] for i, row in enumerate(rows)]
    texts = torch.tensor(rows[:32])
    rules = [between_scores(model, read_rule(kind), texts, n_loops) for kind in ("state", "kl", "second_order")]
    pool = known(model, prompts, [None, *rules], n_loops, options.new, options.seed, n_vocab)
    print(f"  {len(pool)} requests decoded alone", flush=True)
    try:
        check_drafts(model)
        draft_loops = 2
    except UsageError:
        draft_loops = None
    places = options.width
    cache_tokens = room(model, torch.float64, [options.prompt + options.new] * places)
    how = Options(options.width, places, cache_tokens=cache_tokens, draft_loops=draft_loops)
    engine = Engine(model, how, dtype=torch.float64, n_vocab=n_vocab)
    began = time.perf_counter()
    with engine.runner.passes():
        found = many(
            engine,
            pool,
            options.requests,
            options.seed,
            tell=lambda n: None if n % 1000 else print(f"  {n} have ended, {resident_mb():.0f} MB", flush=True),
        )
    print(json.dumps({"run": options.run, "seconds": time.perf_counter() - began, **found}))


if __name__ == "__main__":
    main()
