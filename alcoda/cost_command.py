"""The commands ``alcoda cost`` and ``alcoda capacity``. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alcoda.errors import UsageError
from alcoda.options import Json, Plugin, Set, With, parse_loops, parse_size
from alcoda.show import print_capacity, print_footprint, print_json, print_ledger, print_match


def cost(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or run folders.", metavar="RECIPE...")],
    overlays: With = None,
    settings: Set = None,
    loops: Annotated[
        int | None, typer.Option(help="Depth of the forward pass, decoding and cache. Default: n_loops.")
    ] = None,
    plugin: Plugin = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--match",
            help="Of two recipes, change the first so that it meets the second: params or flops. "
            "--set then acts on the first only.",
        ),
    ] = None,
    free: Annotated[
        str | None,
        typer.Option(
            help="What --match may change: n_loops, d_ff, d_model (n_heads goes with it) or tokens (of the run). "
            "Numbers that the recipe names stay; what it leaves to this one follows."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            help="Which FLOPs a token --match flops compares: mean, of training at its mean depth (default), or max, "
            "of a forward pass at n_loops."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Estimate memory, communication and time of a train step on so many ranks.")
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(help="How --ranks share the work: ddp or fsdp. Default: as the recipe says."),
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="What a rank's device can do, 10^12 FLOP/s in the recipe's dtype. For times.")
    ] = None,
    utilisation: Annotated[float, typer.Option(help="The share of the peak that training reaches.")] = 0.4,
    bandwidth_gbps: Annotated[
        float | None, typer.Option(help="What a rank can send, 10^9 bits a second. For times.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The ledger: parameters, FLOPs and cache bytes a token, by named term. --match: equal cost of two recipes.
    --ranks: the memory, communication and time of a train step."""
    from alcoda import api
    from alcoda.training.recipe import named

    files = [path / "recipe.yaml" if path.is_dir() else path for path in recipes]
    if ranks is None and (parallel is not None or utilisation != 0.4 or peak_tflops or bandwidth_gbps):
        raise UsageError("--parallel, --peak-tflops, --utilisation and --bandwidth-gbps go with --ranks N")
    if by is not None or free is not None or at is not None:
        if by is None or free is None:
            raise UsageError("--match and --free go together (--at with them): for example --match flops --free d_ff")
        if len(recipes) != 2:
            raise UsageError(f"--match takes two recipes, one to change and one to meet (got {len(recipes)})")
        if loops is not None:
            raise UsageError("--loops with --match: costs are compared at each recipe's own depths; leave --loops out")
        if ranks is not None:
            raise UsageError("--ranks with --match: ask for one of them at a time")
        a, b = api.load_recipe(files[0], settings or (), overlays or ()), api.load_recipe(files[1])
        print_match(api.match(a, b, by, free, at), recipes, settings or (), as_json)
        return
    found = []
    for path, file in zip(recipes, files, strict=True):
        recipe = api.load_recipe(file, settings or (), overlays or ())
        step = None
        if ranks is not None:
            step = api.footprint(recipe, ranks, parallel, peak_tflops, utilisation, bandwidth_gbps)
        found.append((str(path), api.cost(recipe, loops), step))
    if as_json:
        lines = [
            {
                "recipe": name,
                "what": named(name, settings or (), overlays or ()),
                **one.to_json(),
                **({"footprint": step.to_json()} if step else {}),
            }
            for name, one, step in found
        ]
        print_json(lines[0] if len(lines) == 1 else lines)
        return
    for name, one, step in found:
        print_ledger(named(name, settings or (), overlays or ()), one)
        if step is not None:
            print_footprint(step)
    print(f"convention: {found[0][1].convention}")


def capacity(
    model: Annotated[Path, typer.Argument(help="A run, or a recipe.", metavar="RUN|RECIPE")],
    memory: Annotated[str, typer.Option(help="In all: 24GB, 24GiB, 512MB.", metavar="SIZE")],
    settings: Set = None,
    overlays: With = None,
    loops: Annotated[int | None, typer.Option(help="That a token may run. Default: n_loops.")] = None,
    tokens: Annotated[
        str,
        typer.Option(help="Of a request, prompt and new ones: 256,1024. Default: the context.", metavar="NUMBERS"),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="Of weights and cache: bfloat16, float32, or auto: what the engine decodes in on this machine."
        ),
    ] = "auto",
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """How many requests of what length fit into a memory beside the weights, with each decode cache."""
    from alcoda import api

    lengths = parse_loops(tokens, "--tokens")
    found = api.capacity(model, parse_size(memory), loops, lengths, dtype, settings or (), overlays or ())
    if as_json:
        print_json(found.to_json())
        return
    print_capacity(found)
