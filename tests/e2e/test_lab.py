"""The lab through the command line: what it writes, what it says, what it refuses, and its page."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import Cli, recipe, snapshot, write_recipe

import alcoda
from alcoda import api
from alcoda.config import validate
from alcoda.errors import UsageError
from alcoda.measure import lab as lab_module
from alcoda.measure.classes import CLASSES
from alcoda.training.recipe import Recipe


def test_a_lab_and_its_page(run_cli: Cli, trained: Path, tmp_path: Path) -> None:
    done = run_cli.ok("lab", trained, "--loops", 5, "--tokens", 900, "--frontier", 300)
    found = done.json
    frontier = found.pop("frontier")
    assert json.loads((trained / "frontier.json").read_text()) == frontier and "readout-only" in done.out
    assert json.loads((trained / "lab/lab.json").read_text()) == found and found["schema"] == 1
    n = found["n_tokens"]
    assert found["loops"] == 5 and 32 < n < 900 and found["depth"]["n_tokens"] == n
    counts = [one["settled"] + one["censored"] for one in found["histogram"]]
    assert sum(counts) == n and counts[0] == 0  # no loop before the first to settle from
    for groups in ("by_class", "by_position", "by_difficulty"):
        assert sum(one["n_tokens"] for one in found[groups]) == n, groups
    assert {one["name"] for one in found["by_class"]} <= set(CLASSES["text"])
    assert [one["loop"] for one in found["by_loop"]] == [1, 2, 3, 4, 5]
    assert [one["loops"] for one in found["elasticity"]["by_depth"]] == [1, 2, 3, 4, 6, 8, 16, 32]
    # The lab's loss at a loop is that of evaluation at that depth.
    at_3 = next(one for one in found["elasticity"]["by_depth"] if one["loops"] == 3)
    assert found["by_loop"][2]["loss"] == pytest.approx(at_3["loss"], rel=1e-5)
    assert len(found["paths"]["by_loop"]) == 6 and {one["loop"] for one in found["contraction"]} == {1, 2, 4}
    assert "mean depth" in done.out
    text = "".join(token["text"] for token in found["passages"][0]["tokens"])
    assert len(text) > 100 and "\ufffd" not in text
    own = trained / "report.html"
    assert f"page: {own}" in done.err and 'class="heat"' in own.read_text()
    page = tmp_path / "report.html"
    (trained / "metrics.jsonl").unlink()  # whose figures are drawn in other tests
    run_cli.ok("report", trained, "--out", page, "--figures", "pdf", "--tables", "csv,latex")
    html = page.read_text()
    assert 'id="lab"' in html and 'class="heat"' in html and "Convergence depth" in html
    parts = tmp_path / "report_parts"
    assert (parts / "lab_0_histogram.pdf").read_bytes().startswith(b"%PDF")
    with (parts / "convergence_depth_by_class_of_token.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["Mean depth"]) for row in rows] == pytest.approx(
        [one["mean"] for one in found["by_class"]], abs=0.006
    )
    assert r"\toprule" in (parts / "convergence_depth_by_class_of_token.tex").read_text()


def test_the_table_of_tokens_is_the_summary(trained: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    found = alcoda.lab(trained, loops=4, tokens=700)
    table = pq.read_table(trained / "lab/tokens.parquet").to_pydict()
    assert len(table["token"]) == found.n_tokens
    assert np.mean(table["depth"]) == pytest.approx(found.depth.mean)
    assert np.mean([loss[-1] for loss in table["loss"]]) == pytest.approx(found.by_loop[-1]["loss"], rel=1e-5)
    assert table["class"].count("word_start") == next(
        one.n_tokens for one in found.by_class if one.name == "word_start"
    )


def test_another_text_and_its_classes(trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("def f(x):\n    return x + 1\n\n\nclass A:\n    y = 'z'\n" * 6)
    found = alcoda.lab(trained, f"text:{source}", loops=3, out=tmp_path / "there")
    assert list(found.classes.values()) == ["code"] and {one.name for one in found.by_class} >= {"keyword", "name"}
    assert (tmp_path / "there/lab.json").exists() and not (trained / "lab").exists()
    prose = alcoda.lab(trained, f"text:{source}", loops=3, classes="text", out=tmp_path / "there")
    assert "keyword" not in {one.name for one in prose.by_class}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", 5], "too few for a distribution"),
        (["--eps", 0], "above 0"),
        (["--loops", 1], "2 or more"),
        (["--classes", "prose"], "auto, text, code"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_what_is_asked_wrongly(run_cli: Cli, trained: Path, arguments: list[object], says: str) -> None:
    run_cli.refused("lab", trained, *arguments, says=(says,))
    assert not (trained / "lab").exists()


@pytest.mark.parametrize("content", ["", "a", "two words"])
def test_a_text_that_is_too_short(run_cli: Cli, trained: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "short.txt").write_text(content)
    run_cli.refused("lab", trained, "--data", f"text:{tmp_path / 'short.txt'}")
    assert not (trained / "lab/lab.json").exists() and not (trained / "lab/tokens.parquet").exists()


def test_a_dense_run_is_refused(run_cli: Cli, tmp_path: Path, corpus: Path) -> None:
    data = recipe(corpus, model__n_core=0, model__n_loops=1, model__inject="none", depth={"kind": "fixed"})
    data["eval"]["loops"] = [1]
    api.train(validate(Recipe, data), tmp_path / "dense")
    run_cli.refused("lab", tmp_path / "dense", says=("dense", "recurrent"))


def test_untied_weights_end_at_their_loops(run_cli: Cli, tmp_path: Path, corpus: Path) -> None:
    changed = write_recipe(tmp_path / "u.yaml", corpus, model__sharing="untied", depth={"kind": "fixed", "loops": 2})
    run_cli.ok("train", changed, "--set", "eval.loops=[1,2]", "--out", tmp_path / "untied")
    run_cli.refused("lab", tmp_path / "untied", says=("2",))
    done = run_cli.ok("lab", tmp_path / "untied", "--loops", 2, "--tokens", 300)
    found = done.json
    assert found["frontier"] is None and "no frontier of exit rules: exit 'fixed': with sharing 'untied'" in done.err
    assert [one["loops"] for one in found["elasticity"]["by_depth"]] == [1, 2]


def test_a_run_with_a_memory_is_read_token_by_token(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    api.train(validate(Recipe, recipe(corpus, model__memory="prev_token")), tmp_path / "run")
    done = run_cli.ok("lab", tmp_path / "run", "--loops", 3, "--tokens", 200)
    assert done.json["frontier"] is None and "no frontier of exit rules: a model with a memory" in done.err
    assert "lower --tokens" in done.err and "token by token" in done.json["notes"][0]
    at_3 = next(one for one in done.json["elasticity"]["by_depth"] if one["loops"] == 3)
    assert done.json["by_loop"][-1]["loss"] == pytest.approx(at_3["loss"], rel=1e-5)


@pytest.mark.parametrize("where", ["check_finite", "evaluate"])
def test_an_interrupted_lab_keeps_the_old_one(trained: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    alcoda.lab(trained, loops=3, tokens=300)
    before = snapshot(trained)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab_module, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        alcoda.lab(trained, loops=4, tokens=300)
    assert snapshot(trained) == before


def test_trace_from_python(trained: Path) -> None:
    lm = alcoda.load(trained)
    ids = lm.tokenizer.encode("one two three")
    found = lm.trace(ids, ["kl_previous", "argmax", "loss", "state"], loops=4)
    assert found["kl_previous"].shape == (len(ids), 4) and found["state"].shape == (len(ids), 4, 16)
    assert found["argmax"][:, -1].tolist() == lm.logits(ids, loops=4).argmax(-1).tolist()
    assert found["loss"][-1].isnan().all() and found["loss"][:-1].isfinite().all()
    assert lm.trace([ids.tolist()] * 2)["entropy"].shape == (2, len(ids), lm.n_loops)
    with pytest.raises(UsageError, match="did you mean"):
        lm.trace(ids, ["entropi"])
