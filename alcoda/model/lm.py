"""`RecurrentLM`: embed, prelude, a loop of one shared core, coda, head. It names no variant and has no branch on one.

tokens -> embed -> prelude -> e            (the anchor, fixed from here on)
          loop t = 0 .. r-1:   x = inject(h, e);   y = core(x, keys);   h = loop_norm(update(h, y, e))
          loop norm -> coda -> norm -> head -> logits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alcoda.model.blocks import Stack
from alcoda.model.config import ModelConfig
from alcoda.model.init import init_weights
from alcoda.model.keys import Context, KeyStore, open_context


class State(NamedTuple):
    """What a loop hands to the next one, a row a token."""

    h_BTD: Tensor


class RecurrentLM(nn.Module):
    """A language model whose core runs any number of times.

    Build it on the meta device for counting, or on a real one and call `init`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape, block = config.shape, config.block
        self.config = config
        self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        self.position = config.position.build(shape)
        self.prelude = Stack("prelude", config.places("prelude"), block, shape)
        self.state_init = config.state_init.build(shape)
        self.inject = config.inject.build(shape)
        self.core = Stack("core", config.places("core"), block, shape)
        self.update = config.update.build(shape)
        self.loop_norm = config.loop_norm.build(block.norm, shape)
        self.coda = Stack("coda", config.places("coda"), block, shape)
        self.final_norm = block.norm.build(shape) if config.final_norm == "own" else nn.Identity()
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False) if config.head == "untied" else None

    def init(self, seed: int) -> RecurrentLM:
        """Fill the weights from ``seed``; returns the model."""
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            n_blocks_run = config.n_prelude + config.n_core * config.n_loops + config.n_coda
            init_weights(self, config.init_std, n_blocks_run)
        return self

    @property
    def head_weight_VD(self) -> Tensor:
        """The read-out's weight: the head's own, or the embedding's."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self,
        ids_BT: Tensor,
        n_loops: int | None = None,
        *,
        n_free: int = 0,
        recompute: bool = False,
        pos_BT: Tensor | None = None,
        live_BT: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Tensor:
        """Logits ``[B, T, V]`` after ``n_loops`` loops.

        Args:
            ids_BT: token ids.
            n_loops: loops of the core; the config's ``n_loops`` where None.
            n_free: how many of them, from the first, run without gradients (truncated backpropagation in depth).
            recompute: keep one state a loop instead of every activation, and run each loop again in the backward pass.
            pos_BT: positions of the tokens; None: they follow what ``store`` holds.
            live_BT: False for padding, which no query sees; None: all live.
            store: keys of earlier tokens, to which this pass adds its own; None keeps nothing.
        """
        n_loops = self.config.n_loops if n_loops is None else n_loops
        passes = self.readouts(
            ids_BT, [n_loops], n_free=n_free, recompute=recompute, pos_BT=pos_BT, live_BT=live_BT, store=store
        )
        return self.logits(next(passes))

    def logits(self, y_BTD: Tensor) -> Tensor:
        """The head: ``[B, T, V]`` of what `readouts` yields."""
        return F.linear(y_BTD, self.head_weight_VD)

    def readouts(
        self,
        ids_BT: Tensor,
        loops: Sequence[int],
        *,
        n_free: int = 0,
        recompute: bool = False,
        pos_BT: Tensor | None = None,
        live_BT: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Iterator[Tensor]:
        """What the head reads, ``[B, T, D]``, at each of the increasing depths ``loops``, from one run to the last.

        With a store, one depth at a time: the coda's keys are written once a pass.
        """
        if list(loops) != sorted(set(loops)) or not loops or loops[0] < 1:
            raise ValueError(f"loops={list(loops)} must be increasing and at least 1")
        if store is not None and len(loops) > 1:
            raise ValueError(f"loops={list(loops)} with a key store: a store serves one depth")
        context = open_context(ids_BT, loops[-1], self.position, (), pos_BT, live_BT, store, self.embed.weight.dtype)
        e_BTD = self.prelude(self.position.embed(self.embed(ids_BT), context.pos), context)
        state = State(self.state_init(e_BTD, context.pos))
        for loop in range(loops[-1]):
            state = self._loop(state, e_BTD, loop, context, free=loop < n_free, recompute=recompute)
            if loop + 1 in loops:
                yield self._finish(state, context)

    def _loop(self, state: State, e_BTD: Tensor, loop: int, context: Context, free: bool, recompute: bool) -> State:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not free):
            if recompute and torch.is_grad_enabled():
                h_BTD = checkpoint(self._one_loop, state, e_BTD, loop, context, use_reentrant=False)
            else:
                h_BTD = self._one_loop(state, e_BTD, loop, context)
        return State(h_BTD)

    def _one_loop(self, state: State, e_BTD: Tensor, loop: int, context: Context) -> Tensor:
        x_BTD = self.inject(state.h_BTD, e_BTD)
        y_BTD = self.core(x_BTD, context.at_loop(self.config.keys.slot_loop(loop)))
        return self.loop_norm.after_loop(self.update(state.h_BTD, y_BTD, e_BTD))

    def _finish(self, state: State, context: Context) -> Tensor:
        y_BTD = self.coda(self.loop_norm.before_coda(state.h_BTD), context)
        return self.loop_norm.norm(y_BTD) if self.config.final_norm == "shared" else self.final_norm(y_BTD)
