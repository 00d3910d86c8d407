"""CORE (DataComp-LM, arXiv 2406.11794): 22 tasks with few shots, each centred on guessing, one number: their mean.

The files are those of the DCLM and LLM Foundry evaluation: JSON lines of three kinds, a YAML file with shots and
delimiters, a CSV file with the accuracy of guessing. Prompts are those of LLM Foundry's in-context learning: shots with
a line break between, what is asked after them, spaces at the end of a context moved to the answer. Which rows are the
shots of a row depends on that row alone, so that ``limit`` changes no prompt.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from alcoda.downstream.encode import Encoder
from alcoda.downstream.score import Answer, Scorer
from alcoda.errors import RunError, UsageError, did_you_mean
from alcoda.model.prefill import Tell

CORE = (
    "agi_eval_lsat_ar",
    "arc_challenge",
    "arc_easy",
    "bigbench_cs_algorithms",
    "bigbench_dyck_languages",
    "bigbench_language_identification",
    "bigbench_operators",
    "bigbench_qa_wikidata",
    "bigbench_repeat_copy_logic",
    "boolq",
    "commonsense_qa",
    "copa",
    "coqa",
    "hellaswag",
    "hellaswag_zeroshot",
    "jeopardy",
    "lambada_openai",
    "openbook_qa",
    "piqa",
    "squad",
    "winograd",
    "winogrande",
)
RECIPES = ("core.yaml", "mmlu_and_lowvar.yaml", "heavy.yaml")
"""Files with shots and delimiters; the first that is there."""
BASELINES = "eval_meta_data.csv"
SEED = 1234
NEEDED = (
    f"it needs a folder with {' or '.join(RECIPES)}, {BASELINES} and the JSON lines that they name (the evaluation "
    "data of DCLM and LLM Foundry): --data FOLDER"
)
FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass(frozen=True)
class CoreTask:
    """One of the 22.

    Attributes:
        kind: of `FIELDS`.
        file: its name in the description.
        path: JSON lines; of a part of them, where ``file`` is not there.
        shots: rows with their answers before each row.
        delimiter: between what is asked and its answer.
        baseline: accuracy of guessing, 0 to 1.
    """

    name: str
    kind: str
    file: str
    path: Path
    shots: int
    delimiter: str
    baseline: float

    def centred(self, accuracy: float) -> float:
        """0 for guessing, 1 for all right."""
        return (accuracy - self.baseline) / (1 - self.baseline)


def read_core(folder: Path, names: Sequence[str] = CORE) -> list[CoreTask]:
    """The tasks ``names`` from the files anywhere below ``folder``.

    Raises:
        UsageError: an unknown name, or a file that is missing.
        RunError: a damaged one.
    """
    for name in names:
        if name not in CORE:
            raise UsageError(f"core/{name}: CORE has no such task{did_you_mean(name, CORE)}")
    if not folder.is_dir():
        raise UsageError(f"--data {folder}: there is no such folder; {NEEDED}")
    files = {path.name: path for path in sorted(folder.rglob("*"), reverse=True) if path.is_file()}
    recipe = next((files[name] for name in RECIPES if name in files), None)
    if recipe is None or BASELINES not in files:
        missing = BASELINES if recipe is not None else " or ".join(RECIPES)
        raise UsageError(f"--data {folder}: no {missing} in it; {NEEDED}")
    described, baselines = _described(recipe), _baselines(files[BASELINES])
    found, missing = [], []
    for name in names:
        entry = described.get(name)
        if entry is None or name not in baselines:
            missing.append(f"{name} in {recipe.name if entry is None else BASELINES}")
            continue
        wanted = Path(str(entry.get("dataset_uri", ""))).name
        path = files.get(wanted) or _part_of(wanted, files)
        if path is None:
            missing.append(wanted)
            continue
        kind, shots = str(entry.get("icl_task_type")), entry.get("num_fewshot", [0])
        if kind not in FIELDS:
            raise RunError(f"{recipe}: {name} is of kind {kind!r}; CORE has {', '.join(FIELDS)}")
        n_shots = int(shots[0] if isinstance(shots, list) else shots)
        delimiter = str(entry.get("continuation_delimiter", " "))
        found.append(CoreTask(name, kind, wanted, path, n_shots, delimiter, baselines[name]))
    if missing:
        raise UsageError(
            f"--data {folder}: {len(missing)} of {len(names)} tasks are not there: {', '.join(missing)}. Put the files "
            f"there, or name the tasks that are (--tasks core/{found[0].name if found else CORE[0]},...)"
        )
    return found


def _part_of(wanted: str, files: dict[str, Path]) -> Path | None:
    """The first rows of a file that is too large to be handed on: ``squad_1000.jsonl`` of ``squad.jsonl``."""
    stem = wanted.removesuffix(".jsonl")
    return next(
        (path for name, path in files.items() if name.startswith(f"{stem}_") and name[len(stem) + 1 : -6].isdecimal()),
        None,
    )


def _described(path: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))["icl_tasks"]
        return {str(entry["label"]): entry for entry in entries}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: it has no list icl_tasks of tasks with a label ({error})") from None


def _baselines(path: Path) -> dict[str, float]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = {row["Eval Task"]: float(row["Random baseline"] or "nan") / 100 for row in csv.DictReader(file)}
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: columns Eval Task and Random baseline are needed ({error})") from None
    return {name: value for name, value in found.items() if 0 <= value < 1}


def read_rows(task: CoreTask) -> list[dict[str, Any]]:
    """Its rows; texts without spaces at their ends. RunError where one has not the fields of its kind."""
    rows = []
    for number, line in enumerate(task.path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row = {key: row[key].strip() if isinstance(row[key], str) else row[key] for key in FIELDS[task.kind]}
            if "gold" in row:
                row["gold"] = int(row["gold"])
                options = row[FIELDS[task.kind][0 if task.kind == "schema" else 1]]
                if not 0 <= row["gold"] < len(options) or not all(isinstance(text, str) for text in options):
                    raise ValueError("gold is none of the options")
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{task.path} line {number} is damaged ({error}): an object with {', '.join(FIELDS[task.kind])} is "
                "needed"
            ) from None
        rows.append(row)
    if not rows:
        raise RunError(f"{task.path} is empty")
    return rows


def prompts(task: CoreTask, rows: Sequence[dict[str, Any]], i: int) -> list[tuple[str, str]]:
    """Contexts and continuations of row ``i``: one a choice; of language modelling one."""
    others = [j for j in range(len(rows)) if j != i]
    shots = random.Random(SEED + i).sample(others, min(task.shots, len(others)))
    before = "".join(_shown(task, rows[j]) + "\n" for j in shots)
    row, delimiter = rows[i], task.delimiter
    if task.kind == "multiple_choice":
        return [(f"{before}{row['query']}{delimiter}", choice) for choice in row["choices"]]
    if task.kind == "schema":
        return [(f"{before}{option}{delimiter}", row["continuation"]) for option in row["context_options"]]
    return [(f"{before}{row['context']}{delimiter}", row["continuation"])]


def _shown(task: CoreTask, row: dict[str, Any]) -> str:
    """A row with its answer."""
    if task.kind == "multiple_choice":
        return f"{row['query']}{task.delimiter}{row['choices'][row['gold']]}"
    asked = row["context_options"][row["gold"]] if task.kind == "schema" else row["context"]
    return f"{asked}{task.delimiter}{row['continuation']}"


def is_right(task: CoreTask, row: dict[str, Any], answers: Sequence[Answer]) -> list[bool]:
    """At each point: language modelling, every token is the likeliest; else the right option has the fewest nats a
    token."""
    if task.kind == "language_modeling":
        return list(answers[0].greedy_P)
    nats_CP = np.array([np.array(answer.nats_P) / answer.n_tokens for answer in answers])
    return (nats_CP.argmin(0) == row["gold"]).tolist()


def score_core(
    task: CoreTask, scorer: Scorer, encoder: Encoder, limit: int | None, bar: Callable[[int], Any]
) -> np.ndarray:
    """Which rows are right, ``[P, N]``, of the first ``limit``. ``bar`` makes the progress bar of so many asks."""
    rows = read_rows(task)
    n_rows = len(rows) if limit is None else min(limit, len(rows))
    texts = [prompts(task, rows, i) for i in range(n_rows)]
    asks = encoder.pairs([pair for of_row in texts for pair in of_row])
    tell: Tell
    with bar(len(asks)) as tell:
        answers = iter(scorer.score(asks, tell))
    right = [is_right(task, rows[i], [next(answers) for _ in of_row]) for i, of_row in enumerate(texts)]
    return np.array(right, dtype=float).T
