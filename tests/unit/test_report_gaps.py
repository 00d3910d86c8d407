"""The report of runs that lack something, or whose files are damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fake_run import make_run
from pages import draw_nothing, edit, report

from alcoda.errors import RunError
from alcoda.report.figures import depth_figure
from alcoda.report.page import write_report
from alcoda.report.read import read_run


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        (["eval.json"], "No evaluation yet: run"),
        (["samples.json"], "No samples yet"),
        (["metrics.jsonl"], "No training metrics yet"),
        (["eval.json", "samples.json", "metrics.jsonl"], "No evaluation yet: run"),
    ],
)
def test_missing_pieces_are_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: list[str], said: str
) -> None:
    draw_nothing(monkeypatch)
    folder = make_run(tmp_path / "run", steps=20)
    for name in absent:
        (folder / name).unlink()
    _, page = report(tmp_path, folder)
    assert said in "".join(page.text)
    _, page = report(tmp_path, folder, make_run(tmp_path / "whole", name="whole", steps=20))
    assert "whole" in "".join(page.text)


def test_run_that_has_barely_begun(tmp_path: Path) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("name: young\n")
    (folder / "run.json").write_text('{"status": "running", "result": null, "commit": null}')
    text, page = report(tmp_path, folder)
    words = "".join(page.text)
    assert "young" in words and "running" in words
    for said in (
        "No evaluation yet",
        "No training metrics yet",
        "No cost ledger",
        "No samples yet",
        "describes no data",
    ):
        assert said in words
    (folder / "metrics.jsonl").write_text(
        '{"type": "train", "train_step": 1, "loss": 8.3, "loops": 4, "tokens": 4096}\n'
    )
    text, page = report(tmp_path, folder)
    assert "4.10 k" in text, "tokens so far"
    assert "No validation during training was logged." in "".join(page.text)


@pytest.mark.parametrize("tail", ['{"type": "train", "train_st', '{"type": "train"}garbage', "17", '"caf\udcc3'])
def test_cut_last_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str) -> None:
    draw_nothing(monkeypatch)
    folder = make_run(tmp_path / "run", steps=20)
    path = folder / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(tail.encode("utf-8", "surrogateescape"))
    assert list(read_run(folder).curve.train_step_N) == list(range(1, 21))
    _, page = report(tmp_path, folder)
    assert "last line of metrics.jsonl is incomplete" in "".join(page.text)
    with path.open("ab") as file:
        file.write(b'\n{"type": "train", "train_step": 21, "loss": 2.0}\n')
    with pytest.raises(RunError, match=r"line \d+ is not a JSON object"):
        read_run(folder)


def test_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"type": "train", "train_step": 15, "loss": 1.5, "loops": 3}\n')
    curve = read_run(folder).curve
    assert list(curve.train_step_N) == list(range(1, 21))
    assert curve.loss_N[14] == 1.5
    assert math.isnan(curve.tokens_per_s_N[14])


def test_odd_numbers_do_not_stop_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"type": "train", "train_step": 21, "loss": NaN, "loops": 3.5}\n')
        file.write('{"type": "train", "train_step": 22, "loss": null, "loops": 3}\n')
    point = {"loops": 3, "loss": 2, "bits_per_byte": 1.5, "low": None, "high": None}
    edit(folder, "eval.json", by_depth=[point], gain=[], bigram_bits_per_byte=None, note="Fewer than 30 documents.")
    _, page = report(tmp_path, folder)
    assert "Fewer than 30 documents." in "".join(page.text)
    edit(folder, "eval.json", by_depth=[])
    report(tmp_path, folder)


def test_far_baseline_gets_a_strip_of_its_own(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    broken = depth_figure([read_run(folder)]) or ""
    edit(folder, "eval.json", bigram_bits_per_byte=1.96)
    whole = depth_figure([read_run(folder)]) or ""
    assert "bigram baseline 1.960" in whole and "bigram baseline 2.874" in broken
    assert broken.count(">2.87</text>") == 1
    assert ">1.96</text>" not in whole


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.json", "{", r"run\.json: this is not readable JSON"),
        ("run.json", "[]", r"run\.json: an object is needed"),
        ("run.json", '{"ledger": {"loops": "8"}}', "ledger: loops has to be a number, not '8'"),
        ("run.json", '{"seeds": 3}', "seeds: an object is needed, not 3"),
        ("eval.json", '{"n_units": true}', "n_units has to be a number, not True"),
        ("eval.json", '{"n_units": 1.5}', "n_units has to be a whole number"),
        ("eval.json", '{"n_units": 1, "n_tokens": 1, "n_bytes": 1, "by_position": 3}', "by_position has to be a list"),
        (
            "eval.json",
            '{"by_position": [{"start": 0, "stop": 1, "bits_per_byte": {"one": 2}}]}',
            "'one' has to be a number of loops",
        ),
        ("frontier.json", '{"train_step": 1}', r"frontier\.json: n_loops is missing"),
        ("frontier.json", "[]", r"frontier\.json: an object is needed"),
        ("caches.json", '{"train_step": 1}', r"caches\.json: loops is missing"),
        ("caches.json", "[]", r"caches\.json: an object is needed"),
        ("prefills.json", '{"train_step": 1}', r"prefills\.json: loops is missing"),
        ("prefills.json", "[]", r"prefills\.json: an object is needed"),
        ("samples.json", "{}", "a list is needed"),
        ("samples.json", '[{"prompt": "a"}]', r"samples\.json\[0\]: loops is missing"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    (folder / name).write_text(content)
    with pytest.raises(RunError, match=said):
        write_report([folder], tmp_path / "out.html")
