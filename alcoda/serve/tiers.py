"""Names under which one model is offered, and how many loops a request's tokens may run.

Every tier that `alcoda calibrate` chose is a model of its own to clients: one set of weights, several operating points.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alcoda.errors import UsageError, did_you_mean
from alcoda.serve.errors import ApiError
from alcoda.serve.protocol import Common, ExitChoice, LoopBounds
from alcoda.serve.settings import Policy

if TYPE_CHECKING:
    from alcoda.engine.llm import LM

BALANCED, EXACT, NONE = "balanced", "exact", "none"
READS_A_FILE = ("trace",)
"""Rules that a client may not name: they read what it names."""


@dataclass(frozen=True)
class Depth:
    """How deep a request's tokens go.

    Attributes:
        tier: the calibrated tier, if it is one; EXACT of a run without any: all loops.
        exit: in words, for the answer.
        how: arguments of `LM.request`.
        max_loops: that a token may run.
    """

    tier: str | None
    exit: str
    max_loops: int
    how: dict[str, Any] = field(default_factory=dict)


class Catalogue:
    """Of a loaded model.

    Args:
        name: that it is offered under.
        max_loops: that a request may ask for.

    Raises:
        UsageError: the policy names a tier that the run does not have.
    """

    def __init__(self, lm: LM, name: str, policy: Policy, max_loops: int) -> None:
        self.name, self.policy, self.n_loops, self.max_loops = name, policy, lm.n_loops, max_loops
        self.mean_loops = {EXACT: float(lm.n_loops)}
        """Of every tier, on the text that it was calibrated on."""
        self.loops = {EXACT: lm.n_loops}
        self.note: str | None = None
        """Why a calibration that is there is not used."""
        self.calibrated = _tiers(lm, self)
        wrong = sorted(policy.tiers() - set(self.mean_loops))
        if wrong:
            raise UsageError(f"policy: unknown tier {wrong[0]!r}{did_you_mean(wrong[0], self.mean_loops)}")
        self.default = policy.default_tier or (BALANCED if BALANCED in self.mean_loops else None)

    def models(self) -> dict[str, str | None]:
        """Every name with its tier."""
        return {self.name: self.default, **{f"{self.name}:{tier}": tier for tier in self.mean_loops}}

    def tier_of(self, model: str | None) -> str | None:
        """The tier that a model's name names; None where it leaves it open. ApiError (404) where there is none."""
        if model in (None, self.name):
            return None
        name, colon, tier = (model or "").partition(":")
        if name != self.name or not colon or tier not in self.mean_loops:
            near = did_you_mean(model or "", self.models())
            raise ApiError(404, f"there is no model {model!r}{near}", param="model", code="model_not_found")
        return tier

    def choose(self, body: Common, key_tier: str | None, n_waiting: int) -> Depth:
        """The depth of a request.

        Args:
            key_tier: the default of its API key.
            n_waiting: completions that wait now.

        Raises:
            ApiError: no such model, tier or rule, or bounds that do not go with it.
        """
        tier, exit, loops = self.tier_of(body.model), body.exit, body.loops
        if tier is not None and exit is not None and exit != tier:
            raise ApiError(
                400, f"exit: the model {body.model!r} has an exit already; ask for {self.name!r}", param="exit"
            )
        if isinstance(exit, ExitChoice):
            return self._of_rule(exit, loops)
        named = tier if exit is None else exit
        if named is None and not isinstance(loops, int):
            named = self._default(key_tier, n_waiting)
        if named in (None, NONE):
            return self._fixed(None, loops)
        if named not in self.mean_loops:
            near = did_you_mean(named, [*self.mean_loops, NONE])
            rule = '; a rule is {"rule": "state", "threshold": 0.05}' if ":" in named else ""
            raise ApiError(400, f"exit: there is no tier {named!r}{near}{rule}", param="exit", code="unknown_tier")
        if named not in self.calibrated:
            return self._fixed(named, loops)
        if isinstance(loops, int):
            raise ApiError(
                400,
                f"loops={loops}: tier {named!r} has a depth of its own; leave loops out, give bounds "
                '({"min": a, "max": b}), or set exit to "none"',
                param="loops",
            )
        most = self._most(loops, self.loops[named], self.loops[named], named)
        return Depth(named, named, most, {"exit": named, **_bounds(loops)})

    def _default(self, key_tier: str | None, n_waiting: int) -> str | None:
        tier, degrade = key_tier or self.default, self.policy.degrade
        if degrade is not None and n_waiting > degrade.above_waiting:
            mean = self.n_loops if tier is None else self.mean_loops[tier]
            if self.mean_loops[degrade.to] < mean:
                return degrade.to
        return tier

    def _of_rule(self, exit: ExitChoice, loops: int | LoopBounds | None) -> Depth:
        from alcoda.depth.rules import rules

        allowed = [name for name in rules() if name not in READS_A_FILE]
        if exit.rule not in allowed:
            raise ApiError(
                400, f"exit.rule: unknown rule {exit.rule!r}{did_you_mean(exit.rule, allowed)}", param="exit.rule"
            )
        threshold, most = exit.threshold, self._check(self._most(loops, self.max_loops, self.n_loops))
        said = exit.rule if threshold is None else f"{exit.rule}:{threshold}"
        # A number of loops is the depth that the rule is of; bounds leave it at the model's, or deeper.
        n_loops = most if isinstance(loops, int) else max(most, self.n_loops)
        how: dict[str, Any] = {"exit": exit.rule, "loops": n_loops, **_bounds(loops)}
        if rules()[exit.rule].short == "loops":  # the number is one of loops, not a threshold
            if isinstance(threshold, list) or (
                threshold is not None and not (threshold.is_integer() and 1 <= threshold <= n_loops)
            ):
                sent = f"a list of {len(threshold)}" if isinstance(threshold, list) else f"{threshold:g}"
                deeper = f' (with "loops": {{"max": n}} up to {self.max_loops})' if n_loops < self.max_loops else ""
                why = f"exit.threshold={sent}: {exit.rule} takes a whole number of loops, from 1 to {n_loops}{deeper}"
                raise ApiError(400, why, param="exit.threshold")
            if threshold is not None:
                said = f"{exit.rule}:{int(threshold)}"
                how["exit"] = said
        else:
            if threshold is None:
                why = f"exit.threshold: {exit.rule} needs a number, or a list with one for each loop"
                raise ApiError(400, why, param="exit.threshold")
            how["threshold"] = threshold
        return Depth(None, said, most, how)

    def _fixed(self, tier: str | None, loops: int | LoopBounds | None) -> Depth:
        limit = self.max_loops if tier is None else self.n_loops
        n_loops = self._check(self._most(loops, limit, self.n_loops, tier))
        return Depth(tier, tier or NONE, n_loops, {"loops": n_loops})

    def _check(self, loops: int) -> int:
        if loops > self.max_loops:
            raise ApiError(400, f"loops={loops}: this server runs {self.max_loops} at most", param="loops")
        return loops

    def _most(self, loops: int | LoopBounds | None, limit: int, otherwise: int, tier: str | None = None) -> int:
        """Loops of a token at most, ``otherwise`` where nothing is asked; ApiError where bounds are above ``limit``."""
        if not isinstance(loops, LoopBounds):
            return otherwise if loops is None else loops
        for name, bound in (("max", loops.max), ("min", loops.min)):
            if bound is not None and bound > limit:
                where = "here at most"
                if tier is not None and limit < self.max_loops:
                    where = f"at most at exit {tier!r}; for up to {self.max_loops} ask for a rule, or for exit {NONE!r}"
                raise ApiError(400, f"loops.{name}={bound}: {limit} loops run {where}", param=f"loops.{name}")
        if loops.min is not None and loops.max is not None and loops.min > loops.max:
            raise ApiError(400, f"loops.min={loops.min} is above loops.max={loops.max}: swap them", param="loops")
        return loops.max or max(otherwise, loops.min or 1)


def _bounds(loops: int | LoopBounds | None) -> dict[str, int | None]:
    return {"min_loops": loops.min, "max_loops": loops.max} if isinstance(loops, LoopBounds) else {}


def _tiers(lm: LM, into: Catalogue) -> set[str]:
    """The calibrated tiers of the run; none where they are of other weights."""
    from alcoda.depth.tiers import Tiers
    from alcoda.errors import RunError

    path = lm.loaded.run.exits_json
    if not path.is_file():
        return set()
    try:
        found = Tiers.load(path)
        for tier in found.tiers:
            lm.loaded.exit(tier.name)
    except (UsageError, RunError) as error:
        into.note = str(error)
        return set()
    into.mean_loops = {tier.name: tier.calib.mean_loops for tier in found.tiers} | (
        {} if any(tier.name == EXACT for tier in found.tiers) else into.mean_loops
    )
    into.loops = {**into.loops, **{tier.name: found.n_loops for tier in found.tiers}}
    return {tier.name for tier in found.tiers}
