"""The report: one HTML file that is complete, well-formed, safe and the same each time, whatever the run lacks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import HOSTILE, add_caches, add_frontier, add_prefills, make_run
from pages import Page, draw_nothing, edit, report

from alcoda.errors import RunError, UsageError
from alcoda.report.curves import loss_figure
from alcoda.report.page import write_report
from alcoda.report.positions import lines, positions
from alcoda.report.read import read_run, read_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    """The report of a complete run."""
    return report(tmp_path_factory.mktemp("whole"), run)


def test_one_run_shows_every_section(run: Path, whole: tuple[str, Page]) -> None:
    text, page = whole
    words = " ".join(" ".join(page.text).split())
    assert [attrs["id"] for attrs in page.all("section")] == [
        "training",
        "depth",
        "cost",
        "samples",
        "config",
        "provenance",
    ]
    # Loss, two validation sources, loops, speed, depth, position, cost.
    assert len(page.all("svg")) == 8
    assert "elastic-10m" in words
    assert "1.726" in words, "the headline is the result at the training mean"
    at_mean = json.loads((run / "eval.json").read_text())["by_depth"][3]
    assert f"95%: {at_mean['low']:.3f} to {at_mean['high']:.3f}" in words
    assert "115 M" in words and "114,819,072" in words, "FLOPs in human units and exact"
    assert 'title="6,556,928"' in text
    assert "bigram baseline 2.874" in words
    assert "training mean 8" in words
    assert "core.mlp" in words
    assert "kind: lognormal" in words, "the recipe"
    for item in ("2.13.0", "0123456789abcdef", "uncommitted changes", "Example CPU", "alcoda train recipes/", "9.41 M"):
        assert item in words
    assert "Processes 2, fsdp over gloo, 1 host" in words
    assert "Peak memory of each process 375 MB, 373 MB" in words
    for sent in ("all-gather 47.4 kB", "reduce-scatter 32.2 kB"):
        assert f"Sent a step and process, {sent}" in words
    assert "Near duplicates were removed." in words
    assert "yet" not in words, "nothing is missing from a complete run"


def test_page_needs_nothing_else(run: Path, whole: tuple[str, Page]) -> None:
    text, page = whole
    for tag, attrs in page.tags:
        for name in ("src", "href", "data", "srcset", "action", "poster", "xlink:href"):
            value = attrs.get(name) or ""
            assert value == "" or value.startswith(("#", "data:")), f"<{tag} {name}={value}>"
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    assert str(run.parent) not in text, "the page does not tell where the run lay"


def test_same_bytes_twice(run: Path, whole: tuple[str, Page], tmp_path: Path) -> None:
    assert write_report([run], tmp_path / "again.html").read_text(encoding="utf-8") == whole[0]


def test_figures_take_their_colours_from_the_page(whole: tuple[str, Page]) -> None:
    text, _ = whole
    css = text[text.index("<style>") : text.index("</style>")]
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert not re.search(r"#[0-9a-f]{6}\b", svg), "a colour is fixed, so it cannot follow light and dark"
        for variable in set(re.findall(r"var\((--[a-z0-9-]+)\)", svg)):
            assert f"{variable}:" in css
    light, dark = css[: css.index("@media")], css[css.index("@media") : css.index("* {")]
    for variable in re.findall(r"(--(?:series|ramp)-\d)", light):
        assert f"{variable}:" in dark


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", name="elastic-add", seed=1, steps=300, better=0.06)
    text, page = report(tmp_path, run, other)
    words = " ".join(" ".join(page.text).split())
    assert "2 runs compared" in words
    rows = re.findall(r"<tr>.*?</tr>", text[: text.index("</header>")], re.DOTALL)[1:]
    assert len(rows) == 2
    assert "1.726" in rows[0] and "1.666" in rows[1]
    assert "1.23 M" in rows[1], "tokens seen of the second run"
    assert len(page.all("svg")) == 8, "both runs share the plots"
    for svg in page.all("svg"):
        label = svg["aria-label"] or ""
        assert "elastic-10m" in label and "elastic-add" in label
    assert "-  recurrence: {inject: concat" in words.replace("- recurrence", "-  recurrence")
    assert "inject: add" in words


def test_bits_by_position(run: Path, tmp_path: Path) -> None:
    first = read_run(run)
    assert first.evaluation is not None
    assert [line.label for line in lines([first])] == ["1 loop", "8 loops", "24 loops"]
    other = make_run(tmp_path / "other", name="other", better=0.05, steps=20)
    both = lines([first, read_run(other)])
    assert [line.label for line in both] == ["elastic-10m, 8 loops", "other, 8 loops"]
    _, page = report(tmp_path, run, other)
    (label,) = [svg["aria-label"] for svg in page.all("svg") if "position" in str(svg["aria-label"])]
    here = first.evaluation.by_position
    assert f"elastic-10m, 8 loops: from {here[0].bits_per_byte[8]:.3f} at the beginning" in str(label)
    assert "224 to 255" in page.text
    # A run that was evaluated before positions were has none, and the page does without.
    edit(other, "eval.json", by_position=None, train_step=None)
    assert positions([read_run(other)]) == "" and lines([first, read_run(other)]) == both[:1]


def test_prefills_are_shown_where_they_were_measured(run: Path, tmp_path: Path) -> None:
    folder = add_prefills(make_run(tmp_path / "memory", name="memory", steps=20))
    edit(folder, "eval.json", prefill={"kind": "exact"})
    _, page = report(tmp_path, folder, run)
    words = " ".join(" ".join(page.text).split())
    assert "prefill" in [attrs["id"] for attrs in page.all("section")] and {"href": "#prefill"} in page.all("a")
    (label,) = [str(svg["aria-label"]) for svg in page.all("svg") if "exact prefill" in str(svg["aria-label"])]
    assert "memory. zero: 0.0310, after a prompt 0.0077; interleaved (subsets 2): 0.0040" in label.replace(
        "0.0078", "0.0077"
    )
    for said in (
        "0.0300 to 0.0320",
        "iterated (tolerance 0.01, max_passes 8)",
        "120 k",
        "Rows were read by exact prefill",
    ):
        assert said in words
    assert "Measured at train step" not in words
    edit(folder, "prefills.json", train_step=7, chunk_tokens=16, note="Of part of it.")
    words = "".join(report(tmp_path, folder)[1].text)
    assert "Measured at train step 7, the evaluation at 20" in words
    assert "read 16 tokens at a time" in words and "Of part of it." in words
    edit(folder, "prefills.json", by_prefill=[])
    report(tmp_path, folder)


def test_caches_are_shown_where_they_were_measured(run: Path, tmp_path: Path) -> None:
    folder = add_caches(make_run(tmp_path / "caches", name="cached", steps=20))
    _, page = report(tmp_path, folder, run)
    words = " ".join(" ".join(page.text).split())
    assert "cache" in [attrs["id"] for attrs in page.all("section")] and {"href": "#cache"} in page.all("a")
    (label,) = [str(svg["aria-label"]) for svg in page.all("svg") if "a slot a loop" in str(svg["aria-label"])]
    assert "cached. mean: 0.0120; last: 0.2500." in label
    for said in ("0.0110 to 0.0130", "1.54 kB", "0.75", "Milliseconds per token, 64 rows at a time", "at 8 loops"):
        assert said in words, said
    assert "Measured at train step" not in words
    edit(folder, "caches.json", train_step=7, note="Of part of it.")
    words = "".join(report(tmp_path, folder)[1].text)
    assert "Measured at train step 7, the evaluation at 20" in words and "Of part of it." in words
    edit(folder, "caches.json", by_cache=[])
    report(tmp_path, folder)


def test_the_frontier_is_shown_where_it_was_measured(run: Path, tmp_path: Path) -> None:
    folder = add_frontier(make_run(tmp_path / "exits", name="exits", steps=20))
    _, page = report(tmp_path, folder, run)
    words = " ".join(" ".join(page.text).split())
    assert "exits" in [attrs["id"] for attrs in page.all("section")] and {"href": "#exits"} in page.all("a")
    labels = [str(svg["aria-label"]) for svg in page.all("svg") if "exits. all at one depth" in str(svg["aria-label"])]
    assert len(labels) == 2 and all("state, readout-only: 1.715 at" in label for label in labels)
    assert "1.731 at 3.2" in labels[0] and "1.731 at 3.2e+07" in labels[1]
    for said in (
        "All tokens at 4 loops are within 0.50% of the loss of 8",
        "state, readout-only",
        "0.0040",
        "0.0030 to 0.0050",
        "−0.0020 to 0.0000",
        "against 4 loops",
    ):
        assert said in words, said
    assert "Measured at train step" not in words
    add_frontier(folder, train_step=7, note="Of part of it.", curves=[])
    words = "".join(report(tmp_path, folder)[1].text)
    assert "Measured at train step 7, the evaluation at 20" in words and "Of part of it." in words
    add_frontier(folder, uniform=[])
    assert "Bits per byte against mean loops" not in "".join(report(tmp_path, folder)[1].text)


def test_legend_of_many_runs_does_not_squeeze_the_plot(run: Path) -> None:
    first = read_run(run)
    few, many = (loss_figure([replace(first, label=f"{'long-name-' * 5}{i}") for i in range(n)]) or "" for n in (2, 12))
    heights = [float(re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[0]) for svg in (few, many)]
    assert heights[1] - heights[0] > 10 * 11, "a row a name"
    assert all(f"-{i}</text>" in many for i in range(12)), "the end of a name tells runs apart"


def test_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "again", steps=20)
    assert [r.label for r in read_runs([run, other])] == ["elastic-10m (one)", "elastic-10m (again)"]
    assert len({r.label for r in read_runs([run, run])}) == 2


def test_samples_are_escaped_and_keep_their_space(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, name="<b>$x_1$ & co", description=HOSTILE)
    sample = {"prompt": "\n  a <i>", "loops": 2, "temperature": 1, "seed": 0, "text": f"  x\n\ty {HOSTILE}"}
    (folder / "samples.json").write_text(json.dumps([sample]))
    text, page = report(tmp_path, folder)
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert "<script" not in text
    assert any("  x\n\ty <script>" in part and "\u2400" in part and "\ufffd" in part for part in page.text)
    assert '<pre><span class="prompt">\n  a &lt;i&gt;</span>' in text
    assert "<b>$x_1$ & co" in "".join(page.text)


def test_a_failed_write_keeps_the_old_report(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)
    out = tmp_path / "new" / "out.html"
    write_report([run], out)
    before = out.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("alcoda.report.page.os.replace", refuse)
    with pytest.raises(RunError, match="no space left"):
        write_report([run], out)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]


def test_missing_matplotlib_is_explained(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install matplotlib"):
        write_report([run], tmp_path / "out.html")


def test_report_imports_no_torch_and_matplotlib_late() -> None:
    code = "import sys, alcoda.report.page; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_foreign_folder_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match=r"no run\.json and no recipe\.yaml.*metrics\.jsonl"):
        write_report([run, tmp_path], tmp_path / "out.html")
    with pytest.raises(UsageError, match="no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "out.html")
    with pytest.raises(UsageError, match="at least one run"):
        write_report([], tmp_path / "out.html")
    with pytest.raises(UsageError, match="is a folder; give the file"):
        write_report([run], tmp_path)
    assert not (tmp_path / "out.html").exists()
