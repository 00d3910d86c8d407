"""Deterministic mode, to the bit; and what is free, or only fills a launch, never shows (invariant 10)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import ATOL, HOUSE, alone, check_alone, drive, engine_of, exits_of, mixed, poison, small
from torch import Tensor

from alcoda.engine.cache import RowStore
from alcoda.engine.request import Request
from alcoda.engine.runner import Runner
from alcoda.engine.sampling import Sampling
from alcoda.model.cache_policy import LastCache, MeanCache
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in

PROMPTS = ((3, 41, 7), (9,), (20, 63, 1, 7, 7), (50, 2))


def ready(dtype: torch.dtype, **fields: Any) -> RecurrentLM:
    """A model as a run is loaded: fp32, or its linear maps in bf16."""
    model = small(**fields).float()
    if dtype == torch.bfloat16:
        hold_in(model, dtype)
    return model


def bits(
    model: RecurrentLM, dtype: torch.dtype, requests: list[Request], every: int, **options: Any
) -> dict[Any, Tensor]:
    """Logits of each request's tokens, by its prompt."""
    engine = engine_of(model, dtype, **options)
    ended = drive(engine, requests, every)
    assert all(c.error is None for (c,) in ended)
    return {c.request.prompt: engine.logits_TV(c) for (c,) in ended}


def check_bits(model: RecurrentLM, dtype: torch.dtype, requests: list[Request], **options: Any) -> None:
    """A request's logits have the same bits with any others, and with drafts."""
    expected = {r.prompt: bits(model, dtype, [r], 0, **options)[r.prompt] for r in requests}
    ways: list[tuple[list[Request], int, dict[str, Any]]] = [(requests, 0, {}), (requests[::-1], 2, {"min_coda": 2})]
    if not model.config.memory.carries:
        ways.append((requests, 3, {"draft_loops": 1}))
    for asked, every, more in ways:
        for prompt, logits_TV in bits(model, dtype, asked, every, **options, **more).items():
            same = torch.equal(logits_TV, expected[prompt])
            assert same, f"{prompt}: off by {(logits_TV - expected[prompt]).abs().max():.3g} with {every}, {more}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["grt", "window", "memory"])
def test_deterministic_is_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model = ready(dtype, **HOUSE[name])
    tests = [None, *exits_of(model, "state", "kl")]
    samplings = (Sampling(), Sampling(temperature=0.9, seed=2))
    requests = [Request(prompt, 5, test=tests[i % 3], sampling=samplings[i % 2]) for i, prompt in enumerate(PROMPTS)]
    check_bits(model, dtype, requests, width=6, deterministic=True)


def test_control_without_it_bits_depend_on_the_width() -> None:
    model = small(d_model=64, d_ff=200).float()
    with pytest.raises(AssertionError, match="off by"):
        check_bits(model, torch.float32, [Request(prompt, 5) for prompt in PROMPTS], width=16)


@pytest.mark.parametrize("kind", ["gate", "kl", "state"])
def test_scores_of_a_rule_are_to_the_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision at the threshold must not turn with the rows beside it."""
    model = ready(torch.float32, **HOUSE["plain"], d_model=64)
    (test,) = exits_of(model, kind)
    found: list[dict[tuple[int, int, int], float]] = []
    places: list[Any] = []
    score, loop = type(test).score, Runner.loop

    def looped(self: Runner, items: Any) -> Any:
        places[:] = [(item.completion.request.prompt[0], item.position, item.loops) for item in items]
        leaves = loop(self, items)
        places.clear()  # a prompt's tokens are others
        return leaves

    def noted(self: Any, seen: Any, kept: Any) -> Any:
        score_N, kept = score(self, seen, kept)
        if places:
            found[-1].update(zip(places, score_N.tolist(), strict=False))
        return score_N, kept

    monkeypatch.setattr(type(test), "score", noted)
    monkeypatch.setattr(Runner, "loop", looped)
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[:2]):
        found.append({})
        requests = [Request(prompt[:1], 6, test=test) for prompt in prompts]
        drive(engine_of(model, torch.float32, width=6, deterministic=True), requests, every=2)
    for other in found[1:]:
        mine = {place: x for place, x in found[0].items() if place[0] == PROMPTS[0][0]}
        assert len(mine) > 10 and all(other[place] == x for place, x in mine.items())


@pytest.mark.parametrize("name", ["plain", "anchor", "window", "memory"])
def test_what_is_free_never_shows(name: str) -> None:
    """Before the first launch, and before each: wherever nothing is held there is NaN."""
    model = small(**HOUSE[name])
    requests = mixed([None, *exits_of(model, "state", "kl")], 4)
    drafts = {} if name == "memory" else {"draft_loops": 1}
    for options in ({"deterministic": True}, {"width": 6, **drafts}, {"cache": MeanCache()}, {"cache": LastCache()}):
        engine = engine_of(model, **options)
        some = requests[:2] if "cache" in options else requests
        check_alone(engine, some, every=2, before=lambda n, engine=engine: poison(engine))


def test_a_request_after_one_of_nan_is_itself() -> None:
    """What has failed leaves NaN where it was; who comes next does not see it."""
    model = small(**HOUSE["grt"])
    for cache in ({"cache": MeanCache()}, {"draft_loops": 1, "width": 6}):
        engine = engine_of(model, **cache)
        broken = engine.submit(Request((8, 8, 8), 8))[0]
        for _ in range(6):
            engine.step()
        with torch.inference_mode():  # what launches made
            engine.runner.state.parts[0].fill_(float("nan"))  # pyrefly: ignore
        drive(engine, [])
        assert broken.finish == "error" and "not finite" in str(broken.error)
        check_alone(engine, mixed(exits_of(model, "state"), 3))


def test_rows_that_only_fill_change_nothing() -> None:
    model = small(**HOUSE["grt"])
    requests = mixed([None, *exits_of(model, "state")], 3)
    for request in requests:
        logits = []
        for width in (1, 2, 9):
            engine = engine_of(model, width=width, deterministic=True)
            (completion,) = drive(engine, [request])[0]
            logits.append(engine.logits_TV(completion))
        expected = alone(model, request).logits_TV
        assert all((x - expected).abs().max() <= ATOL for x in logits)


def test_control_a_key_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    init = RowStore.__init__

    def one_more(self: RowStore, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.ends = [(start, stop + 1) for start, stop in self.ends]

    monkeypatch.setattr(RowStore, "__init__", one_more)
    model = small(**HOUSE["grt"])
    engine = engine_of(model)
    with pytest.raises(AssertionError, match="request"):
        check_alone(engine, mixed([None], 3), before=lambda n: poison(engine))
