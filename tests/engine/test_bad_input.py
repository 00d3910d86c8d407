"""What cannot be served is refused with what is allowed, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import HOUSE, LOOPS, check_alone, engine_of, exits_of, mixed, small

from alcoda.depth.record import Trace
from alcoda.depth.rules import StateChange, TraceRule
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.refusals import check_serves
from alcoda.engine.request import Request
from alcoda.engine.sampling import Sampling
from alcoda.errors import UsageError
from alcoda.model.cache_policy import LastCache, MeanCache
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import ZeroPrefill

PROMPT = (3, 41, 7)


@pytest.fixture(scope="module")
def model() -> RecurrentLM:
    return small(**HOUSE["grt"])


def trace(model: RecurrentLM, rows: int, tokens: int) -> Any:
    depths_BT = torch.full((rows, tokens), 2)
    return TraceRule().build(model, LOOPS, Trace(depths_BT, LOOPS, "at_exit"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": ()}, "the prompt has no tokens: give some text"),
    "a token beyond": ({"prompt": (3, 64)}, "the prompt has the token 64: this model has the ids 0 to 63"),
    "a token below": ({"prompt": (-1,)}, "the prompt has the token -1"),
    "the context": ({"prompt": (1,) * 32}, "32 tokens .* the context holds 32, .* shorten it by 1 or more"),
    "far beyond": ({"prompt": (1,) * 99}, "shorten it by 68 or more"),
    "no new tokens": ({"max_tokens": 0}, "max_tokens=0: at least 1"),
    "fewer than none": ({"max_tokens": -3}, "max_tokens=-3: at least 1"),
    "too many": ({"max_tokens": 30}, "max_tokens=30 after a prompt of 3 tokens.* lower max_tokens to 29"),
    "the cache": ({"max_tokens": 25}, r"are 27 tokens, and the cache holds 20: .*\(cache_tokens\)"),
    "no completions": ({"n": 0}, "n=0: at least 1"),
    "no loops": ({"loops": 0}, "loops=0: at least 1 loop is needed"),
    "too many loops": ({"loops": 5}, "loops=5: this engine keeps keys of 4 loops; ask for no more"),
    "a bias of no token": ({"sampling": Sampling(logit_bias={64: 1.0})}, "there is no token 64: the ids are 0 to 63"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_the_others_go_on(model: RecurrentLM, name: str) -> None:
    fields, message = REFUSED[name]
    engine = engine_of(model, cache_tokens=20)
    requests = mixed([None, *exits_of(model, "state")], 2)
    with pytest.raises(UsageError, match=message):
        engine.submit(Request(**{"prompt": PROMPT, "max_tokens": 4, **fields}))
    engine.check_idle()
    check_alone(engine, requests)


def test_a_vocabulary_that_is_padded_ends_where_it_does(model: RecurrentLM) -> None:
    engine = Engine(model, n_vocab=60, dtype=torch.float64)
    with pytest.raises(UsageError, match="the token 60: this model has the ids 0 to 59"):
        engine.submit(Request((60,)))
    (completion,) = engine.run([Request(PROMPT, 20, sampling=Sampling(logit_bias={59: 100.0}))])[0]
    assert completion.ids == [59] * 20
    with pytest.raises(UsageError, match="there is no token 60"):
        engine.submit(Request(PROMPT, 4, sampling=Sampling(logit_bias={60: 1.0})))


def test_a_rule_must_be_of_this_model_and_depth(model: RecurrentLM) -> None:
    engine = engine_of(model)
    other = StateChange(threshold=0.1).build(small(1, **HOUSE["grt"]), LOOPS)
    with pytest.raises(UsageError, match="the exit rule was built for another model"):
        engine.submit(Request(PROMPT, 4, test=other))
    mine = StateChange(threshold=0.1).build(model, 3)
    with pytest.raises(UsageError, match="loops=4: the exit rule was built for another model, or for 3 loops"):
        engine.submit(Request(PROMPT, 4, test=mine, loops=4))
    deep = StateChange(threshold=0.1).build(model, 6)
    with pytest.raises(UsageError, match="loops=6: this engine keeps keys of 4 loops"):
        engine.submit(Request(PROMPT, 4, test=deep))
    check_alone(engine, [Request(PROMPT, 4, test=mine), Request(PROMPT, 4, test=mine, loops=3)])


def test_a_trace_that_is_too_short_fails_before_it_is_in_a_launch(model: RecurrentLM) -> None:
    engine = engine_of(model)
    check_alone(engine, [Request(PROMPT, 4, test=trace(model, 1, 6))])
    for short, row in ((trace(model, 1, 5), 0), (trace(model, 1, 6), 1), (trace(model, 0, 0), 0)):
        with pytest.raises(UsageError, match=r"exit trace: it holds .* depths"):
            engine.submit(Request(PROMPT, 4, test=short, row=row))
    engine.check_idle()


def test_options_that_cannot_be() -> None:
    for name in ("width", "places", "cache_tokens", "min_coda", "chunk_tokens", "draft_loops"):
        with pytest.raises(UsageError, match=f"{name}=0: at least 1"):
            Options(**{name: 0})
    for cache in (MeanCache(), LastCache()):
        with pytest.raises(UsageError, match=f"draft_loops=1 with cache '{cache.kind}'.*leave draft_loops out"):
            Options(draft_loops=1, cache=cache)
    with pytest.raises(UsageError, match="draft_loops=1 with refill=False"):
        Options(draft_loops=1, refill=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"sharing": "untied"},
        {"sharing": "lora"},
        {"route": "expert_choice"},
        {"route": "token_choice", "inject": "add"},
    ],
    ids=str,
)
def test_models_that_are_not_served(fields: dict[str, Any]) -> None:
    model = small(**fields)
    for refused in (lambda: Engine(model), lambda: check_serves(model)):
        with pytest.raises(UsageError, match=r"the engine cannot serve this model: .*LM\.generate decodes it"):
            refused()


@pytest.mark.parametrize("source", ["core", "coda.0", "final", None])
def test_a_memory_of_what_comes_after_the_loop_has_no_drafts(source: str | None) -> None:
    model = small(memory={"kind": "prev_token", "source": source}, inject="concat")
    with pytest.raises(UsageError, match=r"draft_loops with a memory of '.*train with memory\.source prelude\.I"):
        Engine(model, Options(draft_loops=1))
    Engine(model)
    Engine(small(memory={"kind": "prev_token", "source": "prelude.0"}, inject="concat"), Options(draft_loops=1))
    Engine(small(memory="gated"), Options(draft_loops=1))


def test_a_dense_model_has_no_drafts_and_no_cheap_cache() -> None:
    model = small(n_core=0, n_loops=1)
    with pytest.raises(UsageError, match="this model is dense"):
        Engine(model, Options(draft_loops=1))
    with pytest.raises(UsageError, match="this model is dense"):
        Engine(model, Options(cache=MeanCache()))
    with pytest.raises(UsageError, match="loops=2: this model is dense"):
        Engine(model).submit(Request(PROMPT, 4, loops=2))


def test_a_prefill_that_is_not_exact_with_exits() -> None:
    model = small(memory="prev_token", inject="concat")
    engine = engine_of(model)
    (test,) = exits_of(model, "state")
    with pytest.raises(UsageError, match=r"prefill 'zero' with an exit rule: .* leave prefill out"):
        engine.submit(Request(PROMPT, 4, test=test, prefill=ZeroPrefill()))
    # Without a memory there is nothing to prefill otherwise.
    plain = small()
    check_alone(engine_of(plain), [Request(PROMPT, 4, test=exits_of(plain, "state")[0], prefill=ZeroPrefill())])


def test_a_prefill_that_is_not_exact_with_a_cheap_cache() -> None:
    model = small(memory="prev_token", inject="concat")
    engine = engine_of(model, cache=MeanCache())
    with pytest.raises(UsageError, match="prefill 'zero' with cache 'mean'"):
        engine.submit(Request(PROMPT, 4, prefill=ZeroPrefill()))
    engine.check_idle()
