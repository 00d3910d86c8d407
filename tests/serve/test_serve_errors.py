"""Whatever is asked wrongly: one form of answer, the field, and the way out."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from serving import NAME, WAIT_S, ask, web

from alcoda.serve.protocol import ChatBody, CompletionBody
from alcoda.serve.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IS_JSON = {"Content-Type": "application/json"}


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The envelope, whole."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (name,) = answer.json()
    assert name == "error"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    return error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", 3, "a string, a list of strings"),
        ("prompt", [], "none of them an empty"),
        ("prompt", [[]], "none of them an empty"),
        ("prompt", ["a", 1], "a string, a list of strings"),
        ("prompt", [True], "a string, a list of strings"),
        ("prompt", [-1], "a string, a list of strings"),
        ("prompt", [5, 7, -1], "and number 3 is -1 (got a list of 3)"),
        ("prompt", [[5], [7, 2.5]], "and number 2 of prompt 2 is 2.5"),
        ("prompt", [[5], [2.5]], "and number 1 of prompt 2 is 2.5"),
        ("prompt", [1 << 63], f"ids are whole numbers from 0 to {(1 << 63) - 1}, and number 1 is 9223372036854775808"),
        ("prompt", [5, True], "and number 2 is true"),
        ("prompt", [99999], "the token 99999"),
        ("prompt", "\ud800", "surrogate"),
        ("max_tokens", -1, "greater than or equal to 0"),
        ("max_tokens", 0, "without echo"),
        ("max_tokens", "5", "valid integer"),
        ("max_tokens", 2.5, "valid integer"),
        ("max_tokens", True, "valid integer"),
        ("max_tokens", 10**15, "lower max_tokens to 91 or less"),
        ("max_tokens", 10**30, "less than or equal to 9223372036854775807"),
        ("max_tokens", 1e308, "less than or equal to 9223372036854775807 (got 1e+308)"),
        ("max_completion_tokens", 92, "lower max_completion_tokens to 91 or less"),
        ("max_completion_tokens", 0, "max_completion_tokens=0: without echo"),
        ("max_completion_tokens", "5", 'valid integer (got "5")'),
        ("model", "m" * 5000, "at most 256 characters"),
        ("model", 5, "valid string (got 5)"),
        ("stream_options", 5, "an object (got 5)"),
        ("stream_options", {"include_usage": 1}, "valid boolean"),
        ("top_k", 10**400, "less than or equal to"),
        ("prompt", [10**400], "a list of token ids"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", "hot", "valid number"),
        ("top_p", 0, "greater than 0"),
        ("top_k", 0, "greater than or equal to 1"),
        ("min_p", 1, "less than 1"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 17, "at most"),
        ("stop", "", "1 to 1,000 characters"),
        ("stop", "x" * 1001, "1 to 1,000 characters"),
        ("stop", list("abcde"), "at most 4"),
        ("stop", [""], "1 to 1,000 characters"),
        ("seed", 1 << 70, "less than or equal to"),
        ("stream", "yes", "valid boolean"),
        ("logprobs", 21, "less than or equal to 20"),
        ("presence_penalty", 3, "less than or equal to 2"),
        ("repetition_penalty", 5e-324, "greater than or equal to 0.01"),
        ("repetition_penalty", 1e300, "less than or equal to 100"),
        ("logit_bias", {"x": 1}, "match pattern"),
        ("logit_bias", {"5": 101}, "less than or equal to 100"),
        ("logit_bias", {"99999": 1}, "no token 99999"),
        ("loops", 0, "a whole number from 1"),
        ("loops", {"least": 1}, "loops.least: there is no such field"),
        ("loops", {"min": 3, "max": 2}, "swap them"),
        ("loops", {"min": 9}, "4 loops run here at most"),
        ("loops", 9, "runs 4 at most"),
        ("loops", 1e308, "a whole number from 1"),
        ("loops", {"min": 0}, "loops.min: Input should be greater than or equal to 1 (got 0)"),
        ("loops", {"max": True}, "loops.max: Input should be a valid integer"),
        ("loops", {"max": 1e308}, "loops.max: Input should be less than or equal to"),
        ("exit", "fats", "did you mean 'fast'"),
        ("exit", {"rule": "trace", "threshold": 1}, "unknown rule 'trace'"),
        ("exit", {"rule": "gate", "threshold": 0.5}, "no exit gate"),
        ("exit", {"rule": "state", "threshold": [0.1]}, "1 numbers and 4 loops"),
        ("exit", {"rule": "argmax_stable", "threshold": 1.5}, "whole number of loops"),
        ("exit", {"rule": "argmax_stable", "threshold": 1e308}, "exit.threshold=1e+308: argmax_stable takes a whole"),
        ("exit", {"rule": "fixed", "threshold": 0}, "exit.threshold=0: fixed takes a whole number of loops, from 1 to"),
        ("exit", {"rule": "fixed", "threshold": 9}, "exit.threshold=9: fixed takes a whole number of loops, from 1 to"),
        ("exit", {"rule": "fixed", "threshold": 5}, "from 1 to 4"),
        ("exit", {"rule": "fixed", "threshold": [1, 2]}, "exit.threshold=a list of 2: fixed takes"),
        ("exit", {"rule": "state", "threshold": -1}, "exit.threshold: a number of at least 0, or a list"),
        ("exit", {"rule": "state", "threshold": [None] * 4}, "exit.threshold: a number of at least 0, or a list"),
        ("exit", {"rule": "state", "treshold": 1}, "exit.treshold: there is no such field; did you mean 'threshold'"),
        ("exit", {"rule": 5}, "exit.rule: Input should be a valid string (got 5)"),
        ("exit", {}, "exit.rule: it is needed"),
        ("exit", 5, "the name of a tier"),
        ("timeout", 0, "greater than 0"),
        ("best_of", 3, "at most n=1"),
        ("best_of", 2.0, "at most n=1"),
        ("best_of", 1e308, "less than or equal to"),
        ("best_of", "2", "valid integer"),
        ("suffix", "end", "does not support"),
        ("tools", [{"type": "function"}], "does not support"),
    ],
)
def test_a_field_that_cannot_be(server: Server, field: str, value: object, message: str) -> None:
    body = json.dumps({"prompt": "What", field: value})
    error = refused(web.post(server.url + COMPLETIONS, content=body, headers=IS_JSON, timeout=WAIT_S), 400)
    assert message in error["message"] and len(error["message"]) < 400, error
    assert error["code"] and error["param"].split(".")[0] == field, error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("messages", [], "at least 1 item"),
        ("messages", [{"role": "owner", "content": "a"}], "messages.0.role"),
        ("messages", [{"role": "user"}], "messages.0.content: it is needed"),
        ("messages", [{"role": "user", "content": []}], "messages.0"),
        ("messages", [{"content": "a"}], "messages.0.role: it is needed"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "tools are not supported"),
        ("messages", [{"role": "user", "content": "x" * 200}], "context holds 96"),
        ("messages", [{"role": "user", "content": "x" * 100}] * 100, "a text of 10099 characters"),
        ("messages", [5], "messages.0: Input should be an object (got 5)"),
        ("top_logprobs", 2, "set logprobs to true"),
        ("max_completion_tokens", 5000, "or lower max_completion_tokens to"),
        ("best_of", 2, "at most n=1"),
        ("response_format", {"type": "json_object"}, "does not support"),
        ("functions", [{}], "does not support"),
        ("tool_choice", "required", "does not support"),
        ("audio", {"voice": "x"}, "does not support"),
        ("modalities", ["text", "audio"], "does not support"),
    ],
)
def test_a_field_of_a_chat_that_cannot_be(server: Server, field: str, value: object, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], field: value}
    error = refused(web.post(server.url + CHAT, json=body, timeout=WAIT_S), 400)
    assert message in error["message"], error
    assert str(error["param"]).split(".")[0] == field, error


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"]
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_no_json(server: Server, path: str, body: bytes) -> None:
    answer = web.post(server.url + path, content=body, headers=IS_JSON, timeout=WAIT_S)
    error = refused(answer, 400)
    assert error["code"] == "invalid_json" and "sys." not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/page/../../pyproject.toml", 404, "not_found"),
        ("GET", "/page/%2e%2e/__init__.py", 404, "not_found"),
        ("OPTIONS", COMPLETIONS, 405, "method_not_allowed"),
    ],
)
def test_paths_and_methods(server: Server, method: str, path: str, status: int, code: str) -> None:
    assert refused(web.request(method, server.url + path), status)["code"] == code


def test_a_model_that_there_is_not(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="gpt-4", prompt="a")
    assert found.value.code == "model_not_found" and found.value.param == "model"


def test_more_than_the_context(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model=NAME, prompt="What", max_tokens=92)
    assert found.value.code == "context_length_exceeded"
    assert ask(server, max_tokens=91, ignore_eos=True)["usage"]["total_tokens"] == 96, "what fits is taken"


def test_more_than_the_body_may_have(server: Server) -> None:
    most = server.settings.max_body_bytes
    body = b'{"prompt": "' + b"a" * most + b'"}'
    assert (
        refused(web.post(server.url + COMPLETIONS, content=body, headers=IS_JSON, timeout=WAIT_S), 413)["code"]
        == "request_too_large"
    )

    def parts() -> Any:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    try:
        answer = web.post(server.url + COMPLETIONS, content=parts(), headers=IS_JSON, timeout=WAIT_S)
    except httpx.WriteError:
        return  # it was told while it still sent
    refused(answer, 413)


def test_null_is_what_was_not_sent(server: Server) -> None:
    plain = ask(server)["choices"]
    fields = set(CompletionBody.model_fields) - {"prompt", "max_tokens", "temperature"}
    assert len(fields) > 20
    assert ask(server, **dict.fromkeys(fields))["choices"] == plain
    assert ask(server, stream_options={"include_usage": None})["choices"] == plain
    assert ask(server, loops={"min": None, "max": None})["choices"] == plain
    message = {"role": "user", "content": "Hi", "name": None}
    ask(server, CHAT, messages=[message], **dict.fromkeys(set(ChatBody.model_fields) - {"messages"}))
    told = ask(server, "/tokenize", prompt="Hi")
    assert ask(server, "/tokenize", prompt="Hi", add_special_tokens=None, model=None) == told
    assert ask(server, "/tokenize", prompt="Hi", add_special_tokens=False)["tokens"] == told["tokens"][1:]


def test_max_completion_tokens_is_max_tokens(server: Server) -> None:
    plain = ask(server, max_tokens=3, ignore_eos=True)
    assert plain["usage"]["completion_tokens"] == 3
    for more in ({"max_tokens": None}, {"max_tokens": 8}):
        assert ask(server, **more, max_completion_tokens=3, ignore_eos=True)["choices"] == plain["choices"]
    error = refused(web.post(server.url + COMPLETIONS, json={"prompt": "W" * 90}), 400)
    assert "set max_tokens to 5 or less" in error["message"]
    assert error["param"] == "prompt", "a field that was not sent is not the fault"


def test_what_does_no_harm_is_ignored(server: Server) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "unheard_of": 1}
    asks_nothing = {
        "tools": None,
        "suffix": None,
        "response_format": {"type": "text"},
        "best_of": 1,
        "tool_choice": "none",
    }
    plain = ask(server)["choices"]
    assert ask(server, **harmless, **asks_nothing)["choices"] == plain
    assert ask(server, max_tokens=8.0)["choices"] == plain, "8.0 is a whole number in JSON"


def test_a_failure_of_the_server_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr("alcoda.serve.answers.make_plan", broken)
    error = refused(web.post(server.url + COMPLETIONS, json={"prompt": "a"}), 500)
    assert error["code"] == "internal" and "ZeroDivisionError" in error["message"]
    monkeypatch.undo()
    ask(server)


def test_the_schema_names_every_status(server: Server) -> None:
    schema = web.get(server.url + "/openapi.json").json()
    assert set(schema["paths"]["/v1/completions"]["post"]["responses"]) == {
        "200", "400", "403", "404", "408", "413", "415", "429", "500", "503"
    }  # fmt: skip
    text = json.dumps(schema)
    names = {name.split('"')[0] for name in text.split("#/components/schemas/")[1:]}
    assert names <= set(schema["components"]["schemas"])
    assert "422" not in text
    # Bounds are in the words of JSON Schema, those of whole numbers too.
    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    for name, bounds in (("logprobs", {"minimum": 0, "maximum": 20}), ("top_k", {"minimum": 1})):
        (number,) = (one for one in fields[name]["anyOf"] if one["type"] == "integer")
        assert {key: value for key, value in number.items() if key != "type"} == bounds
    assert '"ge"' not in text and '"le"' not in text


def test_a_rule_without_its_threshold(server: Server) -> None:
    for exit, says in (
        ({"rule": "state"}, "exit.threshold: state needs a number, or a list with one for each loop"),
        ("state:0.05", 'a rule is {"rule": "state", "threshold": 0.05}'),
    ):
        answer = web.post(server.url + COMPLETIONS, json={"prompt": "What", "exit": exit}, timeout=WAIT_S)
        assert says in refused(answer, 400)["message"]


def test_a_text_that_cannot_fit_is_not_even_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a b " * 100_000
    monkeypatch.setattr("alcoda.data.tokenizer.Tokenizer.encode_batch", lambda *_: pytest.fail("it was encoded"))
    for path, body in ((COMPLETIONS, {"prompt": long}), (CHAT, {"messages": [{"role": "user", "content": long}]})):
        answer = web.post(server.url + path, json=body, timeout=WAIT_S)
        assert refused(answer, 400)["code"] == "context_length_exceeded"
    assert refused(web.post(server.url + "/tokenize", json={"prompt": long}, timeout=WAIT_S), 400)["param"] == "prompt"


def test_a_body_that_does_not_come(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alcoda.serve.gate.BODY_S", 0.05)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        said = b""
        while part := connection.recv(4096):
            said += part
    assert said.startswith(b"HTTP/1.1 408") and b"body_timeout" in said
