"""The part of the report about the lab, and figures and tables as files."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_run import HOSTILE, make_run
from pages import draw_nothing

from alcoda.errors import RunError, UsageError
from alcoda.report.export import collecting, write_parts
from alcoda.report.markup import table
from alcoda.report.page import write_report
from alcoda.report.svg import MUTED, draw, series

SPREAD = {"mean": 0.5, "q10": 0.1, "q50": 0.4, "q90": 0.9}


def group(name: str, mean: float, **changed: Any) -> dict[str, Any]:
    return {
        "name": name,
        "n_tokens": 50,
        "share": 0.5,
        "mean": mean,
        "low": mean - 0.1,
        "high": mean + 0.1,
        "median": 2,
        "q90": 3,
        "censored": 0.25,
        "first_crossing": 2.0,
        "stable_loop": 1.5,
        "loss": 3.0,
    } | changed


def add_lab(run: Path, **changed: Any) -> Path:
    """A lab.json of three loops."""
    found = {
        "schema": 1,
        "data": "valid",
        "train_step": 400,
        "loops": 3,
        "eps": 5e-4,
        "unit": "documents",
        "n_units": 31,
        "n_tokens": 100,
        "notes": ["a note"],
        "depth": group("all tokens", 2.5, n_tokens=100),
        "histogram": [{"depth": i, "settled": n, "censored": c} for i, n, c in ((1, 0, 0), (2, 60, 0), (3, 15, 25))],
        "by_eps": [{"eps": 1e-6, "mean": 2.9, "median": 3, "censored": 0.5}],
        "by_class": [group("function_word", 2.25), group("word_start", 2.75, low=None, high=None)],
        "by_position": [group("0 to 31", 2.5)],
        "by_difficulty": [group("0.1 to 2 nats", 2.5)],
        "by_hops": [group("1 hop", 2.5)],
        "hops_accuracy": {"1": [0.1, 0.5, 0.9]},
        "by_loop": [{"loop": 1, "kl_final": SPREAD, "state_change": SPREAD}]
        + [{"loop": i, "kl_previous": SPREAD, "kl_final": SPREAD, "state_change": SPREAD} for i in (2, 3)],
        "elasticity": {
            "by_depth": [{"loops": n, "bits_per_byte": 2.0 - n / 10, "low": 1.5, "high": 2.5} for n in (1, 2)],
            "gain": [{"from_loops": 1, "to_loops": 2, "bits_per_byte": 0.1, "low": 0.05, "high": 0.15}],
        },
        "paths": {
            "how": "two draws",
            "by_loop": [{"loop": i, "distance": SPREAD, "kl": 1e-6, "agree": 0.99} for i in range(4)],
        },
        "contraction": [{"loop": 1, "n_tokens": 16, "radius": SPREAD, "expanding": 0.0}],
        "passages": [
            {
                "source": HOSTILE,
                "tokens": [
                    {"text": "\n"},
                    {"text": "Once", "depth": 2, "censored": False, "class": "word_start", "loss": 1.25},
                    {"text": HOSTILE, "depth": 3, "censored": True, "class": "other", "loss": 9.0},
                    {"text": "\n", "depth": 2, "censored": False, "class": "whitespace", "loss": 0.5},
                ],
            }
        ],
    } | changed
    (run / "lab").mkdir(exist_ok=True)
    (run / "lab/lab.json").write_text(json.dumps(found))
    return run


def page_of(tmp_path: Path, *runs: Path, **how: Any) -> str:
    return write_report(runs, tmp_path / "report.html", **how).read_text()


def test_lab_is_shown_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch, but="lab")
    run = make_run(tmp_path / "run")
    assert 'id="lab"' not in page_of(tmp_path, run)
    page = page_of(tmp_path, add_lab(run))
    for words in ("Convergence", "function word", "25.0%", "a note", "By hops of the answer", "two draws", "0.1000"):
        assert words in page, words
    assert page.count('class="plot"') > 10 and "mathdefault" not in page


def test_a_text_coloured_by_depth_is_safe_and_in_words_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)
    page = page_of(tmp_path, add_lab(make_run(tmp_path / "run")))
    heat = page[page.index('<figure class="heat"') :]
    heat = heat[: heat.index("</figure>")]
    assert "<script" not in heat and "\x00" not in heat
    assert '<span class="h0" title="loop 2: word start, 1.25 nats">Once</span>' in heat
    assert 'class="h7 late" title="loop 3 (not settled): other, 9.00 nats"' in heat
    assert re.search(r'class="legend" aria-label="Legend: loops 2 to 3"', heat)


def test_two_labs_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)
    a, b = add_lab(make_run(tmp_path / "a")), add_lab(make_run(tmp_path / "b", name="other", seed=1))
    page = page_of(tmp_path, a, b)
    lab = page[page.index('id="lab"') :]
    assert "<h3>elastic-10m</h3>" in lab and "<h3>other</h3>" in lab
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_lab_of_an_older_checkpoint_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)
    run = add_lab(make_run(tmp_path / "run"), train_step=7)
    (run / "eval.json").write_text(json.dumps(json.loads((run / "eval.json").read_text()) | {"train_step": 400}))
    assert "Measured at train step 7" in page_of(tmp_path, run)


@pytest.mark.parametrize("changed", [{"loops": "many"}, {"depth": 3}, {"by_class": [{}]}, {"histogram": {"a": 1}}])
def test_a_damaged_lab_is_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    run = add_lab(make_run(tmp_path / "run"), **changed)
    with pytest.raises(RunError, match=r"lab\.json"):
        page_of(tmp_path, run)


def test_parts_that_were_not_measured_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)
    none: dict[str, Any] = {"elasticity": None, "contraction": [], "by_hops": [], "hops_accuracy": {}, "passages": []}
    page = page_of(tmp_path, add_lab(make_run(tmp_path / "run"), **none))
    assert "Convergence" in page and "Elasticity" not in page and 'class="heat"' not in page


def test_figures_and_tables_as_files(tmp_path: Path) -> None:
    run = add_lab(make_run(tmp_path / "run"))
    (run / "metrics.jsonl").unlink()  # its figures are like the others
    page = page_of(tmp_path, run, figures="pdf", tables=["csv", "latex"])
    parts = tmp_path / "report_parts"
    names = {path.name for path in parts.iterdir()}
    assert sum(name.endswith(".pdf") for name in names) == page.count('class="plot"')
    assert sum(name.endswith(".csv") for name in names) == sum(name.endswith(".tex") for name in names)
    assert all((parts / name).read_bytes().startswith(b"%PDF") for name in names if name.endswith(".pdf"))
    with (parts / "convergence_depth_by_class_of_token.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["Tokens"] for row in rows] == ["function word", "word start"]
    assert rows[0]["95% interval"] == "2.15 to 2.35" and rows[1]["95% interval"] == ""
    assert r"95\% interval" in (parts / "convergence_depth_by_class_of_token.tex").read_text()
    assert page == page_of(tmp_path, run)  # they change nothing on it


def test_cells_are_plain_text(tmp_path: Path) -> None:
    with collecting() as made:
        table(["<b>A</b>", "B"], [["x &amp; y_1", '<data value="1234.5" title="t">1.23 k</data>']], "One & two")
        table(["A", "B"], [["−3<small>−4 to −2</small>", "–"]], "One & two")
        draw("key", "label", lambda fig: fig.text(0.5, 0.5, "words", color=series(0)).set_color(MUTED))
    written = {path.name: path.read_bytes() for path in write_parts(made, tmp_path, "pdf", ["csv", "latex"])}
    assert set(written) == {"key.pdf", "one_two.csv", "one_two_2.csv", "one_two.tex", "one_two_2.tex"}
    again = tmp_path / "again"
    assert {path.name: path.read_bytes() for path in write_parts(made, again, "pdf", ["csv", "latex"])} == written
    assert written["one_two.csv"] == b"A,B\nx & y_1,1234.5\n"
    assert written["one_two_2.csv"] == b"A,B\n-3 (-4 to -2),\n"
    assert rb"x \& y\_1 & 1234.5 \\" in written["one_two.tex"]


def test_a_form_that_there_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match="pdf is what there is"):
        page_of(tmp_path, run, figures="png")
    with pytest.raises(UsageError, match=r"did you mean 'latex'"):
        page_of(tmp_path, run, tables=["latx"])
    assert not (tmp_path / "report_parts").exists() and not (tmp_path / "report.html").exists()
