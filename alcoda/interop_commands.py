"""The commands that read other projects' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alcoda.options import Json, Plugin
from alcoda.show import print_json


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder that alcoda import reads.", metavar="RUN")],
    out: Annotated[Path, typer.Argument(help="The folder to write: new, or empty.", metavar="DIR")],
    checkpoint: Annotated[str, typer.Option(help="best, last, or a checkpoint's name.")] = "best",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: bfloat16 or float32. Default: float32, or bfloat16 where that loses nothing.",
            metavar="NAME",
        ),
    ] = None,
    max_shard_bytes: Annotated[
        int | None, typer.Option(help="Of one file of weights. Default: 5 GB.", metavar="BYTES", min=1)
    ] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """A run as a folder for Hugging Face's transformers: AutoModelForCausalLM.from_pretrained(DIR)."""
    from alcoda import api

    found = api.export(run, out, checkpoint, dtype, max_shard_bytes)
    if as_json:
        print_json(found.to_json())
        return
    shards = "" if found.n_shards == 1 else f" in {found.n_shards} files"
    text = "" if found.has_tokenizer else "; it has no tokenizer: token ids alone"
    exits = "; calibrated exits went along" if found.has_exits else ""
    code = "" if found.has_code else "; its choices of a plugin need alcoda: no code went along"
    typer.echo(
        f"{found.path}: {found.params:,} parameters, {found.weights_bytes / 1e6:,.1f} MB of weights ({found.dtype})"
        f"{shards}{text}{exits}{code}; its card is {found.path / 'README.md'}"
    )


def import_model(
    path: Annotated[
        str,
        typer.Argument(
            help="A folder with config.json and safetensors (Huginn, Ouro; dense: Llama, Mistral, Qwen2, Qwen3), a "
            "GGUF file, a llama2.c checkpoint, or a model of the Hugging Face hub: org/name.",
            metavar="PATH",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME of the folder.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bfloat16 or float32. Default: as they are.", metavar="NAME")
    ] = None,
    eot: Annotated[
        str | None, typer.Option(help="Its end-of-text token, where the folder does not say it.", metavar="TOKEN")
    ] = None,
    noise: Annotated[
        bool,
        typer.Option("--noise", help="The state begins as noise at evaluation too, not as zeros (Huginn)."),
    ] = False,
    as_json: Json = False,
) -> None:
    """A checkpoint of another project as a run, on which everything works. None of its code is run."""
    from alcoda import api

    found = api.import_model(path, out, dtype, eot, noise)
    if as_json:
        print_json(found.to_json())
        return
    text = "" if found.has_tokenizer else "; it has no tokenizer: token ids alone"
    typer.echo(
        f"{found.path}: {found.layout}, {found.params:,} parameters, {found.weights_bytes / 1e6:,.1f} MB of weights "
        f"({found.dtype}){text}"
    )
