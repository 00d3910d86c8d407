"""Trajectories of the tokens of a text, batch by batch, and what is kept of them: bounded memory for any text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from alcoda.data.splits import Stream
from alcoda.depth.trajectory import NUMBERS, first_crossing, settled_depth, stable_loop, trace
from alcoda.errors import RunError
from alcoda.model.prefill import Tell
from alcoda.training.device import autocast
from alcoda.training.load import LoadedRun

EPS_SWEEP = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Depths are also counted with these."""

LOGARITHMIC = ("kl_previous", "kl_final", "state_change", "second_order")
_LOWEST, _HIGHEST, _A_DECADE = -12, 4, 40
"""Bins of quantiles of what spans decades: a bin is 6% wide."""
QUANTILES = {"q10": 0.1, "q50": 0.5, "q90": 0.9}


class Part(NamedTuple):
    """Consecutive tokens of a text, each with the loops that predict it.

    Attributes:
        start: place of the first in the text.
        ids_N: the tokens.
        read: by name of `alcoda.depth.trajectory.trace`, ``[N, R]``; of the token before each.
    """

    start: int
    ids_N: np.ndarray
    read: dict[str, torch.Tensor]


def trajectories(
    run: LoadedRun, stream: Stream, n_tokens: int, n_loops: int, batch_rows: int, tell: Tell = lambda n_tokens: None
) -> Iterator[Part]:
    """The first ``n_tokens`` of a stream, cut into rows of ``seq_len`` as `alcoda.training.score.score` does: a token
    is predicted from those before it in its row. ``tell`` is told how many more are read.
    """
    seq_len, device = run.model.config.seq_len, run.model.embed.weight.device
    for start in range(0, n_tokens - 1, batch_rows * seq_len):
        n = min(batch_rows * seq_len, n_tokens - 1 - start)
        ids_N = torch.from_numpy(stream.read(start, start + n + 1).astype(np.int64))
        n_rows = -(-n // seq_len)
        padded = torch.zeros(2, n_rows * seq_len, dtype=torch.int64)
        padded[0, :n], padded[1, :n] = ids_N[:-1], ids_N[1:]
        ids_BT, targets_BT = padded.view(2, n_rows, seq_len)[..., : min(n, seq_len)].to(device)
        share = n / ids_BT.size(1)
        with autocast(device, run.dtype):
            read = trace(run.model, ids_BT, n_loops, targets_BT, tell=lambda t, share=share: tell(t * share))
        yield Part(start + 1, ids_N[1:].numpy(), {name: x.flatten(0, 1)[:n].cpu() for name, x in read.items()})


class ByLoop:
    """What all tokens do at each loop: means, and quantiles of what spans decades (from fine bins)."""

    def __init__(self, n_loops: int) -> None:
        self.n_loops, self.n_tokens = n_loops, 0
        self.sums = {name: np.zeros(n_loops) for name in (*NUMBERS, "correct")}
        self.bins = {
            name: np.zeros((n_loops, (_HIGHEST - _LOWEST) * _A_DECADE), np.int64)
            for name in NUMBERS
            if name in LOGARITHMIC
        }

    def add(self, read: dict[str, np.ndarray], ids_N: np.ndarray) -> None:
        """Tokens, with their trajectories ``[N, R]``."""
        self.n_tokens += len(ids_N)
        self.sums["correct"] += (read["argmax"] == ids_N[:, None]).sum(0)
        for name in NUMBERS:
            if name != "argmax":
                self.sums[name] += read[name].sum(0, dtype=np.float64)
        for name, bins_RK in self.bins.items():
            with np.errstate(divide="ignore", invalid="ignore"):
                at_NR = (np.log10(read[name]) - _LOWEST) * _A_DECADE
            at_NR = np.nan_to_num(at_NR, nan=0, neginf=0).clip(0, bins_RK.shape[1] - 1).astype(np.int64)
            for loop in range(self.n_loops):
                bins_RK[loop] += np.bincount(at_NR[:, loop], minlength=bins_RK.shape[1])

    def to_json(self) -> list[dict[str, Any]]:
        """A record a loop; a number that has no meaning at a loop (a change in the first) is left out."""
        records = []
        for i in range(self.n_loops):
            record: dict[str, Any] = {"loop": i + 1, "accuracy": float(self.sums["correct"][i] / self.n_tokens)}
            for name in NUMBERS:
                mean = float(self.sums[name][i] / self.n_tokens)
                if name == "argmax" or math.isnan(mean):
                    continue
                record[name] = {"mean": mean, **self._quantiles(name, i)} if name in self.bins else mean
            records.append(record)
        return records

    def _quantiles(self, name: str, loop: int) -> dict[str, float]:
        upto_K = self.bins[name][loop].cumsum()
        at = {q: int(np.searchsorted(upto_K, share * self.n_tokens)) for q, share in QUANTILES.items()}
        return {q: 0.0 if k == 0 else 10 ** ((k + 0.5) / _A_DECADE + _LOWEST) for q, k in at.items()}


class Depths(NamedTuple):
    """Depths of tokens, a number each (``[N]``).

    Attributes:
        settled: from that loop on, KL to the loop before stays below eps; R where it does not at R (``censored``).
        crossing: the first loop where it is below.
        stable: the loop from which on the likeliest token is the last loop's.
    """

    settled: np.ndarray
    censored: np.ndarray
    crossing: np.ndarray
    stable: np.ndarray


def depths_of(read: dict[str, torch.Tensor], eps: float) -> Depths:
    """Depths of trajectories ``[N, R]``."""
    kl_NR = read["kl_previous"]
    settled_N, censored_N = settled_depth(kl_NR, eps)
    crossing_N, _ = first_crossing(kl_NR, eps)
    stable_N = stable_loop(read["argmax"])
    small = (x.to(torch.int16).numpy() for x in (settled_N, crossing_N, stable_N))
    settled, crossing, stable = small
    return Depths(settled, censored_N.numpy(), crossing, stable)


def check_finite(read: dict[str, torch.Tensor], train_step: int, n_loops: int) -> None:
    """RunError where a model does not stand so many loops."""
    if not bool(torch.isfinite(read["loss"]).all()):
        loop = int(torch.isfinite(read["loss"]).all(0).long().argmin()) + 1
        raise RunError(
            f"the loss at loop {loop} is not finite: the model of train step {train_step} diverged, or does not stand "
            f"{n_loops} loops; give fewer --loops, or another --checkpoint"
        )


class Sweep:
    """Histograms of the settled depth for each of several eps."""

    def __init__(self, n_loops: int, eps: tuple[float, ...]) -> None:
        self.eps = eps
        self.counts_ER = np.zeros((len(eps), n_loops + 1), np.int64)
        self.censored_E = np.zeros(len(eps), np.int64)

    def add(self, kl_NR: torch.Tensor) -> None:
        """Tokens' ``kl_previous``."""
        for i, eps in enumerate(self.eps):
            settled_N, censored_N = settled_depth(kl_NR, eps)
            self.counts_ER[i] += np.bincount(settled_N.numpy(), minlength=self.counts_ER.shape[1])
            self.censored_E[i] += int(censored_N.sum())

    def to_json(self) -> list[dict[str, float]]:
        """A record an eps, the largest first."""
        records = []
        for eps, counts_R, censored in zip(self.eps, self.counts_ER, self.censored_E, strict=True):
            n, loops_R = counts_R.sum(), np.arange(len(counts_R))
            median = int(np.searchsorted(counts_R.cumsum(), n / 2))
            mean = float(counts_R @ loops_R / n)
            records.append({"eps": eps, "mean": mean, "median": median, "censored": float(censored / n)})
        return records
