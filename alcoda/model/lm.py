"""`RecurrentLM`: embed, prelude, a loop of one shared core, coda, head. It names no variant and has no branch on one.

tokens -> embed -> prelude -> e            (the anchor, fixed from here on)
          each token's memory enters every layer of prelude, core (at each loop) and coda
          loop r = 0 .. n-1, of the tokens that the route lets run it:
              x = inject(carry(h, r), e);   y = core(x, keys);   h = loop_norm(update(h, x, y, e))
          loop norm -> read-out map -> coda -> norm -> head -> logits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alcoda.model.blocks import Stack
from alcoda.model.config import ModelConfig
from alcoda.model.init import EmbeddingTable, init_weights
from alcoda.model.keys import Context, open_context
from alcoda.model.state import Begun, Readout, State, in_rows


class RecurrentLM(nn.Module):
    """A language model whose core runs any number of times.

    Build it on the meta device for counting, or on a real one and call `init`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape, block, norm = config.shape, config.block, config.block.norm
        self.config = config

        def stack(stage: str) -> Stack:
            return Stack(stage, config.places(stage), block, shape, config.memory, config.memory_source)

        self.embed = EmbeddingTable(shape.vocab_size, shape.d_model)
        self.embedding = config.embedding.build(norm, shape)
        self.position = config.position.build(shape)
        self.memory = config.memory.build(shape, block.d_kv(shape), config.memory_source)
        self.prelude = stack("prelude")
        self.state_init = config.state_init.build(shape)
        self.keys = config.keys.build(block, shape, config.places("core"), config.memory)
        self.route = config.route.build(shape, config.n_loops)
        self.carry = config.carry.build(shape)
        self.loop_index = config.loop_index.build(shape)
        self.inject = config.inject.build(norm, shape)
        self.core = config.sharing.build(lambda: stack("core"), config.n_loops)
        self.update = config.update.build(shape)
        self.loop_norm = config.loop_norm.build(norm, shape)
        self.exit_gate = config.exit_gate.build(shape)
        self.readout_map = config.readout_map.build(shape)
        self.coda = stack("coda")
        self.final_norm = config.final_norm.build(norm, shape, self.loop_norm)
        self.head = config.head.build(shape)
        self.soft_cap = config.soft_cap.build()

    def init(self, seed: int) -> RecurrentLM:
        """Fill the weights from ``seed``; returns the model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            init_weights(self, self.config.init_std, self.config.n_blocks_run)
        return self

    @property
    def head_weight_VD(self) -> Tensor:
        """The head's weight: its own, or the embedding's."""
        return self.head.weight_VD(self.embed)

    def logits(self, y_BTD: Tensor) -> Tensor:
        """The head: ``[B, T, V]`` of a read-out's ``y_BTD``."""
        return self.soft_cap(self.head.logits(y_BTD, self.embed))

    def forward(self, ids_BT: Tensor, n_loops: int | None = None, **how: Any) -> Tensor:
        """Logits ``[B, T, V]`` after ``n_loops`` loops (the config's where None); other arguments as `readouts`."""
        n_loops = self.config.n_loops if n_loops is None else n_loops
        return self.logits(next(self.readouts(ids_BT, [n_loops], **how)).y_BTD)

    def readouts(
        self,
        ids_BT: Tensor,
        loops: Sequence[int],
        n_free: int = 0,
        recompute: bool = False,
        rows: Sequence[int] | None = None,
        **given: Any,
    ) -> Iterator[Readout]:
        """The model at each of the increasing depths ``loops``, from one run to the last.

        Args:
            loops: depths that are read out; with a store that decodes, one.
            n_free: how many loops, from the first, run without gradients (truncated backpropagation in depth).
            recompute: keep one state a loop instead of every activation, and run each loop again in the backward pass.
            rows: loops of each row, at most ``loops[-1]``; a row with fewer begins later, so that all end together.
            ids_BT, given: as `begin`.
        """
        self.config.check_readouts(loops, getattr(given.get("store"), "decodes", False), rows, ids_BT.size(0))
        begun, state = self.begin(ids_BT, loops[-1], **given)
        for loop in range(begun.n_loops):
            state = self.loop(begun, state, loop, loop < n_free, recompute, rows)
            if loop + 1 in loops:
                yield self.read_out(begun, state, loop)

    def begin(
        self,
        ids_BT: Tensor,
        n_loops: int,
        memory_BTD: Tensor | None = None,
        context: Context | None = None,
        **at: Any,
    ) -> tuple[Begun, State]:
        """All before the first loop of a pass over the tokens ``ids_BT``. ``memory_BTD``: what each is told of earlier
        ones (`MemoryModule.recall`; None: zero), ``at`` positions, padding and where keys go (`open_context`), or the
        ``context`` that it would open."""
        if context is None:
            windows, dtype = self.config.block.windows(), self.embed.weight.dtype
            context = open_context(ids_BT, n_loops, self.position, windows, dtype, **at)
        x_BTD = self.position.embed(self.embedding(self.embed(ids_BT)), context.pos)
        context = self.memory.enter(context, x_BTD, memory_BTD)
        e_BTD, early_BTD = self.prelude(x_BTD, context)
        begun = Begun(n_loops, e_BTD, early_BTD, context, self.keys(e_BTD, context))
        return begun, State(self.state_init(e_BTD, context.pos), self.carry.start(e_BTD), *self.route.start(e_BTD))

    def loop(
        self, begun: Begun, state: State, loop: int, free: bool = False, recompute: bool = False, rows: Any = None
    ) -> State:
        """The state after loop ``loop`` (from 0), without gradients where ``free``; the rest as `readouts`."""
        run = partial(checkpoint, self.run_loop, use_reentrant=False) if recompute else self.run_loop
        run = torch.no_grad()(run) if free else run
        here = begun.core.at_loop(self.config.keys.slot_loop(loop))
        return in_rows(run, state, begun.e_BTD, loop, here, rows, begun.n_loops)

    def read_out(self, begun: Begun, state: State, loop: int) -> Readout:
        """The model at ``state``. ``loop`` (from 0), after which it is, is the slot of the coda's keys too."""
        y_BTD = self.readout_map(self.loop_norm.before_coda(state.h_BTD))
        y_BTD, late_BTD = self.coda(y_BTD, begun.context.at_loop(loop))
        y_BTD = self.final_norm(y_BTD)
        source_BTD = self.memory.source(begun.early_BTD, state.h_BTD, late_BTD, y_BTD)
        return Readout(self.core.touch(y_BTD, begun.n_loops) if loop + 1 == begun.n_loops else y_BTD, state, source_BTD)

    def run_loop(self, state: State, e_BTD: Tensor, loop: int | Tensor, context: Context) -> State:
        """One loop of all rows. ``loop`` is a tensor [B] where rows are at different ones."""
        return self.route(self._step, state, e_BTD, loop, context)

    def _step(self, state: State, e_BTD: Tensor, loop: int | Tensor, context: Context) -> State:
        x_BTD, kept = self.carry(state.h_BTD, state.kept)
        x_BTD = self.inject(self.loop_index(x_BTD, loop), e_BTD)
        y_BTD, _ = self.core.at(loop)(x_BTD, context)
        h_BTD = self.loop_norm.after_loop(self.update(state.h_BTD, x_BTD, y_BTD, e_BTD))
        return state._replace(h_BTD=h_BTD, kept=kept)
