"""Files of CORE, small: all 22 tasks of three kinds with a few rows each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from alcoda.downstream.core import CORE

SCHEMA = ("winograd", "winogrande")
LANGUAGE = ("bigbench_qa_wikidata", "coqa", "jeopardy", "lambada_openai", "squad")
N_ROWS = 5


def kind_of(name: str) -> str:
    if name in SCHEMA:
        return "schema"
    return "language_modeling" if name in LANGUAGE else "multiple_choice"


def rows_of(name: str) -> list[dict[str, Any]]:
    """Different in every task."""
    made: list[dict[str, Any]] = []
    for i in range(N_ROWS):
        if kind_of(name) == "multiple_choice":
            made.append({"query": f"{name} asks {i} ", "choices": ["no", "yes", f"{i}"], "gold": i % 3})
        elif kind_of(name) == "schema":
            made.append({"context_options": [f"Ann {i}", f"Bob {i}"], "continuation": f"ran {name}", "gold": i % 2})
        else:
            made.append({"context": f"{name} {i} is", "continuation": f" {i}"})
    return made


def write_core(folder: Path) -> Path:
    """Spread over folders, as the published ones are."""
    (folder / "local_data").mkdir(parents=True)
    entries = []
    for i, name in enumerate(CORE):
        path = folder / "local_data" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
        entry: dict[str, Any] = {"label": name, "dataset_uri": f"local_data/{name}.jsonl", "num_fewshot": [i % 3]}
        entry["icl_task_type"] = kind_of(name)
        if kind_of(name) == "multiple_choice" and i % 2:
            entry["continuation_delimiter"] = "\nAnswer: "
        entries.append(entry)
    entries.append({"label": "another", "dataset_uri": "x.jsonl", "icl_task_type": "schema", "num_fewshot": [0]})
    (folder / "heavy.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    lines = [f"{name},,,0,5,{baseline(name)},,text" for name in CORE]
    (folder / "eval_meta_data.csv").write_text(
        "\n".join(["Eval Task,a,b,c,d,Random baseline,f,g", *lines, "another,,,,,,,"])
    )
    return folder


def baseline(name: str) -> int:
    """Of 100."""
    return {"multiple_choice": 25, "schema": 50, "language_modeling": 0}[kind_of(name)]
