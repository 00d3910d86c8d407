"""Thresholds of an exit rule, from the strictest to the loosest; and those that imitate another rule.

All from scores of one reading in which no token leaves (`never`), [N, R]: what they say of a reading with exits is an
estimate, because tokens that leave change what later ones read.
"""

from __future__ import annotations

import numpy as np

from alcoda.depth.rules import ArgmaxStable, ExitRule, Scored
from alcoda.errors import UsageError

RUNGS = 256
"""Settings to choose from, between which equal shares of all scores lie; bisection reads the text 8 times."""


def adjustable(rule: ExitRule) -> ExitRule:
    """The rule, if it has a setting to choose; UsageError otherwise."""
    if isinstance(rule, Scored | ArgmaxStable):
        return rule
    raise UsageError(f"exit {rule.kind!r} has no threshold to choose: take state, second_order, kl, gate, probe, ...")


def ladder(rule: ExitRule, scores_NR: np.ndarray, shape_R: np.ndarray | None = None) -> list[ExitRule]:
    """The rule at ever looser settings: no token leaves below the first, and at the last all do where they can.

    Args:
        shape_R: thresholds a loop of which each rung is a multiple, 0 where no token is to leave; None: one number.
    """
    n_loops = scores_NR.shape[1]
    if isinstance(rule, ArgmaxStable):
        return [rule.model_copy(update={"loops": n}) for n in range(n_loops - 1, 0, -1)]
    shape_R = np.ones(n_loops) if shape_R is None else shape_R
    here_R = shape_R[: n_loops - 1] > 0  # after the last loop all leave
    ratios = scores_NR[:, : n_loops - 1][:, here_R].astype(np.float64) / shape_R[: n_loops - 1][here_R]
    ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
    if len(ratios):
        scales = np.quantile(ratios, np.linspace(0, 1, RUNGS))
        scales = np.unique(np.concatenate([scales[:1] / 2, scales[:-1], scales[-1:] * 2]))
    else:  # no score tells tokens apart: any threshold lets the same ones leave
        scales = np.ones(1)
    return [rule.model_copy(update={"threshold": _plain(scale * shape_R)}) for scale in scales.tolist()]


def _plain(thresholds_R: np.ndarray) -> float | tuple[float, ...]:
    same = bool((thresholds_R == thresholds_R[0]).all())
    return float(thresholds_R[0]) if same else tuple(thresholds_R.tolist())


def expected_depths(rule: ExitRule, scores_NR: np.ndarray) -> np.ndarray:
    """After which loop each token would leave, [N]."""
    n_loops = scores_NR.shape[1]
    bounds = rule.bounds(n_loops)
    leaves_NR = scores_NR < np.array(bounds.thresholds, dtype=scores_NR.dtype)
    leaves_NR[:, : max(bounds.min_loops - bounds.horizon, 1) - 1] = False
    last = bounds.max_loops - 1
    leaves_NR[:, last:] = True
    return np.minimum(leaves_NR.argmax(1) + 1 + bounds.horizon, last + 1)


def loosest_within(scores_NR: np.ndarray, nats_RN: np.ndarray, rungs: list[ExitRule], tolerance: float) -> ExitRule:
    """The loosest rung at which picking each token's loop costs at most ``tolerance`` of the loss of the last loop
    (readout-only); the strictest where none does."""
    most, n_tokens = (1 + tolerance) * nats_RN[-1].sum(), nats_RN.shape[1]
    for rule in reversed(rungs):
        depths_N = expected_depths(rule, scores_NR)
        if nats_RN[depths_N - 1, np.arange(n_tokens)].sum() <= most:
            return rule
    return rungs[0]


def matched(scores_NR: np.ndarray, depths_N: np.ndarray) -> np.ndarray:
    """Thresholds a loop with which as many tokens leave after each as ``depths_N`` says, those of the lowest scores.

    Where the scores order tokens as the rule behind ``depths_N`` does, they are the same tokens.
    """
    n_tokens, n_loops = scores_NR.shape
    thresholds_R, in_N = np.zeros(n_loops), np.ones(n_tokens, dtype=bool)
    for loop in range(n_loops - 1):
        score_N = scores_NR[:, loop].astype(np.float64)
        can_N = in_N & np.isfinite(score_N)
        n_leave = min(int((depths_N <= loop + 1).sum()) - int((~in_N).sum()), int(can_N.sum()))
        if n_leave <= 0:
            continue
        ordered = np.sort(score_N[can_N])
        last = ordered[n_leave - 1]
        above = ordered[np.searchsorted(ordered, last, side="right") :]
        thresholds_R[loop] = (last + above[0]) / 2 if len(above) else last * 2 or 1.0
        in_N &= ~(score_N < thresholds_R[loop])
    return thresholds_R


def spread(rungs: list[ExitRule], scores_NR: np.ndarray | None, points: int) -> list[ExitRule]:
    """About ``points`` of the rungs, strict to loose, whose expected mean loops are evenly spaced."""
    if scores_NR is None:
        picked = np.linspace(0, len(rungs) - 1, min(points, len(rungs))).round().astype(int)
        return [rungs[i] for i in np.unique(picked)]
    means = np.array([expected_depths(rule, scores_NR).mean() for rule in rungs])
    wanted = np.linspace(means.max(), means.min(), points + 1)[1:]
    return [rungs[i] for i in sorted({int(np.abs(means - mean).argmin()) for mean in wanted})]
