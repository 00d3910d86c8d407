"""Measuring a trained model from Python: what `alcoda eval`, `probe`, `calibrate`, `frontier`, `lab` and `harness` do.
All of it is in `alcoda.api` too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alcoda.depth.rules import ExitRule
from alcoda.depth.tiers import Tiers
from alcoda.downstream.evaluate import harness as _harness
from alcoda.downstream.results import HarnessResult
from alcoda.engine.llm import LM, load
from alcoda.measure.caches import CachesResult
from alcoda.measure.caches import evaluate_caches as _evaluate_caches
from alcoda.measure.calibrate import calibrate as _calibrate
from alcoda.measure.evaluate import EvalResult
from alcoda.measure.evaluate import evaluate as _evaluate
from alcoda.measure.exits import ExitResult
from alcoda.measure.exits import evaluate_exit as _evaluate_exit
from alcoda.measure.frontier import MAX_TOKENS, FrontierResult
from alcoda.measure.frontier import frontier as _frontier
from alcoda.measure.lab import EPS, LOOPS, TOKENS, LabResult
from alcoda.measure.lab import lab as _lab
from alcoda.measure.prefills import PrefillsResult
from alcoda.measure.prefills import evaluate_prefills as _evaluate_prefills
from alcoda.measure.probe import ProbeResult
from alcoda.measure.probe import fit_probe as _fit_probe
from alcoda.model.cache_policy import CachePolicy
from alcoda.model.prefill import Prefill
from alcoda.training.load import LoadedRun
from alcoda.training.run import RunFolder


def evaluate(
    run: str | Path | LM,
    loops: Sequence[int] = (),
    data: str = "valid",
    *,
    checkpoint: str = "best",
    prefill: Prefill | str | None = None,
    chunk_tokens: int | None = None,
    cache: CachePolicy | str | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
) -> EvalResult:
    """Bits per byte of a trained model at each depth, with 95% bootstrap intervals; and by position in the row.

    Args:
        run: a run folder, or a loaded model.
        loops: depths; the recipe's ``eval.loops`` where empty.
        data: a split of the run's data (``valid``, ``train``, ``calib``, ``probe``), or a corpus such as ``text:PATH``,
            which is scored whole.
        checkpoint: ``best``, ``last``, or a checkpoint's name, where ``run`` is a folder.
        prefill: how a model with a memory reads rows: ``exact`` (token by token; where None), ``interleaved``,
            ``iterated``, ``zero``, or a `Prefill`.
        chunk_tokens: in chunks of so many tokens; None: rows whole.
        cache: what each token leaves in the decode cache: ``per_loop`` (where None), ``mean`` or ``last``, which are
            read token by token.
        batch_size: rows scored at a time; None: 8, or 64 where they are read token by token.
        max_tokens: score at most so many tokens of each source.
    """
    return _evaluate(
        _loaded(run, checkpoint),
        loops,
        data,
        prefill=prefill,
        chunk_tokens=chunk_tokens,
        cache=cache,
        batch_size=batch_size,
        max_tokens=max_tokens,
    )


def evaluate_caches(
    run: str | Path | LM,
    loops: int | None = None,
    data: str = "valid",
    *,
    checkpoint: str = "best",
    caches: Sequence[CachePolicy | str] = (),
    batch_size: int | None = None,
    max_tokens: int | None = None,
) -> CachesResult:
    """What each decode cache costs in bits per byte, against a slot a loop, with its bytes and its time a token.

    Args:
        run, data, checkpoint, max_tokens: as of `evaluate`.
        loops: the depth; the model's ``n_loops`` where None.
        caches: beside ``per_loop``; where empty, every one that there is.
        batch_size: rows read at a time, token by token; None: 64.
    """
    return _evaluate_caches(
        _loaded(run, checkpoint), loops, data, choices=caches, batch_size=batch_size, max_tokens=max_tokens
    )


def evaluate_prefills(
    run: str | Path | LM,
    loops: int | None = None,
    data: str = "valid",
    *,
    checkpoint: str = "best",
    prefills: Sequence[Prefill | str] = (),
    chunk_tokens: int | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
) -> PrefillsResult:
    """What each prefill of a model with a memory costs in bits per byte, against exact prefill, and its speed: on whole
    rows, and on the second half of each row, read token by token after it has read the first.

    Args:
        run, data, checkpoint, max_tokens: as of `evaluate`.
        loops: the depth; the model's ``n_loops`` where None.
        prefills: beside exact; where empty, every one that there is.
        chunk_tokens: each reads in chunks of so many tokens; None: all at once.
        batch_size: rows read at a time; None: 64.
    """
    return _evaluate_prefills(
        _loaded(run, checkpoint),
        loops,
        data,
        choices=prefills,
        chunk_tokens=chunk_tokens,
        batch_size=batch_size,
        max_tokens=max_tokens,
    )


def evaluate_exit(
    run: str | Path | LM,
    exit: ExitRule | str,
    loops: int | None = None,
    data: str = "valid",
    *,
    checkpoint: str = "best",
    cache: CachePolicy | str | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
) -> ExitResult:
    """Bits per byte, loops and executed FLOPs of a text whose tokens leave the loop early, as decoding would have them.

    Args:
        run, data, checkpoint, cache, batch_size, max_tokens: as of `evaluate`.
        exit: a rule, its name (``state:0.01``), or a tier that `calibrate` chose (``balanced``).
        loops: that run at most; the tier's, or the model's, where None.
    """
    return _evaluate_exit(
        _loaded(run, checkpoint), exit, loops, data, cache=cache, batch_size=batch_size, max_tokens=max_tokens
    )


def fit_probe(
    run: str | Path | LM,
    label: str = "argmax_changes",
    delta: float = 0.01,
    loops: int | None = None,
    data: str = "probe",
    *,
    checkpoint: str = "best",
    out: str | Path | None = None,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Fit the probe of exit rule ``probe`` and save it as the run's ``probe.safetensors`` (or at ``out``).

    Args:
        run, data, checkpoint, max_tokens, batch_size: as of `evaluate`.
        label: ``argmax_changes`` in a later loop, or ``loss_falls``: a later loop lowers the loss by ``delta`` nats.
        loops: the deepest that is looked at; the model's where None.
        seed: of which tokens are used, where the states of all are too many.
    """
    return _fit_probe(
        _loaded(run, checkpoint),
        label,
        delta,
        loops,
        data,
        out=None if out is None else Path(out),
        max_tokens=max_tokens,
        batch_size=batch_size,
        seed=seed,
    )


def calibrate(
    run: str | Path | LM,
    rule: ExitRule | str = "state",
    to: str | None = None,
    tolerances: Mapping[str, float] | None = None,
    loops: int | None = None,
    data: str = "calib",
    held_out: str = "valid",
    *,
    checkpoint: str = "best",
    max_tokens: int | None = None,
    batch_size: int | None = None,
) -> Tiers:
    """Choose thresholds that keep the loss within tolerances of that of all loops, and save them as the run's tiers.

    Args:
        run, checkpoint, max_tokens, batch_size: as of `evaluate`.
        rule: whose thresholds.
        to: a dear rule to imitate (``kl``), with a threshold a loop; None: one threshold.
        tolerances: by the name of the tier, relative to the loss; fast 2%, balanced 0.5% and exact 0 where None.
        loops: that run at most; the model's where None.
        data, held_out: what they are chosen on, and what they are checked on.
    """
    loaded = _loaded(run, checkpoint)
    where = loaded.run.writable().exits_json
    found = _calibrate(
        loaded, rule, to, tolerances, loops, data, held_out, max_tokens=max_tokens, batch_size=batch_size
    )
    found.save(where)
    return found


def frontier(
    run: str | Path | LM,
    rules: Sequence[str] = (),
    loops: int | None = None,
    data: str = "valid",
    *,
    checkpoint: str = "best",
    points: int = 6,
    tolerance: float = 0.005,
    max_tokens: int | None = MAX_TOKENS,
    batch_size: int | None = None,
) -> FrontierResult:
    """Loss against mean loops and executed FLOPs: all tokens at each depth, and every exit rule, rule's cost included.

    Args:
        run, data, checkpoint, batch_size: as of `evaluate`.
        rules: names; where empty, all that the model can be left by, and the run's probe.
        loops: the deepest; the model's where None.
        points: settings of each rule.
        tolerance: of the loss, relative to the deepest: what makes a smaller depth sufficient.
        max_tokens: of each source at most; None: all.
    """
    return _frontier(
        _loaded(run, checkpoint),
        rules,
        loops,
        data,
        points=points,
        tolerance=tolerance,
        max_tokens=max_tokens,
        batch_size=batch_size,
    )


def lab(
    run: str | Path | LM,
    data: str = "valid",
    *,
    checkpoint: str = "best",
    tokens: int = TOKENS,
    loops: int = LOOPS,
    eps: float = EPS,
    classes: str = "auto",
    out: str | Path | None = None,
    batch_size: int | None = None,
) -> LabResult:
    """When the tokens of a text converge in the loop, which ones, and to what; docs/lab.md says what is measured.

    Writes ``lab.json`` and ``tokens.parquet`` (where pyarrow is installed) into ``out``, which the report shows.

    Args:
        run, data, checkpoint, batch_size: as of `evaluate`.
        tokens: trace at most so many of each source.
        loops: of the trajectories.
        eps: a token has converged where the KL of its next-token distribution to that of the loop before stays below,
            in nats.
        classes: ``text``, ``code`` (of Python source), or ``auto``: each source by its looks.
        out: a folder; ``lab`` in that of the run where None.
    """
    return _lab(
        _loaded(run, checkpoint),
        data,
        tokens=tokens,
        loops=loops,
        eps=eps,
        classes=classes,
        out=None if out is None else Path(out),
        batch_size=batch_size,
    )


def harness(
    run: str | Path | LM,
    tasks: Sequence[str],
    loops: Sequence[int] = (),
    exits: Sequence[str] = (),
    *,
    shots: int | None = None,
    limit: int | None = None,
    data: str | Path | None = None,
    bos: bool = False,
    batch_size: int | None = None,
    checkpoint: str = "best",
) -> HarnessResult:
    """Downstream tasks at depths and with exits: accuracy with standard errors, mean loops, executed FLOPs a token;
    docs/harness.md.

    Of a run that is named, every task that is done is kept in its ``harness.json`` and not measured again.

    Args:
        run, checkpoint: as of `evaluate`.
        tasks: of lm-eval by name (hellaswag, lambada_openai, piqa, ...), YAML files of its form, or ``core``.
        loops: depths, all from one pass; the model's ``n_loops`` where empty.
        exits: rules or tiers, beside them.
        shots: solved documents before each that is scored (of lm-eval's tasks); None: 0, or what a YAML file says.
        limit: the first so many documents of each task; None: all.
        data: the folder of the data; None: where ``make tasks`` puts them. Of CORE it must be named.
        bos: whether texts begin with end-of-text, as documents of training do; lm-eval's ``hf`` adds none.
        batch_size: rows read at a time; None: as many as have 2,048 tokens.
    """
    lm = run if isinstance(run, LM) else load(run, checkpoint)
    lm.whole()
    out = None if isinstance(run, LM) else RunFolder.find(run).writable().harness_json
    folder = None if data is None else Path(data)
    how: dict[str, Any] = {"shots": shots, "limit": limit, "data": folder, "bos": bos, "batch_size": batch_size}
    return _harness(lm, tasks, loops, exits, **how, out=out)


def _loaded(run: str | Path | LM, checkpoint: str) -> LoadedRun:
    return (run if isinstance(run, LM) else load(run, checkpoint)).whole()
