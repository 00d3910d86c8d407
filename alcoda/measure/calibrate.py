"""Calibration: thresholds of an exit rule at which the loss stays within a tolerance of that of the deepest loop.

They are chosen on one text, under copy-on-exit, and checked on another. A cheap rule may imitate a dear one: its
threshold at each loop lets as many tokens leave as the dear rule does (readout-only, from one reading each), and a
common factor is then searched for, reading by reading, that keeps within the tolerance (docs/exits.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from alcoda import progress
from alcoda.config import validate
from alcoda.depth.record import fingerprint
from alcoda.depth.rules import NEVER, ExitRule, Probe, Scored
from alcoda.depth.tiers import Coverage, Measured, Tier, Tiers
from alcoda.errors import UsageError
from alcoda.files import sha256
from alcoda.measure.ladder import adjustable, expected_depths, ladder, loosest_within, matched
from alcoda.measure.replays import Passage, Read
from alcoda.model.cost import ledger
from alcoda.training.load import LoadedRun

TOLERANCES = {"fast": 0.02, "balanced": 0.005, "exact": 0.0}
"""The tiers where none are named."""
LEAST_TOKENS = 500
"""Fewer say nothing of half a per cent."""
LEAST_SAVED = 0.001
"""Mean loops below the deepest, as a share of it, under which a threshold is none."""


def calibrate(
    run: LoadedRun,
    rule: ExitRule | str = "state",
    to: str | None = None,
    tolerances: Mapping[str, float] | None = None,
    loops: int | None = None,
    data: str = "calib",
    held_out: str = "valid",
    *,
    max_tokens: int | None = None,
    batch_size: int | None = None,
) -> Tiers:
    """Choose a setting of ``rule`` for each tolerance, on ``data``, and check it on ``held_out``.

    Args:
        to: a rule to imitate, with thresholds a loop (``kl``); None: one threshold for all loops.
        tolerances: by tier, relative to the loss where no token leaves; `TOLERANCES` where None. 0: no token leaves.
        loops: loops that run at most; the model's where None.
        max_tokens: of each source of either text at most.
        batch_size: rows read at a time.

    Raises:
        UsageError: a rule that has nothing to choose or that the model cannot be left by, a text that is too short, a
            tolerance that cannot be, or one that only never leaving keeps.
    """
    tolerances = _checked(TOLERANCES if tolerances is None else tolerances)
    chosen = run.exit(rule, loops)
    own, n_loops = adjustable(chosen.rule), chosen.test.n_loops
    other = None if to is None else _imitated(run, own, to, n_loops)
    texts = {
        "calib": Passage.open(run, data, max_tokens, batch_size, LEAST_TOKENS),
        "held_out": Passage.open(run, held_out, max_tokens, batch_size, LEAST_TOKENS),
    }
    with progress.bar(f"calibrating exit {own.kind}", None) as advance:
        # Scores do not depend on the threshold of a reading in which none leaves.
        sources = [text.uniform(range(1, n_loops + 1), advance) for text in texts.values()]
        at = _At(run, texts["calib"], own, n_loops, sources[0], {}, advance)
        of_own, of_other = (None if one is None else at.scores(one) for one in (own, other))
        tiers = [
            _tier(at, name, tolerance, _rungs(at, of_own, other, of_other, tolerance), texts["held_out"], sources[1])
            for name, tolerance in tolerances.items()
        ]
    return Tiers(
        model=fingerprint(run.model),
        tokenizer=run.tokenizer.sha256,
        train_step=run.train_step,
        n_loops=n_loops,
        imitates=to,
        data=data,
        held_out_data=held_out,
        flops_per_token=ledger(run.model.config, n_loops).forward_flops_per_token,
        tiers=tuple(tiers),
    )


class _At(NamedTuple):
    """A rule on the calibration text. ``nats_RN``: with all tokens at each depth; ``seen``: readings that were made."""

    run: LoadedRun
    text: Passage
    rule: ExitRule
    n_loops: int
    nats_RN: np.ndarray
    seen: dict[str, Read]
    tell: Callable[[float], None]

    def scores(self, rule: ExitRule) -> np.ndarray | None:
        """Where no token leaves; None for a rule that only counts."""
        if not isinstance(rule, Scored):
            return None
        test = self.run.exit(rule.model_copy(update={"threshold": None}), self.n_loops).test
        return self.text.read(test, True, self.tell).scores_NR

    def read(self, rule: ExitRule) -> Read:
        key = rule.model_dump_json()
        if key not in self.seen:
            self.seen[key] = self.text.read(self.run.exit(rule, self.n_loops).test, tell=self.tell)
        return self.seen[key]

    def excess(self, rule: ExitRule) -> float:
        return excess(self.read(rule).nats_N, self.nats_RN[-1])

    def saves(self, rule: ExitRule) -> bool:
        return self.read(rule).depths_N.mean() <= (1 - LEAST_SAVED) * self.n_loops


def excess(nats_N: np.ndarray, deepest_N: np.ndarray) -> float:
    """By how much the loss is above that of the deepest loop, relative to it."""
    return float(nats_N.sum() / deepest_N.sum()) - 1


def sufficient(nats_RN: np.ndarray, tolerance: float) -> int:
    """The smallest depth for all tokens whose loss is within the tolerance of the last one's."""
    return next(i + 1 for i, nats_N in enumerate(nats_RN) if excess(nats_N, nats_RN[-1]) <= tolerance)


def loosest(rungs: list[ExitRule], holds: Callable[[ExitRule], bool]) -> int:
    """The index of the loosest rung that holds, by bisection; -1 where the strictest does not."""
    low, high = -1, len(rungs)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(rungs[middle]) else (low, middle)
    return low


def _checked(tolerances: Mapping[str, float]) -> dict[str, float]:
    if not tolerances:
        raise UsageError("no tier is named: give at least one, for example balanced=0.5%")
    for name, tolerance in tolerances.items():
        if not 0 <= tolerance < 1:
            raise UsageError(
                f"tolerance {name}={tolerance:g}: a share of the loss, from 0 (no token leaves) to below 1; half a per "
                "cent is 0.005 or 0.5%"
            )
    return dict(tolerances)


def _imitated(run: LoadedRun, own: ExitRule, to: str, n_loops: int) -> ExitRule:
    if not isinstance(own, Scored):
        raise UsageError(f"--to {to} with exit {own.kind!r}: it has no threshold a loop to fit; leave --to out")
    other = run.exit(to, n_loops).rule
    if not isinstance(other, Scored) or other.kind == own.kind:
        raise UsageError(
            f"--to {to} with exit {own.kind!r}: name another rule with a threshold, as kl; or leave it out"
        )
    return other


def _rungs(
    at: _At, of_own: np.ndarray | None, other: ExitRule | None, of_other: np.ndarray | None, tolerance: float
) -> tuple[list[ExitRule], np.ndarray | None]:
    """The settings to choose from; and after which loop the rule that is imitated would let each token leave."""
    if of_own is None:
        return ladder(at.rule, np.zeros((1, at.n_loops))), None
    if other is None or of_other is None or not tolerance:
        return ladder(at.rule, of_own), None
    there = loosest_within(of_other, at.nats_RN, ladder(other, of_other), tolerance)
    depths_N = expected_depths(there, of_other)
    shape_R = matched(of_own, depths_N)
    # Where the other rule lets none leave there is no shape to fit: one number for all loops.
    return ladder(at.rule, of_own, shape_R if shape_R.any() else None), depths_N


def _tier(
    at: _At,
    name: str,
    tolerance: float,
    settings: tuple[list[ExitRule], np.ndarray | None],
    held_out: Passage,
    held_out_RN: np.ndarray,
) -> Tier:
    rungs, imitated_N = settings
    rule = NEVER if tolerance == 0 else _chosen(at, name, tolerance, rungs)
    depths_N, test = at.read(rule).depths_N, at.run.exit(rule, at.n_loops).test
    uniform = sufficient(at.nats_RN, tolerance)
    flops_R = rule.executed_flops(at.run.model.config, at.n_loops)
    all_flops_R = NEVER.executed_flops(at.run.model.config, at.n_loops)
    same_N = np.full(held_out.n_tokens, uniform)
    return validate(
        Tier,
        {
            "name": name,
            "tolerance": tolerance,
            "rule": rule,
            "probe": sha256(at.run.run.probe) if isinstance(rule, Probe) and rule.weights is None else None,
            "calib": measured(at.text, at.read(rule), at.nats_RN[-1], flops_R),
            "held_out": measured(held_out, held_out.read(test, tell=at.tell), held_out_RN[-1], flops_R),
            "coverage": None if imitated_N is None else coverage(depths_N, imitated_N),
            "uniform_loops": uniform,
            "uniform_held_out": measured(
                held_out, Read(held_out_RN[uniform - 1], same_N, None), held_out_RN[-1], all_flops_R
            ),
        },
        f"tier {name}",
    )


def _chosen(at: _At, name: str, tolerance: float, rungs: list[ExitRule]) -> ExitRule:
    best = loosest(rungs, lambda rule: at.excess(rule) <= tolerance)
    if best >= 0 and at.saves(rungs[best]):
        return rungs[best]
    looser = next((rule for rule in rungs[best + 1 :] if at.saves(rule)), None)
    met = "" if looser is None else f" The next that does is {at.excess(looser):.3%} above it: give that or more."
    raise UsageError(
        f"tier {name}: exit {at.rule.kind!r} lets no token leave and stays within {tolerance:.4g} of the loss of "
        f"{at.n_loops} loops.{met} Or take another rule, or a tolerance of 0: no token leaves"
    )


def coverage(depths_N: np.ndarray, imitated_N: np.ndarray) -> Coverage:
    """Shares of tokens that leave before, at and after the loop after which the other rule lets them."""
    before, after = float((depths_N < imitated_N).mean()), float((depths_N > imitated_N).mean())
    return Coverage(before=before, same=float((depths_N == imitated_N).mean()), after=after)


def measured(text: Passage, read: Read, deepest_N: np.ndarray, flops_R: tuple[float, ...]) -> Measured:
    """A reading against all tokens at the deepest loop; ``flops_R`` are those of a token by its depth."""
    lost, bits = text.gain(read.nats_N, deepest_N), text.bits(deepest_N).value
    loops = text.mean(read.depths_N)
    return Measured(
        n_tokens=text.n_scored,
        excess=lost.value / bits,
        excess_low=lost.low / bits,
        excess_high=lost.high / bits,
        bits_per_byte=text.bits(read.nats_N).value,
        mean_loops=loops.value,
        mean_loops_low=loops.low,
        mean_loops_high=loops.high,
        flops_per_token=float(np.array(flops_R)[read.depths_N - 1].mean()),
    )
