"""openapi.json: every body, and every status that can occur."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from alcoda.serve.protocol import ChatBody, CompletionBody, TokenizeBody

REF = "#/components/schemas/{model}"
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
}
MEANINGS = {
    400: "The request says what cannot be; the message names the field.",
    401: "No API key of this server.",
    404: "There is no such model, or no such path.",
    405: "The path does not take this method.",
    408: "It took longer than its deadline.",
    413: "The body is too large.",
    429: "Too many wait already: ask again later (Retry-After).",
    500: "The server failed.",
    503: "Not ready: the model is being loaded, the server ends, or the engine does not go on.",
}
OF_PATH: dict[str, tuple[int, ...]] = {
    "/health": (503,),
    "/ready": (503,),
    "/metrics": (401,),
    "/version": (401,),
    "/v1/models": (401, 503),
    "/v1/models/{model}": (401, 404, 503),
    "/v1/completions": (400, 401, 404, 408, 413, 429, 500, 503),
    "/v1/chat/completions": (400, 401, 404, 408, 413, 429, 500, 503),
    "/tokenize": (400, 401, 404, 408, 413, 503),
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


NAMED = {"ge": "minimum", "le": "maximum"}
"""What pydantic calls bounds of a number that is looked at before it is one, and what JSON Schema does."""


def _named(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {NAMED.get(key, key): _named(value) for key, value in schema.items()}
    return [_named(one) for one in schema] if isinstance(schema, list) else schema


def documented(app: FastAPI, make: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The schema of an app."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    found = make(title=app.title, version=app.version, description="docs/serving.md", routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas.clear()
    schemas["Error"] = ERROR
    for path, methods in found["paths"].items():
        for method in methods.values():
            method["responses"] = _responses(path)
            if path in BODIES:
                schema = _named(BODIES[path].model_json_schema(ref_template=REF))
                schemas |= schema.pop("$defs", {})
                schemas[BODIES[path].__name__] = schema
                ref = {"$ref": REF.format(model=BODIES[path].__name__)}
                method["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref}}}
    found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    app.openapi_schema = found
    return found


def _responses(path: str) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    done: dict[str, Any] = {kind: {}}
    if path in ("/v1/completions", "/v1/chat/completions"):
        done["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    return {"200": {"description": "Done.", "content": done}} | {
        str(status): {"description": MEANINGS[status], "content": error} for status in OF_PATH.get(path, ())
    }
