"""One client of a server: a streamed completion with the times at which it came, and what the server has."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from alcoda.errors import RunError, UsageError, did_you_mean, install

CONNECT_S = 10.0
"""For a connection, and for the list of models."""
ANSWER_S = 120.0
"""Without a byte from the server: then the request is one that failed (``timeout``)."""


@dataclass
class Answer:
    """What became of one request. Times are of `time.perf_counter`.

    Attributes:
        due: when it was to be sent.
        sent: when it was.
        first: when its first text came; of an answer without any text, when it ended.
        gaps_s: between texts that came one after the other.
        end: when its last byte came.
        error: None where it was answered whole; else a status (``429``), the code of an error within a stream,
            ``connect``, ``timeout``, ``broken`` (a stream that just ends), or ``unfinished`` (we were interrupted).
        message: of the error, as the server words it.
        tokens, prompt_tokens: as the server counts them.
        loops: that its tokens ran together; None where the server does not say.
        exit: the tier that the server says it used, which may be another than was asked for under load.
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    end: float = 0.0
    error: str | None = "unfinished"
    message: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    loops: int | None = None
    exit: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """To the first text, since it was to be sent: what we are late counts."""
        return None if self.first is None else self.first - self.due

    @property
    def token_s(self) -> float | None:
        """The mean time between its tokens; None of fewer than two."""
        return None if self.first is None or self.tokens < 2 else sum(self.gaps_s) / (self.tokens - 1)


class Client:
    """A server's models, and completions of them.

    Args:
        url: of the server, with or without ``/v1``.
        key: its API key, if it wants one.

    Raises:
        UsageError: not a URL of http; httpx is missing.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            import httpx
        except ImportError as error:
            raise UsageError(f"a load needs httpx: {install('serve')}") from error
        self.url = base_url(url)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError("--api-key: only printable ASCII characters can be sent")
        # Through a proxy of the environment we would measure that too. Every request has a connection of its own, as
        # that of another person has: one that is kept may be closed by the server while we send.
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the models, the server's first one first.

        Raises:
            UsageError: a key that is wrong or missing.
            RunError: no server, or one that is not OpenAI-compatible.
        """
        import httpx

        try:
            answer = await self._http.get(f"{self.url}/models", timeout=CONNECT_S)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise RunError(f"no server answers at {self.url}: {why}. Start one: alcoda serve mini") from None
        except UnicodeError:
            raise UsageError(f"{self.url}: not a URL of a server") from None
        if answer.status_code in (401, 403):
            raise UsageError(
                f"{self.url} refuses the key ({answer.status_code}): give the server's with --api-key or ALCODA_API_KEY"
            )
        if answer.status_code != 200:
            raise RunError(f"{self.url}/models answers {answer.status_code}: {say_error(answer.content)}")
        try:
            names = [one["id"] for one in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f"{self.url}/models answers no list of models: is this an OpenAI-compatible server?"
            ) from None
        if not names:
            raise RunError(f"{self.url} has no model")
        return names

    async def pick(self, wanted: list[str]) -> list[str]:
        """Those of the server's models that are wanted; its first one where none is named.

        Raises:
            UsageError: a name that it does not have; and as `models`.
        """
        there = await self.models()
        for name in wanted:
            if name not in there:
                raise UsageError(f"--model {name}: {self.url} has no such model{did_you_mean(name, there)}")
        return list(dict.fromkeys(wanted)) or there[:1]

    async def complete(self, body: dict[str, Any], answer: Answer) -> None:
        """Send a request and fill in what becomes of it."""
        import httpx

        answer.sent = last = time.perf_counter()
        whole = False
        try:
            async with self._http.stream("POST", f"{self.url}/completions", json=body) as response:
                if response.status_code != 200:
                    answer.message = say_error(await response.aread())
                    answer.error = str(response.status_code)
                    return
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    now, data = time.perf_counter(), line[5:].strip()
                    if data == "[DONE]":
                        whole = True
                        break
                    chunk = json.loads(data)
                    if "error" in chunk:
                        found = chunk["error"]
                        answer.error, answer.message = (
                            str(found.get("code") or found.get("type")),
                            found.get("message", ""),
                        )
                        return
                    if any(choice.get("text") for choice in chunk["choices"]):
                        if answer.first is None:
                            answer.first = now
                        else:
                            answer.gaps_s.append(now - last)
                        last = now
                    _note(chunk, answer)
                    answer.end = now
            answer.error = None if whole else "broken"
            if whole and answer.first is None:
                answer.first = answer.end
        except httpx.TimeoutException:
            answer.error, answer.message = "timeout", f"not a byte for {ANSWER_S:g} s"
        except httpx.ConnectError as error:
            answer.error, answer.message = "connect", str(error)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            answer.error, answer.message = "broken", f"{type(error).__name__}: {error}"


def _note(chunk: dict[str, Any], answer: Answer) -> None:
    """What a chunk counts, and which tier was used."""
    ours = chunk.get("alcoda")
    if isinstance(ours, dict) and ours.get("tier") is not None:
        answer.exit = str(ours["tier"])
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        answer.tokens = usage.get("completion_tokens", 0)
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.loops = (usage.get("completion_tokens_details") or {}).get("loops")


def base_url(url: str) -> str:
    """``http://HOST:PORT/v1`` of what a person writes: ``127.0.0.1:8000``, ``http://HOST:PORT/``."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        known = known and not (parts.query or parts.fragment)
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{url}: not a URL of a server, as http://127.0.0.1:8000")
    base = whole.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def say_error(body: bytes) -> str:
    """The message in an error's envelope; else the beginning of what came."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip() or "nothing more is said"
