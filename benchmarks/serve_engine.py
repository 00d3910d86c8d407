"""What of the engine's speed does the server keep? The last line is JSON.

    python benchmarks/serve_engine.py [--concurrency 8] [--rounds 24] [--starts 7]

The engine of this process with so many requests at one time, and ``alcoda serve mini``, started here, with so many
clients, each of which sends its next request when it has its answer. Both keep their engine from slice to slice, and
get the same greedy requests at the same tier, which go on to their last token. A slice is a second or so; a round is
engine, server, server, engine, so that what the machine's speed does within seconds is shared by both. The clients read
bytes and count texts: what they need is little, but it is of the same cores. Told: tokens/s of both, their ratio round
by round (median, quartiles; the target is 0.85) and of all rounds together, the time to the first text at that
concurrency and of one client alone, and the seconds from the start of the server's process until /ready answered 200
(target 5), of as many starts as --starts. Exit code 1 where a target is missed.
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
from uvicorn.loops.auto import auto_loop_factory

import alcoda
from alcoda.engine.bench import Spread
from alcoda.engine.options import Options
from alcoda.serve.load.prompts import BUILT_IN

RATIO = 0.85
READY_S = 5.0
WARM = 3
"""Slices that are not told of."""


def requests(n: int) -> list[str]:
    """Prompts, no two alike."""
    return [f"{BUILT_IN[i % len(BUILT_IN)]} {i}" for i in range(n)]


class Alone:
    """An engine like the server's, in this process."""

    def __init__(self, lm: Any) -> None:
        self.lm, self.engine = lm, lm.new_engine(Options())

    def slice(self, prompts: Sequence[str], concurrency: int, tier: str, max_tokens: int) -> tuple[int, float]:
        """Tokens and seconds of so many requests at one time: the next one begins when one ends."""
        how = {"exit": tier, "max_tokens": max_tokens, "ignore_eot": True}
        waiting = [self.lm.request(prompt, **how) for prompt in prompts]
        made, left = [], iter(waiting[concurrency:])
        began = time.perf_counter()
        with torch.no_grad(), self.engine.runner.passes():
            for request in waiting[:concurrency]:
                made += self.engine.submit(request)
            while (changed := self.engine.step()) is not None:
                for completion in changed:
                    if completion.finish is not None and (request := next(left, None)) is not None:
                        made += self.engine.submit(request)
        seconds = time.perf_counter() - began
        assert all(completion.error is None for completion in made) and len(made) == len(prompts)
        return sum(len(completion.tokens) for completion in made), seconds


class Client(asyncio.Protocol):
    """A request and what comes of it. It does no more than it must while others are served: it is of the same cores,
    and who takes one from the server's thread makes the engine's wait too."""

    def __init__(self, request: bytes) -> None:
        self.request, self.parts, self.first_s = request, [], 0.0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.began_s = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b'"text":"' in data.replace(b'"text":""', b""):
            self.first_s = time.perf_counter() - self.began_s
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


async def stream(host: str, port: int, body: bytes) -> tuple[float, int]:
    """Seconds to the first text, and how many tokens came, as the server counts them."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(request), host, port)
    await client.closed
    said = b"".join(client.parts)
    assert client.first_s and b"[DONE]" in said, said[-4096:]
    (usage,) = (line for line in said.split(b"\n") if b'"completion_tokens"' in line and b"data: {" in line)
    return client.first_s, json.loads(usage[usage.index(b"{") :])["usage"]["completion_tokens"]


async def served(url: str, concurrency: int, bodies: Sequence[bytes]) -> tuple[int, float, list[float]]:
    """Tokens and seconds of so many clients, and the time of each request to its first text."""
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
    return tokens, time.perf_counter() - began, first_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--requests", type=int, default=16, help="of a slice")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tier", default="balanced")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--model", default="mini")
    options = parser.parse_args(arguments)
    ready_s = []
    for _ in range(options.starts - 1):
        with serving(options.model) as server:
            ready_s.append(server.ready_s)
    alone = Alone(alcoda.load(options.model, device="cpu"))
    few, tier, max_tokens = options.concurrency, options.tier, options.max_tokens
    # Tokens and seconds of each round, of the engine and of the server.
    rounds: list[tuple[list[float], list[float]]] = []
    first_s, first_alone_s = [], []
    with serving(options.model) as server, asyncio.Runner(loop_factory=auto_loop_factory()) as clients:
        ready_s.append(server.ready_s)
        name = server.said["models"][0].partition(":")[0]

        def body(prompt: str) -> bytes:
            asked = {"model": f"{name}:{tier}", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            asked |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            return json.dumps(asked).encode()

        def by_engine(prompts: Sequence[str], sums: list[float]) -> None:
            tokens, seconds = alone.slice(prompts, few, tier, max_tokens)
            sums[:] = sums[0] + tokens, sums[1] + seconds

        def by_server(prompts: Sequence[str], sums: list[float]) -> None:
            tokens, seconds, firsts = clients.run(served(server.url, few, [body(prompt) for prompt in prompts]))
            sums[:] = sums[0] + tokens, sums[1] + seconds
            first_s.extend(firsts)

        n = options.requests
        prompts = requests(2 * n)
        for _ in range(WARM):  # what is made, and found out, at the first use
            by_engine(prompts[:n], [0, 0])
            by_server(prompts[:n], [0, 0])
        first_s.clear()
        for number in range(options.rounds):
            of_engine, of_server = [0.0, 0.0], [0.0, 0.0]
            by_engine(prompts[:n], of_engine)
            by_server(prompts[:n], of_server)
            by_server(prompts[n:], of_server)
            by_engine(prompts[n:], of_engine)
            assert of_engine[0] == of_server[0], "the work is not equal"
            rounds.append((of_engine, of_server))
            first_alone_s += clients.run(served(server.url, 1, [body(prompts[number % n])]))[2]
            a, b = (tokens / seconds for tokens, seconds in (of_engine, of_server))
            print(f"  round {number + 1}: engine {a:,.0f}, server {b:,.0f} tokens/s: {b / a:.3f}", flush=True)
    speeds = [[tokens / seconds for tokens, seconds in sums] for sums in zip(*rounds, strict=True)]
    ratios = Spread.of([b / a for a, b in zip(*speeds, strict=True)])
    found: dict[str, Any] = {"model": options.model, "tier": tier, "concurrency": few}
    found |= {"rounds": options.rounds, "requests": n, "max_tokens": max_tokens}
    found |= {"threads": torch.get_num_threads(), "engine_tokens_per_s": vars(Spread.of(speeds[0]))}
    found |= {"server_tokens_per_s": vars(Spread.of(speeds[1])), "ratio": vars(ratios)}
    # The work of all rounds is equal: seconds over seconds.
    found |= {"ratio_of_sums": sum(a[1] for a, _ in rounds) / sum(b[1] for _, b in rounds)}
    found |= {"first_ms": _ms(first_s), "first_alone_ms": _ms(first_alone_s)}
    found |= {"ready_s": {"median": median(ready_s), "most": max(ready_s), "all": ready_s}}
    found |= {"targets_met": {"ratio": ratios.median >= RATIO, "ready": max(ready_s) <= READY_S}}
    print(json.dumps(found))
    sys.exit(0 if all(found["targets_met"].values()) else 1)


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    spread = Spread.of([1000 * x for x in seconds])
    return {"median": spread.median, "low": spread.low, "high": spread.high, "most": 1000 * max(seconds)}


if __name__ == "__main__":
    main()
