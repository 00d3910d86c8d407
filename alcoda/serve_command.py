"""The command ``alcoda serve``. Thin, as all of `alcoda.cli`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from alcoda.options import Cache, Checkpoint, Json, Plugin, Wavefront, parse_size
from alcoda.show import print_json, say

KEY = "ALCODA_API_KEY"


def serve(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder; a folder (config.json, safetensors, tokenizer.json) or file (GGUF, llama2.c) of "
            "another project; or a model that comes with alcoda.",
            metavar="[RUN]",
        ),
    ] = Path("mini"),
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="Of the model. Default: the run's.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Only requests with one of these keys. Repeatable. Default: ${KEY}.", metavar="KEY"),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="A YAML file: tiers by key, depth under load. See docs/serving.md.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page of this origin may ask (CORS), and a proxy pass its name on as Host; *: any. Repeatable.",
            metavar="URL",
        ),
    ] = None,
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="/metrics needs no key.")] = False,
    max_waiting: Annotated[int, typer.Option(help="Completions that wait; above: 429.", min=0)] = 256,
    max_body: Annotated[str, typer.Option(help="Of a request's body.", metavar="SIZE")] = "4MiB",
    max_n: Annotated[int, typer.Option(help="Completions of a prompt.", min=1)] = 16,
    deadline: Annotated[float | None, typer.Option(help="Seconds of a request, queue included.", min=0.001)] = None,
    drain: Annotated[float, typer.Option(help="Seconds that requests may go on after SIGTERM.", min=0)] = 30.0,
    audit: Annotated[
        float, typer.Option(help="Rerun this share of requests at full depth when idle.", min=0, max=1)
    ] = 0.0,
    loops: Annotated[
        int | None, typer.Option(help="A request may ask for so many: the model's (default) or more.", min=1)
    ] = None,
    width: Annotated[int, typer.Option(help="Tokens of a launch, at most.", min=1)] = 32,
    wavefront: Wavefront = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="A text does not depend on others that run, to the bit.")
    ] = False,
    cache_tokens: Annotated[int | None, typer.Option(help="Room for keys, in tokens of all that run.", min=1)] = None,
    cache: Cache = None,
    decode_only: Annotated[
        bool,
        typer.Option(
            "--decode-only", help="Half the memory of weights on a CPU: no scores of prompts (echo with logprobs)."
        ),
    ] = False,
    checkpoint: Checkpoint = "best",
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Serve a model: OpenAI's API with depth as a dial, and a page. Ctrl-C lets requests end; twice: at once."""
    from alcoda.errors import UsageError, install

    try:
        from alcoda import serving
        from alcoda.serve.origin import is_loopback
    except ImportError as error:
        raise UsageError(f"alcoda serve needs more ({error}); install it with: {install('serve')}") from None

    keys = api_key or [key for key in os.environ.get(KEY, "").split(",") if key]
    server = serving.server(
        run,
        host=host,
        port=port,
        name=name,
        api_keys=keys,
        policy=policy,
        allow_origins=allow_origin or (),
        open_metrics=open_metrics,
        max_waiting=max_waiting,
        max_body_bytes=parse_size(max_body, "--max-body"),
        max_n=max_n,
        deadline_s=deadline,
        drain_s=drain,
        audit=audit,
        loops=loops,
        engine={
            "width": width,
            "draft_loops": wavefront,
            "deterministic": deterministic,
            "cache_tokens": cache_tokens,
            "cache": cache,
        },
        checkpoint=checkpoint,
        decode_only=decode_only,
    )
    server.open()
    if not as_json:
        say(f"{server.url}: loading {run} ...")
    if not is_loopback(host) and not server.settings.keys():
        say(f"anybody who reaches {server.url} may use it: --api-key KEY lets in only those who have one")

    def ready(started: serving.Server) -> None:
        if as_json:
            print_json(started.described())
            return
        models = ", ".join(started.described()["models"])
        say(f"{started.url}: ready, with a page for people there and OpenAI's API at {started.url}/v1 ({models})")
        for note in started.worker.notes():
            say(note)

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        signal.signal(number, server.on_signal)  # what `run` leaves behind: no moment of its end is without
    server.run(ready)
    for number in signals:  # it has ended as it was asked to: once more changes nothing, until the process is gone
        signal.signal(number, signal.SIG_IGN)
    if server.worker.is_left:
        # It is in the middle of what is not Python: ended there as Python takes itself down, it may abort the process.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)
