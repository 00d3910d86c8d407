"""What the benchmarks of the server are made of: known answers are the engine's, and a fault is seen."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from serve_cases import Known
from serve_process import read_metrics
from serve_soak import BAD, KINDS, Soak, Tally, busy, quantiles

METRICS = """# HELP alcoda_running Completions that have a place.
# TYPE alcoda_running gauge
alcoda_running 2.0
alcoda_waiting 0.0
alcoda_cache_tokens_used 17.0
alcoda_cache_tokens 512.0
alcoda_requests_total{endpoint="completions",code="200"} 9.0
"""
ONE = Known({"model": "m", "prompt": "a", "max_tokens": 2}, "xyz", (1, 2), (3, 4), "length", 1)
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "completion_tokens_details": {"loops": 7}}


def test_what_is_not_free_is_found() -> None:
    found = read_metrics(METRICS)
    assert found['alcoda_requests_total{endpoint="completions",code="200"}'] == 9
    assert busy(found) == {"alcoda_running": 2, "alcoda_cache_tokens_used": 17}
    assert busy(found | {"alcoda_running": 0, "alcoda_cache_tokens_used": 0}) == {}


def stream(**changed: Any) -> str:
    """A good stream, but for what is changed."""
    chunk = {
        "id": "c1",
        "choices": [{"text": "xyz", "finish_reason": None, "alcoda": {"tokens": [{"loops": 3}, {"loops": 4}]}}],
    }
    chunk["choices"][0]["text"] = changed.get("text", "xyz")
    last = {"id": changed.get("id", "c1"), "choices": [{"text": "", "finish_reason": "length"}]}
    end = {"id": "c1", "choices": [], "usage": changed.get("usage", USAGE)}
    events = [json.dumps(one) for one in (chunk, last, end)] + ["[DONE]"][: changed.get("done", 1)]
    return "".join(f"data: {event}\n\n" for event in events)


def soaked(act: str, answer: httpx.Response, **more: Any) -> Tally:
    """What one request's answer is judged as."""

    async def run() -> Tally:
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)) as http:
            soak = Soak("http://s", [ONE], {"/v1/completions": {200, 400, 429}}, 0.0, http)
            await getattr(soak, act)(random.Random(0), act, **more)
        return soak.tally

    return asyncio.run(run())


def test_a_good_stream_is_good() -> None:
    tally = soaked("stream", httpx.Response(200, text=stream()))
    assert tally.wrong == [] and tally.answered["stream"] == 1 and tally.ids == {"c1"}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"text": "other"}, "'other', not 'xyz'"),
        ({"id": "c2"}, "2 ids in one stream"),
        ({"usage": {**USAGE, "completion_tokens": 3}}, "usage"),
        ({"done": 0}, "the end is lost"),
    ],
)
def test_a_bad_stream_is_seen(changed: dict[str, Any], told: str) -> None:
    assert any(told in why for why in soaked("stream", httpx.Response(200, text=stream(**changed))).wrong)


def envelope(**more: Any) -> dict[str, Any]:
    return {"error": {"message": "m", "type": "t", "param": None, "code": None, **more}}


def test_refusals() -> None:
    fine = soaked("stream", httpx.Response(429, json=envelope(), headers={"Retry-After": "1"}))
    assert fine.wrong == [] and fine.statuses == Counter({"429": 1})
    assert any("Retry-After" in why for why in soaked("stream", httpx.Response(429, json=envelope())).wrong)
    wrong = soaked("stream", httpx.Response(500, json=envelope())).wrong
    assert any("answers 500" in why for why in wrong)
    assert any("envelope" in why for why in soaked("bad", httpx.Response(400, json={"error": {"message": "m"}})).wrong)


def test_a_client_that_leaves_holds_the_beginning_against_the_answer() -> None:
    def left(text: str) -> list[str]:
        answer = httpx.Response(200, text=stream(text=text))
        return soaked("_stream", answer, one=ONE, leave_after=0, more={}).wrong

    assert left("xyz") == []
    assert any("'y', not the beginning of 'xyz'" in why for why in left("y"))


def test_every_kind_has_a_client() -> None:
    assert all(hasattr(Soak, kind.replace(" ", "_")) for kind in KINDS)
    assert all(codes for _, _, codes in BAD)
    assert quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0}
