"""What the engine gains, mode by mode on the same work: depths of tokens are recorded once and replayed by all.

In a round modes take turns, some tokens at a time; a ratio is to fixed depth in the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, median_low, quantiles
from typing import Any

from alcoda import progress
from alcoda.engine.packed import held_bytes
from alcoda.engine.refusals import check_drafts
from alcoda.engine.stats import flop_bound
from alcoda.engine.workload import MODES, REQUESTS, RULE, UNIFORM, Mode, Timing, Work, timed, timed_in_turn
from alcoda.errors import UsageError
from alcoda.training.device import describe, forget_peak_memory, peak_memory_bytes

WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class Spread:
    """Over rounds: median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, _, high = quantiles(values, n=4) if len(values) > 1 else list(values) * 3
        return cls(median(values), low, high)


@dataclass(frozen=True)
class ModeScore:
    """One mode at one concurrency. Numbers without quartiles are medians over rounds.

    Attributes:
        requests: that were decoded in a round.
        tokens_per_s, decode_tokens_per_s: as of `Timing`.
        ratio, decode_ratio: either over fixed depth's in the same round.
        mean_loops: of the tokens that new ones were drawn from.
        bound: by FLOPs, how many times as fast as fixed depth tokens of that depth could be.
        of_bound, decode_of_bound: shares of it that were reached.
        launches, mean_width: by kind: core (a loop), coda (with what begins after it), piece (of a prompt).
        drafts, checked, accepted: tokens drafted, held against what came of it, and right.
        overhead: the share of decoding that is not within the model's passes (`Stats.overhead`).
        cache_bytes: of the engine's cache.
        same_tokens_as, tokens_identical: in a run of deterministic launches, whether tokens were those of that mode;
            None: it was not asked.
    """

    concurrency: int
    mode: str
    requests: int
    tokens_per_s: Spread
    decode_tokens_per_s: Spread
    ratio: Spread
    decode_ratio: Spread
    mean_loops: float
    bound: float
    of_bound: float
    decode_of_bound: float
    launches: dict[str, int]
    mean_width: dict[str, float]
    drafts: int
    checked: int
    accepted: int
    overhead: float
    cache_bytes: int
    same_tokens_as: str | None
    tokens_identical: bool | None


@dataclass(frozen=True)
class BenchResult:
    """What `bench` measured.

    Attributes:
        what: the run or the shape.
        depths: where the recorded depths are from.
        mean_depth: of all of them that are replayed.
        acceptance: with which drafts are right that are drawn after ``draft_loops``; None: the model's own say.
        simulated: whether tokens and acceptance are scripted.
        params, weights_bytes: of the model as it was loaded.
        held_bytes: of weights that the engine holds: these, and those that it lays out once more for a CPU.
        peak_memory_bytes: the most that the process held, with the caches of all modes at one time.
        machine: as `describe`; ``attention`` and ``attention_reason``, as of `Attends`.
        scores: by concurrency, mode by mode.
    """

    what: str
    loops: int
    prompt_tokens: int
    tokens: int
    rounds: int
    draft_loops: int
    depths: str
    mean_depth: float
    simulated: bool
    acceptance: float | None
    params: int
    weights_bytes: int
    held_bytes: int
    peak_memory_bytes: int
    notes: tuple[str, ...]
    machine: dict[str, Any]
    scores: tuple[ModeScore, ...]

    @property
    def tokens_differ(self) -> list[str]:
        """Modes whose tokens had to be those of another and were not."""
        wrong = [one for one in self.scores if one.tokens_identical is False]
        return [f"{one.mode} and {one.same_tokens_as} at concurrency {one.concurrency}" for one in wrong]

    def score(self, mode: str, concurrency: int) -> ModeScore:
        """That of a mode at a concurrency."""
        return next(one for one in self.scores if (one.mode, one.concurrency) == (mode, concurrency))

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def bench(
    work: Work,
    concurrency: Sequence[int],
    rounds: int,
    *,
    what: str,
    depths: str,
    acceptance: float | None = None,
    deterministic: bool = False,
) -> BenchResult:
    """Time every mode that the model has.

    Args:
        what, depths, acceptance: as of `BenchResult`; the acceptance of a script.
        deterministic: also decode once with launches that are padded, and compare tokens.
    """
    modes, notes = _modes(work)
    n_rows, n_requests = work.trace.depths_BT.size(0), max(concurrency) * REQUESTS
    if n_rows < n_requests:
        notes.append(f"the trace has {n_rows} rows, and up to {n_requests} requests are decoded: rows are used again")
    scores: list[ModeScore] = []
    forget_peak_memory(work.model.embed.weight.device)
    steps = len(concurrency) * len(modes) * (1 + rounds + deterministic)
    with progress.bar(f"decoding {what}", steps) as advance:
        for n in concurrency:
            found: dict[str, list[Timing]] = {mode.name: [] for mode in modes}
            for mode in modes:
                timed(replace(work, n_new=min(work.n_new, WARM_UP_TOKENS)), mode, n, n)
                advance()
            for _ in range(rounds):
                note = f"{n} at a time"
                ran = timed_in_turn(work, modes, n, lambda share, note=note: advance(share * len(modes), note))
                for mode, timing in zip(modes, ran, strict=True):
                    found[mode.name].append(timing)
            told: dict[str, list[list[int]]] = {}
            for mode in modes if deterministic else ():
                told[mode.name] = timed(work, mode, n, deterministic=True).tokens
                advance()
            scores += [_score(work, mode, n, found, told) for mode in modes]
    model = work.model
    # Weights in bf16 are multiplied so, whatever the passes are asked for.
    dtype = min(work.dtype, model.embed.weight.dtype, key=lambda one: one.itemsize)
    attends = work.engine(modes[0], 1).attends
    depths_BT = work.trace.depths_BT[:n_requests, : work.n_cached]
    return BenchResult(
        what=what,
        loops=work.n_loops,
        prompt_tokens=len(work.prompts[0]),
        tokens=work.n_new,
        rounds=rounds,
        draft_loops=work.draft_loops,
        depths=depths,
        mean_depth=float(depths_BT.double().mean()),
        simulated=work.script is not None,
        acceptance=acceptance,
        params=sum(p.numel() for p in model.parameters()),
        weights_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        held_bytes=held_bytes(model, work.dtype),
        peak_memory_bytes=peak_memory_bytes(model.embed.weight.device),
        notes=tuple(notes),
        machine=describe(model.embed.weight.device, dtype)
        | {"attention": attends.name, "attention_reason": attends.reason or None},
        scores=tuple(scores),
    )


def _modes(work: Work) -> tuple[list[Mode], list[str]]:
    """Those that the model has, and why it has not the others."""
    modes, notes = [*MODES, *(RULE if work.rule is not None else ())], []
    try:
        check_drafts(work.model)
    except UsageError as error:
        modes = [mode for mode in modes if not mode.drafts]
        notes.append(f"no wavefront: {error}")
    return ([*modes, UNIFORM] if work.uniform is not None else modes), notes


def _score(
    work: Work, mode: Mode, concurrency: int, found: dict[str, list[Timing]], told: dict[str, list[list[int]]]
) -> ModeScore:
    mine, fixed = found[mode.name], found["fixed"]
    reports = [one.stats.report(work.model.config, work.n_loops) for one in mine]
    kinds = sorted({kind for one in reports for kind in one["launches"]})

    def ratio(name: str) -> Spread:
        return Spread.of([getattr(a, name) / getattr(b, name) for a, b in zip(mine, fixed, strict=True)])

    def count(name: str) -> int:
        return median_low(getattr(one.stats, name) for one in mine)

    mean_loops = median(one["mean_loops"] for one in reports)
    bound = flop_bound(work.model.config, work.n_loops, mean_loops)
    whole, decoding = ratio("tokens_per_s"), ratio("decode_tokens_per_s")
    return ModeScore(
        concurrency=concurrency,
        mode=mode.name,
        requests=mine[0].n_requests,
        tokens_per_s=Spread.of([one.tokens_per_s for one in mine]),
        decode_tokens_per_s=Spread.of([one.decode_tokens_per_s for one in mine]),
        ratio=whole,
        decode_ratio=decoding,
        mean_loops=mean_loops,
        bound=bound,
        of_bound=whole.median / bound,
        decode_of_bound=decoding.median / bound,
        launches={kind: median_low(one["launches"].get(kind, 0) for one in reports) for kind in kinds},
        mean_width={kind: median(one["mean_width"].get(kind, 0.0) for one in reports) for kind in kinds},
        drafts=count("drafts"),
        checked=count("checked"),
        accepted=count("accepted"),
        overhead=median(one["overhead"] for one in reports),
        cache_bytes=mine[0].cache_bytes,
        same_tokens_as=mode.same_as,
        tokens_identical=told[mode.name] == told[mode.same_as] if told and mode.same_as else None,
    )
