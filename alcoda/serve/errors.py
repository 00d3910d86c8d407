"""Every error that a client is told of, in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ApiError(Exception):
    """What a request is answered with when it is not done.

    Args:
        param: the field that was wrong.
        code: for programs: ``model_not_found``, ``context_length_exceeded``, ...
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        code = "invalid_value" if code is None and status == 400 else code
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """The envelope."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body(), self.status, self.headers)


def to_json(value: Any) -> bytes:
    """Half a surrogate pair, which an error may quote, is written as an escape: UTF-8 has no other form for it."""
    return _ENCODER.encode(value).encode(errors="backslashreplace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``value`` as JSON."""
    return Response(to_json(value), status, headers, "application/json")
