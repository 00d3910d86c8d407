"""What a task came out as at every depth, with standard errors; and back from JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alcoda.errors import RunError

FORMAT = 1
"""Of ``harness.json``."""


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; None where it has none."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class PointResult:
    """A task at one point.

    Attributes:
        point: ``8``, or the exit as it was named.
        loops: that ran at most.
        exit: the rule, its kind and fields; None: all tokens ran ``loops``.
        mean_loops: a token that was read.
        flops_per_token: executed, by the ledger, what the rule looks at included.
        metrics: by name.
        gain: of the task's main metric over that of the first point, paired by document; None at the first.
        centred: CORE: accuracy with guessing as 0 and all right as 1.
    """

    point: str
    loops: int
    exit: dict[str, Any] | None
    mean_loops: float
    flops_per_token: float
    metrics: dict[str, Estimate]
    gain: Estimate | None
    centred: float | None


@dataclass(frozen=True)
class TaskResult:
    """One task.

    Attributes:
        source: whose task: ``lm-eval 0.4.13``, or ``core``.
        main: the metric that it is summed up by.
        n: documents that were scored.
        n_tokens: that were read, at each point.
        baseline: CORE: accuracy of guessing.
        note: what the reader should know.
    """

    task: str
    source: str
    shots: int
    main: str
    n: int
    n_tokens: int
    baseline: float | None
    note: str | None
    by_point: tuple[PointResult, ...]


@dataclass(frozen=True)
class CoreScore:
    """CORE at one point: the mean of 22 centred accuracies, and its standard error."""

    point: str
    value: float
    stderr: float | None


@dataclass(frozen=True)
class HarnessResult:
    """What `harness` measured: the tasks that were asked for.

    Attributes:
        limit: documents of each task at most; None: all.
        bos: whether every text began with the token that documents begin with.
        core: where all of CORE was asked for.
    """

    train_step: int
    limit: int | None
    bos: bool
    tasks: tuple[TaskResult, ...]
    core: tuple[CoreScore, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``harness.json`` and ``--json``."""
        return {"version": FORMAT, **asdict(self)}


def read_result(data: dict[str, Any], path: Path) -> TaskResult:
    """What `asdict` made of one; RunError where the file ``path`` that it is of is damaged."""

    def estimate(one: dict[str, Any] | None) -> Estimate | None:
        return None if one is None else Estimate(**one)

    try:
        at = tuple(
            PointResult(
                metrics={name: Estimate(**found) for name, found in one.pop("metrics").items()},
                gain=estimate(one.pop("gain")),
                **one,
            )
            for one in map(dict, data["by_point"])
        )
        rest: dict[str, Any] = {key: value for key, value in data.items() if key != "by_point"}
        return TaskResult(by_point=at, **rest)
    except (TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path} is damaged ({error}): move it away to measure anew") from None


def standard_error(each_N: np.ndarray) -> float | None:
    """Of a mean."""
    return float(each_N.std(ddof=1) / math.sqrt(len(each_N))) if len(each_N) > 1 else None


def pooled_error(parts: Sequence[np.ndarray]) -> float | None:
    """Of the mean over all documents of several tasks, from the variance within each (lm-eval's
    ``pooled_sample_stderr``)."""
    if len(parts) == 1:
        return standard_error(parts[0])
    n, free = sum(map(len, parts)), sum(len(part) - 1 for part in parts)
    if free < 1:
        return None
    return math.sqrt(sum(float(((part - part.mean()) ** 2).sum()) for part in parts) / free / n)


def stderr_of(metric: str, value: float, parts: Sequence[np.ndarray]) -> float | None:
    """Of what sums up the documents of one task or several: a mean, or the exponential of one (perplexity: by the delta
    method); else None."""
    if not all(map(len, parts)) or (error := pooled_error(parts)) is None:
        return None
    each_N = np.concatenate(parts)
    if math.isclose(value, float(each_N.mean()), rel_tol=1e-9, abs_tol=1e-12):
        return error
    if metric == "perplexity" and math.isclose(value, math.exp(-each_N.mean()), rel_tol=1e-6):
        return value * error
    return None


def gain_of(first: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> Estimate | None:
    """Paired by document, of one task or several: what makes one hard is common to both and cancels."""
    if not all(map(len, parts)):
        return None
    gains = [each_N - first_N for first_N, each_N in zip(first, parts, strict=True)]
    return Estimate(float(np.concatenate(gains).mean()), pooled_error(gains))
