"""How many tokens that have left the loop a launch of the coda waits for, by what launches have taken so far."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

FORGETS = 0.98
"""What a launch counts for, once another of its kind has run."""


@dataclass
class LaunchTime:
    """Seconds of one kind of launch as ``fixed_s + row_s * rows``, by least squares over the newest of them."""

    n: float = 0.0
    rows: float = 0.0
    rows2: float = 0.0
    s: float = 0.0
    rows_s: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A launch of so many rows took so long."""
        self.n = FORGETS * self.n + 1
        self.rows = FORGETS * self.rows + rows
        self.rows2 = FORGETS * self.rows2 + rows * rows
        self.s = FORGETS * self.s + seconds
        self.rows_s = FORGETS * self.rows_s + rows * seconds

    @property
    def row_s(self) -> float:
        """Of a row more; 0 where all launches were alike."""
        spread = self.rows2 / self.n - (self.rows / self.n) ** 2 if self.n else 0.0
        if spread < 0.25:
            return 0.0
        return max((self.rows_s / self.n - self.rows * self.s / self.n**2) / spread, 0.0)

    @property
    def fixed_s(self) -> float:
        """Of a launch, however many its rows."""
        return max((self.s - self.row_s * self.rows) / self.n, 0.0) if self.n else 0.0


SIMULATED = 12
"""Tokens of each completion that are simulated, and as many at the least as a mean needs."""
LEAST = 200


def best_min_coda(n_running: int, loops: Counter[int], core: LaunchTime, coda: LaunchTime) -> int:
    """The number with which tokens take least time, by simulation.

    More of them share the cost of a launch of the coda, and leave the loop's launches emptier. As many as run is a
    wave: all begin together, and the coda waits for the last. Which is best depends on how much depths differ.

    Args:
        n_running: completions, all in one launch.
        loops: how many tokens ran so many loops.
        core, coda: what launches take.
    """
    if n_running < 2 or not (loops and core.n and coda.n):
        return 1
    return min(_tried(n_running), key=lambda k: seconds_per_token(k, n_running, loops, core, coda))


def seconds_per_token(min_coda: int, n_running: int, loops: Counter[int], core: LaunchTime, coda: LaunchTime) -> float:
    """Of ``n_running`` completions without end, whose depths are drawn from ``loops``; the same draws for any
    ``min_coda``."""
    (core_s, core_row_s), (coda_s, coda_row_s) = ((one.fixed_s, one.row_s) for one in (core, coda))
    depths, weights, draws = list(loops), list(loops.values()), random.Random(0)
    left = deque([0] * (max(depths) + 1))
    """Tokens in the loop, by how many loops are left to them."""
    for depth in draws.choices(depths, weights, k=n_running):
        left[draws.randint(1, depth)] += 1  # as they may be found: not in step
    out, tokens, seconds = 0, 0, 0.0
    while tokens < max(SIMULATED * n_running, LEAST):
        inside = n_running - out
        if out >= min_coda or not inside:
            seconds += coda_s + coda_row_s * out
            tokens += out
            for depth in draws.choices(depths, weights, k=out):
                left[depth] += 1
            out = 0
        else:
            seconds += core_s + core_row_s * inside
            left.popleft()
            left.append(0)
            out += left[0]
            left[0] = 0
    return seconds / tokens


def _tried(n_running: int) -> list[int]:
    """1 to ``n_running``, with steps of about a third."""
    found = [1]
    while found[-1] < n_running:
        found.append(min(max(found[-1] + 1, found[-1] * 4 // 3), n_running))
    return found
