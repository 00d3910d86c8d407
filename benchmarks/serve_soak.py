"""Two hundred clients at one time for minutes: is any answer lost, wrong or another's? The last line is JSON.

    python benchmarks/serve_soak.py [--minutes 5] [--clients 200]

It starts ``alcoda serve mini`` with a queue that is too short for all of them. Clients stream and do not stream, leave
in the middle, send what is no request, ask for less time than an answer takes. What each request is to be, the engine
made of it alone before (serve_cases.py): the text, its usage, and the loops of each token; of a client that leaves, the
beginning of it. Exit code 1, with what was wrong, unless

* every answer is the known one, or a status that the OpenAPI document names for its path; every 429 has Retry-After;
* no id comes twice, and every stream ends in [DONE] behind one finish a choice;
* the server's memory does not grow once it is warm, its log tells of no fault, it is ready at the end, and nothing
  runs, waits or holds a place then;
* one signal ends it, with exit code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
from serve_cases import Known, known
from serve_process import Served, end, serving

WIDTH = 16
SILENCE_S = 120.0
"""Without a byte: then the answer is lost."""
IDLE_S = 60.0
"""For the server to be idle behind the last client."""
MOST_GROWTH_MB = 24.0
"""Of resident memory between the second fifth of the time and the last: what the allocator may keep."""
KINDS = {"stream": 10, "plain": 4, "leave": 4, "leave plain": 2, "many": 2, "deadline": 2, "bad": 4}
BAD: tuple[tuple[str, bytes, set[int]], ...] = (
    ("/v1/completions", b"{", {400}),
    ("/v1/completions", b"[]", {400}),
    ("/v1/completions", b"\xff\xfe{}", {400}),
    ("/v1/completions", b"[" * 100_000, {400}),
    ("/v1/completions", b'{"model": "nobody", "prompt": "a"}', {404}),
    ("/v1/completions", b'{"prompt": 3}', {400}),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 100000}', {400}),
    ("/v1/completions", b'{"prompt": "a", "temperature": -1}', {400}),
    ("/v1/completions", b'{"prompt": "a", "suffix": "b"}', {400}),
    ("/v1/completions", b'{"prompt": "\\ud800"}', {400}),
    ("/v1/completions", b'{"prompt": [99999999]}', {400}),
    ("/v1/completions", b'{"prompt": "a", "exit": "trace:/etc/hostname"}', {400}),
    ("/v1/completions", b'{"prompt": "a", "loops": 10000}', {400}),
    ("/v1/chat/completions", b'{"messages": []}', {400}),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', {400}),
    ("/v1/nothing", b"{}", {404}),
    ("/v1/models", b"{}", {405}),
    ("/v1/completions", b'{"prompt": "' + b"a" * 5_000_000 + b'"}', {413}),
)


@dataclass
class Tally:
    """What the clients saw."""

    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    tokens: int = 0

    def blame(self, kind: str, why: str) -> None:
        """Something that may not be."""
        if len(self.wrong) < 50:
            print(f"  WRONG ({kind}): {why}", flush=True)
        self.wrong.append(f"{kind}: {why}")

    def take_id(self, kind: str, ident: str) -> None:
        """An id that was never there before."""
        if ident in self.ids:
            self.blame(kind, f"id {ident} came twice")
        self.ids.add(ident)


@dataclass
class Soak:
    """Clients of one server."""

    url: str
    pool: Sequence[Known]
    documented: dict[str, set[int]]
    until: float
    http: httpx.AsyncClient
    tally: Tally = field(default_factory=Tally)

    async def client(self, number: int) -> None:
        """One after the other, at random."""
        rng = random.Random(number)
        await asyncio.sleep(rng.random())
        while time.perf_counter() < self.until:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            self.tally.asked[kind] += 1
            try:
                await getattr(self, kind.replace(" ", "_"))(rng, kind)
            except httpx.TimeoutException:
                self.tally.blame(kind, f"not a byte for {SILENCE_S:g} s: lost")
            except httpx.HTTPError as error:
                self.tally.blame(kind, f"the connection broke: {type(error).__name__}: {error}")
            except (ValueError, KeyError, IndexError, TypeError) as error:
                self.tally.blame(kind, f"an answer in another form: {type(error).__name__}: {error}")

    def status(self, kind: str, path: str, response: httpx.Response) -> bool:
        """Count it; whether it is 200."""
        code = response.status_code
        self.tally.statuses[str(code)] += 1
        known_path = self.documented.get(path, {404, 405})
        if code not in known_path | {404, 405}:
            self.tally.blame(kind, f"{path} answers {code}, which its OpenAPI document does not name")
        if code == 429 and not re.fullmatch(r"[1-9]\d*", response.headers.get("retry-after", "")):
            self.tally.blame(kind, f"429 with Retry-After {response.headers.get('retry-after')!r}")
        return code == 200

    async def refused(self, kind: str, response: httpx.Response, rng: random.Random, *also: int) -> None:
        """An answer other than 200 to a request that is right."""
        body = json.loads(await response.aread())
        (self.tally.refused if response.status_code == 429 else self.tally.answered)[kind] += 1
        if response.status_code not in {429, *also}:
            self.tally.blame(kind, f"{response.status_code} {body}")
        if set(body["error"]) != {"message", "type", "param", "code"}:
            self.tally.blame(kind, f"not the envelope: {body}")
        await asyncio.sleep(rng.uniform(0.5, 2.0))

    async def stream(self, rng: random.Random, kind: str, **more: Any) -> None:
        await self._stream(rng, kind, rng.choice(self.pool), None, more)

    async def leave(self, rng: random.Random, kind: str) -> None:
        await self._stream(rng, kind, rng.choice(self.pool), rng.randint(0, 8), {})

    async def _stream(
        self, rng: random.Random, kind: str, one: Known, leave_after: int | None, more: dict[str, Any]
    ) -> None:
        body = {**one.body, **more, "stream": True, "stream_options": {"include_usage": True}, "return_loops": True}
        text, loops, ids, finishes, usage, done, began = "", [], set(), [], None, False, time.perf_counter()
        first = None
        async with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if not self.status(kind, "/v1/completions", response):
                await self.refused(kind, response, rng)
                return
            seen = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                if done:
                    self.tally.blame(kind, f"behind [DONE]: {line}")
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.tally.blame(kind, f"an error in the stream: {chunk}")
                    break
                ids.add(chunk["id"])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    first = first or (time.perf_counter() if choice["text"] else None)
                    text += choice["text"]
                    loops += [token["loops"] for token in (choice.get("alcoda") or {}).get("tokens", ())]
                    if choice["finish_reason"] is not None:
                        finishes.append(choice["finish_reason"])
                seen += 1
                if leave_after is not None and seen > leave_after:
                    break
        if len(ids) != 1:
            self.tally.blame(kind, f"{len(ids)} ids in one stream")
        for ident in ids:
            self.tally.take_id(kind, ident)
        if leave_after is not None and not done:
            if not one.text.startswith(text) or list(one.loops[: len(loops)]) != loops:
                self.tally.blame(kind, f"{text!r}, not the beginning of {one.text!r}; loops {loops} of {one.loops}")
            self.tally.answered[kind] += 1
            return
        if not done or finishes != [one.finish]:
            self.tally.blame(kind, f"finish {finishes}, [DONE] {done}: the end is lost")
        self.check(kind, one, text, loops, usage)
        self.tally.first_s.append((first or time.perf_counter()) - began)
        self.tally.whole_s.append(time.perf_counter() - began)

    def check(self, kind: str, one: Known, text: str, loops: list[int], usage: dict[str, Any] | None) -> None:
        """Hold an answer against the known one."""
        if text != one.text:
            self.tally.blame(kind, f"{one.body['prompt']!r}: {text!r}, not {one.text!r}")
        if loops != list(one.loops):
            self.tally.blame(kind, f"{one.body['prompt']!r}: loops {loops}, not {list(one.loops)}")
        told = usage and [
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["completion_tokens_details"]["loops"],
        ]
        if told != [one.prompt_tokens, len(one.ids), sum(one.loops)]:
            self.tally.blame(kind, f"usage {usage} of {one.prompt_tokens} and {len(one.ids)} tokens")
        self.tally.answered[kind] += 1
        self.tally.tokens += len(one.ids)

    async def plain(self, rng: random.Random, kind: str) -> None:
        one = rng.choice(self.pool)
        response = await self.http.post(f"{self.url}/v1/completions", json={**one.body, "return_loops": True})
        if not self.status(kind, "/v1/completions", response):
            await self.refused(kind, response, rng)
            return
        found = response.json()
        self.tally.take_id(kind, found["id"])
        (choice,) = found["choices"]
        if choice["finish_reason"] != one.finish:
            self.tally.blame(kind, f"finish {choice['finish_reason']}")
        loops = [token["loops"] for token in choice["alcoda"]["tokens"]]
        self.check(kind, one, choice["text"], loops, found["usage"])

    async def leave_plain(self, rng: random.Random, kind: str) -> None:
        one = rng.choice(self.pool)
        work = self.http.post(f"{self.url}/v1/completions", json=one.body)
        try:
            response = await asyncio.wait_for(work, rng.uniform(0.0, 0.5))
        except TimeoutError:
            self.tally.answered[kind] += 1
            return
        if not self.status(kind, "/v1/completions", response):
            await self.refused(kind, response, rng)
            return
        self.tally.answered[kind] += 1

    async def many(self, rng: random.Random, kind: str) -> None:
        """Several prompts in one request: each choice is its own prompt's."""
        first = rng.choice(self.pool)
        alike = [one for one in self.pool if _but_prompt(one) == _but_prompt(first)]
        some = rng.sample(alike, min(len(alike), rng.randint(2, 4)))
        body = {**first.body, "prompt": [one.body["prompt"] for one in some]}
        response = await self.http.post(f"{self.url}/v1/completions", json=body)
        if not self.status(kind, "/v1/completions", response):
            await self.refused(kind, response, rng)
            return
        found = response.json()
        self.tally.take_id(kind, found["id"])
        texts = {choice["index"]: choice["text"] for choice in found["choices"]}
        if texts != {i: one.text for i, one in enumerate(some)}:
            self.tally.blame(kind, f"{body['prompt']}: {texts}")
        if found["usage"]["completion_tokens"] != sum(len(one.ids) for one in some):
            self.tally.blame(kind, f"usage {found['usage']}")
        self.tally.answered[kind] += 1

    async def deadline(self, rng: random.Random, kind: str) -> None:
        """Less time than an answer takes, mostly: 408, an error in the stream, or all of it."""
        one, streams = rng.choice(self.pool), rng.random() < 0.5
        body = {**one.body, "timeout": rng.uniform(0.005, 0.3), "stream": streams}
        text, ended, late = "", False, False
        async with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if not self.status(kind, "/v1/completions", response):
                await self.refused(kind, response, rng, 408)
                return
            if not streams:
                (choice,) = json.loads(await response.aread())["choices"]
                text, ended = choice["text"], choice["finish_reason"] == one.finish
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        late = late or "error" in chunk
                        text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    ended = ended or line == "data: [DONE]"
        if not (ended or late) or not one.text.startswith(text) or (ended and not late and text != one.text):
            self.tally.blame(kind, f"{text!r} of {one.text!r}, ended {ended}, late {late}")
        self.tally.answered[kind] += 1

    async def bad(self, rng: random.Random, kind: str) -> None:
        path, body, codes = rng.choice(BAD)
        headers = {"Content-Type": "application/json"}
        response = await self.http.post(self.url + path, content=body, headers=headers)
        self.status(kind, path, response)
        if response.status_code not in codes | {429}:  # what takes time to find waits for its turn, like others
            self.tally.blame(kind, f"{path} {body[:60]!r}: {response.status_code} {response.text[:200]}")
        if set(response.json()["error"]) != {"message", "type", "param", "code"}:
            self.tally.blame(kind, f"not the envelope: {response.text[:200]}")
        self.tally.answered[kind] += 1


def _but_prompt(one: Known) -> str:
    return json.dumps({**one.body, "prompt": ""}, sort_keys=True)


def documented(served: Served) -> dict[str, set[int]]:
    """By path, the statuses that the OpenAPI document names for any of its methods."""
    found: dict[str, set[int]] = {}
    for path, methods in json.loads(served.get("/openapi.json")[1])["paths"].items():
        found[path] = {int(code) for method in methods.values() for code in method["responses"] if code.isdigit()}
    return found


def busy(metrics: dict[str, float]) -> dict[str, float]:
    """The gauges of what runs, waits or is held that are not zero."""
    names = re.compile(r"alcoda_\w*(running|waiting|used|in_flight|pending)\w*(\{.*\})?$")
    return {name: value for name, value in metrics.items() if names.match(name) and "total" not in name and value}


async def soak(served: Served, pool: Sequence[Known], clients: int, seconds: float) -> tuple[Tally, list[float]]:
    """Run clients for so long; what they saw, and the server's memory second by second, in MB."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    memory: list[float] = []

    async def watch() -> None:
        while True:
            memory.append(served.resident_mb)
            if len(memory) % 30 == 0:
                told = f"{sum(work.tally.answered.values())} answered, {work.tally.statuses['429']} times 429"
                print(f"  {len(memory)} s: {told}, {memory[-1]:.0f} MB", flush=True)
            await asyncio.sleep(1)

    timeout = httpx.Timeout(SILENCE_S, pool=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http:
        work = Soak(served.url, pool, documented(served), time.perf_counter() + seconds, http)
        watching = asyncio.create_task(watch())
        try:
            await asyncio.gather(*(work.client(number) for number in range(clients)))
        finally:
            watching.cancel()
    return work.tally, memory


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=12, help="different ones, each at three tiers and two lengths")
    parser.add_argument("--max-waiting", type=int, default=128, help="of the server's queue")
    parser.add_argument("--model", default="mini")
    options = parser.parse_args(arguments)
    from alcoda.serve.load.prompts import BUILT_IN

    pool = known(
        options.model, "mini" if options.model == "mini" else options.model, WIDTH, BUILT_IN[: options.prompts]
    )
    print(f"  {len(pool)} requests decoded alone", flush=True)
    how = ("--deterministic", "--width", str(WIDTH), "--max-waiting", str(options.max_waiting))
    with serving(options.model, *how) as served:
        tally, memory = asyncio.run(soak(served, pool, options.clients, options.minutes * 60))
        began = time.perf_counter()
        while (left := busy(served.metrics())) and time.perf_counter() - began < IDLE_S:
            time.sleep(0.2)
        idle_s = time.perf_counter() - began
        if left:
            tally.blame("end", f"not free {IDLE_S:g} s behind the last client: {left}")
        if not any(name.startswith("alcoda_") for name in served.metrics()):
            tally.blame("end", "/metrics has nothing of ours")
        if served.get("/ready")[0] != 200:
            tally.blame("end", "it is not ready any more")
        again, _ = asyncio.run(soak(served, pool, 1, 2.0))
        tally.wrong += again.wrong
        fifth = max(1, len(memory) // 5)
        warm, last = median(memory[fifth : 2 * fifth] or memory), median(memory[-fifth:])
        if last - warm > MOST_GROWTH_MB:
            tally.blame("end", f"memory grew from {warm:.0f} to {last:.0f} MB")
        code = end(served.process)
        if code != 0:
            tally.blame("end", f"exit code {code} after SIGTERM")
        for line in served.complaints():
            tally.blame("log", line)
    lost = sum(tally.asked.values()) - sum(tally.answered.values()) - sum(tally.refused.values())
    if lost and not tally.wrong:
        tally.blame("end", f"{lost} requests are neither answered nor refused")
    found: dict[str, Any] = {"minutes": options.minutes, "clients": options.clients, "asked": dict(tally.asked)}
    found |= {"answered": dict(tally.answered), "refused": dict(tally.refused), "unaccounted": lost}
    found |= {
        "statuses": dict(tally.statuses),
        "tokens": tally.tokens,
        "wrong": tally.wrong[:50],
        "n_wrong": len(tally.wrong),
    }
    found |= {"first_s": quantiles(tally.first_s), "whole_s": quantiles(tally.whole_s), "idle_after_s": idle_s}
    found |= {"warm_mb": warm, "last_mb": last, "most_mb": max(memory), "ids": len(tally.ids)}
    print(json.dumps(found, ensure_ascii=False))
    sys.exit(1 if tally.wrong else 0)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}


if __name__ == "__main__":
    main()
