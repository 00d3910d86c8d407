"""Reading with exits, chunk by chunk into a key store: what decoding does, and the exact form for a memory.

The keys of a token that leaves after loop d are copied into the slots of all deeper loops (`CopiedKeys`), so that later
chunks, of any length, find a key at every loop. Token by token it is the reference that `replay` is held against. A
cache of one slot for all loops (`alcoda.model.cache_policy`) is read no other way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alcoda.depth.exiting import Exits, run_exits
from alcoda.errors import UsageError
from alcoda.model.exit_keys import CopiedKeys
from alcoda.model.keys import Store
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Prefill, Reader
from alcoda.model.state import Readout


class ExitReader(Reader):
    """A `Reader` whose tokens leave the loop when a rule says so. A token's memory is of the state that it left with.

    Attributes:
        depths: loops of the tokens of each pass, [B, T]; 0 for padding.
        scores: of the rule, [B, T, R], where they are kept.
    """

    def __init__(self, model: RecurrentLM, exits: Exits, capacity_tokens: int = 256) -> None:
        super().__init__(model, exits.test.n_loops, capacity_tokens, exits.cache, exits.n_slots())
        if exits.readout_only:
            raise UsageError(
                "readout_only of tokens that are read one after the other: what each is told depends on where those "
                "before it left. It is for models without a memory (model.memory) and cache per_loop, on whole texts"
            )
        if exits.recompute_keys and not self.cache.is_parallel:
            raise UsageError(
                f"recompute_keys with cache {self.cache.kind!r}: a token leaves one key for all loops, and none is "
                "left to be made anew"
            )
        self.exits = exits
        self.depths: list[Tensor] = []
        self.scores: list[Tensor] = []

    def _check_prefill(self, prefill: Prefill) -> None:
        raise UsageError(
            f"prefill {prefill.kind!r} with an exit rule: a memory is of where a token left the loop, which only "
            "reading token by token finds; leave prefill out, or set it to exact"
        )

    def read(
        self,
        ids_BT: Tensor,
        prefill: Prefill | None = None,
        pos_BT: Tensor | None = None,
        live_BT: Tensor | None = None,
        text_BT: Tensor | None = None,
    ) -> Tensor:
        """As `Reader.read`; a memory is always read exactly."""
        self.check_prefill(prefill)
        return super().read(ids_BT, None, pos_BT, live_BT, text_BT)

    def run(
        self,
        ids_BT: Tensor,
        store: Store,
        memory_BTD: Tensor | None,
        pos_BT: Tensor | None = None,
        live_BT: Tensor | None = None,
    ) -> Readout:
        assert isinstance(store, CopiedKeys)
        ran = run_exits(self.model, ids_BT, self.exits, store, memory_BTD, pos_BT, live_BT)
        self.depths.append(ran.depths_BT)
        self.scores += [] if ran.scores_BTR is None else [ran.scores_BTR]
        return ran.out

    def depths_BT(self) -> Tensor:
        """Loops of all tokens that were read; 0 for padding."""
        return torch.cat(self.depths, 1)
