"""Prompts scored over HTTP are what `alcoda harness` says of them; and the live audit."""

from __future__ import annotations

import time
from typing import Any

import pytest
from serving import WAIT_S, ask, metric, serving

from alcoda.downstream.encode import Ask
from alcoda.downstream.score import Scorer, points
from alcoda.engine.llm import LM
from alcoda.serve.server import Server

TEXT = "The fox, and what it saw"
DEPTHS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"exit": "none"}, {}),
    ({"loops": 2}, {"loops": [2]}),
    ({"model": "tiny:fast"}, {"loops": [1], "exits": ["fast"]}),
]


@pytest.mark.parametrize(("body", "at"), DEPTHS)
def test_a_continuation_scores_as_in_the_harness(
    server: Server, lm: LM, body: dict[str, Any], at: dict[str, Any]
) -> None:
    ids = lm.tokenizer.encode(TEXT).tolist()
    where = points(lm.loaded, **at)
    (answer,) = Scorer(lm.loaded, where).score([Ask(tuple(ids[:9]), tuple(ids[9:]))])
    found = ask(server, prompt=[ids], max_tokens=1, echo=True, logprobs=1, seed=1234, **body)["choices"][0]["logprobs"]
    # As lm-eval's local-completions reads it.
    logprobs, tops = found["token_logprobs"][9:-1], found["top_logprobs"][9:-1]
    assert sum(logprobs) == pytest.approx(-answer.nats_P[-1], rel=1e-12)
    greedy = all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))
    assert greedy == answer.greedy_P[-1]


def test_a_greedy_continuation_is_greedy_to_the_bit(server: Server, lm: LM) -> None:
    ids = list(lm.prompt_ids("The"))
    said = lm.generate("The", details=True, max_tokens=20)
    for shift, is_greedy in ((0, True), (1, False)):
        whole = [*ids, *((token.token + shift) % 256 for token in said.tokens)]
        found = ask(server, prompt=[whole], max_tokens=1, echo=True, logprobs=1, exit="none")["choices"][0]["logprobs"]
        told = list(zip(found["token_logprobs"], found["top_logprobs"], strict=True))[len(ids) : -1]
        assert {p == max(top.values()) for p, top in told} == {is_greedy}


def test_the_form_of_an_echo(server: Server, lm: LM) -> None:
    found = ask(server, prompt=[TEXT, "é"], max_tokens=2, echo=True, logprobs=2, seed=1)
    for choice, prompt in zip(found["choices"], (TEXT, "é"), strict=True):
        told, n = choice["logprobs"], len(lm.prompt_ids(prompt))
        assert choice["text"].startswith(prompt) and "".join(told["tokens"]) == choice["text"]
        assert {len(values) for values in told.values()} == {n + 2}
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert all(p <= 0 for p in told["token_logprobs"][1:])
    assert found["usage"]["prompt_tokens"] == len(lm.prompt_ids(TEXT)) + 3


def test_the_token_itself_is_among_the_likeliest(server: Server) -> None:
    """As OpenAI's: up to one more than were asked for."""
    found = ask(server, max_tokens=20, temperature=2, seed=3, logprobs=1, ignore_eos=True)["choices"][0]["logprobs"]
    told = list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))
    whole = [one for one in told if one[0] and one[0].isascii()]  # others are parts of characters
    assert whole and all(top[text] == logprob for text, logprob, top in whole)
    assert {len(top) for _, _, top in told} == {1, 2}


def test_a_prompt_that_fills_the_context_is_scored(server: Server, lm: LM) -> None:
    ids = [65] * lm.model.config.seq_len
    found = ask(server, prompt=[ids], max_tokens=0, echo=True, logprobs=0)
    assert len(found["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert (found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"]) == ("length", 0)


def test_the_audit_says_where_full_depth_would_differ(lm: LM) -> None:
    with serving(lm, audit=1.0) as made:
        for body in ({"model": "tiny:fast"}, {"loops": 2}, {"model": "tiny:fast", "loops": {"min": 4}}):
            ask(made, **body, max_tokens=30, ignore_eos=True)
        ends_s = time.monotonic() + WAIT_S
        while metric(made, "alcoda_audit_tokens_total") < 60 and time.monotonic() < ends_s:
            time.sleep(0.01)
        assert metric(made, "alcoda_audit_tokens_total") == 60, "what has no exit has nothing to compare"
        differ = metric(made, "alcoda_audit_disagreements_total")
    test = lm.request("What", exit="fast").test
    expected = 0
    for exit in ({"exit": "fast"}, {"exit": "fast", "min_loops": 4}):
        expected += _differ(lm, exit)
    assert test is not None and 0 < differ == expected < 60


def _differ(lm: LM, exit: dict[str, Any]) -> int:
    """Of the same texts, by the Python API: the likeliest token at the exit, and at all loops."""
    import torch

    from alcoda.depth.replay import replay

    said = lm.generate("What", details=True, max_tokens=30, ignore_eot=True, **exit)
    ids = [*lm.prompt_ids("What"), *(token.token for token in said.tokens)][:-1]
    test = lm.request("What", **exit).test
    assert test is not None
    of_exit = lm.model.logits(replay(lm.model, torch.tensor([ids]), test).y_BTD)[0].argmax(-1)
    of_full = lm.logits(ids).argmax(-1)
    return int((of_exit != of_full)[len(lm.prompt_ids("What")) - 1 :].sum())
