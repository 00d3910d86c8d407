"""The commands ``alcoda retrofit`` and ``alcoda healed``. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alcoda.options import Json, MaxTokens, Plugin, Run, parse_tokens
from alcoda.show import print_json, print_table, say

if TYPE_CHECKING:
    from alcoda.api import Losses


def retrofit(
    source: Annotated[
        Path,
        typer.Argument(
            help="A dense model: a run, a folder with config.json and safetensors (Llama, Mistral, Qwen2, Qwen3), a "
            "GGUF file, or a checkpoint of llama2.c.",
            metavar="SRC",
        ),
    ],
    prelude: Annotated[int, typer.Option(help="Layers of the prelude: the first of the source.")],
    core: Annotated[int, typer.Option(help="Layers of the core: those right before the coda, or from --core-from on.")],
    coda: Annotated[int, typer.Option(help="Layers of the coda: the last of the source.")],
    out: Annotated[Path, typer.Option(help="The run folder.")],
    loops: Annotated[int, typer.Option(help="Loops of the core that it is to be healed for.")] = 4,
    core_from: Annotated[
        int | None, typer.Option(help="The layer of the source, from 0, that the core begins with.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A corpus (text:PATH, ...): a healing recipe is written for it, and losses are measured on its valid "
            "split."
        ),
    ] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Bytes of the corpus, from its beginning.", min=1)] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Of rows in healing and measuring. Default: 512, or the source's.", min=2)
    ] = None,
    tokens: MaxTokens = "20k",
    steps: Annotated[int, typer.Option(help="Train steps of the healing recipe.")] = 1000,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Make a dense model recurrent: its layers become prelude, core and coda, and at one loop it is the same model.
    Writes a run, and a recipe that heals it for more loops."""
    from alcoda import api

    made = api.retrofit(
        source,
        out,
        prelude,
        core,
        coda,
        loops,
        core_from=core_from,
        data=data,
        max_bytes=max_bytes,
        seq_len=seq_len,
        tokens=parse_tokens(tokens),
        steps=steps,
    )
    if not as_json:
        print_table(["stage", "layers of the source", "how many"], made.split.rows(), n_left=2)
        print(f"identity check: {made.identity}")
        if made.losses is not None:
            _show(made.losses)
        next_step = f"alcoda train {made.recipe} --out {out}-healed"
        say(
            f"{made.path}: a run; "
            + (f"next: {next_step}" if made.recipe else "name a corpus with --data for losses and a healing recipe")
        )
    print_json(made.to_json())


def healed(run: Run, plugin: Plugin = None, as_json: Json = False) -> None:
    """What training made of a retrofit: its losses by loops beside those before, and the source's."""
    from alcoda import api

    losses = api.healed(run)
    if not as_json:
        _show(losses)
    print_json(losses.to_json())


def _show(losses: Losses) -> None:
    print(f"{losses.data}, valid split ({losses.tokens:,} tokens scored), rows of {losses.seq_len}")
    print_table(["model, loops", "nats/token", "bits/byte"], losses.rows())
    if losses.note is not None:
        say(losses.note)
