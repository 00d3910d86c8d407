"""Mastery: whether a model answers what the present stage of a source asks, so that the next one begins.

Measured with the validation of a run and decided by it alone, so the order of batches stays a function of the run: the
stage is kept with the state of the batches, and a resumed run goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alcoda import progress
from alcoda.data.corpora import Corpus, corpus
from alcoda.data.splits import Stream
from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import UsageError
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reading, read_rows
from alcoda.training.device import autocast

if TYPE_CHECKING:
    from alcoda.training.loop import Trainer


def climb(trainer: Trainer) -> list[dict[str, Any]]:
    """Let every ladder climb whose present stage is mastered; what there is to log."""
    data, batches, records = trainer.data, trainer.batches, []
    for number, ladder in enumerate(data.ladders):
        source = data.sources[batches.stage(number)]
        sums = trainer.shared.measure(_right_and_asked, source.splits["valid"], corpus(source.spec), trainer)
        right, asked = trainer.processes.sum(sums)
        if not asked:
            raise UsageError(
                f"{source.name}: its first {trainer.recipe.eval.tokens} validation tokens ask nothing that tells "
                "whether it is mastered; raise eval.tokens, or let it ask more"
            )
        accuracy = right / asked
        record = {"source": source.name, "accuracy": accuracy, "answers": int(asked)}
        records.append({"type": "mastery", "train_step": trainer.train_step, **record})
        if accuracy >= ladder.mastery and batches.climb(number):
            progress.say(
                f"{source.name} is mastered at train step {trainer.train_step} ({accuracy:.1%} of its answers): on to "
                f"{data.sources[batches.stage(number)].name}"
            )
            trainer.batch_state = batches.state()
    return records


def _right_and_asked(model: RecurrentLM, stream: Stream, asks: Corpus, trainer: Trainer) -> list[float]:
    """Of this process's share of a stage's documents: answers given right by the likeliest tokens, and answers."""
    config, processes, was_training = trainer.recipe.eval, trainer.processes, model.training
    rows = list(_rows(stream, asks, trainer.data.tokenizer, trainer.recipe.model.seq_len, config.tokens))
    right = asked = 0
    model.eval()
    starts = range(0, len(rows), config.batch_size)
    try:
        # As many runs of the model in every process; those too many count nothing.
        rank, n_ranks = processes.rank, processes.world_size
        for i in range(rank, -(-len(starts) // n_ranks) * n_ranks, n_ranks):
            part = rows[starts[min(i, len(starts) - 1)] :][: config.batch_size]
            ids_BT = torch.zeros(len(part), max(len(tokens) for tokens, _ in part), dtype=torch.int64)
            for row, (tokens, _) in enumerate(part):
                ids_BT[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            with torch.no_grad(), autocast(trainer.device, trainer.dtype):
                loops, reading = [trainer.recipe.model.n_loops], Reading(config.prefill)
                (y_BTD,) = read_rows(model, ids_BT.to(trainer.device), loops, reading, lambda n_tokens: None)
                likeliest_BT = torch.stack([model.logits(y_TD).argmax(-1) for y_TD in y_BTD]).cpu()
            if i >= len(starts):
                continue
            hit_BT = likeliest_BT[:, :-1] == ids_BT[:, 1:]
            for hit_T, (_, spans) in zip(hit_BT, part, strict=True):
                asked += len(spans)
                right += sum(bool(hit_T[first - 1 : last - 1].all()) for first, last in spans)
    finally:
        model.train(was_training)
    return [float(right), float(asked)]


def _rows(
    stream: Stream, asks: Corpus, tokenizer: Tokenizer, seq_len: int, max_tokens: int
) -> Iterator[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Documents cut to ``seq_len`` tokens, ``max_tokens`` in all, and the tokens ``first .. last`` of each answer."""
    for tokens in stream.documents():
        if max_tokens <= 0:
            return
        tokens = tokens[:seq_len]
        max_tokens -= len(tokens)
        ends_T = np.cumsum(tokenizer.token_bytes_V[tokens])
        spans = [
            (int(np.searchsorted(ends_T, start, side="right")), int(np.searchsorted(ends_T, stop)) + 1)
            for start, stop in asks.asked(tokenizer.decode_bytes(tokens))
        ]
        yield tokens, spans
