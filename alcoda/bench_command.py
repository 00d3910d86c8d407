"""The commands ``alcoda bench ...``. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from alcoda.errors import UsageError
from alcoda.options import Checkpoint, Json, Plugin, Set, parse_loops, parse_rates
from alcoda.show import print_bench, print_json, print_table, say

app = typer.Typer(
    help="Speed: of the engine, mode against mode; of a running server, load by load.", no_args_is_help=True
)


@app.callback()
def _bench() -> None:
    """Speed: of the engine, mode against mode; of a running server, load by load."""


@app.command()
def engine(
    run: Annotated[
        Path | None, typer.Argument(help="A run folder, or mini. Default: --shape.", metavar="[RUN]")
    ] = None,
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


@app.command()
def serve(
    url: Annotated[str, typer.Argument(help="Of a running server: http://127.0.0.1:8000.", metavar="URL")],
    api_key: Annotated[
        str | None, typer.Option(help="The server's, if it wants one.", envvar="ALCODA_API_KEY", show_envvar=True)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that it has: mini:fast. Repeatable. Default: its first one.", metavar="NAME"),
    ] = None,
    rate: Annotated[
        str,
        typer.Option(
            help="Requests a second, at random times: 2,4,8. Default, without --concurrency.", metavar="NUMBERS"
        ),
    ] = "",
    concurrency: Annotated[
        str, typer.Option(help="In its place: so many clients, each waits for its answers: 1,8.", metavar="NUMBERS")
    ] = "",
    duration: Annotated[float, typer.Option(help="Seconds of each load and model.")] = 30.0,
    ttft_ms: Annotated[float, typer.Option(help="Target: to the first text.")] = 500.0,
    itl_ms: Annotated[float, typer.Option(help="Target: between tokens, in the mean of a request.")] = 50.0,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Prompts: one a line, or .jsonl with prompt. Default: openings of stories.", metavar="FILE"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each request.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the times and of which prompt is drawn.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it: a .svg, .png or .pdf (needs matplotlib).", metavar="FILE")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also keep the JSON here.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Load a running server: latencies, and requests a second that met their targets. The last line is JSON.

    Requests are sent at times drawn before, whatever the answers do. Ctrl-C gives the table of what there is.
    """
    from alcoda.files import write_json
    from alcoda.serve.load.bench import bench_serve  # not by way of the API: a client needs no torch

    if out is not None and out.is_dir():
        raise UsageError(f"--out {out}: it is a folder; name a file in it")
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.absolute().parent}")
    found = bench_serve(
        url,
        api_key=api_key,
        models=model or (),
        rates=parse_rates(rate),
        concurrency=parse_loops(concurrency, "--concurrency"),
        duration_s=duration,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        prompts=prompt_file,
        max_tokens=max_tokens,
        seed=seed,
        plot=plot,
    )
    if not as_json:
        _print_load(found)
        for note in found.notes:
            say(note)
    if out is not None:
        write_json(out, found.to_json())
    print_json(found.to_json())
    if found.interrupted:
        raise typer.Exit(130)


def _print_load(found: Any) -> None:
    """A `LoadResult` as a table."""

    def three(times: Any) -> str:
        return "" if times is None else f"{times.p50:,.0f} / {times.p90:,.0f} / {times.p99:,.0f}"

    rows = [
        [
            one.model,
            one.load,
            f"{one.completed:,} of {one.requests:,}",
            ", ".join(f"{n} {error}" for error, n in one.errors.items()),
            three(one.ttft_ms),
            three(one.itl_ms),
            three(one.e2e_ms),
            f"{one.output_tokens_per_s:,.1f}",
            "" if one.mean_loops is None else f"{one.mean_loops:.2f}",
            f"{one.goodput_per_s:.2f}",
            f"{one.good_share:.0%}",
        ]
        for one in found.scores
    ]
    head = ["model", "load", "answered", "errors", "first text", "between", "whole", "tokens/s", "loops"]
    title = (
        f"{found.url}: {found.max_tokens} new tokens a request, {found.duration_s:g} s each; ms at p50 / p90 / p99; "
        f"good: first text within {found.ttft_ms:g} ms and {found.itl_ms:g} ms a token"
    )
    print_table([*head, "good/s", "good"], rows, title, n_left=4)
