"""What of the engine's speed does the server keep? The last line is JSON.

    python benchmarks/serve_engine.py [--concurrency 8] [--rounds 5]

In turn, engine and server (A B A B): the engine of this process with so many requests at one time, and ``alcoda serve
mini``, started here, with so many clients, each of which sends its next request when it has its answer. Both get the
same greedy requests at the same tier, which go on to their last token. The clients read bytes and count texts: what
they need is little, but it is of the same cores. Told: tokens/s of both, their ratio round by round (median, quartiles;
the target is 0.85), the time to the first text at that concurrency and of one client alone, and the seconds from the
server's start to /ready (target 5), of as many starts as --starts. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as the command line does

import torch
from serve_process import serving

import alcoda
from alcoda.engine.bench import Spread
from alcoda.engine.engine import Engine, Options
from alcoda.serve.load.prompts import BUILT_IN

RATIO = 0.85
READY_S = 5.0


def requests(n: int) -> list[str]:
    """Prompts, no two alike."""
    return [f"{BUILT_IN[i % len(BUILT_IN)]} {i}" for i in range(n)]


def engine_alone(lm: Any, concurrency: int, prompts: Sequence[str], tier: str, max_tokens: int) -> float:
    """Tokens/s of so many requests at one time: the next one begins when one ends."""
    how = {"exit": tier, "max_tokens": max_tokens, "ignore_eot": True}
    waiting = [lm.request(prompt, **how) for prompt in prompts]
    engine = lm.engine(waiting, Options(cache_tokens=32 * lm.recipe.model.seq_len))
    assert isinstance(engine, Engine)
    made, began = [], time.perf_counter()
    with torch.no_grad(), engine.runner.passes():
        for request in waiting[:concurrency]:
            made += engine.submit(request)
        left = iter(waiting[concurrency:])
        while (changed := engine.step()) is not None:
            for completion in changed:
                if completion.finish is not None and (request := next(left, None)) is not None:
                    made += engine.submit(request)
    seconds = time.perf_counter() - began
    assert all(completion.error is None for completion in made) and len(made) == len(prompts)
    return sum(len(completion.tokens) for completion in made) / seconds


async def stream(host: str, port: int, body: bytes) -> tuple[float, int]:
    """Seconds to the first text, and how many tokens came, as the server counts them."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first, last = None, b""
    while data := await reader.read(1 << 16):
        if first is None and b'"text":"' in data.replace(b'"text":""', b"").replace(b": ", b":"):
            first = time.perf_counter() - began
        last = (last + data)[-4096:]
    writer.close()
    assert first is not None and b"[DONE]" in last, last
    (usage,) = (line for line in last.split(b"\n") if b'"completion_tokens"' in line and b"data: {" in line)
    return first, json.loads(usage[usage.index(b"{") :])["usage"]["completion_tokens"]


async def served_clients(url: str, concurrency: int, bodies: Sequence[bytes]) -> tuple[float, list[float]]:
    """Tokens/s of so many clients, and the time of each request to its first text."""
    host, _, port = url.partition("//")[2].partition(":")
    left, first_s, tokens = list(reversed(bodies)), [], 0
    began = time.perf_counter()

    async def client() -> None:
        nonlocal tokens
        while left:
            first, n = await stream(host, int(port), left.pop())
            first_s.append(first)
            tokens += n

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return tokens / (time.perf_counter() - began), first_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of a round")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tier", default="balanced")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--model", default="mini")
    options = parser.parse_args(arguments)
    ready_s = []
    for _ in range(options.starts - 1):
        with serving(options.model) as served:
            ready_s.append(served.ready_s)
    lm = alcoda.load(options.model, device="cpu")
    prompts = requests(options.requests)
    engine_s, server_s, first_s, alone_s = [], [], [], []
    with serving(options.model) as served:
        ready_s.append(served.ready_s)
        name = served.said["models"][0].partition(":")[0]
        bodies = [
            json.dumps(
                {
                    "model": f"{name}:{options.tier}",
                    "prompt": prompt,
                    "max_tokens": options.max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode()
            for prompt in prompts
        ]
        few = options.concurrency
        engine_alone(lm, few, prompts[:few], options.tier, options.max_tokens)  # what is made at the first use
        asyncio.run(served_clients(served.url, few, bodies[:few]))
        for number in range(options.rounds):
            engine_s.append(engine_alone(lm, few, prompts, options.tier, options.max_tokens))
            speed, firsts = asyncio.run(served_clients(served.url, few, bodies))
            server_s.append(speed)
            first_s += firsts
            alone_s += asyncio.run(served_clients(served.url, 1, bodies[:8]))[1]
            ratio = server_s[-1] / engine_s[-1]
            print(
                f"  round {number + 1}: engine {engine_s[-1]:,.0f}, server {speed:,.0f} tokens/s: {ratio:.3f}",
                flush=True,
            )
    ratios = Spread.of([b / a for a, b in zip(engine_s, server_s, strict=True)])
    found: dict[str, Any] = {"model": options.model, "tier": options.tier, "concurrency": options.concurrency}
    found |= {"rounds": options.rounds, "requests": options.requests, "max_tokens": options.max_tokens}
    found |= {"threads": torch.get_num_threads(), "engine_tokens_per_s": vars(Spread.of(engine_s))}
    found |= {"server_tokens_per_s": vars(Spread.of(server_s)), "ratio": vars(ratios)}
    found |= {"first_ms": _ms(first_s), "first_alone_ms": _ms(alone_s), "ready_s": ready_s}
    found |= {"targets_met": {"ratio": ratios.median >= RATIO, "ready": median(ready_s) <= READY_S}}
    print(json.dumps(found))
    sys.exit(0 if all(found["targets_met"].values()) else 1)


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    spread = Spread.of([1000 * x for x in seconds])
    return {"median": spread.median, "low": spread.low, "high": spread.high, "most": 1000 * max(seconds)}


if __name__ == "__main__":
    main()
