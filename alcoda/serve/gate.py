"""What every request passes before the app: it is counted, its key is looked at, its body is bounded."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alcoda.serve.errors import ApiError
from alcoda.serve.origin import Origins
from alcoda.serve.worker import Worker

BODY_S = 30.0
"""In which a body is to come, where the deadline of requests is no shorter."""
LINGER = 8
"""Times the largest body are read and thrown away before one that is larger is refused: who still writes when the
connection closes never reads why."""
OPEN = ("/health", "/ready", "/")
"""Paths that need no key."""
ENDPOINTS = (
    *OPEN,
    "/metrics",
    "/version",
    "/tokenize",
    "/openapi.json",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
)


class Gate:
    """The outermost layer.

    Args:
        keys: that are let in, with the tier of each; none: everybody is.
        open_metrics: whether /metrics needs none.
        worker: which knows whether the server ends.
        origins: which pages may ask.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Mapping[str, str | None],
        open_metrics: bool,
        worker: Worker,
        origins: Origins,
    ) -> None:
        self.app, self.worker, self.origins = app, worker, origins
        self.max_body_bytes = worker.settings.max_body_bytes
        self.keys = [(_digest(key), tier) for key, tier in keys.items()]
        self.needs_key = needs_key(keys, open_metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self.origins.check(scope["headers"])
            scope.setdefault("state", {})["tier"] = self._tier(scope)
            receive = await self._bounded(scope, receive)
            with self.worker.request():
                await self.app(scope, receive, counted)
        except ApiError as error:
            await error.response()(scope, receive, counted)
        finally:
            self.worker.metrics.requests.labels(_endpoint(scope["path"]), str(status)).inc()

    def _tier(self, scope: Scope) -> str | None:
        """The default tier of a request's key; ApiError (401) where it has none that is known."""
        if not self.needs_key(scope["path"]):
            return None
        sent = _digest(_key(scope))
        found: list[str | None] = []
        # All are compared, each in the time that any takes: how long it took says nothing.
        for known, tier in self.keys:
            if hmac.compare_digest(known, sent):
                found.append(tier)
        if not found:
            raise ApiError(
                401,
                "an API key of this server is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found[0]

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The whole body, read before the app runs; ApiError where it is too long (413) or late (408), or where the
        server ends before it is there (503)."""
        if scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            return receive
        parts: list[bytes] = []
        size, most = 0, self.max_body_bytes
        limit_s = min(BODY_S, self.worker.settings.deadline_s or BODY_S)
        length = dict(scope["headers"]).get(b"content-length", b"")
        said = int(length[:20]) if length.isdigit() else 0
        if said > LINGER * most:
            raise self._too_large()
        try:
            async with self.worker.body(limit_s):
                while size <= LINGER * most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    size += len(message.get("body", b""))
                    if size <= most:
                        parts.append(message.get("body", b""))
                    else:
                        parts.clear()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            self.worker.check_not_ending()
            why = f"the body did not come within {limit_s:g} s"
            headers = {"Connection": "close", "x-should-retry": "false"}
            raise ApiError(408, why, code="body_timeout", headers=headers) from None
        if size > most:
            raise self._too_large()
        body: Message | None = {"type": "http.request", "body": b"".join(parts), "more_body": False}

        async def again() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            told, body = body, None
            return told

        return again

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self.max_body_bytes} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )


def needs_key(keys: Collection[str], open_metrics: bool) -> Callable[[str], bool]:
    """Whether a path is answered to those only who have one of some keys; arguments as of `Gate`."""
    free = {*OPEN, *(["/metrics"] if open_metrics else [])}
    return lambda path: bool(keys) and path not in free and (not path.startswith("/page/") or path.endswith(".json"))


def _digest(key: str) -> bytes:
    """Of one length, whatever the key's is."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _key(scope: Scope) -> str:
    headers: dict[bytes, Any] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _endpoint(path: str) -> str:
    """For a label: one of few."""
    if path in ENDPOINTS:
        return path
    if path.startswith("/page/"):
        return "/page"
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"
