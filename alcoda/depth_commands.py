"""Commands about leaving the loop: probe, calibrate, frontier. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alcoda.errors import UsageError, did_you_mean
from alcoda.options import Checkpoint, Json, MaxTokens, Plugin, Run, parse_tokens
from alcoda.show import print_frontier, print_json, print_probe, print_tiers, say

LABELS = {"argmax": "argmax_changes", "loss": "loss_falls"}
Loops = Annotated[int | None, typer.Option(help="Loops that run at most. Default: the model's n_loops.")]
Rows = Annotated[int | None, typer.Option("--batch-size", help="Rows read at a time. Default: 8.", min=1)]


def probe(
    run: Run,
    label: Annotated[
        str, typer.Option(help="What it foretells: argmax (it changes in a later loop), loss (a later loop lowers it).")
    ] = "argmax",
    delta: Annotated[float, typer.Option(help="With --label loss: by at least so many nats.")] = 0.01,
    loops: Loops = None,
    data: Annotated[str, typer.Option(help="What it is fitted on: a split of the run, or a corpus.")] = "probe",
    tokens: MaxTokens = "20k",
    out: Annotated[Path | None, typer.Option(help="The file. Default: probe.safetensors of the run.")] = None,
    seed: Annotated[int, typer.Option(help="Of which tokens are used, where all are too many.", min=0)] = 0,
    checkpoint: Checkpoint = "best",
    batch_size: Rows = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Fit the router of --exit probe: does a later loop still matter for this token? The last line is JSON."""
    from alcoda import api

    if label not in LABELS:
        raise UsageError(f"--label {label}{did_you_mean(label, LABELS)}")
    how = {"checkpoint": checkpoint, "max_tokens": parse_tokens(tokens), "batch_size": batch_size}
    found = api.fit_probe(run, LABELS[label], delta, loops, data, out=out, seed=seed, **how)  # pyrefly: ignore
    if not as_json:
        print_probe(found)
        say(f"{found.path}; next: alcoda eval {api.measured_in(run)} --exit probe:0.1")
    print_json(found.to_json())


def calibrate(
    run: Run,
    rule: Annotated[
        str, typer.Option(help="Whose thresholds: state, second_order, kl, gate, probe, argmax_stable.")
    ] = ("state"),
    to: Annotated[
        str | None, typer.Option(help="Imitate this dear rule, with a threshold for each loop: kl.", metavar="RULE")
    ] = None,
    tolerance: Annotated[
        str | None, typer.Option(help="Of tier balanced: how much of the loss may be lost. Default: 0.5%.")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="These tiers in place of fast=2%, balanced=0.5%, exact=0 (no token leaves). Repeatable.",
            metavar="NAME=TOLERANCE",
        ),
    ] = None,
    loops: Loops = None,
    data: Annotated[str, typer.Option(help="What they are chosen on: a split of the run, or a corpus.")] = "calib",
    held_out: Annotated[str, typer.Option(help="What they are checked on.")] = "valid",
    tokens: MaxTokens = "20k",
    checkpoint: Checkpoint = "best",
    batch_size: Rows = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Choose exit thresholds within a tolerance of the loss, and keep them in the run. The last line is JSON."""
    from alcoda import api
    from alcoda.measure.calibrate import TOLERANCES

    tolerances = dict(map(_tier, tier)) if tier else dict(TOLERANCES)
    if tolerance is not None:
        tolerances["balanced"] = _share(tolerance)
    how = {"checkpoint": checkpoint, "max_tokens": parse_tokens(tokens), "batch_size": batch_size}
    found = api.calibrate(run, rule, to, tolerances, loops, data, held_out, **how)  # pyrefly: ignore
    if not as_json:
        print_tiers(found)
        for one in found.tiers:
            if one.uniform_held_out.flops_per_token <= one.held_out.flops_per_token and one.tolerance:
                share = one.uniform_held_out.flops_per_token / one.held_out.flops_per_token
                say(
                    f"{one.name}: no saving. All tokens at --loops {one.uniform_loops} keep within {one.tolerance:.2%} "
                    f"on {data} too, for {share:.0%} of its FLOPs"
                )
            if one.held_out.excess > one.tolerance:
                say(
                    f"{one.name}: on {held_out} it loses {one.held_out.excess:.3%}, more than the {one.tolerance:.2%} "
                    "that it keeps within on the text it was chosen on; calibrate on more (--tokens), or more strictly"
                )
        where = api.measured_in(run)
        say(f"{where / 'exits.json'}; next: alcoda generate {where} --exit {found.tiers[0].name} --prompt TEXT")
    print_json(found.model_dump(mode="json"))


def frontier(
    run: Run,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Only this rule. Repeatable. Default: all that the model can be left by.", metavar="RULE"),
    ] = None,
    loops: Loops = None,
    data: Annotated[str, typer.Option(help="A split of the run, or a corpus.")] = "valid",
    tokens: MaxTokens = "20k",
    points: Annotated[int, typer.Option(help="Settings of each rule.", min=1)] = 6,
    tolerance: Annotated[str, typer.Option(help="Of the loss: what makes a smaller depth sufficient.")] = "0.5%",
    checkpoint: Checkpoint = "best",
    batch_size: Rows = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Loss against loops and FLOPs, by exit rule and with each rule's own cost; kept for the report. The last line is
    JSON."""
    from alcoda import api

    how = {"checkpoint": checkpoint, "max_tokens": parse_tokens(tokens), "batch_size": batch_size}
    found = api.frontier(run, rule or (), loops, data, points=points, tolerance=_share(tolerance), **how)  # pyrefly: ignore
    if not as_json:
        print_frontier(found)
        say(found.note or f"intervals over {found.n_units} documents, {found.n_tokens:,} tokens")
    print_json(found.to_json())
    api.keep_frontier(run, found)  # last: where it cannot be written, it has been said


def _tier(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--tier {text}: NAME=TOLERANCE, for example balanced=0.5%")
    return name, _share(value)


def _share(text: str) -> float:
    """``0.5%`` or ``0.005``."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"tolerance {text!r}: a share of the loss, for example 0.5% or 0.005") from None
