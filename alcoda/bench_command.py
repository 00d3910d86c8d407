"""The commands ``alcoda bench ...``. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alcoda.options import Checkpoint, Json, Plugin, Set, parse_loops
from alcoda.show import print_bench, print_json, say

app = typer.Typer(help="Speed of decoding, mode against mode.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Speed of decoding, mode against mode."""


@app.command()
def engine(
    run: Annotated[Path | None, typer.Argument(help="A run folder. Default: --shape.", metavar="[RUN]")] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="In place of a run: a recipe, with random weights and scripted tokens. Default: d512.",
            metavar="RECIPE",
        ),
    ] = None,
    settings: Set = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay the depths in this file (a trace).", metavar="FILE")
    ] = None,
    mean_depth: Annotated[
        float | None, typer.Option(help="Replay drawn depths of this mean. Default of a shape: 4.9.")
    ] = None,
    leave: Annotated[
        str | None,
        typer.Option(
            "--exit",
            help="Of a run: replay the depths of this tier or rule, recorded first. Default: balanced.",
            metavar="RULE",
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at one time: 1,8,32.", metavar="NUMBERS")] = "1,8,32",
    loops: Annotated[int | None, typer.Option(help="Of fixed depth. Default: the tier's, or the model's.")] = None,
    tokens: Annotated[int | None, typer.Option(help="New tokens of a request. Default: 64, or half a context.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Of a prompt. Default: the same.")] = None,
    rounds: Annotated[int, typer.Option(help="In each, every mode takes its turn.", min=1)] = 3,
    draft_loops: Annotated[int, typer.Option(help="The wavefront drafts after so many loops.", min=1)] = 2,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Of a shape: the share of drafts that are right, simulated. Default: a measured one."),
    ] = None,
    uniform: Annotated[
        int | None,
        typer.Option(help="Also time all tokens at so many loops. Default: of a tier, its smallest sufficient depth."),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Tokens of a launch. Default: 32 or more.", min=1)] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Also decode once with padded launches: fixed and wavefront must give equal tokens."
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or auto: as the run or the hardware.")] = "auto",
    checkpoint: Checkpoint = "best",
    seed: Annotated[int, typer.Option(help="Of prompts, random weights, depths and scripts.", min=0)] = 0,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Fixed depth, masked, no-refill, refill, wavefront, on the same depths of tokens. The last line is JSON."""
    from alcoda import api

    found = api.bench_engine(
        run,
        shape=shape,
        settings=settings or (),
        trace=trace,
        mean_depth=mean_depth,
        exit=leave,
        concurrency=parse_loops(concurrency, "--concurrency"),
        loops=loops,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        rounds=rounds,
        draft_loops=draft_loops,
        acceptance=acceptance,
        uniform=uniform,
        width=width,
        deterministic=deterministic,
        dtype=dtype,
        checkpoint=checkpoint,
        seed=seed,
    )
    if not as_json:
        print_bench(found)
        for note in found.notes:
            say(note)
    print_json(found.to_json())
    if found.tokens_differ:
        say(f"tokens differ that had to be equal: {'; '.join(found.tokens_differ)}")
        raise typer.Exit(1)
