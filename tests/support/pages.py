"""A report's page, walked: what holds for every one."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from alcoda.report.markup import esc
from alcoda.report.page import write_report

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


class Page(HTMLParser):
    """Walks a page: records unbalanced tags, ids, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} closes nothing")

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def report(tmp_path: Path, *runs: Path) -> tuple[str, Page]:
    """The text of a report and its walk; checks what holds for every page."""
    out = write_report(runs, tmp_path / "out.html")
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert page.faults == []
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)), "an id occurs twice"
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert used <= set(ids), "a reference points nowhere"
    for svg in page.all("svg"):
        assert svg.get("role") == "img"
        assert svg.get("aria-label")
    assert all(th.get("scope") in ("row", "col") for th in page.all("th"))
    assert not list(tmp_path.glob(".out.html*")), "a temporary file was left"
    return text, page


def edit(folder: Path, name: str, **changed: Any) -> None:
    """Replace keys of a JSON file of a run."""
    data = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(data | changed))


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Empty figures, for tests of the words: drawing is what takes the time."""

    def blank(key: str, label: str, *_: Any, **__: Any) -> str:
        return f'<svg role="img" aria-label="{esc(label)}"></svg>'

    patch.setattr("alcoda.report.curves.draw", blank)
    for module in ("caches", "figures", "frontier", "positions", "prefills"):
        patch.setattr(f"alcoda.report.{module}.draw", blank)
