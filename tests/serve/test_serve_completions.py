"""Completions and chats through the openai client, against what the model says in this process."""

from __future__ import annotations

import json

import openai
import pytest
from serving import NAME, WAIT_S, Held, ask, serving, web

from alcoda.engine.llm import LM
from alcoda.engine.options import Options
from alcoda.serve.server import Server

ENGINE = Options(width=4, deterministic=True)


def alone(lm: LM, prompt: str, exit: str | None = "balanced", **how: object) -> str:
    return lm.generate(prompt, engine=ENGINE, exit=exit, **how)


def test_a_completion_is_the_models(client: openai.OpenAI, lm: LM) -> None:
    found = client.completions.create(model=NAME, prompt="What", max_tokens=12, temperature=0)
    assert found.choices[0].text == alone(lm, "What", max_tokens=12)
    assert (found.choices[0].finish_reason, found.object, found.model) == ("length", "text_completion", NAME)
    assert found.usage is not None and (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 12)


def test_a_seed_says_what_is_drawn(client: openai.OpenAI, lm: LM) -> None:
    how = {"model": NAME, "prompt": "What", "max_tokens": 12, "temperature": 1.3, "seed": 5}
    first, again = (client.completions.create(**how).choices[0].text for _ in range(2))  # pyrefly: ignore
    assert first == again == alone(lm, "What", max_tokens=12, temperature=1.3, seed=5)
    others = {client.completions.create(**{**how, "seed": None}).choices[0].text for _ in range(4)}  # pyrefly: ignore
    assert len(others) > 1, "without one each draws its own"


@pytest.mark.parametrize("penalty", [0.01, 100])
def test_a_repetition_penalty_at_its_bounds(server: Server, lm: LM, penalty: float) -> None:
    text = ask(server, max_tokens=12, repetition_penalty=penalty)["choices"][0]["text"]
    assert text == alone(lm, "What", max_tokens=12, repetition_penalty=penalty) != alone(lm, "What", max_tokens=12)


def test_n_of_many_prompts_in_order(client: openai.OpenAI, lm: LM) -> None:
    found = client.completions.create(model=NAME, prompt=["A", "Two"], n=3, max_tokens=6, temperature=1, seed=2)
    assert [one.index for one in found.choices] == list(range(6))
    expected = [alone(lm, prompt, n=3, max_tokens=6, temperature=1, seed=2) for prompt in ("A", "Two")]
    assert [one.text for one in found.choices] == [*expected[0], *expected[1]]
    assert found.usage is not None and (found.usage.prompt_tokens, found.usage.completion_tokens) == (2 + 4, 36)


def test_ids_are_read_as_they_are(client: openai.OpenAI, lm: LM) -> None:
    ids = list(lm.prompt_ids("What"))
    of_ids = client.completions.create(model=NAME, prompt=ids, max_tokens=9, temperature=0)
    of_lists = client.completions.create(model=NAME, prompt=[ids, ids[1:]], max_tokens=9, temperature=0)
    text = alone(lm, "What", max_tokens=9)
    assert of_ids.choices[0].text == of_lists.choices[0].text == text
    assert of_lists.choices[1].text != text, "without the token that begins a document"


def test_a_stop_string_over_token_borders(client: openai.OpenAI, lm: LM) -> None:
    text = alone(lm, "What", max_tokens=16)
    stop = text[5:8]  # each byte is a token
    assert len(stop.encode()) >= 3, "the stop string is of several tokens"
    found = client.completions.create(model=NAME, prompt="What", max_tokens=16, temperature=0, stop=["never", stop])
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    parts = client.completions.create(model=NAME, prompt="What", max_tokens=16, temperature=0, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in parts) == found.choices[0].text


def test_the_end_of_a_text(lm: LM, server: Server) -> None:
    bias = {str(lm.tokenizer.eot): 100}
    found = ask(server, logit_bias=bias)
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("", "stop")
    assert found["usage"]["completion_tokens"] == 1, "the token that ends it was drawn too"
    assert found["usage"]["completion_tokens_details"]["loops"] >= 1
    going_on = ask(server, logit_bias=bias, ignore_eos=True)
    assert (going_on["choices"][0]["finish_reason"], going_on["usage"]["completion_tokens"]) == ("length", 8)


def test_a_chat(client: openai.OpenAI, lm: LM) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    found = client.chat.completions.create(model=NAME, messages=messages, max_tokens=7, temperature=0)  # pyrefly: ignore
    said = alone(lm, "System: Be brief.\nUser: Hi\nAssistant:", max_tokens=7)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", said)
    assert found.object == "chat.completion" and found.usage is not None and found.usage.completion_tokens == 7


def test_what_the_template_puts_after_an_answer_ends_it(lm: LM) -> None:
    body = {"logit_bias": {"65": 100}, "max_tokens": 3}
    chat = {"messages": [{"role": "user", "content": "Hi"}], **body}
    with serving(lm) as made:
        made.worker.chat.stop_ids = frozenset({65})
        found = ask(made, "/v1/chat/completions", **chat)["choices"][0]
        assert (found["message"]["content"], found["finish_reason"]) == ("", "stop")
        for answer in (ask(made, "/v1/chat/completions", **chat, ignore_eos=True), ask(made, **body)):
            assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "length"


def test_a_chat_goes_on_to_the_end_of_the_context(server: Server, lm: LM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    found = ask(server, "/v1/chat/completions", messages=messages, temperature=0, ignore_eos=True)
    assert found["usage"]["total_tokens"] == lm.model.config.seq_len
    fewer = ask(server, "/v1/chat/completions", messages=messages, max_tokens=9, max_completion_tokens=3)
    assert fewer["usage"]["completion_tokens"] <= 3, "max_completion_tokens goes first"


def test_a_chat_in_events(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    how = {"model": NAME, "messages": messages, "max_tokens": 7, "temperature": 0}
    whole = client.chat.completions.create(**how)  # pyrefly: ignore
    parts = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))  # pyrefly: ignore
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == (
        whole.choices[0].message.content
    )
    assert len({(part.id, part.created, part.model, part.object) for part in parts}) == 1
    assert [part.choices[0].finish_reason for part in parts if part.choices].count("length") == 1
    assert parts[-1].choices == [] and parts[-1].usage == whole.usage
    assert all(part.usage is None for part in parts[:-1])


def test_models(client: openai.OpenAI, lm: LM) -> None:
    found = {one.id: one for one in client.models.list()}
    assert list(found) == [NAME, f"{NAME}:fast", f"{NAME}:balanced", f"{NAME}:exact"]
    more = client.models.retrieve(f"{NAME}:fast").model_dump()["alcoda"]
    assert more["tier"] == "fast" and more["context"] == lm.model.config.seq_len and more["is_chat"] is False
    assert found[NAME].model_dump()["alcoda"]["tier"] == "balanced"
    with pytest.raises(openai.NotFoundError, match="no model 'tiny:slow'; did you mean"):
        client.models.retrieve(f"{NAME}:slow")


def test_tokenize(server: Server, lm: LM) -> None:
    found = ask(server, "/tokenize", prompt="Añ")
    assert found["tokens"] == list(lm.prompt_ids("Añ")) and found["count"] == 4
    assert ask(server, "/tokenize", prompt="Añ", add_special_tokens=False)["count"] == 3


def test_a_text_in_events_begins_before_it_ends(server: Server) -> None:
    with Held(server, launches=12) as held:
        body = {"prompt": "What", "max_tokens": 20, "ignore_eos": True, "temperature": 0, "stream": True}
        with web.stream("POST", server.url + "/v1/completions", json=body, timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            held.goes.set()
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert first["choices"][0]["text"] and first["choices"][0]["finish_reason"] is None
    assert [one["choices"][0]["finish_reason"] for one in rest].count("length") == 1
