"""What a loop hands to the next one, and how some of its rows are taken out and put back.

Every part is a row a token, so that a router can run some tokens of a sequence, the driver some sequences of a batch,
and an engine any tokens of any requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alcoda.model.keys import Context


class State(NamedTuple):
    """The loop's state.

    Attributes:
        h_BTD: the state proper.
        kept: earlier states that the carry-in mixes, [B, T, D] each, newest first.
        route: what the router knows of each token, [B, T] each.
        aux_BT: the router's auxiliary loss so far, a token.
    """

    h_BTD: Tensor
    kept: tuple[Tensor, ...] = ()
    route: tuple[Tensor, ...] = ()
    aux_BT: Tensor | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> State:
        """``f`` of every tensor."""
        return self.merge(self, lambda x, _: f(x))

    def merge(self, other: State, f: Callable[[Tensor, Tensor], Tensor]) -> State:
        """``f`` of every tensor and its counterpart in ``other``."""
        return State(
            f(self.h_BTD, other.h_BTD),
            tuple(f(a, b) for a, b in zip(self.kept, other.kept, strict=True)),
            tuple(f(a, b) for a, b in zip(self.route, other.route, strict=True)),
            None if self.aux_BT is None or other.aux_BT is None else f(self.aux_BT, other.aux_BT),
        )


Run = Callable[[State, Tensor, int | Tensor, Context], State]
"""One loop of the rows it is given: (state, e, loop, context) -> state."""


class Begun(NamedTuple):
    """What every loop and read-out of one pass has in common.

    Attributes:
        n_loops: loops of the pass.
        e_BTD: the anchor.
        early_BTD: the prelude's, where it is the source of a memory.
        context: of the pass, for the coda.
        core: the same with the keys that the core reads in place of its own, where it does.
    """

    n_loops: int
    e_BTD: Tensor
    early_BTD: Tensor
    context: Context
    core: Context


class Readout(NamedTuple):
    """The model at one depth.

    Attributes:
        y_BTD: what the head reads.
        state: what it comes from.
        source_BTD: what later tokens remember of each; None where the model has no memory.
    """

    y_BTD: Tensor
    state: State
    source_BTD: Tensor | None = None


def in_rows(
    run: Run, state: State, e_BTD: Tensor, loop: int, context: Context, rows: Sequence[int] | None, n_loops: int
) -> State:
    """``run`` loop ``loop`` of ``n_loops``, on the rows that have begun.

    Args:
        rows: loops of each row; None: all run all. A row with fewer than ``n_loops`` idles at the start, so that the
            last loops, which carry the gradients, are the last of every row (Parcae, papers.md 5.2).
    """
    if rows is None:
        return run(state, e_BTD, loop, context)
    began = [row for row, n in enumerate(rows) if n_loops - n <= loop]
    index_N = torch.tensor(began, device=e_BTD.device)
    loop_N = torch.tensor([loop - (n_loops - rows[row]) for row in began], device=e_BTD.device)
    if len(began) == len(rows):
        return run(state, e_BTD, loop_N, context)
    new = run(state.map(lambda x: x[index_N]), e_BTD[index_N], loop_N, context.rows(index_N))
    return state.merge(new, lambda x, x_new: x.index_copy(0, index_N, x_new.to(x.dtype)))
