"""Scoring: the nats of every token of a text at several depths, in one run of the model to the deepest.

Text is cut into rows of ``seq_len`` tokens; each token is predicted from those before it in its row. Every token is
scored once. End-of-text tokens stand for no bytes of text and are not scored (they are still read).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from alcoda.data.splits import Stream
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reading, Tell, read_rows
from alcoda.training.device import autocast

LOGIT_ROWS = 2048
"""Tokens whose logits exist at one time."""


class Scored(NamedTuple):
    """Consecutive tokens of a text.

    Attributes:
        start: place of the first in the text.
        nats_LN: natural-log loss of each, a row a depth; 0 where a token is not scored.
        bytes_N: bytes of text that each stands for; 0 where it is not scored.
        read_s: seconds that reading them took, at all depths, the head left out.
    """

    start: int
    nats_LN: np.ndarray
    bytes_N: np.ndarray
    read_s: float = 0.0


@torch.no_grad()
def score(
    model: RecurrentLM,
    stream: Stream,
    token_bytes_V: np.ndarray,
    loops: Sequence[int],
    *,
    batch_size: int = 8,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    reading: Reading | None = None,
    tell: Tell = lambda n_tokens: None,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Scored]:
    """Score a stream, batch by batch; the model is in evaluation mode meanwhile.

    Args:
        reading: how rows are read where the model has a memory; None: token by token.
        tell: is told how many more tokens of the stream are read, at all depths.
        share: (r, n): of every n batches only the r-th (0-based), for n processes that score a text together. Each of
            them runs the model as often: one that has no batch left runs its last again and gives nothing.
    """
    seq_len, device = model.config.seq_len, model.embed.weight.device
    n_tokens = min(stream.n_tokens, max_tokens or stream.n_tokens)
    was_training = model.training
    model.eval()
    try:
        starts = range(0, n_tokens - 1, batch_size * seq_len)
        rank, n_shares = share
        for i in range(rank, -(-len(starts) // n_shares) * n_shares, n_shares):
            start = starts[min(i, len(starts) - 1)]
            stop = min(start + batch_size * seq_len, n_tokens - 1)
            n = stop - start
            inputs_BT, target_N = rows_between(stream, start, stop, seq_len, device)
            with autocast(device, dtype):
                # Of the columns of a row that is padded, the text's part is what counts as read.
                part = n / inputs_BT.size(1)
                ys = read_rows(
                    model, inputs_BT, loops, reading, lambda n_tokens, part=part: tell(n_tokens * part), n_text=n
                )
                rows, read_s = [], 0.0
                for y_BTD, seconds in _timed(ys, device):
                    rows.append(nats(model, y_BTD.flatten(0, 1)[:n], target_N))
                    read_s += seconds
            if i >= len(starts):
                continue
            bytes_N = token_bytes_V[target_N.cpu().numpy()]
            yield Scored(start + 1, np.stack(rows) * (bytes_N > 0), bytes_N, read_s)
    finally:
        model.train(was_training)


def rows_between(
    stream: Stream, start: int, stop: int, seq_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``start .. stop`` as rows [B, T], the last one filled up with zeros; and what follows each token, [N]."""
    tokens = torch.from_numpy(stream.read(start, stop + 1).astype(np.int64))
    n = stop - start
    n_rows = -(-n // seq_len)
    padded = torch.zeros(n_rows * seq_len, dtype=torch.int64)
    padded[:n] = tokens[:-1]
    return padded.view(n_rows, seq_len)[:, : min(n, seq_len)].to(device), tokens[1:].to(device)


def _timed(ys: Iterator[torch.Tensor], device: torch.device) -> Iterator[tuple[torch.Tensor, float]]:
    """Each with the seconds that making it took."""
    while True:
        began = time.perf_counter()
        y_BTD = next(ys, None)
        if y_BTD is None:
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield y_BTD, time.perf_counter() - began


def nats(model: RecurrentLM, y_ND: torch.Tensor, target_N: torch.Tensor) -> np.ndarray:
    """Loss of each target, [N], given what the head reads before it."""
    parts = [
        F.cross_entropy(model.logits(y).float(), target, reduction="none")
        for y, target in zip(y_ND.split(LOGIT_ROWS), target_N.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(parts).double().cpu().numpy()
