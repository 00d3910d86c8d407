"""Passes: a text is run several times over, each time with the memories that the passes before have made (LRT,
papers.md 4.2). One mechanism for every way to train a memory; `alcoda.model.prefill` is its twin for inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alcoda.model.lm import RecurrentLM
from alcoda.model.rewrite import KeyPages
from alcoda.model.state import Readout


class Pass(NamedTuple):
    """One pass over some tokens of each row.

    Attributes:
        tokens: their positions: of a part of the text that no pass has run yet, or of any that one has.
        weight: of its loss, a mean over the scored targets at ``over``.
        over: positions.
    """

    tokens: range
    weight: float
    over: range

    def of(self, x_BT: Tensor) -> Tensor:
        """Its tokens of ``[B, T, ...]``."""
        return x_BT[:, self.tokens.start : self.tokens.stop : self.tokens.step]


def run_passes(
    model: RecurrentLM, ids_BT: Tensor, passes: Sequence[Pass], loops: Sequence[int], detach: bool = False, **how: Any
) -> Iterator[tuple[Pass, list[Readout]]]:
    """Every pass with its read-outs at ``loops``, in order, in one graph: gradients flow through the keys and the
    memories from each pass into those before it.

    A token's memory is of the newest state of the token before it, at the deepest of ``loops``; zero where no pass has
    run that one yet. Keys are, for each token, of the newest pass that ran it.

    Args:
        ids_BT: whole rows.
        detach: whether memories carry no gradients.
        how: as `RecurrentLM.readouts`.
    """
    n_tokens = ids_BT.size(1)
    every = range(n_tokens)
    keeps = has_pages(passes, n_tokens)
    page: KeyPages | None = None
    sources_BTD: Tensor | None = None
    for one in passes:
        if keeps:
            page = KeyPages(one.tokens, None if one.tokens == every else page)
        memory_BTD = None if sources_BTD is None else one.of(model.memory.recall(sources_BTD))
        readouts = list(model.readouts(one.of(ids_BT), loops, store=page, memory_BTD=memory_BTD, **how))
        yield one, readouts
        new_BTD = readouts[-1].source_BTD
        if new_BTD is not None:
            sources_BTD = _put(model, sources_BTD, new_BTD.detach() if detach else new_BTD, one.tokens, n_tokens)


def has_pages(passes: Sequence[Pass], n_tokens: int) -> bool:
    """Whether keys are handed from pass to pass: not where each runs all tokens."""
    return any(one.tokens != range(n_tokens) for one in passes)


def keys_held(passes: Sequence[Pass]) -> list[int]:
    """How many keys a layer holds in each of the passes: those of all tokens that one has run."""
    return list(accumulate((one.tokens[-1] + 1 for one in passes), max))


def _put(model: RecurrentLM, sources_BTD: Tensor | None, new_BTD: Tensor, tokens: range, n_tokens: int) -> Tensor:
    """What every token has become, after zeros for those before the text: as `MemoryModule.recall` takes it."""
    before = model.memory.n_carried
    if sources_BTD is None:
        sources_BTD = new_BTD.new_zeros(new_BTD.size(0), before + n_tokens, new_BTD.size(2))
    start, stop = before + tokens.start, before + tokens.stop
    return torch.slice_scatter(sources_BTD, new_BTD.to(sources_BTD.dtype), 1, start, stop, tokens.step)
