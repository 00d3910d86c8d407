"""The command line. Thin: it parses, calls `alcoda.api`, and prints; heavy imports are inside the commands."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from alcoda import (
    bench_command,
    cost_command,
    depth_commands,
    eval_command,
    harness_command,
    interop_commands,
    lab_command,
    launch,
    retrofit_command,
    serve_command,
)
from alcoda.errors import RunError, UsageError
from alcoda.options import Cache, Checkpoint, Json, Plugin, Run, Set, Wavefront, With, parse_keep
from alcoda.show import print_json, print_recipes, print_table, say

app = typer.Typer(
    name="alcoda",
    help="Train, measure and serve recurrent-depth language models.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    command, many = context.invoked_subcommand, launch.place().world_size
    if many > 1 and command != "train":
        raise UsageError(
            f"alcoda {command} is for one process, and torchrun started {many}: only train shares its work. Run "
            f"alcoda {command} without torchrun"
        )
    if threads is not None and context.resilient_parsing is False:
        import torch

        torch.set_num_threads(threads)


@app.command()
def train(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe: a YAML file, or one of the project's by name (alcoda recipes): mini/grt.")
    ],
    overlays: With = None,
    settings: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME of the recipe.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    init: Annotated[
        Path | None, typer.Option(help="Start from the weights of this run (the recipe's init_from).", metavar="RUN")
    ] = None,
    plugin: Plugin = None,
) -> None:
    """Train a recipe. Ctrl-C saves a checkpoint; --resume goes on, to the bit. Many processes: torchrun -m alcoda."""
    from alcoda import api

    loaded = api.load_recipe(recipe, settings or (), overlays or ())
    if init is not None:
        loaded = loaded.model_copy(update={"init_from": {"run": str(init)}})
    result = api.train(loaded, out or Path("runs") / loaded.name, resume)
    if not launch.is_main():
        return
    if result.status == "stopped":
        say(
            f"stopped at step {result.train_step}, all saved; go on with: "
            f"alcoda train {result.run / 'recipe.yaml'} --out {result.run} --resume"
            + "".join(f" --plugin {name}" for name in plugin or ())
        )
    else:
        say(f"done: {result.run}; next: alcoda report {result.run} --out report.html")
    print_json(vars(result) | {"run": str(result.run)})


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
    top_p: Annotated[
        float, typer.Option(help="Draw among the fewest likeliest tokens whose probabilities sum to this.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Draw among tokens at least so many times as likely as the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens in prompt or text become less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="The text ends before this string. Repeatable, up to four.", metavar="TEXT"),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            help="How a model with a memory reads the prompt: interleaved (as in training; default), exact (token by "
            "token), iterated, zero.",
            metavar="NAME",
        ),
    ] = None,
    leave: Annotated[
        str | None,
        typer.Option(
            "--exit",
            help="When a token leaves the loop before --loops: RULE:THRESHOLD, for example state:0.01 or kl:1e-3; "
            "fixed:LOOPS, argmax_stable:LOOPS, trace:FILE; or a tier that alcoda calibrate chose: fast, balanced, "
            "exact. See docs/exits.md.",
            metavar="RULE",
        ),
    ] = None,
    cache: Cache = None,
    wavefront: Wavefront = None,
    checkpoint: Checkpoint = "best",
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, streaming."""
    from alcoda import api
    from alcoda.engine.options import Options

    lm = api.load(run, checkpoint, decode_only=True)
    how: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    how |= {"repetition_penalty": repetition_penalty, "stop": stop, "prefill": prefill, "cache": cache}
    how |= {"loops": loops, "max_tokens": max_tokens, "exit": leave, "engine": None}
    if wavefront is not None:
        how |= {"engine": Options(draft_loops=wavefront)}
    if as_json:
        one = lm.generate(prompt, details=True, **how)
        found = {"prompt": prompt, "text": one.text, "loops": loops or lm.n_loops}
        found |= {"temperature": temperature, "seed": seed, "finish": one.finish}
        if cache is not None:
            found |= {"cache": cache}
        if leave is not None:
            ran = [*one.prompt_loops, *(token.loops for token in one.tokens[1:])]
            found |= {"exit": leave, "mean_loops": sum(ran) / len(ran)}
        if one.error is not None:
            raise RunError(one.error)
        print_json(found | {"engine": lm.stats} if lm.stats else found)
        return
    pieces = lm.stream(prompt, **how)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command()
def pack(
    run: Run,
    out: Annotated[Path, typer.Option(help="The folder to write, a run like another.")],
    checkpoint: Checkpoint = "best",
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")] = "bfloat16",
    about: Annotated[
        Path | None, typer.Option(help="A Markdown file for the model card: the data, what it is for, its limits.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Text of this split goes along, so much of each source or of one: then it is measured where the "
            "corpora are not. Repeatable.",
            metavar="SPLIT[/SOURCE]=TOKENS",
        ),
    ] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """What inference needs of a run, to be handed on: weights in bf16, recipe, tokenizer, a model card."""
    from alcoda import api

    packed = api.pack(run, out, checkpoint, dtype, about, dict(map(parse_keep, keep or ())))
    if as_json:
        print_json(packed.to_json())
        return
    typer.echo(
        f"{packed.path}: {packed.params:,} parameters of step {packed.train_step}, {packed.weights_bytes / 1e6:.1f} MB "
        f"of weights, {packed.total_bytes / 1e6:.1f} MB in all; its card is {packed.path / 'README.md'}"
    )


@app.command()
def laws(
    recipe: Annotated[Path, typer.Argument(help="A recipe, or a run folder.")],
    settings: Set = None,
    overlays: With = None,
    plugin: Plugin = None,
    law: Annotated[list[str] | None, typer.Option("--law", help="Only this law. Repeatable.", metavar="NAME")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.", min=0)] = 0,
    full_size: Annotated[
        bool, typer.Option("--full-size", help="Check the model as it is. Default: all choices kept, sizes made small.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Check compiled passes too: a minute.")] = False,
    as_json: Json = False,
) -> None:
    """Does the model keep its promises? No future leak, decoding equal to the full pass, ... Exit code 1 if not."""
    from alcoda import api

    path = recipe / "recipe.yaml" if recipe.is_dir() else recipe
    loaded = api.load_recipe(path, settings or (), overlays or ())
    found = api.check_laws(loaded, law or (), seed=seed, full_size=full_size, compiled=compiled)
    if as_json:
        print_json(found.to_json())
    else:
        words = {"holds": "holds", "broken": "BROKEN", "not applicable": "n.a."}
        rows = [[r.law, r.statement, words[r.status], f"{r.seconds:.2f} s"] for r in found.results]
        print_table(["law", "of a model that keeps it", "", "time"], rows, n_left=3)
        for line in found.notes():
            print(line)
    if not found.hold:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders: one, or several to compare.", metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    figures: Annotated[
        str | None, typer.Option(help="pdf: also write each figure, beside the page.", metavar="FORM")
    ] = None,
    tables: Annotated[
        str, typer.Option(help="csv, latex or csv,latex: also write each table, beside the page.", metavar="FORMS")
    ] = "",
    plugin: Plugin = None,
) -> None:
    """One self-contained HTML page. What a run was not asked for yet (evaluation, samples) is measured first."""
    from alcoda import api

    forms = [form.strip() for form in tables.split(",")] if tables.strip() else []
    say(f"report: {api.write_report(runs, out, figures=figures, tables=forms)}")


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run and begin anew.")] = False,
    settings: Set = None,
    plugin: Plugin = None,
) -> None:
    """Train a small elastic model, measure it at 1 to 32 loops, and write the report. Minutes on two cores."""
    from alcoda.quickstart import quickstart as main_job

    print_json(main_job(out, fresh, settings or ()))


app.command(name="import")(interop_commands.import_model)
app.command()(interop_commands.export)
app.command(name="eval")(eval_command.evaluate)
app.command()(harness_command.harness)
app.command()(cost_command.cost)
app.command()(cost_command.capacity)
app.add_typer(bench_command.app, name="bench")
app.command()(serve_command.serve)
app.command()(lab_command.lab)
app.command()(depth_commands.probe)
app.command()(depth_commands.calibrate)
app.command()(depth_commands.frontier)
app.command()(retrofit_command.retrofit)
app.command()(retrofit_command.healed)


@app.command()
def recipes(
    folder: Annotated[
        Path | None, typer.Argument(help="Where to look. Default: the project's recipes.", metavar="[FOLDER]")
    ] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Every recipe with its parameters, FLOPs and source; and the overlays (for --with)."""
    from alcoda import api

    found = api.recipes(folder)
    for name, error in found.broken.items():
        say(f"{name}: {error}")
    if as_json:
        print_json(found.to_json())
        return
    print_recipes(found)


@app.command()
def entries(
    below: Annotated[str, typer.Argument(help="Only these: model, train.optimizer, ...", metavar="[NAME]")] = "",
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Every entry of a recipe, with its default and meaning; for an axis, its choices and their entries."""
    from alcoda.training.entries import describe_entries

    found = describe_entries(below)
    if as_json:
        print_json([entry._asdict() for entry in found])
        return
    for entry in found:
        print(f"{entry.name} = {entry.default}" if entry.default else entry.name)
        if entry.meaning:
            print(f"    {entry.meaning}")


def main() -> None:
    """Run a command. Exit codes: 0 done (or stopped and saved), 1 failed, 2 asked wrongly, 130 interrupted."""
    debug = "--debug" in sys.argv
    for name in ("stdout", "stderr"):  # closed by the caller: what is said is said to nobody, and the work is done
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process lives)
    # Before torch is loaded: threads that spin while they wait make a step ten times slower when anything else runs on
    # the machine, and are no faster when nothing does (docs/LOG.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            app()
        finally:
            sys.stdout.flush()
    except (SystemExit, KeyboardInterrupt) as end:
        # 130 is what typer makes of a KeyboardInterrupt, once it is at work.
        if isinstance(end, SystemExit) and end.code != 130:
            raise
        say("interrupted; nothing that was finished is lost")
        sys.exit(130)
    except (UsageError, RunError) as error:
        if debug:
            raise
        # What was asked wrongly is the same for every process of a run, unless it says otherwise: the main one says it.
        found_by_all = error.is_said is None and isinstance(error, UsageError)
        if not error.is_said and (launch.is_main() or not found_by_all):
            say(f"error: {error}")
        _end(error.exit_code)
    except BrokenPipeError:
        # The reader of our output is gone (| head): not an error of ours. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        say(
            f"error: {type(error).__name__}: {error} ({Path(where.filename).name} line {where.lineno})\n"
            "(this is unexpected; alcoda --debug COMMAND shows where it happened)"
        )
        sys.exit(1)


def _end(code: int) -> NoReturn:
    """Exit after a failure. One of several processes ends at once, without Python's own taking down: torch's threads
    still run then, hold what the step left behind, and now and then abort the process (exit code -6)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
