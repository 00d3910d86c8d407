"""`alcoda harness` from end to end: the command line, its files, and, where lm-eval is installed, its own numbers."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from core_files import write_core
from helpers import Cli, untouched
from loaded import loaded

import alcoda
from alcoda import api
from alcoda.downstream.encode import Encoder
from alcoda.downstream.score import Scorer, points
from alcoda.downstream.tasks import GROUPS

COPA = [
    {"premise": f"It was {word}.", "choice1": "One two.", "choice2": "Three four.", "question": kind, "label": i % 2}
    for i, (word, kind) in enumerate([("one", "cause"), ("two", "effect"), ("three", "cause"), ("not", "effect")] * 2)
]
LAMBADA = [{"text": "one two three four five"}, {"text": "six seven and or"}, {"text": "two two"}]
GENERATE = """\
task: echo
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["\\n", ".", "x", "y", "z"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """\
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data of two tasks."""
    (tmp_path / "tasks").mkdir()
    write_rows(tmp_path / "tasks/copa.jsonl", COPA)
    write_rows(tmp_path / "tasks/lambada_openai.jsonl", LAMBADA)
    return tmp_path / "tasks"


# -- without lm-eval --------------------------------------------------------------------------------------------------


def test_core_from_the_command_line(run_cli: Cli, trained: Path, tmp_path: Path) -> None:
    data = write_core(tmp_path / "core")
    ask = ["harness", trained, "--tasks", "core", "--data", data, "--loops", "1,3", "--exit", "state:0.5", "--limit", 3]
    done = run_cli.ok(*ask)
    assert len(done.json["tasks"]) == 22 and [score["point"] for score in done.json["core"]] == ["1", "3", "state:0.5"]
    assert "CORE at 3:" in done.out and "core/winograd" in done.out and "--limit" in done.err
    kept = (trained / "harness.json").read_bytes()
    again = run_cli.ok(*ask, "--json")
    assert again.json == done.json and again.out.count("\n") == 1
    assert (trained / "harness.json").read_bytes() == kept
    deep = run_cli.ok("harness", trained, "--tasks", "core/copa", "--data", data, "--loops", 9, "--limit", 2, "--json")
    assert alcoda.load(trained).n_loops < 9 == deep.json["tasks"][0]["by_point"][0]["mean_loops"]
    run_cli.ok("report", trained, "--out", tmp_path / "report.html")
    assert 'id="tasks"' in (tmp_path / "report.html").read_text()


def test_the_list(run_cli: Cli, folder: Path) -> None:
    lines = run_cli.ok("harness", "--list", "--data", folder).out.splitlines()
    assert "copa" in lines and any(line.startswith("hellaswag (no data") and "make tasks" in line for line in lines)
    assert "core/squad" in run_cli.ok("harness", "--list", "--json").json["tasks"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--tasks", "helaswag"], "did you mean 'hellaswag'"),
        (["--tasks", "core"], "--data FOLDER"),
        (["--tasks", "copa", "--limit", 0], "limit 0: at least 1"),
        (["--tasks", "copa", "--loops", "0"], "loops"),
        (["--tasks", "copa", "--loops", "x"], "whole numbers"),
        (["--tasks", "copa", "--exit", "balanced"], "balanced"),
        (["--tasks", "hellaswag"], "make tasks"),
        (["--tasks", "mmlu"], "make tasks"),
        (["--tasks", "copa", "--shots", len(COPA)], f"task copa has {len(COPA) - 1} documents"),
        (["--tasks", "core/copa", "--shots", 1], "--data"),
        ([], "no task is named"),
        (["--unpack", "none.whl"], "no such file"),
    ],
)
def test_bad_input(run_cli: Cli, trained_once: Path, folder: Path, arguments: list[Any], says: str) -> None:
    data = [] if "core" in arguments else ["--data", folder]
    with untouched(trained_once), untouched(folder):
        run_cli.refused("harness", trained_once, *arguments, *data, says=(says,))


def test_no_run_is_named(run_cli: Cli) -> None:
    run_cli.refused("harness", "--tasks", "copa", says=("no run is named",))


# -- with it ----------------------------------------------------------------------------------------------------------


def plain(lm: api.LM, loops: int) -> Any:
    """A model for lm-eval that knows nothing of batches, made of its own `TemplateLM` and of `lm.logits`."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Plain(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return lm.tokenizer.eot

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return lm.tokenizer.encode(string).tolist()

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            found = []
            for _, context, continuation in requests:
                ids = (context + continuation)[-(lm.recipe.model.seq_len + 1) :][:-1]
                logits = lm.logits(ids, loops=loops)[-len(continuation) :]
                target = torch.tensor(continuation)
                nats = F.cross_entropy(logits, target, reduction="sum")
                found.append((-float(nats), bool((logits.argmax(-1) == target).all())))
            return found

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                windows = get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.eot_token_id, lm.recipe.model.seq_len, 1
                )
                pairs = [(None, *make_disjoint_window(window)) for window in windows]
                found.append(sum(nats for nats, _ in self._loglikelihood_tokens(pairs)))
            return found

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError

    return Plain()


def test_numbers_are_lm_evals_own(trained: Path, folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from alcoda.downstream import adapter

    lm = alcoda.load(trained)
    found = alcoda.harness(lm, ["copa", "lambada_openai"], [1, 3], ["state:0.5"], data=folder)
    again = alcoda.harness(lm, ["copa", "lambada_openai"], [3], data=folder, batch_size=1)
    assert [len(one.by_point) for one in found.tasks] == [3, 3]
    for one, alone in zip(found.tasks, again.tasks, strict=True):
        assert one.source == alone.source == f"lm-eval {adapter.VERSION}"
        assert one.n == len(COPA if one.task == "copa" else LAMBADA)
        for name, value in alone.by_point[0].metrics.items():
            assert one.by_point[1].metrics[name].value == pytest.approx(value.value, rel=1e-6)
        for at, loops in zip(one.by_point, (1, 3), strict=False):
            task = adapter.load_task(one.task, folder)
            theirs = adapter.evaluate(
                plain(lm, loops),
                {"tasks": {one.task: task}, "groups": {}, "group_map": {}},
                # Of a perplexity it would fork processes, which may hang beside torch's threads.
                bootstrap_iters=100 if one.task == "copa" else 0,
            )
            assert theirs is not None
            said = theirs["results"][one.task]
            for name, measured in at.metrics.items():
                assert measured.value == pytest.approx(said[f"{name},none"], rel=1e-5)
                if one.task == "copa":
                    assert measured.stderr == pytest.approx(said[f"{name}_stderr,none"], rel=1e-9)
    # The control: the depths differ, and so do their numbers.
    perplexities = [at.metrics["perplexity"].value for at in found.tasks[1].by_point]
    assert len(set(perplexities)) == 3


def test_shots_and_a_group_are_lm_evals_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.metrics import pooled_sample_stderr

    from alcoda.downstream import adapter

    subjects = {"mmlu_anatomy": 5, "mmlu_virology": 3}
    monkeypatch.setitem(GROUPS, "mmlu", tuple(subjects))
    for i, (name, n) in enumerate(subjects.items()):
        rows = [
            {"question": f"is {w} {i}?", "choices": ["one", "two", "three", "four"], "answer": j % 4}
            for j, w in enumerate("abcdefgh"[:n])
        ]
        write_rows(folder / f"{name}.jsonl", rows)
        write_rows(folder / f"{name}.shots.jsonl", [{**rows[0], "question": f"shot {k}"} for k in range(2)])
    lm = loaded(seq_len=512)
    found = alcoda.harness(lm, ["copa", "mmlu"], [1, 3], shots=2, data=folder)
    plainly = alcoda.harness(lm, ["copa", "mmlu"], [1, 3], data=folder)
    assert [one.shots for one in found.tasks] == [2, 2] and found.tasks[1].n == 8
    # The control: with shots other texts are read.
    for one, other in zip(found.tasks, plainly.tasks, strict=True):
        assert other.shots == 0 and one.n_tokens > other.n_tokens
    for one, names in zip(found.tasks, (["copa"], list(subjects)), strict=True):
        for at, loops in zip(one.by_point, (1, 3), strict=True):
            tasks = {name: adapter.load_task(name, folder, 2) for name in names}
            asked = {"tasks": tasks, "groups": {}, "group_map": {}}
            said = adapter.evaluate(plain(lm, loops), asked, bootstrap_iters=100, log_samples=True)
            assert said is not None
            for name, task in tasks.items():
                (first, *_) = task.instances
                assert first.args[0].count("Answer:" if name != "copa" else "\n\n") == 3 - (name == "copa")
                for sample in said["samples"][name]:  # no document is its own shot
                    asks = str(sample["doc"].get("premise", sample["doc"].get("question")))
                    assert sample["arguments"][0][0].count(asks.rstrip(".")) == 1
            results = [said["results"][name] for name in names]
            sizes = [len(said["samples"][name]) for name in names]
            value = sum(r["acc,none"] * n for r, n in zip(results, sizes, strict=True)) / sum(sizes)
            assert at.metrics["acc"].value == value
            stderr = pooled_sample_stderr([r["acc_stderr,none"] for r in results], sizes)
            assert at.metrics["acc"].stderr == pytest.approx(stderr, rel=1e-9)


def test_tasks_of_ones_own(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation through the engine, and whole texts in windows; nobody is asked for anything."""
    pytest.importorskip("lm_eval")
    from alcoda.downstream import adapter

    asked: list[Any] = []

    def nowhere(*address: Any, **how: Any) -> Any:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)

    lm = alcoda.load(trained)
    texts = [{"text": "one two three four five six seven"}, {"text": "two"}, {"text": "one " * 30}]
    file, names = write_rows(tmp_path / "texts.jsonl", texts), []
    for name, text in (("echo", GENERATE), ("rolling", ROLLING)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text.format(file=file, cache=tmp_path / "cache"))
        names.append(str(path))
    found = alcoda.harness(lm, names, [1, 3], ["state:0.5"])
    echo, rolling = found.tasks
    assert asked == []
    assert [one.main for one in found.tasks] == ["exact_match", "byte_perplexity"]
    for at in echo.by_point:
        assert at.metrics["exact_match"].value == 0, "so small a model repeats nothing"
    assert [at.mean_loops for at in echo.by_point[:2]] == [1, 3] and 1 <= echo.by_point[2].mean_loops <= 3
    task = adapter.load_task(names[1], tmp_path)
    how = {"bootstrap_iters": 0}
    theirs = adapter.evaluate(plain(lm, 3), {"tasks": {"rolling": task}, "groups": {}, "group_map": {}}, **how)
    assert theirs is not None
    said = theirs["results"]["rolling"]["byte_perplexity,none"]
    assert rolling.by_point[1].metrics["byte_perplexity"].value == pytest.approx(said, rel=1e-6)


def test_what_is_generated_is_what_the_engine_gives_and_ends_at_any_stop(trained: Path) -> None:
    pytest.importorskip("lm_eval")
    from alcoda.downstream import adapter

    lm = alcoda.load(trained)
    at = points(lm.loaded, [1, 3])
    answers = adapter.Answers(lm, Scorer(lm.loaded, at), Encoder(lm.tokenizer), lambda what, n: None)
    how = {"until": [], "max_gen_toks": 6}
    contexts = ["one two", "three", "one two"]
    made = answers.generated(1, [(context, how) for context in contexts])
    assert made == lm.generate(contexts, loops=3, max_tokens=6) and made[0] == made[2]
    letter = next(letter for letter in made[0] if letter.isascii())
    stops = ["Q", "W", "X", "Y", letter]  # the engine looks for four
    (cut,) = answers.generated(1, [("one two", {**how, "until": stops})])
    assert cut == made[0].split(letter)[0] != made[0]
    long = answers.generated(1, [("one " * 40, how)])
    assert len(long) == 1, "a context that is too long is cut from the left"
