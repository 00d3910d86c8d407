"""Log-likelihoods of continuations at several depths and with exits: one pass over rows of about one length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.depth.replay import replay
from alcoda.depth.rules import NEVER
from alcoda.depth.tiers import Exit
from alcoda.depth.watch import ExitTest
from alcoda.downstream.encode import Ask
from alcoda.errors import RunError, UsageError
from alcoda.model.prefill import Tell, read_rows
from alcoda.training.device import autocast
from alcoda.training.load import LoadedRun

BATCH_TOKENS = 2048
"""Tokens that are read at a time, padding included, where no number of rows is asked for."""

LOGIT_TOKENS = 512
"""Tokens whose logits exist at one time."""


@dataclass(frozen=True, eq=False)
class Point:
    """One way to run the model: all tokens at ``loops``, or, with ``exit``, at most so many.

    Attributes:
        name: ``8`` or ``balanced``.
        flops_R: executed of a token that runs 1, 2, ... ``loops`` loops, by the ledger.
    """

    name: str
    loops: int
    exit: Exit | None
    flops_R: tuple[float, ...]


def points(run: LoadedRun, loops: Sequence[int] = (), exits: Sequence[str] = ()) -> list[Point]:
    """The depths, increasing, then the exits. No depth: the model's ``n_loops``. Where loops share their weights there
    are more than these, and than it was trained at (`ModelConfig.max_loops`).

    Raises:
        UsageError: a depth that the model does not have (under 1, or beyond ``max_loops``), or an exit that is none.
    """
    config = run.recipe.model
    depths = sorted({config.check_loops(n) for n in loops or [config.n_loops]})
    found = [Point(str(n), n, None, NEVER.executed_flops(config, n)) for n in depths]
    for name in dict.fromkeys(exits):
        chosen = run.exit(name)
        n_loops = chosen.test.n_loops
        found.append(Point(name, n_loops, chosen, chosen.rule.executed_flops(config, n_loops)))
    return found


class Answer(NamedTuple):
    """To an `Ask`, a number a point.

    Attributes:
        nats_P: minus the log-likelihood of the whole continuation.
        greedy_P: whether each of its tokens is the likeliest one.
        n_tokens: of the continuation.
    """

    nats_P: tuple[float, ...]
    greedy_P: tuple[bool, ...]
    n_tokens: int


class Spent:
    """Tokens that were read, and the loops that each ran."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points, self.n_tokens = points, 0
        self.counts_PR = [np.zeros(point.loops + 1, np.int64) for point in points]

    def add(self, p: int, depths_N: np.ndarray) -> None:
        """Tokens of point ``p``."""
        self.counts_PR[p] += np.bincount(depths_N, minlength=len(self.counts_PR[p]))

    def mean_loops(self, p: int) -> float:
        """A token; of point ``p``. NaN where none was read."""
        counts_R = self.counts_PR[p]
        return float(counts_R @ np.arange(len(counts_R)) / counts_R.sum()) if counts_R.sum() else float("nan")

    def flops_per_token(self, p: int) -> float:
        """Executed, by the ledger; likewise."""
        counts_R = self.counts_PR[p][1:]
        return float(counts_R @ np.array(self.points[p].flops_R) / counts_R.sum()) if counts_R.sum() else float("nan")


class Scorer:
    """Scores `Ask`s at every point.

    Rows are sorted by length and read together, and padding changes nothing: what is behind a row's text comes after
    it. What several asks read alike is read once (choices of one token after one context).

    Args:
        points: from `points`.
        batch_size: rows at a time; None: as many as have `BATCH_TOKENS` tokens.
    """

    def __init__(self, run: LoadedRun, points: Sequence[Point], batch_size: int | None = None) -> None:
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: at least 1 row")
        self.run, self.points, self.batch_size = run, points, batch_size
        self.spent = Spent(points)
        # A route that looks at the whole row would look at padding too.
        self.pads = run.recipe.model.route.causal_at_eval

    def score(self, asks: Sequence[Ask], tell: Tell = lambda n: None) -> list[Answer]:
        """An answer an ask; ``tell`` is told how many more pieces (`Ask.pieces`) are answered.

        Raises:
            RunError: a log-likelihood that is not finite.
        """
        seq_len = self.run.recipe.model.seq_len
        pieces = [(i, piece) for i, ask in enumerate(asks) for piece in ask.pieces(seq_len)]
        of_row: dict[tuple[int, ...], list[tuple[int, Ask]]] = defaultdict(list)
        for i, piece in pieces:
            of_row[piece.row(seq_len)].append((i, piece))
        nats_PN = np.zeros((len(self.points), len(asks)))
        greedy_PN = np.ones((len(self.points), len(asks)), bool)
        for rows in self._batches(sorted(of_row, key=len, reverse=True)):
            here = [(b, i, piece) for b, row in enumerate(rows) for i, piece in of_row[row]]
            found = self._answers(rows, [(b, piece) for b, _, piece in here])
            for (_, i, _), (nats_P, greedy_P) in zip(here, found, strict=True):
                nats_PN[:, i] += nats_P
                greedy_PN[:, i] &= greedy_P
            tell(len(here))
        return [
            Answer(tuple(nats_P.tolist()), tuple(greedy_P.tolist()), len(ask.continuation))
            for nats_P, greedy_P, ask in zip(nats_PN.T, greedy_PN.T, asks, strict=True)
        ]

    def _batches(self, rows: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """The longest first: where they do not fit into memory, that is seen at once."""
        batch: list[tuple[int, ...]] = []
        for row in rows:
            most = self.batch_size or max(1, BATCH_TOKENS // len(batch[0] if batch else row))
            if batch and (len(batch) >= most or (not self.pads and len(row) != len(batch[0]))):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.no_grad()
    def _answers(
        self, rows: Sequence[tuple[int, ...]], asks: Sequence[tuple[int, Ask]]
    ) -> Iterator[tuple[tuple[float, ...], tuple[bool, ...]]]:
        """Nats and whether all is greedy, at each point, of pieces with the row that each is of."""
        device = self.run.model.embed.weight.device
        n_most = max(map(len, rows))
        ids_BT = torch.full((len(rows), n_most), self.run.tokenizer.eot)
        live_BT = torch.zeros(len(rows), n_most, dtype=torch.bool)
        for b, row in enumerate(rows):
            ids_BT[b, : len(row)] = torch.tensor(row)
            live_BT[b, : len(row)] = True
        # A token is predicted from the place before it; the last of a continuation is not read.
        places = [b * n_most + len(rows[b]) - len(ask.continuation) + k for b, ask in asks for k in _range(ask)]
        at_N = torch.tensor(places, device=device)
        target_N = torch.tensor([token for _, ask in asks for token in ask.continuation], device=device)
        sizes = [len(ask.continuation) for _, ask in asks]
        nats_PK, greedy_PK = [], []
        for y_BTD in self._read(ids_BT.to(device), live_BT.to(device)):
            nats_N, right_N = self._head(y_BTD.flatten(0, 1)[at_N], target_N)
            nats_PK.append([float(part.sum()) for part in nats_N.split(sizes)])
            greedy_PK.append([bool(part.all()) for part in right_N.split(sizes)])
        if not np.isfinite(nats_PK).all():
            raise RunError(
                f"a log-likelihood is not finite: the model of train step {self.run.train_step} diverged, or does not "
                "stand that depth; give other --loops, or another --checkpoint"
            )
        return zip(zip(*nats_PK, strict=True), zip(*greedy_PK, strict=True), strict=True)

    def _read(self, ids_BT: Tensor, live_BT: Tensor) -> Iterator[Tensor]:
        """What the head reads at every token, at each point; all fixed depths come from one run of the model."""
        run, n_tokens = self.run, int(live_BT.sum())
        fixed = [point.loops for point in self.points if point.exit is None]
        self.spent.n_tokens += n_tokens
        with autocast(ids_BT.device, run.dtype):
            ys = read_rows(run.model, ids_BT, fixed, run.reading(None, None)) if fixed else iter(())
            for p, point in enumerate(self.points):
                if point.exit is None:
                    y_BTD, depths_N = next(ys), np.full(n_tokens, point.loops)
                else:
                    found = replay(run.model, ids_BT, point.exit.test, live_BT=live_BT)
                    y_BTD, depths_N = found.y_BTD, found.depths_BT[live_BT].cpu().numpy()
                self.spent.add(p, depths_N)
                yield y_BTD

    def _head(self, y_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each target in nats, and whether it is the likeliest token."""
        nats, right = [], []
        for y, target in zip(y_ND.split(LOGIT_TOKENS), target_N.split(LOGIT_TOKENS), strict=True):
            logits = _logits(self.run, y)
            nats.append(F.cross_entropy(logits, target, reduction="none"))
            right.append(logits.argmax(-1) == target)
        return torch.cat(nats).double().cpu(), torch.cat(right).cpu()


class TokenScore(NamedTuple):
    """Of one token of a text, given those before it.

    Attributes:
        top: the likeliest tokens there and their log-probabilities; of the same row as ``logprob``, so that the token
            is the likeliest iff its number is the largest.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@torch.no_grad()
def score_tokens(run: LoadedRun, ids: Sequence[int], loops: int, test: ExitTest | None, top: int) -> list[TokenScore]:
    """Each token of ``ids`` after the first, as a `Scorer` scores a continuation: all tokens at ``loops``, or left by
    ``test``.

    Args:
        ids: at most one more than the context holds.
        top: how many likeliest tokens are told of.

    Raises:
        RunError: a log-probability that is not finite.
    """
    if len(ids) < 2:
        return []
    ids_1T = torch.tensor([ids[:-1]], device=run.model.embed.weight.device)
    target_T = torch.tensor(ids[1:], device=ids_1T.device)
    found: list[TokenScore] = []
    with autocast(ids_1T.device, run.dtype):
        if test is None:
            (y_1TD,) = read_rows(run.model, ids_1T, [loops], run.reading(None, None))
        else:
            y_1TD = replay(run.model, ids_1T, test, live_BT=torch.ones_like(ids_1T, dtype=torch.bool)).y_BTD
        for y_ND, target_N in zip(y_1TD[0].split(LOGIT_TOKENS), target_T.split(LOGIT_TOKENS), strict=True):
            log_p_NV = torch.log_softmax(_logits(run, y_ND), -1)
            of_target_N = log_p_NV.gather(1, target_N[:, None])[:, 0]
            if not bool(of_target_N.isfinite().all()):
                raise RunError("a log-probability is not finite: the model diverged, or does not stand that depth")
            best = log_p_NV.topk(min(top, log_p_NV.size(-1)), -1)
            tops = [
                tuple(zip(i, p, strict=True)) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
            found += map(TokenScore, target_N.tolist(), of_target_N.tolist(), tops)
    return found


def _logits(run: LoadedRun, y_ND: Tensor) -> Tensor:
    """In fp32 or finer."""
    logits_NV = run.model.logits(y_ND)
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def _range(ask: Ask) -> range:
    return range(len(ask.continuation))
