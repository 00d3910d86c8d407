"""What is kept of each token of a text whose trajectories pass by, and groups of tokens with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from alcoda.measure.bootstrap import mean_interval
from alcoda.measure.text import buckets

N_DIFFICULTIES = 5
"""Equal groups by the loss at the last loop."""


@dataclass(frozen=True)
class Group:
    """Convergence depths of some tokens.

    Attributes:
        name: which.
        n_tokens, share: how many, and of all.
        mean, low, high: of the settled depth, with its 95% interval over units (None: fewer than two hold any).
        median, q90: of the settled depth.
        censored: the share that has not settled at the last loop; it counts with that depth.
        first_crossing: mean of the first loop below eps.
        stable_loop: mean of the loop from which on the likeliest token stays.
        loss: mean at the last loop, nats.
    """

    name: str
    n_tokens: int
    share: float
    mean: float
    low: float | None
    high: float | None
    median: float
    q90: float
    censored: float
    first_crossing: float
    stable_loop: float
    loss: float


class Tally:
    """About 20 bytes a token, in columns that are named below."""

    NAMES = ("unit", "settled", "censored", "crossing", "stable", "kind", "pos", "hops", "loss")

    def __init__(self, n_loops: int, seq_len: int) -> None:
        self.n_loops, self.seq_len, self.n_units = n_loops, seq_len, 0
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in self.NAMES}
        self._whole: dict[str, np.ndarray] = {}
        self.correct: dict[int, np.ndarray] = {}
        """By hops: answers that are right after each loop."""

    def add(self, correct_NR: np.ndarray, **columns: np.ndarray) -> None:
        """Tokens: a value each of every column. ``unit`` is in the newest stream (`close`)."""
        columns["unit"] = columns["unit"] + self.n_units
        for name, parts in self._parts.items():
            parts.append(columns[name])
        for hops in np.unique(columns["hops"]).tolist():
            if hops:
                here_R = correct_NR[columns["hops"] == hops].sum(0)
                self.correct[hops] = self.correct.get(hops, np.zeros(self.n_loops, np.int64)) + here_R

    def close(self, n_units: int) -> None:
        """A stream of so many units ends."""
        self.n_units += n_units

    def __getitem__(self, name: str) -> np.ndarray:
        """A whole column."""
        if name not in self._whole:
            self._whole[name] = np.concatenate(self._parts[name]) if self._parts[name] else np.zeros(0)
            self._parts[name].clear()
        return self._whole[name]

    @property
    def n_tokens(self) -> int:
        return len(self["settled"])

    def units_held(self) -> int:
        """Units with a token."""
        return len(np.unique(self["unit"]))

    def group(self, name: str, mask_N: np.ndarray | slice = slice(None)) -> Group:
        """Those that ``mask_N`` picks: at least one."""
        settled_N, unit_N = self["settled"][mask_N], self["unit"][mask_N]
        sums_U = np.bincount(unit_N, settled_N, minlength=self.n_units)
        counts_U = np.bincount(unit_N, minlength=self.n_units).astype(np.float64)
        several = (counts_U > 0).sum() > 1
        interval = mean_interval(sums_U, counts_U) if several else (float(settled_N.mean()), None, None)
        median, q90 = np.quantile(settled_N, [0.5, 0.9], method="inverted_cdf").tolist()
        means = {field: float(self[field][mask_N].mean()) for field in ("censored", "crossing", "stable", "loss")}
        return Group(
            name,
            len(settled_N),
            len(settled_N) / self.n_tokens,
            *interval,
            median,
            q90,
            means["censored"],
            means["crossing"],
            means["stable"],
            means["loss"],
        )

    def groups(self, labels_N: np.ndarray, names: Sequence[str]) -> tuple[Group, ...]:
        """A group of each label that a token has; ``names`` by label."""
        return tuple(self.group(name, labels_N == i) for i, name in enumerate(names) if (labels_N == i).any())

    def by_position(self) -> tuple[Group, ...]:
        """By the position in the row that a token is predicted from."""
        ends_P = buckets(self.seq_len)
        names = [f"{start} to {stop - 1}" for start, stop in pairwise(ends_P)]
        return self.groups(np.searchsorted(ends_P[:-1], self["pos"], side="right") - 1, names)

    def by_difficulty(self) -> tuple[Group, ...]:
        """By the loss at the last loop, easiest first."""
        edges = np.quantile(self["loss"], np.linspace(0, 1, N_DIFFICULTIES + 1)).tolist()
        names = [f"{low:.3g} to {high:.3g} nats" for low, high in pairwise(edges)]
        return self.groups(np.searchsorted(edges[1:-1], self["loss"], side="right"), names)

    def by_hops(self) -> tuple[Group, ...]:
        """Of answers of pointer chasing, by their number of hops."""
        names = [f"{hops} hop{'s' * (hops > 1)}" for hops in range(1, int(self["hops"].max(initial=0)) + 1)]
        return self.groups(self["hops"].astype(np.int64) - 1, names)  # 0 is what is no answer

    def histogram(self) -> list[dict[str, Any]]:
        """Tokens at each depth, three ways to count it."""
        counts = {
            name: np.bincount(self[name], minlength=self.n_loops + 1) for name in ("settled", "crossing", "stable")
        }
        censored = int(self["censored"].sum())
        return [
            {
                "depth": depth,
                "settled": int(counts["settled"][depth]) - (censored if depth == self.n_loops else 0),
                "censored": censored if depth == self.n_loops else 0,
                "first_crossing": int(counts["crossing"][depth]),
                "stable_loop": int(counts["stable"][depth]),
            }
            for depth in range(1, self.n_loops + 1)
        ]
