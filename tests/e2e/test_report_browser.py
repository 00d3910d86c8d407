"""The report opens in a real browser, without a network, and its plots are drawn."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_run import make_run

from alcoda.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_page_renders_its_plots(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    # The page has no script of its own: one is added to measure what the browser laid out.
    probe = (
        "<script>onload=()=>{const s=[...document.querySelectorAll('svg')].map(e=>e.getBoundingClientRect());"
        "document.title=JSON.stringify({plots:s.filter(r=>r.width>150&&r.height>80).length,"
        "wide:document.documentElement.scrollWidth-innerWidth})}</script>"
    )
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    seen = json.loads(title.group(1))
    assert seen["plots"] >= 5
    assert seen["wide"] <= 0, "the page scrolls sideways"
