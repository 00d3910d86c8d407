"""The command ``alcoda lab``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alcoda.errors import UsageError
from alcoda.options import Checkpoint, Json, MaxTokens, Plugin, Run, parse_tokens
from alcoda.show import print_frontier, print_json, print_table, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alcoda.api import LM, LabResult
    from alcoda.measure.tally import Group


def lab(
    run: Run,
    data: Annotated[
        str, typer.Option(help="valid, train, calib, probe, or a corpus: text:PATH, pystdlib, ...")
    ] = "valid",
    tokens: MaxTokens = "200k",
    loops: Annotated[int, typer.Option(help="Loops of the trajectories.")] = 16,
    eps: Annotated[
        float, typer.Option(help="A token has converged where KL to the loop before stays below, in nats.")
    ] = 5e-4,
    frontier: Annotated[
        int,
        typer.Option(help="Read so many tokens with every exit rule too, for its frontier; 0: leave it out.", min=0),
    ] = 20_000,
    classes: Annotated[
        str, typer.Option(help="Token classes: text, code (of Python source), auto (each source by its looks).")
    ] = "auto",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Rows at a time. Default: 8, or 64 where they are read token by token.", min=1),
    ] = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None,
        typer.Option(help="Where lab.json and tokens.parquet go. Default: RUN/lab, of the report."),
    ] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """When do tokens converge in the loop, which ones, and to a fixed point; and what does it save to leave there? The
    last line is JSON; the page is RUN/report.html."""
    from alcoda import api
    from alcoda.training.run import RunFolder

    lm = api.load(run, checkpoint)
    found = api.lab(
        lm,
        data,
        tokens=parse_tokens(tokens) or sys.maxsize,
        loops=loops,
        eps=eps,
        classes=classes,
        out=out,
        batch_size=batch_size,
    )
    why_not = _why_no_frontier(lm)
    points = None
    if frontier and not why_not:
        points = api.frontier(lm, data=data, max_tokens=frontier, batch_size=batch_size)
    if not as_json:
        _show(found)
        if points is not None:
            print_frontier(points)
        elif frontier:
            say(f"no frontier of exit rules: {why_not}")
        say(f"lab: {out or api.measured_in(run) / 'lab'}")
    print_json({**found.to_json(), "frontier": points and points.to_json()})
    # Last: where one cannot be written, what was measured has been said.
    if points is not None and out is None:
        api.keep_frontier(run, points)
    if out is None:
        page = RunFolder(api.measured_in(run)).report
        say(f"page: {api.write_report([run], page)}")


def _why_no_frontier(lm: LM) -> str:
    """Empty where tokens can leave the loop, and in one pass over a text."""
    if lm.recipe.model.memory.carries:
        return "a model with a memory is read token by token, once for each point (alcoda frontier does it)"
    from alcoda.depth.rules import NEVER

    try:
        NEVER.check(lm.recipe.model, lm.n_loops)
    except UsageError as error:
        return str(error)
    return ""


def _show(found: LabResult) -> None:
    head = ["tokens", "number", "mean depth", "95% interval", "median", "90%", "censored", "likeliest stays"]
    print_table(head, _rows([found.depth]), f"{found.data}: depth at which KL stays below {found.eps:g}")
    for title, groups in (
        ("by class", found.by_class),
        ("by position in the row", found.by_position),
        ("by loss at the last loop", found.by_difficulty),
        ("by hops of the answer", found.by_hops),
    ):
        if groups:
            print_table(head, _rows(groups), title)
    rows = [
        [str(one.loop), *(f"{one.radius[q]:.3f}" for q in ("q10", "q50", "q90")), f"{one.expanding:.0%}"]
        for one in found.contraction
    ]
    if rows:
        print_table(
            ["after loop", "radius 10%", "median", "90%", "1 or more"], rows, "spectral radius of one loop, of a token"
        )
    last = found.paths.by_loop[-1]
    say(
        f"two initial states after {last.loop} loops: relative distance {last.distance['mean']:.3g}, KL {last.kl:.3g}, "
        f"{last.agree:.1%} agree"
    )
    for note in found.notes:
        say(note)


def _rows(groups: Sequence[Group]) -> list[list[str]]:
    return [
        [
            one.name,
            f"{one.n_tokens:,}",
            f"{one.mean:.2f}",
            "" if one.low is None or one.high is None else f"[{one.low:.2f}, {one.high:.2f}]",
            f"{one.median:g}",
            f"{one.q90:g}",
            f"{one.censored:.1%}",
            f"{one.stable_loop:.2f}",
        ]
        for one in groups
    ]
