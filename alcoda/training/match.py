"""Equal cost: solve one free dimension of a recipe so that it meets another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from alcoda.depth.sample import MOST_LOOPS
from alcoda.errors import UsageError, did_you_mean
from alcoda.model.cost import Ledger
from alcoda.training.recipe import Recipe

LARGEST = 10**9
"""No dimension is searched beyond."""

Settings = dict[str, int | None]


@dataclass(frozen=True)
class Side:
    """One recipe of a match.

    Attributes:
        value: of the free dimension (of ``tokens``: training tokens of the run).
        cost: what is compared: parameters, FLOPs a token, or training FLOPs of the run (where tokens are free).
        ledger: all costs a token.
    """

    value: int
    cost: float
    ledger: Ledger

    def to_json(self) -> dict[str, Any]:
        """The ledger's totals with it."""
        totals = {name: value for name, value in self.ledger.to_json().items() if name not in ("terms", "convention")}
        return {"value": self.value, "cost": self.cost, **totals}


@dataclass(frozen=True)
class MatchResult:
    """How A was changed to meet B.

    Attributes:
        by, free, at: as asked for; ``at`` is None where parameters were matched.
        compared: what was made equal, in words.
        before, after, target: A as it was, A as it is now, and B.
        settings: what changes A so (``model.d_ff=1234``), as --set takes it.
        recipe: A so changed.
    """

    by: str
    free: str
    at: str | None
    compared: str
    before: Side
    after: Side
    target: Side
    settings: tuple[str, ...]
    recipe: Recipe

    @property
    def off_percent(self) -> float:
        """How far the changed A is above B (below: negative)."""
        return 100 * (self.after.cost / self.target.cost - 1)

    def to_json(self) -> dict[str, Any]:
        """All but the recipe, which the settings make."""
        return {
            "match": self.by,
            "free": self.free,
            "at": self.at,
            "compared": self.compared,
            "value": self.after.value,
            "off_percent": self.off_percent,
            "set": list(self.settings),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "target": self.target.to_json(),
        }


def match(a: Recipe, b: Recipe, by: str, free: str, at: str | None = None) -> MatchResult:
    """Solve the dimension ``free`` of ``a`` so that it costs what ``b`` costs, as nearly as its values allow.

    What the recipe leaves to the free dimension follows it: d_ff to d_model, the depths of a sampler to n_loops.
    Numbers that it names stay as they are.

    Args:
        a: the recipe that is changed.
        b: the recipe that is met.
        by: ``params`` (stored parameters) or ``flops``.
        free: ``n_loops``; ``d_ff``; ``d_model``, with n_heads in proportion, so that heads keep their width, in steps
            that the heads of keys go on dividing; or ``tokens``, in whole train steps, where training FLOPs of the
            whole runs are compared (at their mean depths, whatever this seed draws).
        at: with ``flops``: ``mean`` (also None), training FLOPs a token at the sampler's mean depth; or ``max``,
            forward FLOPs a token at n_loops.

    Raises:
        UsageError: no value reaches B (it names the bound, and both costs there), or the arguments do not go together.
    """
    _check(a, b, by, free, at)
    if by == "flops":
        at = at or "mean"
    compared = "parameters" if at is None else "forward FLOPs a token at n_loops"
    if at == "mean":
        compared = "training FLOPs of the run" if free == "tokens" else "training FLOPs a token at the mean depth"
    # The same number of steps for every candidate: what a budget pays for would change with the model.
    fixed, grid = _with(a, {"train.budget": None, "train.steps": a.n_steps}), GRIDS[free](a)

    def side(recipe: Recipe, value: int) -> Side:
        ledger = recipe.ledger()
        if at == "mean":
            return Side(value, ledger.training_flops_per_token * (value if free == "tokens" else 1), ledger)
        return Side(value, ledger.params if at is None else ledger.forward_flops_per_token, ledger)

    def try_at(number: int) -> Side | UsageError:
        if not 1 <= number <= grid.most:
            return UsageError(f"{free} goes from {grid.value(1):,} to {grid.value(grid.most):,}")
        try:
            return side(_with(fixed, grid.settings(number)), grid.value(number))
        except UsageError as error:
            return error

    before, target = side(fixed, grid.value(grid.start)), side(b, GRIDS[free](b).own_value)
    near, far = _bracket(try_at, grid.start, before, target.cost)
    if isinstance(far[1], UsageError):
        beyond = try_at(grid.start + 1)
        is_flat = isinstance(beyond, Side) and near[1].cost == before.cost == beyond.cost
        raise UsageError(
            _unchanged(free, at, compared) if is_flat else _missed(near[1], far[1], target, free, compared)
        )
    number, after = min((near, (far[0], far[1])), key=lambda found: abs(found[1].cost - target.cost))
    changed = grid.settings(number)
    if a.train.budget is not None and a.train.steps is not None and "train.steps" not in changed:
        changed["train.steps"] = None  # of a run's recipe.yaml, which keeps both: another model, another number
    texts = tuple(f"{name}={'null' if value is None else value}" for name, value in changed.items())
    return MatchResult(by, free, at, compared, before, after, target, texts, _with(a, changed))


def _check(a: Recipe, b: Recipe, by: str, free: str, at: str | None) -> None:
    for recipe in (a, b):
        if not isinstance(recipe, Recipe):
            raise UsageError(f"match takes two Recipes, not {recipe!r}: alcoda.load_recipe(PATH) reads one")
    for name, value, allowed in (("match", by, BY), ("free", free, GRIDS), ("at", at or "mean", AT)):
        if value not in allowed:
            raise UsageError(f"--{name} {value}: there is no such choice{did_you_mean(value, allowed)}")
    if at is not None and by != "flops":
        raise UsageError(f"--at {at} says where FLOPs are compared, and parameters have no depth: leave it out")
    if free == "tokens" and by != "flops":
        raise UsageError("--free tokens with --match params: tokens change no parameters; take --match flops")
    if free == "tokens" and at == "max":
        raise UsageError("--free tokens compares training FLOPs, which are spent at the mean depth: leave --at out")
    if free == "n_loops" and not a.model.is_recurrent:
        raise UsageError("--free n_loops: the first recipe is dense (n_core=0) and has no loop; free d_ff or d_model")


# -- dimensions -------------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """The values that a free dimension may take, numbered from 1; costs rise with the number.

    Attributes:
        start: the number of the recipe's own value.
        most: the largest number.
        unit: the value of number 1.
        settings: the entries that a number changes.
    """

    start: int
    most: int
    unit: int
    settings: Callable[[int], Settings]

    def value(self, number: int) -> int:
        return number * self.unit

    @property
    def own_value(self) -> int:
        return self.value(self.start)


def _n_loops(recipe: Recipe) -> Grid:
    return Grid(recipe.model.n_loops, MOST_LOOPS, 1, lambda number: {"model.n_loops": number})


def _d_ff(recipe: Recipe) -> Grid:
    return Grid(recipe.model.shape.d_ff, LARGEST, 1, lambda number: {"model.d_ff": number})


def _d_model(recipe: Recipe) -> Grid:
    """Heads and width in one proportion: then a head keeps its width, and is turned by RoPE as before."""
    d_model, n_heads = recipe.model.d_model, recipe.model.n_heads
    k = math.gcd(d_model, n_heads)

    def scaled(number: int, of: int) -> Settings:
        return {"model.d_model": d_model * number // of, "model.n_heads": n_heads * number // of}

    def fits(step: int) -> bool:
        try:
            _with(recipe, scaled(k + step, k))
        except UsageError:
            return False
        return True

    # What else has to divide (heads of keys) holds for the recipe: where it holds one step on, it holds on every step.
    step = next(step for step in range(1, k + 1) if k % step == 0 and (step == k or fits(step)))
    n = k // step
    return Grid(n, LARGEST * n // d_model, d_model // n, lambda number: scaled(number, n))


def _tokens(recipe: Recipe) -> Grid:
    no_budget: Settings = {"train.budget": None} if recipe.train.budget is not None else {}
    return Grid(recipe.n_steps, LARGEST, recipe.step_tokens, lambda number: {**no_budget, "train.steps": number})


BY, AT = ("params", "flops"), ("mean", "max")
GRIDS = {"n_loops": _n_loops, "d_ff": _d_ff, "d_model": _d_model, "tokens": _tokens}


def _with(recipe: Recipe, settings: Settings) -> Recipe:
    """The recipe with entries of its parts (``model.d_ff``) changed."""
    parts: dict[str, dict[str, int | None]] = {}
    for name, value in settings.items():
        part, entry = name.split(".")
        parts.setdefault(part, {})[entry] = value
    return recipe.model_copy(update={part: getattr(recipe, part).model_copy(update=new) for part, new in parts.items()})


# -- search -----------------------------------------------------------------------------------------------------------


def _bracket(
    try_at: Callable[[int], Side | UsageError], start: int, before: Side, wanted: float
) -> tuple[tuple[int, Side], tuple[int, Side | UsageError]]:
    """Two neighbours: the last number on A's side of ``wanted``, and the first beyond it, or beyond what is legal.

    Doubling away from A, then bisection: they need no more than that costs rise with the number, and that the legal
    numbers are one interval.
    """
    sign = 1 if before.cost < wanted else -1

    def is_short(found: Side | UsageError) -> TypeGuard[Side]:
        return isinstance(found, Side) and sign * (found.cost - wanted) < 0

    near, near_side, jump = start, before, 1
    far, far_side = start, before
    while is_short(far_side):
        near, near_side = far, far_side
        far, jump = near + sign * jump, 2 * jump
        far_side = try_at(far)
    while abs(far - near) > 1:
        middle = (near + far) // 2
        found = try_at(middle)
        if is_short(found):
            near, near_side = middle, found
        else:
            far, far_side = middle, found
    return (near, near_side), (far, far_side)


def _missed(near: Side, bound: UsageError, target: Side, free: str, compared: str) -> str:
    below = near.cost < target.cost
    return (
        f"no {free} of the first recipe meets the second: {'up to' if below else 'down to'} {free}={near.value:,} it "
        f"stays {'below' if below else 'above'} it ({compared}: {_number(near.cost)} there, against "
        f"{_number(target.cost)}), and {free} ends there: {bound}"
    )


def _unchanged(free: str, at: str | None, compared: str) -> str:
    why = "loops share their parameters; free d_ff or d_model"
    if at is not None:
        why = "its depth names loops of its own; set them to null so that they follow n_loops, or take --at max"
    return f"--free {free} changes no {compared} of the first recipe: {why}"


def _number(cost: float) -> str:
    return f"{cost:,.0f}" if cost < 1e9 else f"{cost:.5g}"
