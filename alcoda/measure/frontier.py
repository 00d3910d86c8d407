"""Loss against loops and against executed FLOPs: all tokens at one depth (A0), and every exit rule (papers.md 3.1).

Rules are read under copy-on-exit, as an engine computes them, and pay for what they look at: KL takes coda and head
after each loop. Beside them stands an upper bound that nothing can serve, readout-only. A point is held against all
tokens at one depth, three times: at equal loops, at equal FLOPs, and at the smallest depth that is good enough, which
is the honest baseline: a model that saturates at 3 loops saves nothing by leaving after 3 of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from alcoda import progress
from alcoda.depth.exiting import pick_coda_keys
from alcoda.depth.rules import NEVER, ExitRule, Scored, read_rule
from alcoda.errors import UsageError
from alcoda.measure.calibrate import excess, sufficient
from alcoda.measure.ladder import adjustable, expected_depths, ladder, spread
from alcoda.measure.replays import Passage
from alcoda.training.load import LoadedRun

RULES = ("kl", "state", "second_order", "argmax_stable", "gate", "probe")
BOUNDS = ("kl", "state")
"""Rules of which the upper bound is shown too."""
MAX_TOKENS = 20_000


@dataclass(frozen=True)
class Difference:
    """Bits per byte saved against all tokens at one depth (positive: fewer), paired, with its 95% interval."""

    bits_per_byte: float
    low: float
    high: float


@dataclass(frozen=True)
class UniformPoint:
    """All tokens at one depth. excess: of its loss over that of the deepest, relative to it."""

    loops: int
    bits_per_byte: float
    low: float
    high: float
    excess: float
    flops_per_token: float


@dataclass(frozen=True)
class Point:
    """A rule at one setting.

    Attributes:
        rule: its kind and fields.
        mean_loops: with its 95% interval; ``bits_per_byte`` with its own.
        excess: of the loss over that of the deepest depth, relative to it.
        flops_per_token: executed, what the rule looked at included; ``rule_flops_per_token``: that alone.
        at_equal_loops, at_equal_flops: against all tokens at as many loops (FLOPs), between two depths by linear
            interpolation; beyond the deepest, against that.
        over_sufficient: against the smallest depth within the tolerance.
    """

    rule: dict[str, Any]
    mean_loops: float
    mean_loops_low: float
    mean_loops_high: float
    bits_per_byte: float
    low: float
    high: float
    excess: float
    flops_per_token: float
    rule_flops_per_token: float
    at_equal_loops: Difference
    at_equal_flops: Difference
    over_sufficient: Difference


@dataclass(frozen=True)
class Curve:
    """A rule at several settings, strict to loose. ``is_upper_bound``: readout-only. ``best``: index of the point
    of the fewest loops within the tolerance, if there is one."""

    rule: str
    coda_keys: str
    is_upper_bound: bool
    points: tuple[Point, ...]
    best: int | None


@dataclass(frozen=True)
class FrontierResult:
    """What `frontier` measured.

    Attributes:
        tolerance: of the loss, relative to that of ``n_loops``.
        sufficient_loops: the smallest depth for all tokens within it.
        unit, n_units, n_tokens, note: as of `alcoda.measure.evaluate.EvalResult`.
        left_out: rules that the model has not what they need for, and why.
    """

    data: str
    train_step: int
    n_loops: int
    tolerance: float
    sufficient_loops: int
    unit: str
    n_units: int
    n_tokens: int
    note: str | None
    uniform: tuple[UniformPoint, ...]
    curves: tuple[Curve, ...]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """For ``frontier.json`` and ``--json``."""
        return asdict(self)


def frontier(
    run: LoadedRun,
    rules: Sequence[str] = (),
    loops: int | None = None,
    data: str = "valid",
    *,
    points: int = 6,
    tolerance: float = 0.005,
    max_tokens: int | None = MAX_TOKENS,
    batch_size: int | None = None,
) -> FrontierResult:
    """Measure every rule at ``points`` settings, spread evenly over mean loops, on one text.

    Args:
        rules: their names; where empty, all that the model can be left by (a probe if one was fitted).
        loops: of the deepest; the model's where None.
        max_tokens: of each source at most.
        batch_size: rows read at a time.

    Raises:
        UsageError: a model that no rule fits, a rule that is named and does not fit, a text that is too short.
    """
    if points < 1 or not 0 <= tolerance < 1:
        raise UsageError(f"points={points}, tolerance={tolerance:g}: at least 1 point, a tolerance from 0 to below 1")
    n_loops = run.recipe.model.n_loops if loops is None else loops
    NEVER.check(run.recipe.model, n_loops)
    fits, left_out = _fitting(run, rules, n_loops)
    text = Passage.open(run, data, max_tokens, batch_size)
    n_passes = 1 + len(fits) * (points + 1)
    with progress.bar(f"frontier of {', '.join(one.kind for one in fits)}", text.n_tokens * n_passes) as advance:
        uniform_RN = text.uniform(range(1, n_loops + 1), advance)
        at = _Against(text, uniform_RN, sufficient(uniform_RN, tolerance), n_loops)
        curves = []
        for rule in fits:
            scores_NR = None
            if isinstance(rule, Scored):
                scores_NR = text.read(run.exit(rule, n_loops).test, True, advance).scores_NR
            rungs = ladder(rule, np.zeros((1, n_loops)) if scores_NR is None else scores_NR)
            settings = spread(rungs, scores_NR, points)
            tests = [run.exit(setting, n_loops).test for setting in settings]
            reads = [text.read(test, tell=advance) for test in tests]
            found = [at.point(one, read.nats_N, read.depths_N) for one, read in zip(settings, reads, strict=True)]
            curves.append(_curve(rule, pick_coda_keys(tests[0], None), False, found, tolerance))
            if rule.kind in BOUNDS and scores_NR is not None and not run.recipe.model.memory.carries:
                # No token leaves, so the states are those of all tokens at one depth, and so is each loss.
                depths = [expected_depths(one, scores_NR) for one in settings]
                found = [
                    at.point(one, np.take_along_axis(uniform_RN, depths_N[None] - 1, 0)[0], depths_N)
                    for one, depths_N in zip(settings, depths, strict=True)
                ]
                curves.append(_curve(rule, "per_loop", True, found, tolerance))
    return FrontierResult(
        data=data,
        train_step=run.train_step,
        n_loops=n_loops,
        tolerance=tolerance,
        sufficient_loops=at.sufficient,
        unit=text.text.unit,
        n_units=text.n_units,
        n_tokens=text.n_scored,
        note=text.note(),
        uniform=tuple(at.uniform_point(loop) for loop in range(1, n_loops + 1)),
        curves=tuple(curves),
        left_out=left_out,
    )


def _fitting(run: LoadedRun, named: Sequence[str], n_loops: int) -> tuple[list[ExitRule], dict[str, str]]:
    fits, left_out = [], {}
    for name in dict.fromkeys(named or RULES):
        rule = adjustable(read_rule(name))
        try:
            run.exit(rule, n_loops)
            fits.append(rule)
        except UsageError as error:
            if named:
                raise
            left_out[name] = str(error)
    return fits, left_out


def _curve(rule: ExitRule, coda_keys: str, is_bound: bool, points: list[Point], tolerance: float) -> Curve:
    within = [i for i, point in enumerate(points) if point.excess <= tolerance]
    best = min(within, key=lambda i: points[i].mean_loops, default=None)
    return Curve(rule.kind, coda_keys, is_bound, tuple(points), best)


class _Against(NamedTuple):
    """All tokens at each depth of a text, which points are held against."""

    text: Passage
    uniform_RN: np.ndarray
    sufficient: int
    n_loops: int

    def flops(self, rule: ExitRule) -> np.ndarray:
        """Of a token, by its depth."""
        return np.array(rule.executed_flops(self.text.run.model.config, self.n_loops), dtype=float)

    def uniform_point(self, loops: int) -> UniformPoint:
        nats_N = self.uniform_RN[loops - 1]
        over = excess(nats_N, self.uniform_RN[-1])
        return UniformPoint(loops, *self.text.bits(nats_N), over, float(self.flops(NEVER)[loops - 1]))

    def point(self, rule: ExitRule, nats_N: np.ndarray, depths_N: np.ndarray) -> Point:
        loops, bits = self.text.mean(depths_N), self.text.bits(nats_N)
        flops, bare = (float(self.flops(one)[depths_N - 1].mean()) for one in (rule, NEVER))
        by_flops = float(np.interp(flops, self.flops(NEVER), np.arange(1, self.n_loops + 1)))
        return Point(
            rule=rule.model_dump(mode="json"),
            mean_loops=loops.value,
            mean_loops_low=loops.low,
            mean_loops_high=loops.high,
            bits_per_byte=bits.value,
            low=bits.low,
            high=bits.high,
            excess=excess(nats_N, self.uniform_RN[-1]),
            flops_per_token=flops,
            rule_flops_per_token=flops - bare,
            at_equal_loops=self._saved(self._between(loops.value), nats_N),
            at_equal_flops=self._saved(self._between(by_flops), nats_N),
            over_sufficient=self._saved(self.uniform_RN[self.sufficient - 1], nats_N),
        )

    def _between(self, loops: float) -> np.ndarray:
        """Nats of a share of the tokens at one depth and the others at the next, so that their mean is ``loops``."""
        below = min(int(loops), self.n_loops - 1) or 1
        share = loops - below
        above = min(below, len(self.uniform_RN) - 1)
        return (1 - share) * self.uniform_RN[below - 1] + share * self.uniform_RN[above]

    def _saved(self, uniform_N: np.ndarray, nats_N: np.ndarray) -> Difference:
        return Difference(*self.text.gain(uniform_N, nats_N))
