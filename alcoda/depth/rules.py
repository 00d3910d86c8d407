"""Exit rules: when a token leaves the loop. Exits are `alcoda.depth.exiting`'s; a rule only looks at rows.

A rule is a config; `ExitRule.build` makes the test that it is at work. A test sees N rows that have just run a loop,
each a token of any sequence at any loop, and gives a score for each. **A row leaves iff its score is below the
threshold**, so that 0 is never for a score that is 0 or more, as all of these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from alcoda.config import Choice, Int, NonNegativeFloat, PositiveFloat, PositiveInt, validate
from alcoda.depth.record import ProbeWeights, Trace
from alcoda.depth.watch import (
    ArgmaxTest,
    Bounds,
    CosineTest,
    EntropyTest,
    ExitTest,
    FixedTest,
    GateTest,
    KlTest,
    LastKlTest,
    MinPKlTest,
    ProbeTest,
    SecondOrderTest,
    StateTest,
    TraceTest,
)
from alcoda.errors import UsageError, did_you_mean
from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger, readout_flops
from alcoda.model.lm import RecurrentLM


class ExitRule(Choice, axis="exit"):
    """When a token leaves the loop."""

    needs_logits: ClassVar[bool] = False
    """Whether every loop that is looked at takes coda and head."""
    short: ClassVar[str] = "threshold"
    """The field that ``KIND:VALUE`` sets."""

    def build(self, model: RecurrentLM, n_loops: int, given: Any = None) -> ExitTest:
        """The rule at work on a model that runs ``n_loops`` loops.

        Args:
            given: what the rule would read from a file: a `Trace`, `ProbeWeights`.

        Raises:
            UsageError: as `check`; or what it reads does not fit the model.
        """
        self.check(model.config, n_loops)
        return self.make(model, self.bounds(n_loops), given)

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        """`build` of a choice, once it is checked."""
        raise NotImplementedError

    def check(self, config: ModelConfig, n_loops: int) -> None:
        """UsageError where tokens of such a model cannot leave so."""
        config.check_loops(n_loops)
        if not config.is_recurrent:
            raise UsageError(f"exit {self.kind!r}: this model is dense (n_core=0) and has no loop to leave")
        if config.has_weights_by_loop:
            part = f"route {config.route.kind!r}" if config.sharing.is_tied else f"sharing {config.sharing.kind!r}"
            raise UsageError(
                f"exit {self.kind!r}: with {part}, loops have weights of their own, so that the keys of one cannot "
                "stand for those of deeper ones. Train with sharing tied (and route none or token_choice), or choose "
                "a depth for all tokens with loops"
            )
        bounds = self.bounds(n_loops)
        if bounds.min_loops > n_loops:
            raise UsageError(
                f"exit.min_loops={bounds.min_loops}: only {n_loops} loops run; lower it, or run more loops"
            )
        if len(bounds.thresholds) != n_loops:
            raise UsageError(
                f"exit.threshold has {len(bounds.thresholds)} numbers and {n_loops} loops run: give one for each loop, "
                "or one number for all"
            )

    def bounds(self, n_loops: int) -> Bounds:
        """Of a rule that counts down the loops that are left: below 1 there is none."""
        return Bounds(1, n_loops, 0, (1.0,) * n_loops)

    def flops(self, config: ModelConfig) -> int:
        """Of looking at one token after one loop; coda and head included where it needs them."""
        return readout_flops(config) if self.needs_logits else 0

    def executed_flops(self, config: ModelConfig, n_loops: int) -> tuple[float, ...]:
        """Of a token that runs 1, 2, ... ``n_loops`` loops, its read-out and all that the rule looked at included.

        After the last loop nothing is to be decided; a rule that looks at logits looks there at those that are the
        token's own.
        """
        looks = [d - 1 if self.needs_logits else min(d, n_loops - 1) for d in range(1, n_loops + 1)]
        own = self.flops(config)
        return tuple(ledger(config, i + 1).forward_flops_per_token + n * own for i, n in enumerate(looks))


class Watching(ExitRule):
    """A rule that looks at what a loop did."""

    min_loops: PositiveInt = 1
    """No token leaves before."""
    max_loops: PositiveInt | None = None
    """Every token leaves then; null: at the last loop."""
    horizon: Annotated[Int, Field(ge=0, le=1)] = 0
    """How many loops after the one that decided the token leaves: 1 on a device that must not wait."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.max_loops is not None and self.min_loops > self.max_loops:
            raise ValueError(f"min_loops={self.min_loops} is above max_loops={self.max_loops}: swap them, or raise max")
        return self

    def bounds(self, n_loops: int) -> Bounds:
        return Bounds(self.min_loops, min(n_loops, self.max_loops or n_loops), self.horizon, (1.0,) * n_loops)


class Scored(Watching):
    """A rule whose score is a number of its own."""

    threshold: NonNegativeFloat | tuple[NonNegativeFloat, ...] | None = None
    """Tokens with a score below it leave; a list: one for each loop; null: none does."""

    def bounds(self, n_loops: int) -> Bounds:
        thresholds = self.threshold if isinstance(self.threshold, tuple) else (self.threshold or 0.0,) * n_loops
        return super().bounds(n_loops)._replace(thresholds=thresholds)


class Fixed(ExitRule):
    """After ``loops`` loops, every token."""

    kind: Literal["fixed"] = "fixed"
    short: ClassVar[str] = "loops"
    loops: PositiveInt | None = None
    """Null: all that run, so that no token leaves early."""

    def check(self, config: ModelConfig, n_loops: int) -> None:
        super().check(config, n_loops)
        if self.loops is not None and self.loops > n_loops:
            raise UsageError(f"exit.loops={self.loops}: only {n_loops} loops run; lower it, or run more loops")

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return FixedTest(model, bounds, self.loops or bounds.max_loops)


NEVER = Fixed()
"""No token leaves early."""


class TraceRule(ExitRule):
    """When a record says so."""

    kind: Literal["trace"] = "trace"
    short: ClassVar[str] = "depths"
    depths: str | None = None
    """The file of a `Trace`; null: it is given from Python."""

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        if given is None and self.depths is None:
            raise UsageError("exit trace without depths: name the file of a trace (exit.depths), or give one")
        trace = Trace.load(self.depths) if given is None and self.depths is not None else given
        if not isinstance(trace, Trace):
            raise UsageError(f"exit trace: {trace!r} is no Trace")
        return TraceTest(model, bounds, trace)


class Kl(Scored):
    """``KL(p_i || p_i-1)`` in nats, p_i the next-token distribution after loop i (papers.md 3.1). Not in loop 1."""

    kind: Literal["kl"] = "kl"
    needs_logits: ClassVar[bool] = True

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return KlTest(model, bounds)


class LastKl(Scored):
    """``KL(p_i-1 || p_i)`` in nats, Huginn's direction (its ``kl``; papers.md 3.2). Not in loop 1."""

    kind: Literal["kl_last"] = "kl_last"
    needs_logits: ClassVar[bool] = True

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return LastKlTest(model, bounds)


class MinPKl(Scored):
    """``KL(q_i-1 || q_i)`` in nats (Huginn's ``minp-kl``; papers.md 3.2), q_i the next-token distribution after loop i
    with ``1 / V`` for each token less likely than ``min_p`` times the likeliest, normed anew. Not in loop 1."""

    kind: Literal["minp_kl"] = "minp_kl"
    needs_logits: ClassVar[bool] = True
    min_p: Annotated[PositiveFloat, Field(le=1)] = 0.1
    """Huginn's 0.1."""

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return MinPKlTest(model, bounds, self.min_p)


class EntropyChange(Scored):
    """``|H(p_i) - H(p_i-1)|`` in nats (Huginn's ``entropy-diff``; papers.md 3.2). Not in loop 1."""

    kind: Literal["entropy"] = "entropy"
    needs_logits: ClassVar[bool] = True

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return EntropyTest(model, bounds)


class StateChange(Scored):
    """``|h_i - h_i-1| / |h_i|`` (Huginn's latent difference, papers.md 3.2)."""

    kind: Literal["state"] = "state"

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return StateTest(model, bounds)

    def flops(self, config: ModelConfig) -> int:
        return 4 * config.d_model  # two sums of squares


class CosineChange(Scored):
    """``1 - cos(h_i, h_i-1)``, at least 0; 1 where a state is 0 (Huginn's ``cosine``; papers.md 3.2)."""

    kind: Literal["cosine"] = "cosine"

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return CosineTest(model, bounds)

    def flops(self, config: ModelConfig) -> int:
        return 6 * config.d_model  # two sums of squares, and a product


class SecondOrder(Scored):
    """``|d_i - d_i-1| / |h_i|``, ``d_i = h_i - h_i-1``: the change of the change (arXiv 2509.23314, there not over
    ``|h|``), the largest of the last ``hits`` loops. Not before loop ``hits + 1``."""

    kind: Literal["second_order"] = "second_order"
    hits: Annotated[Int, Field(ge=1, le=2)] = 2
    """Loops in a row that must be below the threshold (2 in that paper)."""

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return SecondOrderTest(model, bounds, self.hits)

    def flops(self, config: ModelConfig) -> int:
        return 4 * config.d_model


class ArgmaxStable(Watching):
    """When the likeliest token has stayed the same for ``loops`` loops (Huginn's argmax stability, papers.md 3.2)."""

    kind: Literal["argmax_stable"] = "argmax_stable"
    needs_logits: ClassVar[bool] = True
    short: ClassVar[str] = "loops"
    loops: PositiveInt | None = None
    """Loops in a row that did not change it; null: no token leaves early."""

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return ArgmaxTest(model, bounds, self.loops)


class Gate(Scored):
    """``prod_j<=i (1 - lambda_j)``: the model's own probability that the token goes on (Ouro, papers.md 5.4; its
    quantile q is a threshold of 1 - q)."""

    kind: Literal["gate"] = "gate"

    def check(self, config: ModelConfig, n_loops: int) -> None:
        super().check(config, n_loops)
        if not config.exit_gate.has_gate:
            raise UsageError(
                "exit 'gate': this model has no exit gate to ask. Train with model.exit_gate linear and objective "
                "per_loop, or choose exit state"
            )

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        return GateTest(model, bounds)

    def flops(self, config: ModelConfig) -> int:
        return config.exit_gate.cost(config.shape).flops


class Probe(Scored):
    """``sigmoid(w . h / rms(h) + b_i)``: a probe's probability that a later loop still matters (papers.md 3.1, A2)."""

    kind: Literal["probe"] = "probe"
    weights: str | None = None
    """The file of `ProbeWeights`; null: they are given from Python."""

    def make(self, model: RecurrentLM, bounds: Bounds, given: Any) -> ExitTest:
        if given is None and self.weights is None:
            raise UsageError("exit probe without weights: name their file (exit.weights), or give them")
        probe = ProbeWeights.load(self.weights) if given is None and self.weights is not None else given
        if not isinstance(probe, ProbeWeights):
            raise UsageError(f"exit probe: {probe!r} are no ProbeWeights")
        return ProbeTest(model, bounds, probe)

    def flops(self, config: ModelConfig) -> int:
        return 4 * config.d_model  # a sum of squares, and the product with w


def rules() -> dict[str, type[ExitRule]]:
    """Every registered rule by its name."""
    return {kind: rule for kind, rule in ExitRule.choices.items() if issubclass(rule, ExitRule)}


def at_work(rule: ExitRule | ExitTest, model: RecurrentLM, n_loops: int | None = None) -> ExitTest:
    """A rule at work on a model that runs ``n_loops`` loops, its own where None."""
    if isinstance(rule, ExitRule):
        return rule.build(model, model.config.n_loops if n_loops is None else n_loops)
    if rule.model is not model or n_loops not in (None, rule.n_loops):
        raise UsageError(f"loops={n_loops}: the exit rule was built for another model, or for {rule.n_loops} loops")
    return rule


def read_rule(text: str, threshold: float | Sequence[float] | None = None) -> ExitRule:
    """``KIND``, or ``KIND:VALUE`` where the value is a threshold (loops, a file: `ExitRule.short`).

    Raises:
        UsageError: no such rule, or a value that it does not take.
    """
    kind, colon, value = text.partition(":")
    if kind not in rules():
        raise UsageError(f"unknown exit {kind!r}{did_you_mean(kind, rules())}")
    fields: dict[str, Any] = {"kind": kind}
    if colon:
        fields[rules()[kind].short] = _number(value)
    if threshold is not None:
        fields["threshold"] = threshold if isinstance(threshold, float | int) else tuple(threshold)
    return validate(rules()[kind], fields, f"exit {text!r}")


def _number(text: str) -> int | float | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
