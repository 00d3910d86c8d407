"""What a load measured, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from alcoda.serve.load.client import Answer
from alcoda.serve.load.drive import Driven

LATE_MS = 5.0
"""A client that is later than this, at the 99th percentile, measures itself too."""


@dataclass(frozen=True)
class Quantiles:
    """In ms."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles | None:
        """None of nothing."""
        if not len(seconds):
            return None
        return cls(*(float(x) for x in np.percentile(np.asarray(seconds) * 1000, (50, 90, 99))))


@dataclass(frozen=True)
class LoadScore:
    """One model at one load.

    Attributes:
        rate_per_s: offered; None of a closed loop.
        concurrency: of a closed loop; None of an open one.
        seconds: from the first request's time to the last answer's end.
        requests: that were sent.
        completed: that were answered whole.
        errors: how many of the others, by status or kind (`Answer.error`).
        ttft_ms: to the first text, since the request was due.
        itl_ms: between a text and the next.
        e2e_ms: to the end.
        output_tokens: of those that completed.
        output_tokens_per_s: over ``seconds``.
        mean_loops: of their tokens; None where the server does not say.
        tiers: how many answers the server says to be of each tier.
        good: that met both targets, of the time to the first text and of the mean time between tokens.
        goodput_per_s: good ones a second.
        good_share: of all that were sent.
        send_late_ms: how late our own sending was; None of a closed loop.
        loop_late_ms: how late our own event loop was.
        interrupted: whether it was stopped before its end.
    """

    model: str
    rate_per_s: float | None
    concurrency: int | None
    seconds: float
    requests: int
    completed: int
    errors: dict[str, int]
    ttft_ms: Quantiles | None
    itl_ms: Quantiles | None
    e2e_ms: Quantiles | None
    output_tokens: int
    output_tokens_per_s: float
    mean_loops: float | None
    tiers: dict[str, int]
    good: int
    goodput_per_s: float
    good_share: float
    send_late_ms: Quantiles | None
    loop_late_ms: Quantiles | None
    interrupted: bool

    @property
    def load(self) -> str:
        """In words."""
        return f"{self.rate_per_s:g}/s" if self.concurrency is None else f"{self.concurrency} at once"

    @property
    def is_late(self) -> bool:
        """Whether the client was too slow itself."""
        return any(one is not None and one.p99 > LATE_MS for one in (self.send_late_ms, self.loop_late_ms))


@dataclass(frozen=True)
class LoadResult:
    """What `bench_serve` measured.

    Attributes:
        url: of the server.
        ttft_ms, itl_ms: targets of a good request.
        prompts: how many different ones.
        max_tokens: new tokens of each request.
        seed: of arrivals and prompts.
        scores: by load, then model by model.
        interrupted: whether it was stopped before its end.
    """

    url: str
    duration_s: float
    ttft_ms: float
    itl_ms: float
    prompts: int
    max_tokens: int
    seed: int
    scores: tuple[LoadScore, ...]
    interrupted: bool

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the numbers."""
        found = []
        for one in self.scores:
            if one.is_late:
                late = max(x.p99 for x in (one.send_late_ms, one.loop_late_ms) if x is not None)
                found.append(
                    f"{one.model}, {one.load}: this client itself was {late:.1f} ms late at the 99th percentile (more "
                    f"than {LATE_MS:g}): its latencies are too long. Run it on another machine, or at a lower load"
                )
            others = {tier: n for tier, n in one.tiers.items() if ":" in one.model and tier != _tier(one.model)}
            if others:
                told = ", ".join(f"{n} at {tier}" for tier, n in others.items())
                found.append(f"{one.model}, {one.load}: the server answered {told}: its policy lowers depth under load")
        return found

    def to_json(self) -> dict[str, Any]:
        """For ``--json`` and ``--out``."""
        return asdict(self) | {"notes": self.notes}


def _tier(model: str) -> str:
    return model.rpartition(":")[2]


def score(
    driven: Driven,
    model: str,
    ttft_ms: float,
    itl_ms: float,
    rate_per_s: float | None = None,
    concurrency: int | None = None,
) -> LoadScore:
    """The numbers of one run."""
    whole = [answer for answer in driven.answers if answer.error is None]
    good = sum(is_good(answer, ttft_ms, itl_ms) for answer in whole)
    seconds = max(driven.ended - driven.began, 1e-9)
    tokens = sum(answer.tokens for answer in whole)
    told = [answer for answer in whole if answer.loops is not None and answer.tokens]
    return LoadScore(
        model=model,
        rate_per_s=rate_per_s,
        concurrency=concurrency,
        seconds=seconds,
        requests=len(driven.answers),
        completed=len(whole),
        errors=dict(sorted(Counter(a.error for a in driven.answers if a.error is not None).items())),
        ttft_ms=Quantiles.of([answer.ttft_s for answer in whole if answer.ttft_s is not None]),
        itl_ms=Quantiles.of([gap for answer in whole for gap in answer.gaps_s]),
        e2e_ms=Quantiles.of([answer.end - answer.due for answer in whole]),
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds,
        mean_loops=sum(a.loops or 0 for a in told) / sum(a.tokens for a in told) if told else None,
        tiers=dict(sorted(Counter(answer.exit for answer in whole if answer.exit is not None).items())),
        good=good,
        goodput_per_s=good / seconds,
        good_share=good / len(driven.answers) if driven.answers else 0.0,
        send_late_ms=Quantiles.of(driven.send_late_s),
        loop_late_ms=Quantiles.of(driven.loop_late_s),
        interrupted=driven.interrupted,
    )


def is_good(answer: Answer, ttft_ms: float, itl_ms: float) -> bool:
    """Whether a whole answer met both targets; one of a single token has no time between tokens to meet."""
    ttft_s, token_s = answer.ttft_s, answer.token_s
    return ttft_s is not None and ttft_s * 1000 <= ttft_ms and (token_s is None or token_s * 1000 <= itl_ms)
