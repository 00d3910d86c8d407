"""The live audit: some finished requests are read again at full depth while nothing waits."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from alcoda.engine.background import Background
    from alcoda.engine.llm import LM
    from alcoda.engine.request import Completion
    from alcoda.serve.metrics import Metrics

LOG = logging.getLogger("alcoda.serve")
MOST_WAITING = 32
"""Audits that wait for idle time; where there are more, the next is dropped."""


class Compared(NamedTuple):
    """Tokens of a text, and those whose likeliest token differs between its exit and full depth."""

    n_tokens: int
    n_differ: int


class Audit:
    """Of one server.

    Args:
        share: of the finished requests that have an exit.
        seed: of which.
    """

    def __init__(self, share: float, metrics: Metrics, seed: int = 0) -> None:
        self.share, self.metrics = share, metrics
        self.n_waiting = 0
        self._random = random.Random(seed)

    def offer(
        self, lm: LM, background: Background, completion: Completion, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """A completion that has ended, which may be among those that are read again.

        Args:
            post: does something in the event loop.
        """
        if completion.request.test is None or self._random.random() >= self.share:
            return
        if self.n_waiting >= MOST_WAITING:
            self.metrics.unaudited.inc()
            return
        self.n_waiting += 1
        future = background.call(lambda: compare(lm, completion), when_idle=True)
        future.add_done_callback(lambda done: post(lambda: self._done(done)))

    def _done(self, future: Future[Compared]) -> None:
        self.n_waiting -= 1
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            LOG.warning("audit: %s", error)
            return
        found = future.result()
        self.metrics.audited.inc(found.n_tokens)
        self.metrics.disagreed.inc(found.n_differ)


def compare(lm: LM, completion: Completion) -> Compared:
    """The text of a completion read twice, exactly and in parallel: as it was decoded, and with all loops."""
    import torch

    from alcoda.depth.replay import replay
    from alcoda.model.cache_policy import PER_LOOP
    from alcoda.model.prefill import read_rows
    from alcoda.training.device import autocast

    request, run = completion.request, lm.loaded
    assert request.test is not None
    ids = [*request.prompt, *completion.ids][:-1]
    first = len(request.prompt) - 1  # of its state the first token was drawn
    ids_1T = torch.tensor([ids], device=run.model.embed.weight.device)
    with torch.no_grad(), autocast(ids_1T.device, run.dtype):
        exited = replay(run.model, ids_1T, request.test, cache=request.cache or PER_LOOP)
        (full_1TD,) = read_rows(run.model, ids_1T, [lm.n_loops], run.reading(None, None))
        of_exit, of_full = (run.model.logits(y_1TD[0, first:]).argmax(-1) for y_1TD in (exited.y_BTD, full_1TD))
    return Compared(len(of_exit), int((of_exit != of_full).sum()))
