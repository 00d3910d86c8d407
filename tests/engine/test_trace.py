"""What a traced request tells of each token, from loop to loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engines import ATOL, HOUSE, LOOPS, alone, check_same, drive, engine_of, exits_of, small
from torch import tensor

from alcoda.depth.trajectory import trace
from alcoda.engine.request import Completion, Request, Step

PROMPT = (3, 41, 7)


def steps_of(completion: Completion) -> list[Step]:
    return [step for token in completion.tokens for step in token.steps]


@pytest.mark.parametrize("options", [{}, {"width": 8, "draft_loops": 1}, {"deterministic": True}], ids=str)
def test_of_each_token_a_step_a_loop(options: dict[str, Any]) -> None:
    """Which changes nothing of what comes, and is the same with drafts beside it."""
    model = small(**HOUSE["grt"])
    for test in (None, *exits_of(model, "state", "kl")):
        request = Request(PROMPT, 6, test=test, trace=True)
        engine = engine_of(model, **options)
        beside = replace(request, trace=False, prompt=(9,))
        (completion,), (other,) = drive(engine, [request, beside], every=2)
        check_same(engine, completion, alone(model, request))
        check_same(engine, other, alone(model, beside))
        assert not any(token.steps for token in other.tokens)
        assert completion.tokens[0].steps == (), "it is drawn from the prompt"
        for token in completion.tokens[1:]:
            assert len(token.steps) == token.loops
            assert token.steps[0].kl is None and all(step.kl is not None for step in token.steps[1:])
            assert token.steps[-1].top[0][0] == token.token, "drawn from the last step"
        (plain,) = drive(engine_of(model), [request])[0]
        for step, expected in zip(steps_of(completion), steps_of(plain), strict=True):
            assert abs(step.state_change - expected.state_change) < ATOL
            assert abs((step.kl or 0) - (expected.kl or 0)) < ATOL
            assert [token for token, _ in step.top] == [token for token, _ in expected.top]


def test_it_is_the_trajectory_of_the_text() -> None:
    """Of a model whose coda reads no keys, the same is found in one pass over the text."""
    model = small(**HOUSE["no_coda"])
    (completion,) = drive(engine_of(model), [Request(PROMPT, 6, trace=True)])[0]
    text_1T = tensor([[*PROMPT, *completion.ids]])
    found = trace(model, text_1T, LOOPS, text_1T.roll(-1, 1), ["state_change", "kl_previous", "argmax"])
    for i, token in enumerate(completion.tokens[1:]):
        at = len(PROMPT) + i
        for loop, step in enumerate(token.steps):
            assert abs(step.state_change - float(found["state_change"][0, at, loop])) < 1e-6
            assert step.top[0][0] == int(found["argmax"][0, at, loop])
            assert step.kl is None or abs(step.kl - float(found["kl_previous"][0, at, loop])) < 1e-6
