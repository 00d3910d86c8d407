"""A text with exits: bits per byte, loops and executed FLOPs, as decoding would have them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from alcoda import progress
from alcoda.depth.exiting import pick_coda_keys
from alcoda.depth.rules import NEVER, ExitRule
from alcoda.measure.calibrate import measured
from alcoda.measure.replays import Passage
from alcoda.model.cache_policy import CachePolicy, pick_cache
from alcoda.training.load import LoadedRun


@dataclass(frozen=True)
class ExitResult:
    """What `evaluate_exit` measured.

    Attributes:
        exit: the rule, its kind and fields; ``tier``: the name of the tier that it is of.
        coda_keys: the mode in which it was measured.
        cache: what each token left in the cache, also where all ran ``n_loops``: the kind of cache and its fields.
        loss: mean nats a scored token.
        bits_per_byte, low, high: with its 95% interval; ``deepest``: of all tokens at ``n_loops``.
        gap, gap_low, gap_high: bits per byte more than those, paired; ``excess``: relative to their loss.
        mean_loops: a token that is read, with its interval; ``depths``: tokens by the loops that they ran.
        flops_per_token: executed, what the rule looks at included; ``deepest_flops_per_token``: of all tokens at
            ``n_loops``.
        unit, n_units, n_tokens, n_bytes, note: as of `alcoda.measure.evaluate.EvalResult`.
    """

    data: str
    train_step: int
    exit: dict[str, Any]
    tier: str | None
    n_loops: int
    coda_keys: str
    cache: dict[str, Any]
    loss: float
    bits_per_byte: float
    low: float
    high: float
    deepest: float
    gap: float
    gap_low: float
    gap_high: float
    excess: float
    mean_loops: float
    mean_loops_low: float
    mean_loops_high: float
    depths: dict[int, int]
    flops_per_token: float
    deepest_flops_per_token: float
    unit: str
    n_units: int
    n_tokens: int
    n_bytes: int
    note: str | None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def evaluate_exit(
    run: LoadedRun,
    exit: ExitRule | str,
    loops: int | None = None,
    data: str = "valid",
    *,
    cache: CachePolicy | str | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
) -> ExitResult:
    """Score a text whose tokens leave by a rule or a tier (`alcoda.training.load.LoadedRun.exit`).

    Args:
        loops: that run at most; the tier's, or the model's, where None.
        data, cache, max_tokens, batch_size: as of `alcoda.measure.evaluate.evaluate`.
    """
    keeps = pick_cache(cache, run.recipe.model)
    chosen = run.exit(exit, loops)
    n_loops, rule = chosen.test.n_loops, chosen.rule
    text = Passage.open(run, data, max_tokens, batch_size, cache=keeps)
    with progress.bar(f"scoring {data} with exit {chosen.tier or rule.kind}", 2 * text.n_tokens) as advance:
        read = text.read(chosen.test, tell=advance)
        (deepest_N,) = text.uniform([n_loops], advance)
    found = measured(text, read, deepest_N, rule.executed_flops(run.model.config, n_loops))
    bits, gap = text.bits(read.nats_N), text.gain(read.nats_N, deepest_N)
    return ExitResult(
        data=data,
        train_step=run.train_step,
        exit=rule.model_dump(mode="json"),
        tier=chosen.tier,
        n_loops=n_loops,
        coda_keys=pick_coda_keys(chosen.test, None),
        cache=keeps.model_dump(),
        loss=text.loss(read.nats_N),
        bits_per_byte=bits.value,
        low=bits.low,
        high=bits.high,
        deepest=text.bits(deepest_N).value,
        gap=gap.value,
        gap_low=gap.low,
        gap_high=gap.high,
        excess=found.excess,
        mean_loops=found.mean_loops,
        mean_loops_low=found.mean_loops_low,
        mean_loops_high=found.mean_loops_high,
        depths={loop: n for loop, n in enumerate(np.bincount(read.depths_N, minlength=n_loops + 1).tolist()) if loop},
        flops_per_token=found.flops_per_token,
        deepest_flops_per_token=NEVER.executed_flops(run.model.config, n_loops)[-1],
        unit=text.text.unit,
        n_units=text.n_units,
        n_tokens=text.n_scored,
        n_bytes=int(text.bytes_N.sum()),
        note=text.note(),
    )
