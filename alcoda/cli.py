"""The command line. Thin: it parses, calls `alcoda.api`, and prints; heavy imports are inside the commands."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from alcoda.errors import RunError, UsageError

app = typer.Typer(
    name="alcoda",
    help="Train and measure recurrent-depth language models.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Run = Annotated[Path, typer.Argument(help="A run folder (what alcoda train --out wrote).", metavar="RUN")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change an entry of the recipe: train.steps=500 (alcoda entries lists them). Repeatable.",
        metavar="A.B=C",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON, one line.")]
Checkpoint = Annotated[str, typer.Option(help="best, last, or a checkpoint's name (step_00000500).")]


def _version(wanted: bool) -> None:
    if wanted:
        import alcoda

        print(alcoda.__version__)
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads that torch uses; all cores by default.", min=1)
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if threads is not None and context.resilient_parsing is False:
        import torch

        torch.set_num_threads(threads)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file (recipes/, or a run's recipe.yaml).")],
    settings: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME of the recipe.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
) -> None:
    """Train a recipe. Ctrl-C saves a checkpoint; --resume goes on, to the bit."""
    from alcoda import api

    loaded = api.load_recipe(recipe, settings or ())
    result = api.train(loaded, out or Path("runs") / loaded.name, resume)
    if result.status == "stopped":
        _say(
            f"stopped at step {result.train_step}, all saved; go on with: "
            f"alcoda train {result.run / 'recipe.yaml'} --out {result.run} --resume"
        )
    else:
        _say(f"done: {result.run}; next: alcoda report {result.run} --out report.html")
    _print_json(vars(result) | {"run": str(result.run)})


@app.command(name="eval")
def evaluate(
    run: Run,
    loops: Annotated[str, typer.Option(help="Depths: 1,2,4,8. Default: those of the recipe.")] = "",
    data: Annotated[
        str, typer.Option(help="valid, train, calib, probe, or a corpus, scored whole: text:PATH, pystdlib, ...")
    ] = "valid",
    checkpoint: Checkpoint = "best",
    batch_size: Annotated[int, typer.Option(help="Rows scored at a time.", min=1)] = 8,
    max_tokens: Annotated[int | None, typer.Option(help="Score at most so many tokens of each source.", min=2)] = None,
    as_json: Json = False,
) -> None:
    """Bits per byte at each depth, with 95% intervals. The last line is JSON."""
    from alcoda import api

    result = api.evaluate(
        run, parse_loops(loops), data, checkpoint=checkpoint, batch_size=batch_size, max_tokens=max_tokens
    )
    if not as_json:
        rows = [
            [
                str(d.loops),
                f"{d.loss:.4f}",
                f"{d.bits_per_byte:.4f}",
                f"[{d.low:.4f}, {d.high:.4f}]",
                _gain(result, d.loops),
            ]
            for d in result.by_depth
        ]
        _table(["loops", "nats/token", "bits/byte", "95%", f"gain over {result.by_depth[0].loops}"], rows)
        _say(result.note or f"intervals over {result.n_units} documents, {result.n_bytes:,} bytes")
    _print_json(result.to_json())


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    loops: Annotated[
        int | None, typer.Option(help="Loops of the core for every token. Default: the model's n_loops.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many likeliest tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    checkpoint: Checkpoint = "best",
    as_json: Json = False,
) -> None:
    """Continue a prompt, streaming."""
    from alcoda import api

    lm = api.load(run, checkpoint)
    pieces = lm.stream(prompt, loops=loops, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        text = "".join(pieces)
        _print_json(
            {"prompt": prompt, "text": text, "loops": loops or lm.n_loops, "temperature": temperature, "seed": seed}
        )
        return
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command()
def cost(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or run folders.", metavar="RECIPE...")],
    settings: Set = None,
    loops: Annotated[
        int | None, typer.Option(help="Depth of the forward pass, decoding and cache. Default: n_loops.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The ledger: parameters, FLOPs and cache bytes a token, by named term."""
    from alcoda import api

    ledgers = []
    for path in recipes:
        recipe = api.load_recipe(path / "recipe.yaml" if path.is_dir() else path, settings or ())
        ledgers.append((str(path), api.cost(recipe, loops)))
    if as_json:
        found = [{"recipe": name, **one.to_json()} for name, one in ledgers]
        _print_json(found[0] if len(found) == 1 else found)
        return
    for name, one in ledgers:
        rows = [
            [t.name, f"{t.params:,}", _flops(t.forward_flops), _flops(t.training_flops), f"{t.kv_bytes:,}"]
            for t in one.terms
        ]
        rows.append(
            [
                "total",
                f"{one.params:,}",
                _flops(one.forward_flops_per_token),
                _flops(one.training_flops_per_token),
                f"{one.kv_bytes_per_token:,}",
            ]
        )
        _table(["a token", "params", "forward FLOPs", "training FLOPs", "KV bytes"], rows, name)
        print(
            f"at {one.loops} loops and {one.seq_len} tokens of context; "
            f"training at a mean of {one.training_loops:.2f} loops, {one.training_grad_loops:.2f} with gradients; "
            f"decoding costs {_flops(one.decode_flops_per_token)} FLOPs a token; "
            f"{one.effective_params:,} parameters with every loop counted"
        )
    print(f"convention: {one.convention}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders: one, or several to compare.", metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page. What a run was not asked for yet (evaluation, samples) is measured first."""
    from alcoda import api

    _say(f"report: {api.write_report(runs, out)}")


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run and begin anew.")] = False,
    settings: Set = None,
) -> None:
    """Train a small elastic model, measure it at 1 to 32 loops, and write the report. Minutes on two cores."""
    from alcoda.quickstart import quickstart as main_job

    _print_json(main_job(out, fresh, settings or ()))


@app.command()
def entries(
    below: Annotated[str, typer.Argument(help="Only these: model, train.optimizer, ...", metavar="[NAME]")] = "",
    as_json: Json = False,
) -> None:
    """Every entry of a recipe, with its default and meaning; for an axis, its choices and their entries."""
    from alcoda.training.entries import describe_entries

    found = describe_entries(below)
    if as_json:
        _print_json([entry._asdict() for entry in found])
        return
    for entry in found:
        print(f"{entry.name} = {entry.default}" if entry.default else entry.name)
        if entry.meaning:
            print(f"    {entry.meaning}")


def parse_loops(text: str) -> list[int]:
    """``"1,2,4"`` as numbers."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise UsageError(f"--loops {text}: write whole numbers with commas between, for example 1,2,4,8") from None


def _gain(result: Any, loops: int) -> str:
    gain = next((g for g in result.gain if g.to_loops == loops), None)
    return f"{gain.bits_per_byte:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]" if gain else ""


def _flops(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return f"{number:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # As wide as it needs: a wrapped row can be read, a number that is cut off cannot.
    console = Console()
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=500), table).maximum)
    console.print(table)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def main() -> None:
    """Run a command. Exit codes: 0 done (or stopped and saved), 1 failed, 2 asked wrongly, 130 interrupted."""
    debug = "--debug" in sys.argv
    for name in ("stdout", "stderr"):  # closed by the caller: what is said is said to nobody, and the work is done
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process lives)
    # Before torch is loaded: threads that spin while they wait make a step ten times slower when anything else runs on
    # the machine, and are no faster when nothing does (docs/LOG.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        if end.code == 130:  # what typer makes of a KeyboardInterrupt
            _say("interrupted; nothing that was finished is lost")
        raise
    except (UsageError, RunError) as error:
        if debug:
            raise
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output is gone (| head): not an error of ours. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        _say(
            f"error: {type(error).__name__}: {error}\n"
            "(this is unexpected; alcoda --debug COMMAND shows where it happened)"
        )
        sys.exit(1)


def _terminate(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
