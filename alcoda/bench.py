"""`bench_engine`: the engine timed on a run's own text, or on a shape with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from alcoda.depth.record import Trace
from alcoda.depth.tiers import Tiers, command
from alcoda.engine.bench import BenchResult, bench
from alcoda.engine.engine import Engine
from alcoda.engine.llm import LM, load
from alcoda.engine.options import Options
from alcoda.engine.paged import room
from alcoda.engine.refusals import check_serves
from alcoda.engine.workload import REQUESTS, Script, Work, record, spread_depths
from alcoda.errors import UsageError
from alcoda.measure.prompts import prompts_of
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.training.device import pick_device, pick_dtype
from alcoda.training.folders import project_recipes
from alcoda.training.recipe import load_recipe, named
from alcoda.training.run import RunFolder

CONCURRENCY = (1, 8, 32)
ROUNDS = 3
SHAPE = "d512"
TOKENS = 64
"""Of a prompt, and new ones: so many, or half a context where that is fewer."""
EXIT = "balanced"
DRAFT_LOOPS = 2
ACCEPTANCE = (0.47, 0.79, 0.87, 0.92, 0.95, 0.97, 0.98, 1.0)
"""The share of drafts that are right, by the loops that they are drawn after, from 1: of the shipped model, greedy, in
fp32, of 3,008 tokens that follow 64 prompts of the validation text that it was trained beside (docs/LOG.md)."""
MEAN_DEPTH = 4.9
"""Of 8 loops, of a shape: where tokens can leave at the loss of all loops (papers.md 3.1: 4.94)."""


def bench_engine(
    run: str | Path | LM | None = None,
    *,
    shape: str | ModelConfig | None = None,
    settings: Sequence[str] = (),
    trace: str | Path | Trace | None = None,
    mean_depth: float | None = None,
    exit: str | None = None,
    concurrency: Sequence[int] = CONCURRENCY,
    loops: int | None = None,
    tokens: int | None = None,
    prompt_tokens: int | None = None,
    rounds: int = ROUNDS,
    draft_loops: int = DRAFT_LOOPS,
    acceptance: float | None = None,
    uniform: int | None = None,
    width: int | None = None,
    deterministic: bool = False,
    dtype: str = "auto",
    checkpoint: str = "best",
    seed: int = 0,
) -> BenchResult:
    """Time the engine's modes on the same depths: fixed, masked, no-refill, refill, wavefront, refill with wavefront.

    Of a run, prompts are first halves of rows of its validation text, and depths those at which a calibrated tier lets
    tokens leave, recorded first. Of a shape weights and prompts are random, tokens scripted, and depths drawn.

    Args:
        run: a run folder, or a loaded model.
        shape: in its place, a recipe (``d512``) or a model's config.
        settings: of the shape's recipe: ``model.d_model=256``.
        trace: depths to replay, or their file; in place of the tier.
        mean_depth: draw depths of this mean, in place of a trace; of a shape 4.9 where None.
        exit: of a run: the tier, or a rule; ``balanced`` where None.
        concurrency: requests that run at one time.
        loops: of fixed depth; the tier's, or the model's, where None.
        tokens, prompt_tokens: new ones, and of a prompt; 64 where None, or half a context.
        rounds: in which every mode takes its turn.
        draft_loops: the wavefront drafts the next token after so many.
        acceptance: of a shape: the share of drafts that are right, which is simulated, however many loops they were
            drawn after; `ACCEPTANCE` where None.
        uniform: also time all tokens at so many loops; of a tier, its smallest sufficient depth where None.
        width: tokens of a launch; 32, or the concurrency where that is more, where None.
        deterministic: also decode once with padded launches, and compare tokens.
        dtype: auto, bfloat16 or float32.
        checkpoint: where ``run`` is a folder.
        seed: of which prompts, weights, depths and scripts.

    Raises:
        UsageError: what cannot be timed so.
        RunError: a request failed.
    """
    _check(run, shape, settings, trace, mean_depth, exit, acceptance)
    sizes = (("rounds", rounds), ("tokens", tokens), ("prompt_tokens", prompt_tokens), ("uniform", uniform))
    launches = (("draft_loops", draft_loops), ("width", width))
    for name, value in (*sizes, *launches, *(("concurrency", n) for n in concurrency)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: at least 1")
    if not concurrency or len(set(concurrency)) < len(concurrency):
        raise UsageError(f"concurrency {list(concurrency)}: one number or more, each once")
    n_rows, places = REQUESTS * max(concurrency), max(concurrency)
    loaded = rule = None
    if run is None:
        model, what = _random(shape or SHAPE, settings, dtype, seed)
        # Weights in bf16 are multiplied as they are: nothing is cast on the way.
        runs_in, n_vocab = torch.float32, model.config.vocab_size
    else:
        loaded = (run if isinstance(run, LM) else load(run, checkpoint, dtype=dtype)).whole()
        model, what = loaded.model, loaded.run.path.resolve().name
        runs_in, n_vocab = loaded.decode_dtype, loaded.tokenizer.vocab_size
    check_serves(model)
    if not model.config.is_recurrent:
        raise UsageError(
            "bench engine: this model is dense (n_core=0), and all its modes are one; time one with a core"
        )
    n_prompt, n_new = _lengths(model.config, prompt_tokens, tokens)
    n_loops = model.config.check_loops(model.config.n_loops if loops is None else loops)
    if loaded is None:
        shares = ACCEPTANCE if acceptance is None else (acceptance,)
        acceptance = _acceptance(draft_loops) if acceptance is None else acceptance
        prompts, script = _scripted(n_rows, n_prompt, n_new, n_vocab, shares, seed)
    else:
        prompts, script = prompts_of(loaded, "valid", n_rows, n_prompt, seed), None
    if trace is not None:
        depths = trace if isinstance(trace, Trace) else Trace.load(trace)
        told = "recorded" if isinstance(trace, Trace) else f"of {Path(trace).name}"
    elif loaded is None or mean_depth is not None:
        mean = MEAN_DEPTH if mean_depth is None else mean_depth
        depths = spread_depths(n_rows, n_prompt + n_new, n_loops, mean, seed)
        told = f"drawn, of mean {mean:g}"
    else:
        if exit is None:
            _check_tiers(loaded.run)
        found = loaded.exit(exit or EXIT, loops)
        n_loops, told = found.test.n_loops, f"of exit {exit or EXIT}"
        options = Options(
            width=width or max(Options.width, places),
            places=places,
            cache_tokens=room(model, runs_in, [n_prompt + n_new] * places),
        )
        engine = Engine(model, options, n_loops=n_loops, dtype=runs_in, n_vocab=n_vocab)
        rule = found.test
        depths = record(engine, prompts, n_new, rule)
        if found.tier is not None and uniform is None:
            sufficient = Tiers.load(loaded.run.exits_json).tier(found.tier).uniform_loops
            uniform = sufficient if sufficient < n_loops else None
    if uniform is not None and uniform > n_loops:
        raise UsageError(f"uniform={uniform}: {n_loops} loops run at most; lower it, or raise loops")
    work = Work(
        model,
        prompts,
        n_new,
        depths,
        n_loops,
        dtype=runs_in,
        draft_loops=draft_loops,
        rule=rule,
        uniform=uniform,
        width=width,
        script=script,
        n_vocab=n_vocab,
    )
    return bench(work, concurrency, rounds, what=what, depths=told, acceptance=acceptance, deterministic=deterministic)


def _check(
    run: object,
    shape: object,
    settings: Sequence[str],
    trace: object,
    mean_depth: float | None,
    exit: str | None,
    acceptance: float | None,
) -> None:
    """UsageError for what does not go together."""
    if run is not None and (shape is not None or settings):
        raise UsageError("a run and a shape (or its settings): name one of them; a run has weights and text of its own")
    if run is not None and acceptance is not None:
        raise UsageError(f"acceptance={acceptance:g} of a run: its drafts are right or not by themselves; leave it out")
    if run is None and exit is not None:
        raise UsageError(f"exit {exit!r} of a shape: random weights have no tiers; give a trace or a mean depth")
    if sum(value is not None for value in (trace, mean_depth, exit)) > 1:
        raise UsageError("trace, mean_depth, exit: depths are of one of them; leave the others out")
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise UsageError(f"acceptance={acceptance:g}: a share, from 0 to 1")


def _check_tiers(run: RunFolder) -> None:
    """UsageError where no depths are named, and the run has none of the tier that is taken then."""
    tiers = [tier.name for tier in Tiers.load(run.exits_json).tiers] if run.exits_json.is_file() else []
    if EXIT not in tiers:
        have = f"has the tiers {', '.join(tiers)} alone" if tiers else "has none"
        raise UsageError(
            f"bench engine replays the depths of the calibrated tier {EXIT!r} where nothing is named, and {run.path} "
            f"{have}: {command(run.exits_json)} makes them; or name depths: --exit state:0.1 (a rule or a tier), "
            "--mean-depth 4, --trace FILE"
        )


def _lengths(config: ModelConfig, prompt_tokens: int | None, tokens: int | None) -> tuple[int, int]:
    """Tokens of a prompt, and new ones."""
    half = min(TOKENS, config.seq_len // 2)
    n_prompt, n_new = prompt_tokens or half, tokens or half
    if n_prompt + n_new > config.seq_len:
        raise UsageError(
            f"prompt_tokens={n_prompt} and tokens={n_new}: the context holds {config.seq_len}; lower one of them"
        )
    if n_new < 2:
        raise UsageError(f"tokens={n_new}: at least 2, since the first one comes of the prompt")
    return n_prompt, n_new


def _random(shape: str | ModelConfig, settings: Sequence[str], dtype: str, seed: int) -> tuple[RecurrentLM, str]:
    """A model of random weights, and what it is called."""
    if isinstance(shape, ModelConfig):
        config, what = shape, "shape"
    else:
        own = project_recipes() / "engine" / f"{shape}.yaml"
        recipe = load_recipe(own if own.exists() else shape, settings)
        config, what = recipe.model, named(recipe.name, settings)
    device = pick_device()
    model = RecurrentLM(config).init(seed).eval().to(device)
    return (model.bfloat16() if pick_dtype(dtype, device) == torch.bfloat16 else model), what


def _acceptance(draft_loops: int) -> float:
    if draft_loops > len(ACCEPTANCE):
        raise UsageError(
            f"draft_loops={draft_loops} of a shape: how many drafts are right was measured after 1 to "
            f"{len(ACCEPTANCE)} loops; say it with acceptance"
        )
    return ACCEPTANCE[draft_loops - 1]


def _scripted(
    n_rows: int, n_prompt: int, n_new: int, n_vocab: int, acceptance: Sequence[float], seed: int
) -> tuple[list[tuple[int, ...]], Script]:
    """Random prompts, and what follows them."""
    script = Script.of(n_rows, n_prompt + n_new, n_vocab, acceptance, seed)
    return [tuple(row[:n_prompt]) for row in script.tokens], script
