"""`bench_serve`: how much a running server answers in time, by load and by model."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from alcoda import progress
from alcoda.errors import RunError, UsageError
from alcoda.report.load import check_form, draw_load
from alcoda.serve.load.client import Answer, Client
from alcoda.serve.load.drive import Driven, arrivals, closed_loop, open_loop
from alcoda.serve.load.prompts import BUILT_IN, read_prompts
from alcoda.serve.load.score import LoadResult, LoadScore, score

Result = TypeVar("Result")
RATES = (2.0, 4.0, 8.0)
DURATION_S = 30.0
TTFT_MS = 500.0
ITL_MS = 50.0
MAX_TOKENS = 64
MOST_REQUESTS = 1_000_000
"""Of one rate: their times are drawn beforehand."""


def bench_serve(
    url: str,
    *,
    api_key: str | None = None,
    models: Sequence[str] = (),
    rates: Sequence[float] = (),
    concurrency: Sequence[int] = (),
    duration_s: float = DURATION_S,
    ttft_ms: float = TTFT_MS,
    itl_ms: float = ITL_MS,
    prompts: Sequence[str] | str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    plot: str | Path | None = None,
) -> LoadResult:
    """Load a running OpenAI-compatible server, and measure what it answers in time.

    Of a rate, requests arrive at random (Poisson), at times that are drawn before the first is sent: a server that is
    slow gets no fewer of them. Every model gets the same requests at the same times, one model after the other. Every
    request is greedy and goes on to ``max_tokens``. Ctrl-C ends it with what there is.

    Args:
        url: of the server: ``http://127.0.0.1:8000``.
        api_key: if it wants one.
        models: names that it has (``mini:fast``), loaded one after the other; the first of its list where empty.
        rates: requests a second; 2, 4 and 8 where neither they nor ``concurrency`` are given.
        concurrency: in their place, so many clients at one time, each of which waits for its answers.
        duration_s: of each rate or concurrency and model.
        ttft_ms, itl_ms: targets of a good request: to its first text, and between its tokens in the mean.
        prompts: to draw from, or their file (one a line, or ``.jsonl`` with ``prompt``); else openings of stories.
        max_tokens: new tokens of each request.
        seed: of arrivals and of which prompt is drawn.
        plot: a file to draw the result into: .svg, .png or .pdf.

    Raises:
        UsageError: an argument that cannot be, a wrong key, a model that the server does not have.
        RunError: no server there, or one that refuses every request.
    """
    loads = _loads(rates, concurrency)
    for name, value in (("duration", duration_s), ("ttft-ms", ttft_ms), ("itl-ms", itl_ms)):
        if not 0 < value < math.inf:
            raise UsageError(f"--{name} {value:g}: a number above 0")
    if max_tokens < 1:
        raise UsageError(f"--max-tokens {max_tokens}: 1 or more")
    for rate, _ in loads:
        if rate is not None and rate * duration_s > MOST_REQUESTS:
            raise UsageError(f"--rate {rate:g} for {duration_s:g} s: more than {MOST_REQUESTS:,} requests")
    if isinstance(prompts, str | Path):
        prompts = read_prompts(Path(prompts))
    texts = tuple(BUILT_IN if prompts is None else prompts)
    if not texts:
        raise UsageError("prompts: at least one is needed")
    if plot is not None:
        check_form(Path(plot))
    client = Client(url, api_key)
    work = _Work(client, loads, duration_s, (ttft_ms, itl_ms), texts, max_tokens, seed)
    scores, interrupted = _run(work.run(list(models)))
    found = LoadResult(
        client.url, duration_s, ttft_ms, itl_ms, len(texts), max_tokens, seed, tuple(scores), interrupted
    )
    if plot is not None:
        draw_load(found.to_json(), Path(plot))
    return found


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`; in a thread of its own where a loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _loads(rates: Sequence[float], concurrency: Sequence[int]) -> list[tuple[float | None, int | None]]:
    if rates and concurrency:
        raise UsageError("--rate and --concurrency: one of them (requests at random times, or so many at one time)")
    for rate in rates:
        if not 0 < rate < math.inf:
            raise UsageError(f"--rate {rate:g}: requests a second, above 0")
    for n in concurrency:
        if not 1 <= n <= 10_000:
            raise UsageError(f"--concurrency {n}: from 1 to 10000")
    if concurrency:
        return [(None, n) for n in concurrency]
    return [(rate, None) for rate in rates or RATES]


class _Work:
    """All loads of all models, one after the other."""

    def __init__(
        self,
        client: Client,
        loads: Sequence[tuple[float | None, int | None]],
        duration_s: float,
        targets_ms: tuple[float, float],
        prompts: Sequence[str],
        max_tokens: int,
        seed: int,
    ) -> None:
        self.client, self.loads, self.duration_s, self.targets_ms = client, loads, duration_s, targets_ms
        self.prompts, self.max_tokens, self.seed = prompts, max_tokens, seed

    async def run(self, wanted: list[str]) -> tuple[list[LoadScore], bool]:
        """The scores, and whether we were interrupted."""
        scores: list[LoadScore] = []
        async with self.client:
            models = await self.client.pick(wanted)
            for model in models:
                await self._try(model)
            for rate, concurrency in self.loads:
                for model in models:
                    driven = await self._load(model, rate, concurrency)
                    scores.append(score(driven, model, *self.targets_ms, rate, concurrency))
                    if driven.interrupted:
                        return scores, True
        return scores, False

    async def _try(self, model: str) -> None:
        """One request that counts for nothing: is it answered at all, and what the server makes at its first use."""
        answer = Answer(0.0)
        await self.client.complete(self._body(model, self.prompts[0]), answer)
        if answer.error is not None:
            why = f": {answer.message}" if answer.message else ""
            raise RunError(f"{self.client.url} did not answer a first request to {model} ({answer.error}){why}")

    def _body(self, model: str, prompt: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _load(self, model: str, rate: float | None, concurrency: int | None) -> Driven:
        rng = random.Random(f"{self.seed} {rate} {concurrency}")
        times_s = [] if rate is None else arrivals(rate, self.duration_s, rng)
        drawn = [rng.choice(self.prompts) for _ in times_s]

        async def send(number: int, answer: Answer) -> None:
            # Of a closed loop nobody knows how many there will be: the number's own draw.
            prompt = drawn[number] if drawn else random.Random(f"{self.seed} {number}").choice(self.prompts)
            await self.client.complete(self._body(model, prompt), answer)

        if rate is not None:
            with progress.bar(f"{model} at {rate:g}/s", len(times_s)) as advance:
                return await open_loop(send, times_s, self.duration_s, advance)
        assert concurrency is not None
        with progress.bar(f"{model}, {concurrency} at once", None) as advance:
            return await closed_loop(send, concurrency, self.duration_s, advance)
