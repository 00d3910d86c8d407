"""Reads a run folder into a typed `Run`. What is not there yet is None or empty, what is damaged is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from alcoda.errors import RunError, UsageError
from alcoda.report.caches import Caches, read_caches
from alcoda.report.fields import Fields, load, objects
from alcoda.report.frontier import Frontier, read_frontier
from alcoda.report.lab import Lab, read_lab
from alcoda.report.prefills import Prefills, read_prefills
from alcoda.report.tasks import TaskScores, read_tasks


@dataclass(frozen=True)
class Term:
    """One named part of the cost; FLOPs and bytes are per token."""

    name: str
    params: int
    forward_flops: float
    training_flops: float
    kv_bytes: float


@dataclass(frozen=True)
class Ledger:
    """The cost of a model at ``loops`` loops and ``seq_len`` keys, by term and in total."""

    loops: float
    seq_len: int
    params: int
    effective_params: int
    terms: tuple[Term, ...]
    forward_flops_per_token: float
    training_flops_per_token: float
    decode_flops_per_token: float
    kv_bytes_per_token: float
    convention: str


@dataclass(frozen=True)
class TrainCurve:
    """What training logged, one entry a logged train step, in order of it; absent numbers are nan."""

    train_step_N: np.ndarray
    loss_N: np.ndarray
    loops_N: np.ndarray
    tokens_per_s_N: np.ndarray


@dataclass(frozen=True)
class ValidPoint:
    """One evaluation during training."""

    train_step: int
    source: str
    loops: int
    bits_per_byte: float


@dataclass(frozen=True)
class LoopPoint:
    """A number that a diagnostic pass took inside the loop: a mean with its quantiles, or one value (they are None)."""

    train_step: int
    loop: int
    name: str
    mean: float
    q10: float | None
    q90: float | None


@dataclass(frozen=True)
class DepthPoint:
    """The result at one depth: loss in nats a token, and bits per byte with its 95% interval (None: not measured)."""

    loops: int
    loss: float
    bits_per_byte: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Gain:
    """Bits per byte that ``to_loops`` saves over ``from_loops``, paired by unit, with its 95% interval."""

    from_loops: int
    to_loops: int
    bits_per_byte: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PositionPoint:
    """Bits per byte, by loops, of the tokens that are predicted from positions ``start`` to ``stop`` - 1 of a row."""

    start: int
    stop: int
    bits_per_byte: dict[int, float]


@dataclass(frozen=True)
class Evaluation:
    """The final evaluation: ``n_units`` of ``unit`` ("documents" or "blocks") were resampled for the intervals."""

    data: str
    train_step: int | None
    prefill: str
    unit: str
    n_units: int
    n_tokens: int
    n_bytes: int
    note: str
    by_depth: tuple[DepthPoint, ...]
    gain: tuple[Gain, ...]
    by_position: tuple[PositionPoint, ...]
    bigram_bits_per_byte: float | None


@dataclass(frozen=True)
class Sample:
    """One generated text; ``text`` may or may not begin with ``prompt``."""

    prompt: str
    loops: int
    temperature: float
    seed: int
    text: str


@dataclass(frozen=True)
class Run:
    """All that a report shows of one run. ``label`` tells it apart from the other runs of the page."""

    folder: str
    label: str
    info: Fields
    recipe: str
    ledger: Ledger | None
    curve: TrainCurve
    valid: tuple[ValidPoint, ...]
    inside: tuple[LoopPoint, ...]
    evaluation: Evaluation | None
    prefills: Prefills | None
    caches: Caches | None
    frontier: Frontier | None
    lab: Lab | None
    samples: tuple[Sample, ...]
    tasks: tuple[TaskScores, ...]
    last: Fields
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.info.text("name") or self.folder

    @property
    def status(self) -> str:
        return self.info.text("status", "unknown")

    @property
    def mean_loops(self) -> float | None:
        """The mean depth of training, or the depth that the ledger is for."""
        mean = self.info.child("depth").maybe_number("mean")
        if mean is None and self.ledger is not None:
            mean = self.ledger.loops
        return mean if mean is not None and mean > 0 and math.isfinite(mean) else None

    @property
    def nominal_loops(self) -> float | None:
        """The depth that the model is built for, where the run says it; else its mean depth in training."""
        return self.ledger.loops if self.ledger is not None and self.ledger.loops > 0 else self.mean_loops

    @property
    def headline(self) -> DepthPoint | None:
        """The evaluated depth that the model is built for (n_loops), or the one nearest to it (by ratio)."""
        points = self.evaluation.by_depth if self.evaluation else ()
        mean = self.nominal_loops
        if not points or mean is None:
            return points[-1] if points else None
        return min(points, key=lambda point: abs(math.log(max(point.loops, 0.5)) - math.log(mean)))

    def total(self, result_key: str, metrics_key: str) -> float | None:
        """A number of the result, or so far (the last training line) where there is no result yet."""
        final = self.info.child("result").maybe_number(result_key)
        return final if final is not None else self.last.maybe_number(metrics_key)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of ``folders``, in order, with labels that differ.

    Raises `UsageError` where a folder is not a run (or none is given), `RunError` where a file of a run is damaged.
    """
    if not folders:
        raise UsageError("a report needs at least one run folder; give the folder that `alcoda train` wrote")
    runs = [read_run(folder) for folder in folders]
    return [_labelled(run, index, runs) for index, run in enumerate(runs)]


def read_run(folder: Path) -> Run:
    """One run folder as a `Run`; its ``label`` is its name. Raises as `read_runs` does."""
    folder = Path(folder)
    missing = [name for name in ("run.json", "recipe.yaml") if not (folder / name).is_file()]
    if missing:
        state = f"no {' and no '.join(missing)} in it" if folder.is_dir() else "there is no such folder"
        raise UsageError(
            f"{folder} is not a run: {state}. Give a folder that `alcoda train` wrote, with run.json, recipe.yaml "
            "and metrics.jsonl in it"
        )
    info = Fields(load(folder / "run.json"), str(folder / "run.json"))
    try:
        recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{folder / 'recipe.yaml'}: not readable as UTF-8 text ({error})") from error
    lines, notes = _metrics(folder / "metrics.jsonl")
    train = [line for line in lines if line.text("type") == "train"]
    last = train[-1] if train else Fields({}, "metrics.jsonl")
    name = info.text("name") or folder.resolve().name
    return Run(
        folder=folder.resolve().name,
        label=name,
        info=info,
        recipe=recipe,
        ledger=_ledger(info.child("ledger")) if "ledger" in info else None,
        curve=_curve(train),
        valid=_valid([line for line in lines if line.text("type") == "eval"]),
        inside=_inside([line for line in lines if line.text("type") == "diagnostics"]),
        evaluation=_evaluation(folder / "eval.json"),
        prefills=read_prefills(folder / "prefills.json"),
        caches=read_caches(folder / "caches.json"),
        frontier=read_frontier(folder / "frontier.json"),
        lab=read_lab(folder / "lab/lab.json"),
        samples=_samples(folder / "samples.json"),
        tasks=read_tasks(folder / "harness.json"),
        last=last,
        notes=notes,
    )


def _labelled(run: Run, index: int, runs: Sequence[Run]) -> Run:
    label = run.label
    if sum(other.label == label for other in runs) > 1:
        label = f"{label} ({run.folder})"
        if sum((other.label, other.folder) == (run.label, run.folder) for other in runs) > 1:
            label = f"{run.label} ({run.folder}, {index + 1})"
    return replace(run, label=label)


def _ledger(data: Fields) -> Ledger:
    terms = tuple(
        Term(
            name=term.text("name", "?"),
            params=term.integer("params"),
            forward_flops=term.number("forward_flops"),
            training_flops=term.number("training_flops"),
            kv_bytes=term.number("kv_bytes"),
        )
        for term in data.children("terms")
    )
    return Ledger(
        loops=data.number("loops"),
        seq_len=data.integer("seq_len"),
        params=data.integer("params"),
        effective_params=data.integer("effective_params"),
        terms=terms,
        forward_flops_per_token=data.number("forward_flops_per_token"),
        training_flops_per_token=data.number("training_flops_per_token"),
        decode_flops_per_token=data.number("decode_flops_per_token"),
        kv_bytes_per_token=data.number("kv_bytes_per_token"),
        convention=data.text("convention"),
    )


def _metrics(path: Path) -> tuple[list[Fields], tuple[str, ...]]:
    if not path.is_file():
        return [], ()
    entries: list[Fields] = []
    lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    notes: tuple[str, ...] = ()
    for position, (number, line) in enumerate(lines):
        try:
            entries.append(Fields(json.loads(line), f"{path} line {number}"))
        except (ValueError, RunError) as error:
            # A crash can cut the line that was being written, which is the last one; no other line can be short.
            if position == len(lines) - 1:
                notes = ("The last line of metrics.jsonl is incomplete (the run was cut off there) and is left out.",)
                break
            raise RunError(f"{path} line {number} is not a JSON object; the file is damaged ({error})") from error
    return entries, notes


def _curve(lines: Sequence[Fields]) -> TrainCurve:
    # A run that was resumed logs some train steps twice: the later line is the one that counts.
    by_step = {line.integer("train_step"): line for line in lines}
    steps = sorted(by_step)

    def column(key: str) -> np.ndarray:
        values = [by_step[step].maybe_number(key) for step in steps]
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    step_N = np.array(steps, dtype=np.int64)
    return TrainCurve(step_N, column("loss"), column("loops"), column("tokens_per_s"))


def _valid(lines: Sequence[Fields]) -> tuple[ValidPoint, ...]:
    points = {}
    for line in lines:
        key = (line.text("source", "valid"), line.integer("loops"), line.integer("train_step"))
        points[key] = ValidPoint(key[2], key[0], key[1], line.number("bits_per_byte"))
    return tuple(points[key] for key in sorted(points))


_ABOUT = ("type", "train_step", "loop", "loops")


def _inside(lines: Sequence[Fields]) -> tuple[LoopPoint, ...]:
    points = {}
    for line in lines:
        step, loop = line.integer("train_step"), line.integer("loop")
        for key in line.data:
            if key in _ABOUT or key.endswith((".q10", ".q50", ".q90")):
                continue
            name = key.removesuffix(".mean")
            quantiles = line.maybe_number(f"{name}.q10"), line.maybe_number(f"{name}.q90")
            points[step, loop, name] = LoopPoint(step, loop, name, line.number(key), *quantiles)
    return tuple(points[key] for key in sorted(points))


def _evaluation(path: Path) -> Evaluation | None:
    if not path.is_file():
        return None
    data = Fields(load(path), str(path))
    points = [
        DepthPoint(
            loops=point.integer("loops"),
            loss=point.number("loss"),
            bits_per_byte=point.number("bits_per_byte"),
            low=point.maybe_number("low"),
            high=point.maybe_number("high"),
        )
        for point in data.children("by_depth")
    ]
    gains = [
        Gain(
            from_loops=gain.integer("from_loops"),
            to_loops=gain.integer("to_loops"),
            bits_per_byte=gain.number("bits_per_byte"),
            low=gain.maybe_number("low"),
            high=gain.maybe_number("high"),
        )
        for gain in data.children("gain")
    ]
    positions = [
        PositionPoint(
            start=part.integer("start"),
            stop=part.integer("stop"),
            bits_per_byte=_by_loops(part.child("bits_per_byte")),
        )
        for part in data.children("by_position")
    ]
    return Evaluation(
        data=data.text("data", "valid"),
        train_step=data.integer("train_step") if "train_step" in data else None,
        prefill=data.child("prefill").text("kind"),
        unit=data.text("unit", "documents"),
        n_units=data.integer("n_units"),
        n_tokens=data.integer("n_tokens"),
        n_bytes=data.integer("n_bytes"),
        note=data.text("note"),
        by_depth=tuple(sorted(points, key=lambda point: point.loops)),
        gain=tuple(gains),
        by_position=tuple(positions),
        bigram_bits_per_byte=data.maybe_number("bigram_bits_per_byte"),
    )


def _by_loops(data: Fields) -> dict[int, float]:
    for key in data.data:
        if not key.isdecimal():
            raise RunError(f"{data.where}: {key!r} has to be a number of loops")
    return {int(key): data.number(key) for key in data.data}


def _samples(path: Path) -> tuple[Sample, ...]:
    if not path.is_file():
        return ()
    return tuple(
        Sample(
            prompt=item.text("prompt"),
            loops=item.integer("loops"),
            temperature=item.number("temperature"),
            seed=item.integer("seed"),
            text=item.text("text"),
        )
        for item in objects(load(path), str(path))
    )
