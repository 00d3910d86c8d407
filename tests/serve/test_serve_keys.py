"""API keys, pages of other origins, and the policy of depths."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from serving import Held, ask, in_thread, serving, until, web

from alcoda.engine.llm import LM
from alcoda.errors import UsageError
from alcoda.serve.server import Server
from alcoda.serve.settings import Policy
from alcoda.serving import server as make_server

BODY = {"prompt": "What", "max_tokens": 2, "temperature": 0}
POLICY = {
    "default_tier": "balanced",
    "keys": [{"key": "of-fast", "tier": "fast"}, {"key": "of-none"}],
    "degrade": {"above_waiting": 0, "to": "fast"},
}


@pytest.fixture(scope="module")
def locked(lm: LM) -> Iterator[Server]:
    with serving(lm, {"width": 2, "places": 2}, api_keys=["k1", "k2"], policy=POLICY) as made:
        yield made


def post(made: Server, key: str | None = "k1", **body: object) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return web.post(made.url + "/v1/completions", json={**BODY, **body}, headers=headers, timeout=60)


@pytest.mark.parametrize("key", [None, "wrong", "k", "k11", "é"])
def test_no_key(locked: Server, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/v1/nothing", "/page/lab.json"):
        found = web.get(locked.url + path, headers=headers)
        assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
        assert found.headers["www-authenticate"] == "Bearer"


def test_what_needs_no_key(locked: Server, lm: LM) -> None:
    for path in ("/health", "/ready", "/", "/page/index.html"):
        assert web.get(locked.url + path).status_code == 200
    assert [web.head(locked.url + path).status_code for path in ("/health", "/ready", "/")] == [200] * 3
    with serving(lm, api_keys=["k"], open_metrics=True) as made:
        assert web.get(made.url + "/metrics").status_code == 200


def test_each_key_is_let_in(locked: Server) -> None:
    assert [post(locked, key).status_code for key in ("k1", "k2", "of-fast", "of-none")] == [200] * 4
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_key_has_a_tier(locked: Server) -> None:
    told = [post(locked, key).json()["alcoda"]["tier"] for key in ("k1", "of-fast", "of-none")]
    assert told == ["balanced", "fast", "balanced"]
    assert post(locked, "of-fast", model="tiny:exact").json()["alcoda"]["tier"] == "exact", "what is named goes first"
    assert post(locked, "of-fast", exit="balanced").json()["alcoda"]["tier"] == "balanced"


def test_depth_falls_while_many_wait(locked: Server) -> None:
    def asks(**body: object) -> tuple[threading.Thread, list[str]]:
        return in_thread(lambda: post(locked, **body).json()["alcoda"]["tier"])

    with Held(locked):
        first = asks(n=3)  # two run, one waits
        until(lambda: locked.worker.n_open == 3, "three are let in")
        others = [asks(), asks(model="tiny:exact"), asks(loops=3)]
        until(lambda: locked.worker.n_open == 6, "and three more")
    for thread, _ in (first, *others):
        thread.join()
    assert [found[0] for _, found in (first, *others)] == ["balanced", "fast", "exact", None]


def test_other_origins(locked: Server, lm: LM) -> None:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in web.options(locked.url + "/v1/completions", headers=asks).headers
    with serving(lm, api_keys=["k"], allow_origins=["https://a.example"]) as made:
        found = web.options(made.url + "/v1/completions", headers=asks)
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "https://a.example"
        refused = web.get(made.url + "/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers, "a page can read why"
        other = web.options(made.url + "/v1/completions", headers={**asks, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: 3", "keys"),
        ("keys: [{key: a, tier: fast}, {key: a}]", "twice"),
        ("keys: [{key: 'a b'}]", "key"),
        ("degrade: {above_waiting: -1, to: fast}", "above_waiting"),
        ("defaulttier: fast", "did you mean 'default_tier'"),
        ("a: [", "no YAML"),
    ],
)
def test_a_policy_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Policy.load(path)


def test_a_policy_of_a_file(tmp_path: Path, lm: LM) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("default_tier: exact\nkeys:\n  - key: abc\n    tier: fast\n")
    with serving(lm, policy=path) as made:
        assert post(made, "abc").json()["alcoda"]["tier"] == "fast"
    with pytest.raises(UsageError, match="no/such"):
        make_server(lm, policy="no/such")
    path.write_text("default_tier: slow")
    with pytest.raises(UsageError, match="unknown tier 'slow'"), serving(lm, policy=path):
        pass


def test_a_default_tier(lm: LM) -> None:
    with serving(lm, policy={"default_tier": "exact"}) as made:
        found = ask(made, return_loops=True)
    assert found["alcoda"]["tier"] == "exact" and found["alcoda"]["mean_loops"] == lm.n_loops
