"""The command ``alcoda eval``. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from alcoda.errors import UsageError, did_you_mean
from alcoda.options import Checkpoint, Json, Plugin, Run, parse_loops
from alcoda.show import print_caches, print_exit, print_json, print_prefills, print_scores, say


def evaluate(
    run: Run,
    loops: Annotated[str, typer.Option(help="Depths: 1,2,4,8. Default: those of the recipe.")] = "",
    data: Annotated[
        str, typer.Option(help="valid, train, calib, probe, or a corpus, scored whole: text:PATH, pystdlib, ...")
    ] = "valid",
    checkpoint: Checkpoint = "best",
    prefill: Annotated[
        str | None,
        typer.Option(
            help="How a model with a memory reads rows: exact (token by token; default), interleaved, iterated, zero. "
            "all: compare them, and keep the table in the run's prefills.json.",
            metavar="NAME",
        ),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="It reads in chunks of so many tokens. Default: rows whole.")
    ] = None,
    leave: Annotated[
        str | None,
        typer.Option(
            "--exit",
            help="When tokens leave the loop, at --loops at the latest: state:0.01, kl:1e-3, ..., or a tier that "
            "alcoda calibrate chose: fast, balanced, exact.",
            metavar="RULE",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="What a token leaves in the decode cache: per_loop (a slot a loop; default), mean (of its loops' "
            "keys), last (of its last loop); other than per_loop, rows are read token by token. all: compare them, "
            "and keep the table in the run's caches.json.",
            metavar="NAME",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Rows scored at a time. Default: 8, or 64 where rows are read token by token.", min=1),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Score at most so many tokens of each source.", min=2)] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Bits per byte at each depth, with 95% intervals. The last line is JSON."""
    from alcoda import api
    from alcoda.model.cache_policy import caches
    from alcoda.model.prefill import prefills

    depths = parse_loops(loops)
    for option, given, choices in (("--prefill", prefill, prefills()), ("--cache", cache, caches())):
        if given is not None and given not in (names := [*choices, "all"]):
            raise UsageError(f"{option} {given!r}{did_you_mean(given, names)}")
    if cache == "all" and (prefill is not None or chunk is not None or leave is not None):
        raise UsageError("--cache all goes without --prefill, --chunk and --exit: all tokens are read one by one")
    for option, given, many in (("--cache", cache, "caches"), ("--prefill", prefill, "prefills")):
        if given == "all" and len(depths) > 1:
            raise UsageError(f"--loops {loops} with {option} all: {many} are compared at one depth; give one")
    sizes: Any = {"checkpoint": checkpoint, "batch_size": batch_size, "max_tokens": max_tokens}
    depth = depths[0] if depths else None
    if leave is not None:
        if len(depths) > 1 or prefill not in (None, "exact") or chunk is not None:
            raise UsageError(
                "--exit goes with one depth in --loops (no token runs more), and without --prefill and --chunk: with "
                "exits a text is read exactly"
            )
        result = api.evaluate_exit(run, leave, depth, data, cache=cache, **sizes)
        show = print_exit
    elif cache == "all":
        result = api.evaluate_caches(run, depth, data, **sizes)
        show = print_caches
    elif prefill == "all":
        if cache not in (None, "per_loop"):
            raise UsageError(f"--prefill all with --cache {cache}: it is filled token by token; leave --cache out")
        result = api.evaluate_prefills(run, depth, data, chunk_tokens=chunk, **sizes)
        show = print_prefills
    else:
        result = api.evaluate(run, depths, data, prefill=prefill, chunk_tokens=chunk, cache=cache, **sizes)
        show = print_scores
    if not as_json:
        show(result)
        say(result.note or f"intervals over {result.n_units} documents, {result.n_bytes:,} bytes")
    print_json(result.to_json())
    # Last: where it cannot be written, it has been said.
    if isinstance(result, api.PrefillsResult):
        api.keep_prefills(run, result)
    elif isinstance(result, api.CachesResult):
        api.keep_caches(run, result)
