"""Calibrated exits of a run: named tiers of quality, bound to the weights and the tokenizer that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from alcoda.config import Config, Float, NonNegativeFloat, PositiveInt, validate
from alcoda.depth.record import fingerprint
from alcoda.depth.rules import ExitRule, Probe, read_rule, rules
from alcoda.depth.watch import ExitTest
from alcoda.errors import RunError, UsageError, did_you_mean
from alcoda.files import read_json, sha256, write_json
from alcoda.model.lm import RecurrentLM

Share = Annotated[float, Field(ge=0, le=1)]


class Coverage(Config):
    """Shares of tokens that leave before the loop after which another rule would let them, after the same, or later."""

    before: Share
    same: Share
    after: Share


class Measured(Config):
    """A rule on one text, under copy-on-exit, against all tokens at the deepest loop.

    Attributes:
        excess: by how much its mean loss is above theirs, relative to it; with its 95% interval, paired over units.
        bits_per_byte: its own.
        mean_loops: with its 95% interval.
        flops_per_token: executed, read-out and what the rule looks at included.
    """

    n_tokens: PositiveInt
    excess: Float
    excess_low: Float
    excess_high: Float
    bits_per_byte: Float
    mean_loops: Float
    mean_loops_low: Float
    mean_loops_high: Float
    flops_per_token: Float


class Tier(Config):
    """One level of quality.

    Attributes:
        name: what ``--exit NAME`` calls it.
        tolerance: the most that the loss may be above that of the deepest loop, relative to it; 0: no token leaves.
        rule: what keeps within it on the calibration text.
        probe: SHA-256 of the probe's file, where the rule reads one.
        calib, held_out: on the text that it was chosen on, and on another.
        coverage: of the calibration text, against the rule that was imitated, if one was.
        uniform_loops: the smallest depth for all tokens that keeps within the tolerance there: what a saving is to be
            held against.
        uniform_held_out: that depth on the other text.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
    tolerance: NonNegativeFloat
    rule: ExitRule
    probe: str | None = None
    calib: Measured
    held_out: Measured
    coverage: Coverage | None = None
    uniform_loops: PositiveInt
    uniform_held_out: Measured

    @model_validator(mode="after")
    def _no_rule(self) -> Self:
        if self.name in rules():
            raise ValueError(f"{self.name!r} is the name of a rule: call the tier otherwise")
        return self


class Tiers(Config):
    """What ``exits.json`` of a run holds.

    Attributes:
        model: `alcoda.depth.record.fingerprint` of the weights.
        tokenizer: SHA-256 of the tokenizer.
        n_loops: loops that run at most.
        imitates: the rule whose exits the thresholds were fitted to, if any; its threshold differs by tier.
        data, held_out_data: what they were chosen and checked on.
        flops_per_token: of all tokens at ``n_loops``.
    """

    version: Literal[1] = 1
    model: str
    tokenizer: str
    train_step: int
    n_loops: PositiveInt
    imitates: str | None
    data: str
    held_out_data: str
    flops_per_token: Float
    tiers: tuple[Tier, ...]

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> Tiers:
        """What `save` wrote; RunError where it is damaged."""
        try:
            return validate(cls, read_json(path), path.name)
        except UsageError as error:
            raise RunError(
                f"{path} is damaged or of another version: {error}. Calibrate anew: {command(path)}"
            ) from None

    def check(self, path: Path, model: str, tokenizer: str | None) -> Tiers:
        """These, if they are of this model and tokenizer (None: any)."""
        other = "weights" if self.model != model else "a tokenizer" if tokenizer not in (None, self.tokenizer) else None
        if other is not None:
            raise UsageError(
                f"{path}: these exits were calibrated with {other} other than this model's (train step "
                f"{self.train_step:,}), and their thresholds say nothing about it. Calibrate it: {command(path)}"
            )
        return self

    def tier(self, name: str) -> Tier:
        """The tier of that name."""
        found = next((tier for tier in self.tiers if tier.name == name), None)
        if found is None:
            raise UsageError(unknown(name, [tier.name for tier in self.tiers]))
        return found


def command(path: Path) -> str:
    """The command that writes ``path``."""
    return f"alcoda calibrate {path.parent}"


def unknown(name: str, tiers: Sequence[str]) -> str:
    """The message of a name that is neither a tier nor a rule."""
    return f"unknown exit {name!r}{did_you_mean(name, [*tiers, *rules()])}"


EXITS, PROBE = "exits.json", "probe.safetensors"
"""Their files in a folder: those of a run, and of what was exported of one."""


class Exit(NamedTuple):
    """When tokens leave: a rule, the same at work, and the calibrated tier that it is of, if it is of one."""

    rule: ExitRule
    test: ExitTest
    tier: str | None


def find_exit(
    choice: ExitRule | str,
    model: RecurrentLM,
    folder: Path,
    tokenizer: str | None,
    loops: int | None = None,
    threshold: float | Sequence[float] | None = None,
) -> Exit:
    """When the tokens of a model leave: a rule, its name (``state:0.01``), or a calibrated tier (``balanced``).

    Args:
        folder: where the tiers and the probe lie.
        tokenizer: SHA-256 of the one in use; None: it is not known, and not checked.
        loops: that run at most; None: the tier's, or the model's.

    Raises:
        UsageError: no such rule or tier; one that the model cannot be left by; a tier of other weights, another
            tokenizer, another depth.
    """
    if isinstance(choice, str) and choice.partition(":")[0] not in rules():
        return _find_tier(choice, model, folder, tokenizer, loops, threshold)
    rule = read_rule(choice, threshold) if isinstance(choice, str) else choice
    return Exit(rule, _at_work(rule, model, folder, model.config.n_loops if loops is None else loops), None)


def _find_tier(
    name: str,
    model: RecurrentLM,
    folder: Path,
    tokenizer: str | None,
    loops: int | None,
    threshold: float | Sequence[float] | None,
) -> Exit:
    path, probe = folder / EXITS, folder / PROBE
    if not path.is_file():
        raise UsageError(
            f"{unknown(name, [])}. Or is it a calibrated tier? {folder} has none: {command(path)} makes them"
        )
    tiers = Tiers.load(path)
    tier = tiers.tier(name)
    tiers.check(path, fingerprint(model), tokenizer)
    if threshold is not None:
        raise UsageError(f"threshold={threshold}: tier {name!r} has thresholds of its own; leave it out")
    if loops not in (None, tiers.n_loops):
        raise UsageError(
            f"loops={loops}: tier {name!r} was calibrated at {tiers.n_loops} loops; leave loops out, or run "
            f"{command(path)} --loops {loops}"
        )
    if tier.probe is not None and (not probe.is_file() or sha256(probe) != tier.probe):
        raise UsageError(
            f"{probe} is not the probe that tier {name!r} was calibrated with; calibrate anew: "
            f"{command(path)} --rule probe"
        )
    return Exit(tier.rule, _at_work(tier.rule, model, folder, tiers.n_loops), name)


def _at_work(rule: ExitRule, model: RecurrentLM, folder: Path, n_loops: int) -> ExitTest:
    if isinstance(rule, Probe) and rule.weights is None:
        if not (folder / PROBE).is_file():
            raise UsageError(f"exit probe: {folder} has none; alcoda probe {folder} fits one")
        rule = rule.model_copy(update={"weights": str(folder / PROBE)})
    return rule.build(model, n_loops)
