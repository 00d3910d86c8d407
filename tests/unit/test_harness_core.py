"""CORE from files: prompts, what is right, the centred mean; what is done is kept, and bad input is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_files import N_ROWS, baseline, kind_of, rows_of, write_core
from loaded import loaded

from alcoda.downstream import evaluate as module
from alcoda.downstream.core import CORE, CoreTask, is_right, prompts, read_core, read_rows
from alcoda.downstream.encode import Ask
from alcoda.downstream.evaluate import harness
from alcoda.downstream.score import Answer, Scorer
from alcoda.errors import RunError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_core(tmp_path / "core")


def task(kind: str, shots: int = 0, delimiter: str = " ") -> CoreTask:
    return CoreTask("one", kind, "one.jsonl", Path("one.jsonl"), shots, delimiter, 0.25)


def test_there_are_22() -> None:
    assert len(set(CORE)) == 22


def test_prompts_of_each_kind() -> None:
    rows: list[dict[str, Any]] = [
        {"query": "Sky?", "choices": ["red", "blue"], "gold": 1},
        {"query": "Sun?", "choices": ["hot", "cold"], "gold": 0},
    ]
    one = task("multiple_choice", shots=10, delimiter="\nAnswer: ")
    assert prompts(one, rows, 0) == [
        ("Sun?\nAnswer: hot\nSky?\nAnswer: ", "red"),
        ("Sun?\nAnswer: hot\nSky?\nAnswer: ", "blue"),
    ]
    rows = [{"context_options": ["Ann", "Bob"], "continuation": "ran", "gold": 1}]
    assert prompts(task("schema"), rows, 0) == [("Ann ", "ran"), ("Bob ", "ran")]
    rows = [{"context": "Paris is in", "continuation": "France"}, {"context": "Rome is in", "continuation": "Italy"}]
    assert prompts(task("language_modeling", shots=1), rows, 1) == [("Paris is in France\nRome is in ", "Italy")]


def test_shots_are_others_and_stay_whatever_the_limit() -> None:
    rows = [{"context": f"q{i}", "continuation": f"a{i}"} for i in range(30)]
    one = task("language_modeling", shots=5)
    seen = set()
    for i in range(30):
        ((context, _),) = prompts(one, rows, i)
        lines = context.split("\n")
        assert len(lines) == 6 and lines[-1] == f"q{i} " and f"q{i} a{i}" not in lines[:-1]
        assert prompts(one, rows, i) == [(context, f"a{i}")]
        seen.add(tuple(lines[:-1]))
    assert len(seen) > 20, "each row has shots of its own"


def test_what_is_right() -> None:
    answers = [Answer((3.0, 8.0), (False, False), 1), Answer((4.0, 4.0), (True, False), 2)]
    row = {"gold": 1}
    assert is_right(task("multiple_choice"), row, answers) == [True, True], "the fewest nats a token"
    assert is_right(task("schema"), {"gold": 0}, [answers[0], Answer((2.0, 9.0), (False, False), 1)]) == [False, True]
    assert is_right(task("language_modeling"), row, answers[1:]) == [True, False]


def test_accuracy_is_centred_and_core_is_their_mean(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scorer that likes every right answer at depth 4, and of multiple choice none at depth 1."""
    right = {
        row["choices"][row["gold"]] for name in CORE for row in rows_of(name) if kind_of(name) == "multiple_choice"
    }
    assert right == {"no", "yes", "2"}
    lm = loaded()

    def known(self: Scorer, asks: Sequence[Ask], tell: Any = None) -> list[Answer]:
        made = []
        for ask in asks:
            text = lm.tokenizer.decode([*ask.context, *ask.continuation]).rsplit("\n", 1)[-1]
            if text.startswith(("Ann", "Bob")):
                is_gold = text.startswith("Ann" if int(text[4]) % 2 == 0 else "Bob")
            else:
                numbered = [w for w in lm.tokenizer.decode(ask.context).split() if w.isdecimal()]
                options = ["no", "yes", numbered[-1]]
                answer = lm.tokenizer.decode(ask.continuation).strip()
                is_gold = answer == options[int(numbered[-1]) % 3]
            n = len(ask.continuation)
            made.append(Answer((n * (2.0 + is_gold), n * (2.0 - is_gold)), (False, True), n))
        return made

    monkeypatch.setattr(Scorer, "score", known)
    found = harness(lm, ["core"], [1, 4], data=folder)
    assert len(found.tasks) == 22 and [score.point for score in found.core] == ["1", "4"]
    assert found.core[1].value == pytest.approx(1.0)
    for one in found.tasks:
        name = one.task.removeprefix("core/")
        low, high = one.by_point
        assert one.n == N_ROWS and one.baseline == baseline(name) / 100 and one.main == "acc"
        assert high.metrics["acc"].value == 1 and high.centred == 1
        assert low.metrics["acc"].value == 0 and low.centred == pytest.approx(-one.baseline / (1 - one.baseline))
        assert high.gain is not None and high.gain.value == 1 and low.gain is None
    expected = np.mean([-baseline(name) / (100 - baseline(name)) for name in CORE])
    assert found.core[0].value == pytest.approx(expected)


def test_it_runs_from_files(folder: Path) -> None:
    found = harness(loaded(), ["core"], [1, 4], ["state:0.5"], data=folder, limit=2)
    assert [one.task for one in found.tasks] == [f"core/{name}" for name in CORE]
    for one in found.tasks:
        assert one.n == 2 and one.n_tokens > 0 and [at.point for at in one.by_point] == ["1", "4", "state:0.5"]
        assert [at.mean_loops for at in one.by_point[:2]] == [1, 4] and 1 <= one.by_point[2].mean_loops <= 4
        assert one.by_point[0].flops_per_token < one.by_point[1].flops_per_token
        assert all(at.metrics["acc"].stderr is not None for at in one.by_point)
    assert len(found.core) == 3 and all(score.stderr is not None for score in found.core)
    alone = harness(loaded(), ["core/squad"], data=folder)
    assert [one.task for one in alone.tasks] == ["core/squad"] and alone.core == ()


def test_a_part_of_a_file_is_taken_and_told(folder: Path) -> None:
    whole = folder / "local_data/squad.jsonl"
    whole.rename(whole.with_name("squad_1000.jsonl"))
    (one,) = harness(loaded(), ["core/squad"], data=folder).tasks
    assert one.note == "squad_1000.jsonl in place of squad.jsonl"


def test_a_route_that_sees_the_answer_is_told(folder: Path) -> None:
    lm = loaded(route={"kind": "expert_choice", "auxiliary": "none"})
    (one,) = harness(lm, ["core/copa"], data=folder).tasks
    assert one.note is not None and "no prediction" in one.note
    assert harness(loaded(), ["core/copa"], data=folder).tasks[0].note is None


# -- kept -------------------------------------------------------------------------------------------------------------


def test_what_is_done_is_kept_and_not_measured_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, out, names = loaded(), tmp_path / "harness.json", ["core/copa", "core/squad", "core/boolq"]
    scored: list[str] = []
    score_core = module.score_core

    def counted(task: CoreTask, *rest: Any) -> np.ndarray:
        if task.name == "boolq" and len(scored) == 2:
            scored.append("interrupted")
            raise KeyboardInterrupt
        scored.append(task.name)
        return score_core(task, *rest)

    monkeypatch.setattr(module, "score_core", counted)
    with pytest.raises(KeyboardInterrupt):
        harness(lm, names, [1], data=folder, out=out)
    assert [one["result"]["task"] for one in json.loads(out.read_text())["kept"]] == ["core/copa", "core/squad"]
    found = harness(lm, names, [1], data=folder, out=out)
    assert scored == ["copa", "squad", "interrupted", "boolq"]
    assert harness(lm, names, [1], data=folder, out=out) == found and len(scored) == 4
    assert harness(lm, names, [1], data=folder) == found, "what is read back is what was measured"
    scored.clear()
    for changed in ({"limit": 2}, {"loops": [2]}, {"bos": True}, {"exits": ["fixed:2"]}):
        how: dict[str, Any] = {"loops": [1], **changed}
        harness(lm, ["core/copa"], how.pop("loops"), how.pop("exits", ()), data=folder, out=out, **how)
    assert scored == ["copa"] * 4, "another question is measured"
    assert len(json.loads(out.read_text())["kept"]) == 3, "one result a task"


def test_a_damaged_file_of_results_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "harness.json"
    for text in ("{", "[]", '{"version": 0, "kept": []}'):
        out.write_text(text)
        with pytest.raises(RunError):
            harness(loaded(), ["core/copa"], data=folder, out=out)
        assert out.read_text() == text, "it is left alone"


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, how, says",
    [
        (["helaswag"], {}, "did you mean 'hellaswag'"),
        (["core/copaa"], {}, "did you mean 'copa'|unknown task"),
        ([], {}, "no task is named"),
        (["copa", "core"], {}, "run it by itself"),
        (["none.yaml"], {}, "no such file"),
        (["core"], {"data": None}, "--data FOLDER"),
        (["core"], {"data": Path("nowhere")}, "no such folder"),
        (["core"], {"limit": 0}, "limit 0: at least 1"),
        (["core"], {"loops": [0]}, "loops"),
        (["core"], {"exits": ["balanced"]}, "balanced"),
    ],
)
def test_bad_input(folder: Path, names: list[str], how: dict[str, Any], says: str) -> None:
    how = {"data": folder, **how}
    with pytest.raises(UsageError, match=says):
        harness(loaded(), names, how.pop("loops", ()), how.pop("exits", ()), **how)


def test_bad_files(folder: Path) -> None:
    path = folder / "local_data/copa.jsonl"
    for line in ('{"query": "a"}', "[]", '{"query": "a", "choices": ["b"], "gold": 1}', "{", ""):
        path.write_text(line + "\n")
        with pytest.raises(RunError, match=r"copa\.jsonl"):
            read_rows(read_core(folder, ["copa"])[0])
    path.unlink()
    with pytest.raises(UsageError, match=r"1 of 2 tasks are not there: copa\.jsonl.*core/squad"):
        read_core(folder, ["copa", "squad"])
    (folder / "eval_meta_data.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RunError, match="Random baseline"):
        read_core(folder)
    (folder / "eval_meta_data.csv").unlink()
    with pytest.raises(UsageError, match=r"no eval_meta_data\.csv in it"):
        read_core(folder)
    (folder / "heavy.yaml").write_text("a: 1")
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    with pytest.raises(RunError, match="icl_tasks"):
        read_core(folder)
