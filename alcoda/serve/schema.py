"""openapi.json: every body, every answer, and every status that can occur."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from alcoda.serve import objects
from alcoda.serve.protocol import JSON, ChatBody, CompletionBody, TokenizeBody

REF = "#/components/schemas/{model}"
EVENTS = "text/event-stream"
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
}
ANSWERS: dict[str, type[BaseModel]] = {
    "/health": objects.Health,
    "/ready": objects.Ready,
    "/version": objects.Version,
    "/v1/models": objects.Models,
    "/v1/models/{model}": objects.Model,
    "/v1/completions": objects.Completion,
    "/v1/chat/completions": objects.ChatCompletion,
    "/tokenize": objects.Tokens,
}
CHUNKS: dict[str, type[BaseModel]] = {
    "/v1/completions": objects.CompletionChunk,
    "/v1/chat/completions": objects.ChatCompletionChunk,
}
"""Of streams: what each event has after ``data:``."""
MEANINGS = {
    400: "The request says what cannot be; the message names the field, or the header that is there twice.",
    401: "No API key of this server.",
    403: "A page of an origin that may not ask, or a Host that is not this server.",
    404: "There is no such model, or no such path.",
    408: "It took longer than its deadline.",
    413: "The body is too large.",
    415: "The body is not said to be application/json.",
    429: "Too many wait already: ask again later (Retry-After).",
    500: "The server failed.",
    503: "Not ready: the model is being loaded, the server ends, or the engine does not go on.",
}
STOPPED = "The model could not be loaded, or the engine has stopped: the process is to be started anew."
OF_PATH: dict[str, tuple[int, ...]] = {
    "/health": (400, 403, 503),
    "/ready": (400, 403, 503),
    "/metrics": (400, 401, 403),
    "/version": (400, 401, 403),
    "/v1/models": (400, 401, 403, 503),
    "/v1/models/{model}": (400, 401, 403, 404, 503),
    "/v1/completions": (400, 401, 403, 404, 408, 413, 415, 429, 500, 503),
    "/v1/chat/completions": (400, 401, 403, 404, 408, 413, 415, 429, 500, 503),
    "/tokenize": (400, 401, 403, 404, 408, 413, 415, 500, 503),
}
HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    429: {"Retry-After": {"required": True, "description": "Seconds.", "schema": {"type": "integer"}}},
    503: {"Retry-After": {"description": "Seconds, where it may pass.", "schema": {"type": "integer"}}},
}
TEXT = """docs/serving.md says what the fields mean.

A path that is not here answers 404, a method that a path does not name 405 (the header Allow has those that it does),
both with an Error. Bytes that are no HTTP are answered 400 in plain text and the connection is closed."""
NAMED = {"ge": "minimum", "le": "maximum"}
"""What pydantic calls bounds of a number that is looked at before it is one, and what JSON Schema does."""


def _named(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {NAMED.get(key, key): _named(value) for key, value in schema.items()}
    return [_named(one) for one in schema] if isinstance(schema, list) else schema


def documented(app: FastAPI, make: Callable[..., dict[str, Any]], needs_key: Callable[[str], bool]) -> dict[str, Any]:
    """The schema of an app.

    Args:
        needs_key: whether a path is answered to those only who have a key.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Duplicate Operation ID")  # of GET and HEAD; they get their own below
        found = make(title=app.title, version=app.version, description=TEXT, routes=app.routes)
    for path, methods in found["paths"].items():
        has_key = needs_key(path)
        for verb, method in methods.items():
            method["operationId"] = "_".join([verb, *re.findall(r"\w+", path)])
            method["responses"] = _responses(path, verb, has_key)
            method["security"] = [{"key": []}] if has_key else []
            if path in BODIES:
                method["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(BODIES[path])}}}
    models = [*BODIES.values(), *ANSWERS.values(), *CHUNKS.values(), objects.Error]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    found["components"] = {"schemas": _named(schemas["$defs"]), "securitySchemes": keys}
    app.openapi_schema = found
    return found


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REF.format(model=model.__name__)}


def _responses(path: str, verb: str, has_key: bool) -> dict[str, Any]:
    done: dict[str, Any] = {JSON: {"schema": _ref(ANSWERS[path])}} if path in ANSWERS else {}
    if path == "/metrics":
        done = {"text/plain": {"schema": {"type": "string"}}}
    if path in CHUNKS:
        done[EVENTS] = {"schema": _event(CHUNKS[path])}
    found = {"200": _response("Done.", done, verb)}
    for status in OF_PATH[path]:
        if status != 401 or has_key:
            text = STOPPED if (path, status) == ("/health", 503) else MEANINGS[status]
            found[str(status)] = _response(text, {JSON: {"schema": _ref(objects.Error)}}, verb, HEADERS.get(status))
    return found


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One event of a stream: before OpenAPI 3.2 the schema of a stream is that of each."""
    found = {"contentMediaType": JSON, "contentSchema": {"anyOf": [_ref(chunk), _ref(objects.Error)]}}
    return {
        "description": "With stream: server-sent events. An Error is the last one; else [DONE] is.",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, found]}},
    }


def _response(
    text: str, content: Mapping[str, Any], verb: str, headers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    body = {} if verb == "head" else {"content": content}
    return {"description": text, **({} if headers is None else {"headers": headers}), **body}
