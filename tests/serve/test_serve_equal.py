"""What is asked in other ways is the same: in events or whole, alone or among others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from serving import WAIT_S, ask, events

from alcoda.engine.llm import LM
from alcoda.serve.server import Server

CHAT = "/v1/chat/completions"
USAGE = {"stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.2, "seed": 3, "max_tokens": 20, "logprobs": 3},
    "n": {"n": 3, "temperature": 1, "seed": 1, "logprobs": 0, "return_loops": True},
    "prompts": {"prompt": ["A", "What is", "é"], "n": 2, "temperature": 1, "seed": 9},
    "echo": {"echo": True, "logprobs": 2, "max_tokens": 5},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "echo without numbers": {"echo": True},
    "trajectory": {"return_trajectory": True, "model": "tiny:fast"},
    "bytes": {"temperature": 2.0, "seed": 8, "max_tokens": 60, "logprobs": 1, "return_loops": True, "ignore_eos": True},
}


def joined(parts: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any, Any]:
    """The choices of a stream as a whole answer has them; its usage, and what it says of depth."""
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        for choice in part["choices"]:
            one = choices.setdefault(
                choice["index"],
                {"index": choice["index"], "text": "", "finish_reason": None, "logprobs": None, "tokens": []},
            )
            one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            assert one["finish_reason"] is None, "nothing comes after the end"
            one["finish_reason"] = choice["finish_reason"]
            one["tokens"] += choice.get("alcoda", {}).get("tokens", [])
            if choice["logprobs"] is not None:
                new = {name: values for name, values in choice["logprobs"].items() if values is not None}
                kept = one["logprobs"] or {}
                one["logprobs"] = {name: [*kept.get(name, ()), *values] for name, values in new.items()}
    last = parts[-1]
    return [choices[i] for i in sorted(choices)], last["usage"], last["alcoda"]


def whole(answer: dict[str, Any]) -> tuple[list[dict[str, Any]], Any, Any]:
    """The same of a whole answer."""
    choices = [
        {
            "index": one["index"],
            "text": one["text"] if "text" in one else one["message"]["content"],
            "finish_reason": one["finish_reason"],
            "logprobs": one["logprobs"] and {k: v for k, v in one["logprobs"].items() if v is not None},
            "tokens": one.get("alcoda", {}).get("tokens", []),
        }
        for one in answer["choices"]
    ]
    return choices, answer["usage"], answer["alcoda"]


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_is_the_whole_answer(server: Server, name: str) -> None:
    body = BODIES[name]
    assert joined(events(server, **body, **USAGE)) == whole(ask(server, **body))


def test_a_stream_of_a_stopped_text_is_the_whole_answer(server: Server) -> None:
    text = ask(server, max_tokens=40, logprobs=1)["choices"][0]["text"]
    for begin, end in ((3, 4), (7, 10), (15, 17)):
        body = {"max_tokens": 40, "logprobs": 2, "stop": text[begin:end], "return_loops": True}
        found = whole(ask(server, **body))
        assert joined(events(server, **body, **USAGE)) == found
        (choice,), usage, _ = found
        cut = text.index(text[begin:end])
        assert choice["text"] == text[:cut] == "".join(choice["logprobs"]["tokens"])
        assert "".join(one["text"] for one in choice["tokens"]) == choice["text"]
        assert usage["completion_tokens"] > len(choice["tokens"]), "those of the stop string were drawn too"


def test_a_chat_in_events_is_the_whole_answer(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 1.5, "seed": 4}
    body |= {"logprobs": True, "top_logprobs": 2, "n": 2, "return_loops": True, "ignore_eos": True}
    assert joined(events(server, CHAT, **body, **USAGE)) == whole(ask(server, CHAT, **body))


def test_texts_of_tokens_are_the_text(server: Server, lm: LM) -> None:
    found = ask(server, **BODIES["bytes"])["choices"][0]
    assert "�" in found["text"], "characters were broken off"
    assert "".join(one["text"] for one in found["alcoda"]["tokens"]) == found["text"]
    assert "".join(found["logprobs"]["tokens"]) == found["text"]
    for text, offset in zip(found["logprobs"]["tokens"], found["logprobs"]["text_offset"], strict=True):
        assert found["text"][offset : offset + len(text)] == text


async def together(server: Server, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json() for answer in answers]


def test_a_seeded_request_is_itself_among_32_others(server: Server) -> None:
    mine = {"prompt": "What", "max_tokens": 24, "temperature": 1.0, "seed": 11, "logprobs": 2, "return_loops": True}
    alone = whole(ask(server, **mine))
    exits: list[dict[str, Any]] = [{}, {"model": "tiny:fast"}, {"loops": 2}, {"exit": "none"}]
    others = [
        {"prompt": "x" * (1 + i), "max_tokens": 1 + i % 20, "temperature": 1, "seed": i, **exits[i % 4]}
        for i in range(32)
    ]
    found = asyncio.run(together(server, [*others[:16], mine, *others[16:]]))
    assert whole(found[16]) == alone
    assert len({one["id"] for one in found}) == 33
