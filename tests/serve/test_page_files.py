"""The page's files without a browser: they are served with headers that keep markup out, and reach for nothing else."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from fastapi import FastAPI
from fastapi.testclient import TestClient

import alcoda
from alcoda.serve import page as page_module
from alcoda.serve.page import STATIC, about, mount

FILES = sorted(STATIC.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
N_SHADES = 16


class Page(HTMLParser):
    """Tags with their attributes, labels, and whether every tag was closed."""

    VOID = frozenset({"meta", "link", "input", "br", "path", "ellipse"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs), tuple(self.open)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes another"


@pytest.fixture(scope="module")
def html() -> Page:
    return Page((STATIC / "index.html").read_text())


@pytest.fixture(scope="module")
def mini() -> alcoda.LM:
    return alcoda.load("mini")


@pytest.fixture
def client(mini: alcoda.LM) -> TestClient:
    app = FastAPI()
    app.state.worker = SimpleNamespace(lm=mini, check_ready=lambda: None)
    mount(app)
    return TestClient(app)


def test_every_file_is_served_with_headers_that_keep_markup_out(client: TestClient) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "javascript", ".svg": "image/svg+xml"}
    for url, path in [("/", STATIC / "index.html"), *((f"/page/{path.name}", path) for path in FILES)]:
        answer = client.get(url)
        assert (answer.status_code, answer.content) == (200, path.read_bytes())
        assert kinds[path.suffix] in answer.headers["content-type"]
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/page/../__init__.py").status_code == 404
    assert client.get("/page/nothing.js").status_code == 404


def test_no_file_names_another_place() -> None:
    for path in FILES:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|\burl\(", text), path.name


def test_nothing_becomes_markup_or_code() -> None:
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc|\.style\b"
    for path in SCRIPTS:
        assert not re.search(banned, path.read_text()), path.name
    text = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|\son[a-z]+=|\sstyle=|<style", text)


def test_the_html_is_whole_and_every_field_has_a_label(html: Page) -> None:
    ids = [found["id"] for _, found, _ in html.tags if found.get("id")]
    assert len(ids) == len(set(ids))
    labelled = {found.get("for") for tag, found, _ in html.tags if tag == "label"}
    fields = [(found, inside) for tag, found, inside in html.tags if tag in ("input", "textarea", "select")]
    assert len(fields) > 8
    for found, inside in fields:
        assert found.get("id") in labelled or "label" in inside, found
    for name in ("aria-labelledby", "for"):
        assert {found[name] for _, found, _ in html.tags if found.get(name)} <= {*ids, "token-title"}
    (lang,) = [found.get("lang") for tag, found, _ in html.tags if tag == "html"]
    assert lang == "en"
    assert {"main", "header", "footer", "h1", "h2"} <= {tag for tag, _, _ in html.tags}


def test_scripts_name_only_what_the_html_has(html: Page) -> None:
    ids = {found["id"] for _, found, _ in html.tags if found.get("id")}
    named = {name for path in SCRIPTS for name in re.findall(r'byId\("([a-z-]+)"\)', path.read_text())}
    assert named and named <= ids
    imported = {name for path in SCRIPTS for name in re.findall(r'from "\./([a-z]+\.js)"', path.read_text())}
    assert imported | {"page.js"} == {path.name for path in SCRIPTS}


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _themes() -> list[dict[str, str]]:
    css = (STATIC / "page.css").read_text()
    light, dark = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", part)) for part in css.split("@media", 2)[:2])
    return [light, light | dark]


@pytest.mark.parametrize("theme", _themes(), ids=["light", "dark"])
def test_depths_are_in_order_by_lightness_alone_and_their_text_is_readable(theme: dict[str, str]) -> None:
    lightness = [_luminance(theme[f"d{i}"]) ** (1 / 3) for i in range(N_SHADES)]
    steps = [b - a for a, b in itertools.pairwise(lightness)]
    assert all(step < -0.01 for step in steps) or all(step > 0.01 for step in steps), lightness
    for i in range(N_SHADES):
        assert _contrast(theme[f"d{i}"], theme[f"t{i}"]) >= 4.5, i
    for ink in ("ink", "muted", "accent"):
        assert _contrast(theme[ink], theme["card"]) >= 4.5 and _contrast(theme[ink], theme["page"]) >= 4.5, ink
    assert _contrast(theme["accent"], theme["accent-ink"]) >= 4.5
    assert _contrast(theme["warn"], theme["warn-page"]) >= 4.5
    assert _contrast(theme["edge"], theme["page"]) >= 3 and _contrast(theme["edge"], theme["card"]) >= 3
    css, script = (STATIC / "results.css").read_text(), (STATIC / "dom.js").read_text()
    assert f"SHADES = {N_SHADES};" in script
    assert all(f'[data-shade="{i}"] {{ --d: var(--d{i}); --t: var(--t{i}); }}' in css for i in range(N_SHADES))


def test_the_lab_of_mini_comes_along(client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = client.get("/page/lab.json").json()
    lab = found["lab"]
    assert sum(one["settled"] + one["censored"] for one in lab["histogram"]) == lab["n_tokens"] > 10_000
    assert [one["depth"] for one in lab["histogram"]] == list(range(1, lab["loops"] + 1))
    assert set(found["tiers"]) == {"fast", "balanced", "exact"}
    assert found["tiers"]["balanced"]["rule"]["kind"] == "state" and found["tiers"]["balanced"]["mean_loops"] < 8
    chains = found["examples"][-1]
    assert chains.startswith("hops: ") and chains.endswith("?")


def test_a_lab_of_other_weights_or_a_damaged_one_is_not_shown(
    mini: alcoda.LM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    own = mini.loaded.run.writable()  # the copy here goes before the one of the package
    path = own.lab / "lab.json"
    data = json.loads(path.read_text())
    data["n_tokens"] += 1
    path.write_text(json.dumps(data))
    lab = about(mini)["lab"]
    assert lab is not None and lab["n_tokens"] == data["n_tokens"]
    path.write_text(json.dumps(data | {"train_step": 1}))
    lab = about(mini)["lab"]
    assert lab is not None and lab["n_tokens"] == data["n_tokens"] - 1
    path.write_text("{")
    found = about(mini)
    assert found["lab"] is None and "cannot be read" in found["note"]


def test_a_run_without_lab_tiers_or_chains(mini: alcoda.LM, tmp_path: Path) -> None:
    from alcoda.training.run import RunFolder

    loaded = SimpleNamespace(run=RunFolder(tmp_path), train_step=7000)
    recipe = SimpleNamespace(data=SimpleNamespace(corpus="pystdlib", mix=None))
    found = about(SimpleNamespace(loaded=loaded, recipe=recipe))  # type: ignore[arg-type]
    assert found["lab"] is None and "alcoda lab" in found["note"] and found["tiers"] == {}
    assert found["examples"] == list(page_module.PROMPTS)
