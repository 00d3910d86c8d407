"""What a page in somebody's browser can have a server at their own machine do: nothing, unless it is let."""

from __future__ import annotations

import http.client
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import serving, web

from alcoda.config import validate
from alcoda.engine.llm import LM
from alcoda.errors import UsageError
from alcoda.serve.errors import ApiError
from alcoda.serve.origin import Origins
from alcoda.serve.server import Server
from alcoda.serve.settings import Settings

BODY = json.dumps({"prompt": "What", "max_tokens": 1, "temperature": 0})
IS_JSON = "application/json"
OTHERS = ("https://evil.example", "null", "http://localhost:1", "file://", "http://[", "https://a.example.evil.example")
KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", "")


@pytest.fixture(scope="module")
def shared(lm: LM) -> Iterator[Server]:
    with serving(lm, allow_origins=["https://a.example"]) as made:
        yield made


def post(made: Server, path: str = "/v1/completions", kind: str | None = IS_JSON, **headers: str) -> httpx.Response:
    given = {} if kind is None else {"Content-Type": kind}
    return web.post(made.url + path, content=BODY, headers={**given, **headers}, timeout=60)


def told(answer: httpx.Response) -> tuple[int, str | None]:
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json().get("error", {}).get("code")


def ran(made: Server) -> float:
    assert made.worker.service is not None
    return made.worker.service.background.engine.stats.tokens


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", ""],
)
def test_what_is_not_said_to_be_json(server: Server, path: str, kind: str) -> None:
    before = ran(server)
    assert told(post(server, path, kind or None)) == (415, "unsupported_media_type")
    assert ran(server) == before


@pytest.mark.parametrize("kind", [IS_JSON, "application/json; charset=utf-8", "Application/JSON ;charset=utf-8"])
def test_what_is(server: Server, kind: str) -> None:
    assert post(server, kind=kind).status_code == 200


@pytest.mark.parametrize("origin", OTHERS)
def test_a_page_of_another_origin(shared: Server, origin: str) -> None:
    before = ran(shared)
    for kind in (IS_JSON, "text/plain"):
        assert told(post(shared, kind=kind, Origin=origin)) == (403, "origin_not_allowed")
    assert told(web.get(shared.url + "/v1/models", headers={"Origin": origin})) == (403, "origin_not_allowed")
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    answer = web.options(shared.url + "/v1/completions", headers=asks)
    assert told(answer) == (403, "origin_not_allowed") and "access-control-allow-origin" not in answer.headers
    assert ran(shared) == before


def test_pages_that_may_ask(shared: Server) -> None:
    port = shared.url.rsplit(":", 1)[1]
    for name in ("localhost", "127.0.0.1"):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        assert post(shared, **own).status_code == 200, "the server's own"
    answer = post(shared, Origin="https://a.example")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
    assert post(shared, kind="text/plain", Origin="https://a.example").status_code == 415


def test_a_name_that_was_made_to_point_here(shared: Server) -> None:
    """DNS rebinding: to the browser the page and the server are one place."""
    before = ran(shared)
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[", "[::1"):
        found = post(shared, Host=host, Origin=f"http://{host}")
        assert told(found) == (403, "host_not_allowed")
        assert "--allow-origin" in found.json()["error"]["message"]
        assert told(web.get(shared.url + "/health", headers={"Host": host})) == (403, "host_not_allowed")
    assert ran(shared) == before
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:9", "[::1]:9", "a.example", "a.example:443"):
        assert post(shared, Host=host).status_code == 200, "a tunnel of another port, a proxy of a name that is allowed"
    own = {"Host": "a.example", "Origin": "https://a.example"}
    assert post(shared, **own).status_code == 200


@pytest.mark.parametrize(
    ("host", "allowed", "named", "origin", "passes"),
    [
        ("0.0.0.0", [], "any.example", None, True),
        ("0.0.0.0", [], "any.example", "https://any.example", True),
        ("0.0.0.0", [], "any.example:443", "https://any.example", True),
        ("0.0.0.0", [], "any.example:80", "https://any.example", False),
        ("0.0.0.0", [], "any.example", "https://other.example", False),
        ("0.0.0.0", [], "any.example", "chrome-extension://any.example", False),
        ("::1", [], "[::1]:8000", "http://[::1]:8000", True),
        ("localhost", [], "evil.example", None, False),
        ("127.0.0.5", [], "127.0.0.5:8000", None, True),
        ("127.0.0.1", ["*"], "evil.example", "https://other.example", True),
        ("127.0.0.1", [], "", None, True),
        ("127.0.0.1", [], "", "null", False),
    ],
)
def test_who_may_ask(host: str, allowed: list[str], named: str, origin: str | None, passes: bool) -> None:
    headers = [(b"host", named.encode()), *([] if origin is None else [(b"origin", origin.encode())])]
    checks = Origins(host, allowed)
    if passes:
        checks.check(headers)
    else:
        with pytest.raises(ApiError) as found:
            checks.check(headers)
        assert found.value.status == 403


@pytest.mark.parametrize("name", ["Host", "Origin"])
def test_a_header_that_is_there_twice(shared: Server, name: str) -> None:
    """A proxy may have looked at the first, and a server at the last."""
    place = shared.url.removeprefix("http://")
    values = [place, place] if name == "Host" else [shared.url, shared.url]
    for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
        connection = http.client.HTTPConnection(place, timeout=60)  # httpx sends no such thing
        connection.putrequest(method, path, skip_host=name == "Host")
        for value in values:
            connection.putheader(name, value)
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        connection.close()
        assert (answer.status, error["code"]) == (400, "invalid_header")
        assert f"the header {name} is there 2 times" in error["message"]


@pytest.mark.parametrize(("origin", "lets"), [("https://b.example", True), ("null", True), ("file://", False)])
def test_the_way_out_is_one(shared: Server, origin: str, lets: bool) -> None:
    """What a refusal says to start the server with, the server takes."""
    message = post(shared, Origin=origin).json()["error"]["message"]
    assert message.endswith(f"--allow-origin {origin} lets them" if lets else "may not ask this server")
    if lets:
        assert validate(Settings, {"allow_origins": (origin,)}, "serve").allow_origins == (origin,)


@pytest.mark.parametrize("origin", [
    "https://a.example/",
    "a.example",
    "https://a.example/page",
    "https://",
    "http://[",
    "http://[abc]",
    "http://a\u2100b",
    "https://:8443",
    "https://a.example:443",
    "http://a.example:80",
    "https://a.example:99999",
])  # fmt: skip
def test_an_origin_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(UsageError, match=r"allow_origins.*is no origin"):
        validate(Settings, {"allow_origins": (origin,)}, "serve")


def test_origins_that_browsers_send() -> None:
    sent = ("https://a.example", "http://a.example:443", "https://[::1]:8443", "null", "*", "moz-extension://a-b")
    assert validate(Settings, {"allow_origins": sent}, "serve").allow_origins == sent


def test_what_the_docs_send_is_taken(server: Server) -> None:
    """Every curl that posts says that it is JSON, or curl would say that it is a form."""
    root = Path(__file__).parents[2]
    pages = [*root.glob("docs/*.md"), root / "README.md"]
    commands = [one for page in pages for one in re.findall(r"^curl (?:.*\\\n)*.*", page.read_text(), re.M)]
    posts = [shlex.split(one.replace("\\\n", " ")) for one in commands if " -d " in one]
    assert posts
    for words in posts:
        kind = words[words.index("-H") + 1].partition(": ")[2]
        body = json.loads(words[words.index("-d") + 1]) | {"model": "tiny", "max_tokens": 2}
        answer = web.post(server.url + "/v1/completions", content=json.dumps(body), headers={"Content-Type": kind})
        assert answer.status_code == 200, answer.text
    shown = (root / "alcoda/serve/page/static").glob("*.js")
    assert any("curl" in (text := path.read_text()) and "Content-Type: application/json" in text for path in shown)
