"""Tasks run and kept: accuracy with its standard error, loops and executed FLOPs of every task at every depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from alcoda import progress
from alcoda.downstream.core import CORE, NEEDED, CoreTask, read_core, score_core
from alcoda.downstream.encode import Encoder
from alcoda.downstream.results import (
    FORMAT,
    CoreScore,
    Estimate,
    HarnessResult,
    PointResult,
    TaskResult,
    gain_of,
    read_result,
    standard_error,
    stderr_of,
)
from alcoda.downstream.score import Point, Scorer, points
from alcoda.downstream.tasks import GROUPS, SOURCES, default_folder, members, read_task
from alcoda.engine.llm import LM
from alcoda.errors import RunError, UsageError, did_you_mean
from alcoda.files import read_json, write_json

MAIN = ("acc_norm", "acc", "exact_match")
"""What a task is summed up by: the first that it has, else its first metric. CORE and LAMBADA have acc alone."""


def harness(
    lm: LM,
    tasks: Sequence[str],
    loops: Sequence[int] = (),
    exits: Sequence[str] = (),
    *,
    shots: int | None = None,
    limit: int | None = None,
    data: Path | None = None,
    bos: bool = False,
    batch_size: int | None = None,
    out: Path | None = None,
) -> HarnessResult:
    """Run tasks at depths and with exits; all depths of a task come from one pass over its texts.

    Args:
        tasks: names of `SOURCES` or `GROUPS`; a YAML file of lm-eval's form; ``core``, or one of its as ``core/copa``.
        loops: depths, as of `points`: where loops share their weights also beyond ``n_loops``, which is taken where
            none is named.
        exits: rules, or tiers that ``alcoda calibrate`` chose, beside them.
        shots: solved documents before each that is scored, of lm-eval's tasks; None: 0, or what a YAML file says.
        limit: the first so many documents of each task (of MMLU: of each subject).
        data: where the data of the tasks are; None: where ``make tasks`` puts them. CORE's must be named.
        bos: whether texts begin with the token that documents of training begin with.
        batch_size: rows read at a time; None: as many as have about 2,048 tokens.
        out: a file in which every task that is done is kept; what it holds of the same weights, points and arguments
            is not measured again. None: nothing is kept.

    Raises:
        UsageError: an unknown task, depth or exit, no data, no lm-eval, a limit under 1. Nothing was run then.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit {limit}: at least 1 document of each task; leave it out for all")
    at = points(lm.loaded, loops, exits)
    named = _named(tasks)
    of_core = _core_tasks(data, [name.removeprefix("core/") for name in named if _of_core(name)])
    folder = data or default_folder()
    for name in named:
        _check_data(name, folder, shots)
    if any(not _of_core(name) for name in named):
        from alcoda.downstream import adapter  # noqa: F401 (where lm-eval is missing, that is said before anything runs)
    asked = {"train_step": lm.loaded.train_step, "limit": limit, "bos": bos, "points": [_described(p) for p in at]}
    kept = _kept(out)
    found = []
    for name in named:
        key = {**asked, "task": name} | ({} if shots is None else {"shots": shots})
        before = next((one for one in kept if one["asked"] == key), None)
        if before is None:
            scorer = Scorer(lm.loaded, at, batch_size)
            encoder = Encoder(lm.tokenizer, bos)
            if name in of_core:
                result = _core(of_core[name], scorer, encoder, limit)
            else:
                result = _lm_eval(lm, name, folder, shots, scorer, encoder, limit)
            # One result a task: what was measured otherwise gives way.
            kept = [one for one in kept if one["asked"]["task"] != name] + [{"asked": key, "result": asdict(result)}]
            if out is not None:
                write_json(out, {"version": FORMAT, "kept": kept})
        else:
            assert out is not None, "what is kept is kept in a file"
            result = read_result(before["result"], out)
        found.append(result)
    scores = _core_scores([r for r in found if r.source == "core"]) if set(of_core) >= _all_core() else ()
    return HarnessResult(lm.loaded.train_step, limit, bos, tuple(found), scores)


def task_names() -> list[str]:
    """All that can be named."""
    return [*_short_names(), *(name for group in GROUPS.values() for name in group), *sorted(_all_core())]


def _short_names() -> list[str]:
    """The same, groups by their own names alone."""
    grouped = {name for group in GROUPS.values() for name in group}
    return [*(name for name in SOURCES if name not in grouped), *GROUPS, "core"]


def _check_data(name: str, folder: Path, shots: int | None) -> None:
    """What can be known before a task is run: its data are there, and enough of them."""
    if shots is not None and (shots < 0 or _of_core(name)):
        why = "CORE's tasks have shots of their own, leave it out" if _of_core(name) else "at least 0"
        raise UsageError(f"shots {shots}: {why}")
    for one in members(name):
        most = len(read_task(one, folder)) - 1
        if shots and SOURCES[one].shots is not None:
            most = len(read_task(one, folder, shots=True))
        if shots and shots > most:
            raise UsageError(f"shots {shots}: task {one} has {most} documents for them")


def _all_core() -> set[str]:
    return {f"core/{name}" for name in CORE}


def _of_core(name: str) -> bool:
    return name.startswith("core/")


def _named(tasks: Sequence[str]) -> list[str]:
    """Those tasks, each once, CORE as its 22."""
    found: list[str] = []
    for name in tasks:
        if name == "core":
            found += [f"core/{one}" for one in CORE]
        elif name.endswith((".yaml", ".yml")):
            if not Path(name).is_file():
                raise UsageError(f"--tasks {name}: no such file")
            found.append(name)
        elif name in task_names():
            found.append(name)
        else:
            raise UsageError(f"unknown task {name!r}{did_you_mean(name, _short_names())}, or a YAML file")
    if not found:
        raise UsageError(f"no task is named; there are {', '.join(_short_names())}, or a YAML file")
    if any(map(_of_core, found)) and not all(map(_of_core, found)):
        raise UsageError("CORE has data of its own (--data FOLDER): run it by itself, its results add up in one file")
    return list(dict.fromkeys(found))


def _core_tasks(data: Path | None, names: Sequence[str]) -> dict[str, CoreTask]:
    if not names:
        return {}
    if data is None:
        raise UsageError(f"CORE without --data: {NEEDED}")
    return {f"core/{task.name}": task for task in read_core(data, names)}


def _described(point: Point) -> dict[str, Any]:
    rule = None if point.exit is None else point.exit.rule.model_dump(mode="json")
    return {"point": point.name, "loops": point.loops, "exit": rule}


def _kept(out: Path | None) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    held = read_json(out)
    if not isinstance(held, dict) or held.get("version") != FORMAT or not isinstance(held.get("kept"), list):
        raise RunError(f"{out} is damaged, or of another version: move it away to measure anew")
    return held["kept"]


def _bar(task: str) -> Callable[[str, int], Any]:
    return lambda what, n: progress.bar(f"{task}: {what}", n)


def _lm_eval(
    lm: LM, name: str, folder: Path, shots: int | None, scorer: Scorer, encoder: Encoder, limit: int | None
) -> TaskResult:
    from alcoda.downstream import adapter

    tasks = [adapter.load_task(one, folder, shots) for one in members(name) or (name,)]
    answers = adapter.Answers(lm, scorer, encoder, _bar(name if len(tasks) > 1 else str(tasks[0].config.task)))
    measured = adapter.run_tasks(tasks, answers, limit)
    main = next((one for one in MAIN if one in measured[0]), next(iter(measured[0]), ""))
    if not main:
        raise RunError(f"{name}: lm-eval gave no number")
    at = []
    for p, metrics in enumerate(measured):
        estimates = {key: Estimate(one.value, stderr_of(key, one.value, one.parts)) for key, one in metrics.items()}
        at.append(_point(scorer, p, estimates, gain_of(measured[0][main].parts, metrics[main].parts) if p else None))
    n_documents, note = sum(map(len, measured[0][main].parts)), _leak(scorer)
    n_shots = int(tasks[0].config.num_fewshot or 0)
    source = f"lm-eval {adapter.VERSION}"
    return TaskResult(name, source, n_shots, main, n_documents, scorer.spent.n_tokens, None, note, tuple(at))


def _core(task: CoreTask, scorer: Scorer, encoder: Encoder, limit: int | None) -> TaskResult:
    right_PN = score_core(task, scorer, encoder, limit, lambda n: progress.bar(f"core/{task.name}", n))
    at = []
    for p, right_N in enumerate(right_PN):
        accuracy = Estimate(float(right_N.mean()), standard_error(right_N))
        gain = gain_of([right_PN[0]], [right_N]) if p else None
        at.append(_point(scorer, p, {"acc": accuracy}, gain, task.centred(accuracy.value)))
    part = None if task.path.name == task.file else f"{task.path.name} in place of {task.file}"
    note = "; ".join(filter(None, (part, _leak(scorer)))) or None
    name, n_tokens = f"core/{task.name}", scorer.spent.n_tokens
    return TaskResult(name, "core", task.shots, "acc", right_PN.shape[1], n_tokens, task.baseline, note, tuple(at))


def _leak(scorer: Scorer) -> str | None:
    if scorer.run.recipe.model.route.causal_at_eval:
        return None
    return "the route looks at the whole text, also at the answer that is scored: this is no prediction"


def _point(
    scorer: Scorer, p: int, metrics: dict[str, Estimate], gain: Estimate | None, centred: float | None = None
) -> PointResult:
    spent = scorer.spent
    loops, flops = spent.mean_loops(p), spent.flops_per_token(p)
    return PointResult(
        **_described(scorer.points[p]),
        mean_loops=loops,
        flops_per_token=flops,
        metrics=metrics,
        gain=gain,
        centred=centred,
    )


def _core_scores(results: Sequence[TaskResult]) -> tuple[CoreScore, ...]:
    scores = []
    for p, point in enumerate(results[0].by_point):
        centred, errors = [], []
        for one in results:
            accuracy = one.by_point[p].metrics["acc"]
            centred.append(one.by_point[p].centred)
            errors.append(None if accuracy.stderr is None else accuracy.stderr / (1 - (one.baseline or 0.0)))
        known = [error for error in errors if error is not None]
        stderr = math.sqrt(sum(e * e for e in known)) / len(results) if len(known) == len(results) else None
        scores.append(CoreScore(point.point, float(np.mean(centred)), stderr))
    return tuple(scores)
