"""What an engine did."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger


class Stopwatch:
    """Adds up the seconds that are spent within it (``with``)."""

    def __init__(self) -> None:
        self._s = self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._s += perf_counter() - self._began

    def take(self) -> float:
        """Those since it was asked last."""
        taken, self._s = self._s, 0.0
        return taken


@dataclass
class Stats:
    """What an engine did since it was made.

    Attributes:
        tokens: that were drawn and kept.
        prompt_tokens: that were read.
        loops: how many drawn-from tokens ran so many loops.
        prompt_loops: the same of prompts.
        launches, rows, seconds: by kind: core, coda (with what begins after it), piece.
        model_s: of `seconds`, those within the model's passes: its blocks, and coda and head.
        drafts, checked, accepted: tokens drafted, those of them that came to be held against what was drawn in the end,
            and those that turned out right.
        wall_s: that it was at work.
        failures: requests that failed.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    loops: Counter[int] = field(default_factory=Counter)
    prompt_loops: Counter[int] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    model_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    drafts: int = 0
    checked: int = 0
    accepted: int = 0
    wall_s: float = 0.0
    failures: int = 0

    @property
    def mean_loops(self) -> float:
        """Of the tokens that others were drawn from."""
        n = sum(self.loops.values())
        return sum(depth * count for depth, count in self.loops.items()) / n if n else 0.0

    @property
    def overhead(self) -> float:
        """The share of the time of decoding, prompts left out, that is not within the model's passes: scheduler, rows
        gathered and put back, keys copied, rules, drawing."""
        decoding_s = self.wall_s - self.seconds["piece"]
        return 1 - (sum(self.model_s.values()) - self.model_s["piece"]) / decoding_s if decoding_s > 0 else 0.0

    def report(self, config: ModelConfig, n_loops: int) -> dict[str, Any]:
        """For ``--json``: tokens/s, mean loops and histogram, launches, mean widths, drafts; and the bound by FLOPs,
        ``(F0 + R Fr) / (F0 + d Fr)``, over running all loops."""
        return {
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "tokens_per_s": self.tokens / self.wall_s if self.wall_s else 0.0,
            "mean_loops": self.mean_loops,
            "loops": {str(depth): n for depth, n in sorted(self.loops.items())},
            "launches": dict(self.launches),
            "mean_width": {kind: self.rows[kind] / n for kind, n in self.launches.items() if n},
            "seconds": dict(self.seconds),
            "wall_s": self.wall_s,
            "model_s": dict(self.model_s),
            "overhead": self.overhead,
            "drafts": self.drafts,
            "checked": self.checked,
            "accepted": self.accepted,
            "flop_bound": flop_bound(config, n_loops, self.mean_loops or n_loops),
            "failures": self.failures,
        }


def flop_bound(config: ModelConfig, n_loops: int, mean_loops: float) -> float:
    """How much less work tokens of ``mean_loops`` loops are than tokens of ``n_loops``: ``(F0 + R Fr) / (F0 + d Fr)``,
    F0 what a token is whatever its loops, Fr a loop (forward FLOPs of the ledger, attention over the whole context)."""
    if n_loops < 2:
        return 1.0
    one, two = (ledger(config, n).forward_flops_per_token for n in (1, 2))
    loop = two - one
    return (one - loop + n_loops * loop) / (one - loop + mean_loops * loop)
