"""openapi.json and docs/serving.md against what the server does: answers, events, methods, keys, metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from serving import ask, events, serving, web

from alcoda.engine.llm import LM
from alcoda.serve.schema import ANSWERS, CHUNKS
from alcoda.serve.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
KEY = {"Authorization": "Bearer k"}
SHAPES: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "n": 2},
    {"echo": True, "logprobs": 1},
    {"echo": True, "max_tokens": 0, "logprobs": 0},
    {"return_loops": True, "exit": "fast"},
    {"return_trajectory": True, "logprobs": 1, "exit": {"rule": "state", "threshold": 0.5}},
    {"stream_options": {"include_usage": True}, "stop": "e"},
]


@pytest.fixture(scope="module")
def locked(lm: LM) -> Iterator[Server]:
    with serving(lm, api_keys=["k"]) as made:
        yield made


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return web.get(server.url + "/openapi.json").json()


def check(document: dict[str, Any], path: str, value: Any, is_chunk: bool = False) -> None:
    """``value`` is what the document says of a path's answer (of its events, where it is a chunk)."""
    (CHUNKS if is_chunk else ANSWERS)[path].model_validate_json(json.dumps(value))
    operation = document["paths"][path]
    content = (operation.get("get") or operation["post"])["responses"]["200"]["content"]
    schema = content["text/event-stream" if is_chunk else "application/json"]["schema"]
    if is_chunk:
        schema = schema["properties"]["data"]["anyOf"][1]["contentSchema"]
    if find_spec("jsonschema") is not None:
        import jsonschema

        # References lead into the document: it is the root.
        jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def body(path: str, shape: dict[str, Any]) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"max_tokens": 6, "ignore_eos": True, **shape}
    shape = {name: value for name, value in shape.items() if name != "echo"} | {"max_tokens": 6}
    return {**HI, **shape, **({"logprobs": True, "top_logprobs": shape["logprobs"]} if "logprobs" in shape else {})}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_answers_and_events(server: Server, document: dict[str, Any], path: str, shape: dict[str, Any]) -> None:
    check(document, path, ask(server, path, **body(path, shape)))
    found = events(server, path, **body(path, shape))
    assert found
    for event in found:
        check(document, path, event, is_chunk=True)


def test_the_other_answers(server: Server, document: dict[str, Any]) -> None:
    for path in ("/health", "/ready", "/version", "/v1/models"):
        check(document, path, web.get(server.url + path).json())
    check(document, "/v1/models/{model}", web.get(server.url + "/v1/models/tiny:fast").json())
    check(document, "/tokenize", ask(server, "/tokenize", prompt="Grüße"))
    assert set(ANSWERS) | {"/metrics"} == set(document["paths"])


def test_an_answer_of_another_form_is_found(server: Server, document: dict[str, Any]) -> None:
    good = ask(server, return_loops=True)
    for wrong in ({**good, "more": 1}, {**good, "usage": None}, {**good, "choices": [{"index": "0"}]}):
        with pytest.raises(Exception, match=r"more|usage|choices"):
            check(document, COMPLETIONS, wrong)


def test_methods(locked: Server) -> None:
    document = web.get(locked.url + "/openapi.json", headers=KEY).json()
    ids = []
    for path, operations in document["paths"].items():
        there = {verb.upper() for verb in operations}
        ids += [one["operationId"] for one in operations.values()]
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            at = path.replace("{model}", "tiny")
            answer = web.request(method, locked.url + at, headers=KEY)
            assert (answer.status_code == 405) == (method not in there), (method, path)
            if answer.status_code == 405:
                assert set(answer.headers["allow"].split(", ")) == there, path
    assert len(set(ids)) == len(ids)


def test_keys_are_asked_for_where_the_document_says_so(lm: LM, locked: Server, document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["security"] == [] and "401" not in operation["responses"], "this server has no keys"
    of_locked = web.get(locked.url + "/openapi.json", headers=KEY).json()
    asks = set()
    for path, operations in of_locked["paths"].items():
        for verb, operation in operations.items():
            answer = web.request(verb, locked.url + path.replace("{model}", "tiny"))
            needs = operation["security"] == [{"key": []}]
            assert (answer.status_code == 401) == needs == ("401" in operation["responses"]), path
            asks |= {path} if needs else set()
    assert asks == set(of_locked["paths"]) - {"/health", "/ready"}
    assert of_locked["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}


def test_files_of_the_page_come_whole(server: Server) -> None:
    whole = web.get(server.url + "/page/page.js")
    assert whole.headers["accept-ranges"] == "none"
    for asked in ("bytes=0-4", "bytes=99999999-", "nonsense"):
        found = web.get(server.url + "/page/page.js", headers={"Range": asked})
        assert found.status_code == 200 and found.content == whole.content
        assert web.get(server.url + "/", headers={"Range": asked}).status_code == 200


def test_metrics_are_those_of_the_docs(server: Server) -> None:
    names = set(re.findall(r"^# TYPE (\w+)", web.get(server.url + "/metrics").text, re.M))
    exported = {name for name in names if not name.endswith("_created")}
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    table = page.split("**Metrics**")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`(alcoda_\w+)`", row.split(" | ")[0])]
    assert len(documented) == len(set(documented)), "each once"
    assert set(documented) == exported


def test_statuses_are_those_of_the_docs(document: dict[str, Any]) -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    table = page.split("### Errors")[1].split("\n## ")[0]
    documented = {code for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(", ")}
    there = {code for path in document["paths"].values() for one in path.values() for code in one["responses"]}
    assert documented - {"401", "405"} == there - {"200"}, "401 where there are keys; 405 is of what is not there"
