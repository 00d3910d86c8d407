"""Work that decoding is timed on: the same prompts and the same recorded depths in every mode of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from alcoda import progress
from alcoda.data.shuffle import uniform
from alcoda.depth.exiting import pick_coda_keys
from alcoda.depth.record import Trace
from alcoda.depth.rules import Kl, TraceRule
from alcoda.depth.watch import ExitTest
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.paged import room
from alcoda.engine.request import Completion, Item, Request
from alcoda.engine.sampling import Drawn, Row, Sampling
from alcoda.engine.stats import Stats
from alcoda.errors import RunError, UsageError
from alcoda.model.lm import RecurrentLM

REQUESTS = 2
"""For each place, so that places are taken again."""
_TOKENS, _COINS, _DEPTHS = 0x7C11, 0x7C12, 0x7C13


@dataclass(frozen=True)
class Mode:
    """A way to decode.

    Attributes:
        exits: what looks at tokens: none, kl (after every loop, and lets none leave: the harness of the papers, which
            runs all loops and masks), the trace, or the rule that the trace is a record of.
        refill: as of `Options`.
        drafts: whether the wavefront runs.
        same_as: the mode whose tokens it must give, where each launch is padded (`Options.deterministic`).
    """

    name: str
    exits: str = "none"
    refill: bool = True
    drafts: bool = False
    same_as: str | None = None


MODES = (
    Mode("fixed"),
    Mode("masked", exits="kl"),
    Mode("no_refill", exits="trace", refill=False, same_as="refill"),
    Mode("refill", exits="trace"),
    Mode("wavefront", drafts=True, same_as="fixed"),
    Mode("refill_wavefront", exits="trace", drafts=True, same_as="refill"),
)
RULE = (Mode("rule", exits="rule"), Mode("rule_wavefront", exits="rule", drafts=True, same_as="rule"))
"""With the rule at work in place of its record: what it costs to ask it is in their time."""
UNIFORM = Mode("uniform")
"""All tokens at one smaller depth."""


@dataclass(frozen=True)
class Script:
    """What is drawn where the weights are random, and drafts of it could not be right: a token of each row and
    position, and whether a draft is it. Both are pure functions of row and position, and the second of loops.

    Attributes:
        coins: by row and position, from 0 to 1: a draft is right where it is below the acceptance.
        acceptance: the share of drafts that are right, by the loops that they are drawn after, from 1; beyond them the
            last.
    """

    tokens: Sequence[Sequence[int]]
    coins: Sequence[Sequence[float]]
    acceptance: Sequence[float]
    n_vocab: int

    @classmethod
    def of(cls, n_rows: int, n_tokens: int, n_vocab: int, acceptance: Sequence[float], seed: int = 0) -> Script:
        """Of random tokens."""
        tokens_BT = (uniform(n_rows * n_tokens, _TOKENS, seed) * n_vocab).astype(int).reshape(n_rows, n_tokens)
        coins_BT = uniform(n_rows * n_tokens, _COINS, seed).reshape(n_rows, n_tokens)
        return cls(tokens_BT.tolist(), coins_BT.tolist(), acceptance, n_vocab)

    def draft(self, row: int, position: int, loops: int) -> int:
        """What is drafted there after so many loops."""
        token, acceptance = self.tokens[row][position], self.acceptance[min(loops, len(self.acceptance)) - 1]
        return token if self.coins[row][position] < acceptance else (token + 1) % self.n_vocab


class Scripted(Engine):
    """An engine whose tokens come from a script. The likeliest one is found all the same, and kept as ``top``. A
    request's seed is its row of the script."""

    def __init__(self, model: RecurrentLM, options: Options, script: Script, **how: Any) -> None:
        super().__init__(model, options, **how)
        self.script = script

    def _draw(self, logits_NV: torch.Tensor, rows: list[Row]) -> list[Drawn | str]:
        found: list[Drawn | str] = []
        for row, drawn in zip(rows, super()._draw(logits_NV, rows), strict=True):
            if isinstance(drawn, Drawn):
                token = self.script.tokens[row.sampling.seed][len(row.prompt) + len(row.output)]
                drawn = Drawn(token, top=((drawn.token, math.nan),))
            found.append(drawn)
        return found

    def _draft(self, item: Item, drawn: Drawn | str) -> list[Item]:
        if isinstance(drawn, Drawn):
            row = item.completion.request.sampling.seed
            drawn = drawn._replace(token=self.script.draft(row, item.position + 1, item.loops))
        return super()._draft(item, drawn)


@dataclass(frozen=True, eq=False)
class Work:
    """What all modes are timed on.

    Attributes:
        prompts: of one length; of a concurrency C, the first C * `REQUESTS` are decoded.
        n_new: tokens that follow each.
        trace: depths of the tokens of each row, prompt included; rows are used again where they are too few.
        n_loops: that fixed depth runs.
        dtype: of the passes.
        draft_loops: of the wavefront.
        rule: that the trace is a record of; None: the modes of `RULE` are not run.
        uniform: loops of mode uniform; None: it is not run.
        width: tokens of a launch; None: 32, and the concurrency where that is more.
        script: None: tokens are the model's own.
        n_vocab: as of `Engine`.
    """

    model: RecurrentLM
    prompts: Sequence[tuple[int, ...]]
    n_new: int
    trace: Trace
    n_loops: int
    dtype: torch.dtype = torch.float32
    draft_loops: int = 1
    rule: ExitTest | None = None
    uniform: int | None = None
    width: int | None = None
    script: Script | None = None
    n_vocab: int | None = None

    def __post_init__(self) -> None:
        n_rows, n_tokens = self.trace.depths_BT.shape
        if n_rows < 1 or n_tokens < self.n_cached:
            raise UsageError(
                f"the trace holds {n_rows} rows of {n_tokens} tokens, and of a prompt and its new tokens "
                f"{self.n_cached} are read: ask for fewer, or record a longer one"
            )
        if int(self.trace.depths_BT[:, : self.n_cached].min()) < 1:
            raise UsageError("the trace has padding (depth 0) among the tokens that are decoded: ask for fewer tokens")

    @property
    def n_cached(self) -> int:
        """Tokens of a request that are read."""
        return len(self.prompts[0]) + self.n_new - 1

    def engine(self, mode: Mode, concurrency: int, deterministic: bool = False) -> Engine:
        """One that has done nothing yet."""
        options = Options(
            width=self.width or max(Options.width, concurrency),
            places=concurrency,
            cache_tokens=room(self.model, self.dtype, [self.n_cached] * concurrency),
            refill=mode.refill,
            draft_loops=self.draft_loops if mode.drafts else None,
            deterministic=deterministic,
        )
        how: dict[str, Any] = {"n_loops": self.loops(mode), "dtype": self.dtype, "n_vocab": self.n_vocab}
        if self.script is None:
            return Engine(self.model, options, **how)
        return Scripted(self.model, options, self.script, **how)

    def loops(self, mode: Mode) -> int:
        """That a token may run."""
        return self.uniform if mode is UNIFORM and self.uniform is not None else self.n_loops

    def test(self, mode: Mode) -> ExitTest | None:
        """What looks at tokens."""
        match mode.exits:
            case "none":
                return None
            case "kl":
                return Kl(threshold=0.0).build(self.model, self.n_loops)
            case "rule":
                return self.rule
        return TraceRule().build(self.model, self.n_loops, self.trace)

    def requests(self, mode: Mode, n: int, test: ExitTest | None) -> list[Request]:
        """The first ``n``."""
        n_rows = self.trace.depths_BT.size(0)
        return [
            Request(
                prompt,
                self.n_new,
                Sampling(seed=row),
                loops=self.loops(mode),
                test=test,
                row=row % n_rows,
            )
            for row, prompt in enumerate(self.prompts[:n])
        ]


@dataclass(frozen=True)
class Timing:
    """One run of one mode.

    Attributes:
        seconds: that the engine was at work, from the first request to the last token.
        tokens: by request, the likeliest at each position.
    """

    seconds: float
    stats: Stats
    n_requests: int
    tokens: list[list[int]]
    cache_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """New ones, prompts' time included."""
        return self.stats.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """New ones but each request's first, which comes of its prompt, over the time without prompts."""
        return (self.stats.tokens - self.n_requests) / max(self.seconds - self.stats.seconds["piece"], 1e-9)


class Decoding:
    """One mode's engine and its requests, decoded a share at a time (`go`)."""

    def __init__(self, work: Work, mode: Mode, concurrency: int, n: int | None = None, deterministic: bool = False):
        requests = work.requests(mode, concurrency * REQUESTS if n is None else n, work.test(mode))
        self.mode, self.n_tokens, self.seconds = mode, sum(one.max_tokens for one in requests), 0.0
        self.engine = work.engine(mode, concurrency, deterministic)
        self.completions = [one for request in requests for one in self.engine.submit(request)]

    def go(self, share: float = 1.0) -> None:
        """Launch until so large a share of all new tokens is there; with 1, until nothing is left to do."""
        began, upto = perf_counter(), self.n_tokens if share < 1 else self.n_tokens + 1
        with self.engine.runner.passes():
            while self.engine.stats.tokens < share * upto and self.engine.step() is not None:
                pass
        self.seconds += perf_counter() - began

    def timing(self) -> Timing:
        """Of a run that has ended.

        Raises:
            RunError: a request failed.
        """
        check_all_ran(self.completions, f"mode {self.mode.name}")
        tokens = [_likeliest(one) for one in self.completions]
        n_bytes = self.engine.runner.arena.size.n_bytes
        return Timing(self.seconds, self.engine.stats, len(self.completions), tokens, n_bytes)


def timed(work: Work, mode: Mode, concurrency: int, n: int | None = None, deterministic: bool = False) -> Timing:
    """Decode ``n`` requests (concurrency * `REQUESTS` where None), so many at one time.

    Raises:
        RunError: a request failed.
    """
    run = Decoding(work, mode, concurrency, n, deterministic)
    run.go()
    return run.timing()


SLICES = 32
"""Into which a run is cut where modes take turns."""


def timed_in_turn(
    work: Work, modes: Sequence[Mode], concurrency: int, told: Callable[[float], None] = lambda share: None
) -> list[Timing]:
    """Decode the same requests in each mode, all at one time: a slice of each mode's tokens in turn, forwards and
    backwards (A B B A), so that a machine whose speed wanders within seconds is as fast for one mode as for another.

    Args:
        told: is called after each slice, with its share of the whole.

    Raises:
        RunError: a request failed.
    """
    runs = [Decoding(work, mode, concurrency) for mode in modes]
    for i in range(1, SLICES + 1):
        for run in runs if i % 2 else reversed(runs):
            run.go(i / SLICES)
            told(1 / (SLICES * len(runs)))
    return [run.timing() for run in runs]


def _likeliest(completion: Completion) -> list[int]:
    """What the model itself would say: tokens, or what they would be if they were not scripted."""
    return [one.top[0][0] if one.top else one.token for one in completion.tokens]


def spread_depths(n_rows: int, n_tokens: int, n_loops: int, mean: float, seed: int = 0) -> Trace:
    """Random depths of a mean, of the distribution on 1 .. ``n_loops`` that has it and the most entropy: the share of
    depth d is proportional to exp(x d).

    Raises:
        UsageError: a mean outside of them.
    """
    if not 1 <= mean <= n_loops:
        raise UsageError(f"mean depth {mean:g}: from 1 to the loops that run, {n_loops}")
    depth_R = torch.arange(1, n_loops + 1, dtype=torch.float64)

    def share(x: float) -> torch.Tensor:
        return torch.softmax(x * depth_R, 0)

    low, high = -60.0, 60.0  # at either end all mass is on one depth, to rounding
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float(share(middle) @ depth_R) < mean else (low, middle)
    ends_R = share(low).cumsum(0)[:-1]
    draws_BT = torch.from_numpy(uniform(n_rows * n_tokens, _DEPTHS, seed)).view(n_rows, n_tokens)
    return Trace(1 + torch.bucketize(draws_BT, ends_R, right=True), n_loops, "at_exit")


def record(engine: Engine, prompts: Sequence[tuple[int, ...]], n_new: int, test: ExitTest) -> Trace:
    """The depths at which a rule lets tokens leave, of prompts and of what follows them.

    Raises:
        RunError: a request failed.
    """
    requests = [Request(prompt, n_new, test=test) for prompt in prompts]
    with progress.bar("recording depths", len(requests)) as advance:
        asked = [engine.submit(request)[0] for request in requests]
        for changed in engine.steps():
            advance(sum(one.finish is not None for one in changed))
    check_all_ran(asked, "recording depths")
    rows = [[*one.prompt_loops, *(token.loops for token in one.tokens[1:])] for one in asked]
    return Trace(torch.tensor(rows), test.n_loops, pick_coda_keys(test, None))


def check_all_ran(completions: Sequence[Completion], what: str) -> None:
    """RunError where a request did not end by its length."""
    for one in completions:
        if one.finish != "length":
            raise RunError(f"{what}: a request ended by {one.finish}: {one.error}")
