"""`ModelConfig`: a point in the design space, and the combinations that make no sense."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from alcoda.config import Config, NonNegativeInt, PositiveFloat, PositiveInt
from alcoda.errors import UsageError
from alcoda.model.blocks import BlockConfig
from alcoda.model.embedding import AsItIs, Embedding
from alcoda.model.head import FinalNorm, Head, NoCap, OwnNorm, SoftCap, Tied
from alcoda.model.memory import Memory, NoMemory, Source
from alcoda.model.positions import Position, Rope
from alcoda.model.recurrence.carry import Carry, LastState
from alcoda.model.recurrence.exit_gate import ExitGate, NoExitGate
from alcoda.model.recurrence.inject import Inject, NoInject
from alcoda.model.recurrence.keys import CoreKeys, PerLoop
from alcoda.model.recurrence.loop_index import LoopIndex, NoLoopIndex
from alcoda.model.recurrence.loop_norm import LoopNorm, NoLoopNorm
from alcoda.model.recurrence.readout_map import NoReadoutMap, ReadoutMap
from alcoda.model.recurrence.route import AllTokens, Route
from alcoda.model.recurrence.sharing import Sharing, TiedLoops
from alcoda.model.recurrence.state_init import FromAnchor, StateInit
from alcoda.model.recurrence.update import Overwrite, Update
from alcoda.model.shape import Place, Shape


class ModelConfig(Config):
    """The architecture: sizes, and one choice on each axis (docs/design). The defaults are a plain weight-tied loop."""

    vocab_size: PositiveInt = 4096
    """Rows of the embedding; at least the tokenizer's size (padding it up is common)."""
    seq_len: PositiveInt = 256
    """Tokens in the context: the length of training rows, and what costs are quoted at."""
    d_model: PositiveInt = 256
    n_heads: PositiveInt = 4
    d_head: PositiveInt | None = None
    """Width of a head; d_model / n_heads where not set."""
    d_ff: PositiveInt | None = None
    """Width of the MLP; the MLP's own default (4d for gelu, about 8d/3 for swiglu) where not set."""
    n_prelude: NonNegativeInt = 1
    n_core: NonNegativeInt = 2
    """Blocks of the shared core; 0 is a dense model without a loop."""
    n_coda: NonNegativeInt = 1
    n_loops: PositiveInt = 8
    """R: the depth that the model is built for. Samplers, evaluation and generation take it where they name none."""
    block: BlockConfig = BlockConfig()
    position: Position = Rope()
    embedding: Embedding = AsItIs()
    head: Head = Tied()
    soft_cap: SoftCap = NoCap()
    init_std: PositiveFloat = 0.02
    """Standard deviation of every linear map and embedding at the start (alcoda/model/init.py)."""
    state_init: StateInit = FromAnchor()
    carry: Carry = LastState()
    loop_index: LoopIndex = NoLoopIndex()
    inject: Inject = NoInject()
    keys: CoreKeys = PerLoop()
    sharing: Sharing = TiedLoops()
    route: Route = AllTokens()
    update: Update = Overwrite()
    loop_norm: LoopNorm = NoLoopNorm()
    exit_gate: ExitGate = NoExitGate()
    readout_map: ReadoutMap = NoReadoutMap()
    memory: Memory = NoMemory()
    final_norm: FinalNorm = OwnNorm()

    @property
    def shape(self) -> Shape:
        """The sizes, with every default filled in."""
        d_head = self.d_head or self.d_model // self.n_heads
        d_ff = self.d_ff or self.block.mlp.d_ff(self.d_model)
        return Shape(self.d_model, self.n_heads, d_head, d_ff, self.seq_len, self.vocab_size, self.block.bias)

    def places(self, stage: str) -> list[Place]:
        """Where each block of ``prelude``, ``core`` or ``coda`` stands."""
        n_layers = {"prelude": self.n_prelude, "core": self.n_core, "coda": self.n_coda}
        first = {"prelude": 0, "core": self.n_prelude, "coda": self.n_prelude + self.n_core}[stage]
        own_keys = stage != "core" or self.keys.own_keys
        return [Place(first + i, sum(n_layers.values()), own_keys) for i in range(n_layers[stage])]

    @property
    def is_recurrent(self) -> bool:
        """Whether there is a core to loop."""
        return self.n_core > 0

    @property
    def max_loops(self) -> int | None:
        """The most loops that the model has; None: any number."""
        return self.n_loops if not self.is_recurrent or not self.sharing.is_tied or self.route.gathers else None

    @property
    def has_weights_by_loop(self) -> bool:
        """Whether some loop has weights that no other runs with."""
        return self.is_recurrent and not (self.sharing.is_tied and self.route.shares_router)

    @property
    def n_blocks_run(self) -> int:
        """Blocks that a token passes at ``n_loops``."""
        return self.n_prelude + self.n_core * self.n_loops + self.n_coda

    @property
    def memory_source(self) -> Source | None:
        """Which layer's state later tokens remember; None where the model has no memory."""
        return self.memory.source_of(self.n_prelude, self.n_core, self.n_coda, self.n_loops)

    @property
    def anchor_reaches_loop(self) -> bool:
        """Whether loops read the prelude's output otherwise than through the state before them."""
        reads = self.update.reads_anchor or self.route.reads_anchor
        return reads or self.inject.carries_anchor or self.keys.carries_anchor

    def check_loops(self, n_loops: int, name: str = "loops") -> int:
        """``n_loops``, if the model can run so many; UsageError otherwise."""
        try:
            n_loops = operator.index(n_loops)
        except TypeError:
            raise UsageError(f"{name}={n_loops!r}: a whole number is needed") from None
        if n_loops < 1:
            raise UsageError(f"{name}={n_loops}: at least 1 loop is needed")
        if n_loops > 1 and not self.is_recurrent:
            raise UsageError(
                f"{name}={n_loops}: this model is dense (n_core=0) and has nothing to loop; {name}=1 is its only depth"
            )
        if self.max_loops is not None and n_loops > self.max_loops:
            why = f"sharing {self.sharing.kind!r}" if not self.sharing.is_tied else f"route {self.route.kind!r}"
            raise UsageError(
                f"{name}={n_loops}: a model with {why} has weights for n_loops={self.max_loops} loops and no more"
            )
        return n_loops

    def check_readouts(
        self, loops: Sequence[int], decodes: bool, rows: Sequence[int] | None = None, n_rows: int = 0
    ) -> None:
        """Refuse depths that one pass of the model cannot read out."""
        if list(loops) != sorted(set(loops)) or not loops or loops[0] < 1:
            raise ValueError(f"loops={list(loops)} must be increasing and at least 1")
        self.check_loops(loops[-1])
        if decodes and len(loops) > 1:
            raise ValueError(f"loops={list(loops)} with a key store: a store serves one depth")
        if decodes:
            self.check_decodes()
        if rows is None:
            return
        if self.max_loops is not None:
            raise ValueError(
                f"a depth a row with sharing {self.sharing.kind!r} and route {self.route.kind!r}: rows would be at "
                "different loops of weights that belong to one"
            )
        if len(rows) != n_rows or min(rows) < 1 or max(rows) != loops[-1]:
            raise ValueError(
                f"rows={list(rows)} must be {n_rows} depths, one a row, from 1 to loops[-1]={loops[-1]}, which is one"
            )

    def check_decodes(self) -> None:
        """Refuse to decode what looks ahead."""
        if not self.route.causal_at_eval:
            raise UsageError(
                f"this model cannot decode: its route {self.route.kind!r} without an auxiliary decision looks at the "
                "whole text. Train with route.auxiliary loss or router"
            )

    @model_validator(mode="after")
    def _combination(self) -> Self:
        shape = self.shape
        if self.d_head is None and self.d_model % self.n_heads:
            near = min(
                (h for h in range(1, self.d_model + 1) if self.d_model % h == 0), key=lambda h: abs(h - self.n_heads)
            )
            raise ValueError(
                f"n_heads={self.n_heads} must divide d_model={self.d_model}: for example n_heads={near}; or set d_head"
            )
        self.position.check(shape)
        self.block.check(shape)
        if self.n_prelude + self.n_core + self.n_coda == 0:
            raise ValueError("n_prelude, n_core and n_coda are all 0: a model needs at least one block")
        self.memory.check(self.n_prelude, self.n_core, self.n_coda, self.seq_len)
        if self.is_recurrent:
            self._check_recurrent()
        else:
            self._check_dense()
        if self.final_norm.needs_loop_norm and not self.loop_norm.has_norm:
            raise ValueError(
                "final_norm 'shared' is the loop norm's weight again: set loop_norm to before_coda or every_loop, or "
                "final_norm to own"
            )
        return self

    def _check_recurrent(self) -> None:
        carriers = (self.state_init, self.inject, self.carry, self.keys)
        if not any(choice.carries_anchor for choice in carriers):
            raise ValueError(
                f"state_init {self.state_init.kind!r} with inject {self.inject.kind!r}, carry {self.carry.kind!r} and "
                f"keys {self.keys.kind!r}: the tokens cannot reach the loop. Set inject to add or concat, keys to "
                "anchor, carry to hyper, or state_init to anchor"
            )
        if not self.keys.own_keys and self.route.drops_keys:
            raise ValueError(
                f"keys {self.keys.kind!r} with a route {self.route.kind!r} that drops them: tokens that are out would "
                "lose the anchors that they were given for good. Set route.drop_keys to false"
            )
        if self.keys.own_keys and self.route.gathers and not self.route.drops_keys:
            raise ValueError(
                f"route.drop_keys=false with keys {self.keys.kind!r}: a token that is out has no key at that depth. "
                "Set keys to anchor, or route.drop_keys to true"
            )
        if self.route.gathers and self.n_loops < 2:
            raise ValueError(f"route {self.route.kind!r} with n_loops=1 has no choice: set n_loops to 2 or more")
        if self.update.needs_branches and self.block.sandwich == "after_add":
            raise ValueError(
                f"update {self.update.kind!r} with block.sandwich 'after_add': the core's output is the norm of a sum, "
                "so its branches cannot be told apart. Set sandwich to none or on_branch, or update to lti"
            )
        self.keys.check(self.position.rotates)

    def _check_dense(self) -> None:
        if self.n_loops != 1:
            raise ValueError(
                f"n_core=0 has nothing to loop: set n_loops to 1 (got {self.n_loops}), or n_core to 1 or more"
            )
        for field in LOOP_AXES:
            default = type(self).model_fields[field].default
            chosen = getattr(self, field)
            if chosen != default:
                raise ValueError(
                    f"n_core=0 has no loop for {field} {chosen.kind!r} to act in: remove it (the null choice is "
                    f"{default.kind!r}), or set n_core to 1 or more"
                )


LOOP_AXES = (
    "state_init",
    "carry",
    "loop_index",
    "inject",
    "keys",
    "sharing",
    "route",
    "update",
    "loop_norm",
    "exit_gate",
    "readout_map",
)
"""The axes that act in a loop or on what comes out of it."""
