"""A real Chromium at the server's page, for the tests that need one (extra browser)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright (extra browser)")

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian's package chromium, or $CHROMIUM)"),
]
WAIT_MS = 60_000
ROOT = Path(__file__).parents[2]


@contextmanager
def serve(folder: Path, *options: str) -> Generator[str]:
    """The URL of a server with mini."""
    command = [sys.executable, "-m", "alcoda", "serve", "mini", "--port", "0", "--json", *options]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def chromium() -> Generator[Browser]:
    """A browser."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


class Watched:
    """A page that is open, what it asked for, and what it complained of."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.url = url

    def open(self) -> Page:
        self.page.goto(self.url)
        expect(self.page.locator("#dials .dial")).to_have_count(2)
        return self.page

    def check(self) -> None:
        """Nothing was complained of, and nothing asked of another place."""
        assert self.complaints == []
        assert self.asked and all(url.startswith(self.url) for url in self.asked), self.asked


def generate(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", value)
    page.click("#generate")
    finished(page)


def finished(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("Done", timeout=WAIT_MS)


def loops_of(page: Page, lane: str = "a") -> list[int]:
    buttons = page.locator(f"article[aria-labelledby=lane-{lane}] .tokens .token")
    return [int(x) for x in buttons.evaluate_all("all => all.map(one => one.dataset.loops)")]


@pytest.fixture(scope="module")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with serve(tmp_path_factory.mktemp("serve")) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture
def watched(browser: Browser, page_url: str) -> Generator[Watched]:
    found = Watched(browser, page_url)
    yield found
    found.context.close()
