"""A server that streams scripted completions, to measure a client of servers with."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sesame"
LOOPS = 3
"""Of every token."""


@dataclass
class Fake:
    """How it answers, and what it was asked.

    Attributes:
        url: where it is.
        models: their names.
        key: that it wants; None: none.
        first_s, gap_s: before the first text, and between texts.
        answers: by a word in a prompt: ``refuse`` (429), ``break`` (the stream just ends), ``fail`` (an error within
            it), ``mute`` (no text at all).
        tier: that it says it used.
        bodies: of the completions that it was asked for.
    """

    models: tuple[str, ...] = ("m", "m:fast")
    key: str | None = None
    first_s: float = 0.0
    gap_s: float = 0.0
    tier: str | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def fake_server(**how: Any) -> Iterator[Fake]:
    """Runs while the block does."""
    fake = Fake(**how)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _say(self, status: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _may(self) -> bool:
            if fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}":
                return True
            self._say(401, {"error": {"message": "wrong key", "code": "invalid_api_key"}})
            return False

        def do_GET(self) -> None:
            if self._may():
                self._say(200, {"object": "list", "data": [{"id": name} for name in fake.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            if not self._may():
                return
            if "refuse" in body["prompt"]:
                self._say(429, {"error": {"message": "too many", "code": "overloaded"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self._stream(body)

        def _stream(self, body: dict[str, Any]) -> None:
            n = body["max_tokens"]
            time.sleep(fake.first_s)
            for i in range(n):
                if i:
                    time.sleep(fake.gap_s)
                if i == n // 2 and "break" in body["prompt"]:
                    return
                if i == n // 2 and "fail" in body["prompt"]:
                    self._event({"error": {"message": "it broke", "type": "server_error", "code": None}})
                    return
                self._event({"choices": [{"index": 0, "text": "" if "mute" in body["prompt"] else "x"}], "usage": None})
            self.wfile.write(b": a comment\n\n")
            usage = {"prompt_tokens": 2, "completion_tokens": n, "completion_tokens_details": {"loops": LOOPS * n}}
            self._event({"choices": [], "usage": usage, "alcoda": {"tier": fake.tier}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, value: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
            self.wfile.flush()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass  # a client that left

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
