"""Small models, requests of all kinds, and what the engine is held against: each completion read alone, token by token,
by the readers, which know neither scheduler nor arena."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from engine_replay import Recorder, between_scores
from torch import Tensor

from alcoda.depth.exiting import Exits, pick_coda_keys
from alcoda.depth.rules import read_rule
from alcoda.depth.sequential import ExitReader
from alcoda.depth.watch import ExitTest
from alcoda.engine.cache import Arena
from alcoda.engine.options import Options
from alcoda.engine.request import Completion, Request
from alcoda.engine.sampling import GREEDY, Row, Sampling, draw
from alcoda.laws.subject import make_plain, tokens
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reader

ATOL = 1e-9
LOOPS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "seq_len": 32,
    "d_model": 16,
    "n_heads": 2,
    "n_prelude": 1,
    "n_core": 1,
    "n_coda": 1,
    "n_loops": LOOPS,
    "head": "untied",  # a tied one would say the same token again and again
    "init_std": 0.2,
}
GRT: dict[str, Any] = {"inject": {"kind": "concat", "noise": 0.1, "bias": True}, "update": {"kind": "gate"}}
HOUSE: dict[str, dict[str, Any]] = {
    "plain": {"exit_gate": "linear"},
    "grt": {**GRT, "n_core": 2},
    "anchor": {"keys": "anchor", "carry": "hyper"},
    "no_coda": {"n_coda": 0, "n_prelude": 0, "inject": "concat"},
    "window": {
        "n_coda": 2,
        "block": {"window": {"kind": "pattern", "tokens": 3}, "value_embed": {"kind": "table", "gate_channels": 5}},
    },
    "memory": {"memory": "prev_token", "inject": "concat"},
}
"""By name: what each part of the engine could get wrong has a model here."""


def small(seed: int = 0, **fields: Any) -> RecurrentLM:
    """An fp64 model that draws one token or another, in evaluation mode."""
    return make_plain(ModelConfig.model_validate({**SIZES, **fields}), seed)


def exits_of(model: RecurrentLM, *kinds: str, n_loops: int = LOOPS) -> list[ExitTest]:
    """Rules at work, at thresholds by which tokens leave at all loops."""
    ids_BT = tokens(4, 12, seed=5)
    return [between_scores(model, read_rule(kind), ids_BT, n_loops).build(model, n_loops) for kind in kinds]


# -- alone ------------------------------------------------------------------------------------------------------------


class Alone(NamedTuple):
    """What a completion is: tokens, loops of the token that each was drawn from, loops of the prompt's, logits."""

    tokens: list[int]
    loops: list[int]
    prompt_loops: list[int]
    logits_TV: Tensor
    finish: str


@functools.lru_cache(maxsize=256)  # a request is the same object wherever it runs
@torch.no_grad()
def alone(
    model: RecurrentLM, request: Request, stream: int = 0, cache: CachePolicy = PER_LOOP, whole: bool = False
) -> Alone:
    """A completion read by a reader, one token at a time (``whole``: but for the prompt)."""
    test = request.test
    if test is None:
        n_loops = model.config.n_loops if request.loops is None else request.loops
        reader = Reader(model, n_loops, 4, cache)
    else:
        n_loops = test.n_loops
        reader = ExitReader(model, Exits(test, pick_coda_keys(test, None), cache=cache), 4)
    approximate = model.config.memory.carries and request.prefill is not None and not request.prefill.is_exact
    prompt_1T = torch.tensor([request.prompt])
    parts = [prompt_1T] if whole or approximate else prompt_1T.split(1, 1)
    y_1TD = torch.cat([reader.read(part, request.prefill) for part in parts], 1)

    def loops() -> list[int]:
        if not isinstance(reader, ExitReader):
            return [n_loops]
        found = reader.depths_BT()[0].tolist()
        reader.depths.clear()
        return found

    prompt_loops = loops() if test is not None else [n_loops] * len(request.prompt)
    output, ran, logits, finish = [], [prompt_loops[-1]], [], "length"
    while True:
        logits_1V = model.logits(y_1TD[:, -1])
        logits.append(logits_1V[0])
        (drawn,) = draw(logits_1V, [Row(request.sampling, request.prompt, output, stream)])
        assert not isinstance(drawn, str), drawn
        if drawn.token in request.stop_ids:
            finish = "stop"
            break
        output.append(drawn.token)
        if len(output) >= request.max_tokens:
            break
        y_1TD = reader.read(torch.tensor([[drawn.token]]))
        ran += loops()
    return Alone(output, ran[: len(output)], prompt_loops, torch.stack(logits), finish)


# -- requests ---------------------------------------------------------------------------------------------------------

SAMPLINGS = (
    GREEDY,
    Sampling(temperature=1.0, seed=7, top_k=20),
    Sampling(temperature=0.7, seed=3, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.2),
    Sampling(repetition_penalty=1.5, presence_penalty=0.4, logit_bias={5: 1.0}),
)


def mixed(
    tests: Sequence[ExitTest | None],
    n: int,
    seed: int = 0,
    longest: int = 9,
    most_new: int = 8,
    n_loops: int = LOOPS,
) -> list[Request]:
    """Requests of all lengths, rules and ways of drawing."""
    rng = random.Random(seed)
    found = []
    for i in range(n):
        prompt = tuple(rng.randrange(64) for _ in range(rng.randint(1, longest)))
        test = tests[i % len(tests)]
        found.append(
            Request(
                prompt,
                rng.randint(1, most_new),
                sampling=SAMPLINGS[(i // len(tests) + i) % len(SAMPLINGS)],
                test=test,
                loops=rng.randint(1, n_loops) if test is None and i % 2 else None,
                stop_ids=frozenset({rng.randrange(64)}) if i % 3 == 0 else frozenset(),
                name=i,
            )
        )
    return found


# -- the engine -------------------------------------------------------------------------------------------------------


def engine_of(model: RecurrentLM, dtype: torch.dtype = torch.float64, **options: Any) -> Recorder:
    """A small engine that keeps logits."""
    return Recorder(model, Options(**{"width": 3, "chunk_tokens": 4, **options}), dtype=dtype)


def drive(
    engine: Recorder,
    requests: Iterable[Request],
    every: int = 0,
    before: Callable[[int], None] = lambda n: None,
) -> list[list[Completion]]:
    """Run requests until the engine is idle.

    Args:
        every: launches between one request and the next; 0: all are there from the start.
        before: is told of each launch, and may do what it likes.
    """
    waiting, asked, n = list(requests), [], 0
    with engine.runner.passes():
        while True:
            while waiting and (not every or n % every == 0):
                asked.append(engine.submit(waiting.pop(0)))
                if every:
                    break
            before(n)
            if engine.step() is None and not waiting:
                break
            n += 1
            assert n < 10_000, "the engine does not come to an end"
    engine.check_idle()
    return asked


def check_same(engine: Recorder, completion: Completion, expected: Alone) -> None:
    """A completion is what it is alone: tokens, loops, how it ended, and logits to `ATOL`."""
    what = f"request {completion.request.name}, stream {completion.stream}"
    assert completion.error is None, f"{what} failed: {completion.error}"
    found = [token.token for token in completion.tokens]
    assert found == expected.tokens, f"{what}: other tokens: {found}, alone {expected.tokens}"
    assert completion.finish == expected.finish, f"{what}: ended as {completion.finish}"
    assert completion.prompt_loops == expected.prompt_loops, f"{what}: other loops of the prompt"
    assert [token.loops for token in completion.tokens] == expected.loops, f"{what}: other loops"
    logits_TV = engine.logits_TV(completion)
    off = float((logits_TV - expected.logits_TV).abs().max())
    assert logits_TV.shape == expected.logits_TV.shape and off <= ATOL, f"{what}: logits are off by {off:.3g}"


def check_alone(engine: Recorder, requests: Sequence[Request], every: int = 0, **drives: Any) -> None:
    """Requests that run together are what each is alone."""
    for completions in drive(engine, requests, every, **drives):
        for completion in completions:
            expected = alone(engine.model, completion.request, completion.stream, engine.options.cache)
            check_same(engine, completion, expected)


def poison(engine: Recorder) -> None:
    """NaN wherever nothing is held: free tokens of the arena, free rows of the banks."""
    runner = engine.runner
    for start, stop in runner.arena._free:
        for kv in runner.arena.kv.values():
            kv[..., start:stop, :] = float("nan")
    banks = [runner.state, runner.anchor, runner.recall, runner.sums, *runner.kept.values()]
    for bank in banks:
        for part in bank.parts or []:
            worst = (
                float("nan")
                if part.is_floating_point()
                else torch.iinfo(part.dtype).max // 2
                if part.dtype != torch.bool
                else True
            )
            with torch.inference_mode():  # what launches made
                part[runner.free_rows] = worst


def copy_wrongly(self: Arena, stage: str, places: Sequence[tuple[int, int]]) -> None:
    """A planted fault: what stands for the keys of deeper loops is a little off. (What was never written would be too,
    but memory that is not written may hold anything, what is right too.)"""
    kv = self.kv.get(stage)
    for slot, at in places if kv is not None else ():
        for deeper in range(slot + 1, kv.size(2)):
            kv[:, :, deeper, :, at] = 1.01 * kv[:, :, slot, :, at]
