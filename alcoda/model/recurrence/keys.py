"""Keys: which keys the core's queries read at each loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor, nn

from alcoda.config import Bool, Choice
from alcoda.model.blocks import BlockConfig
from alcoda.model.keys import CORE, Context, RowKeys, Slot
from alcoda.model.memory import Memory
from alcoda.model.shape import Cost, Place, Shape, total


class CoreKeys(Choice, axis="keys"):
    """Where the core's keys and values come from, and in which slots they lie."""

    own_keys: ClassVar[bool] = True
    """Whether the core's blocks project keys of their own."""
    carries_anchor: ClassVar[bool] = False
    """Whether the prelude's output reaches every loop through the keys."""

    def check(self, position_rotates: bool) -> None:
        """Raise ValueError where the choice does not fit the model's positions."""

    def rotates(self, position_rotates: bool) -> bool:
        """Whether the core's keys are turned by position."""
        return position_rotates

    def build(self, block: BlockConfig, shape: Shape, places: list[Place], memory: Memory) -> PerLoopModule:
        """A module on ``(e_BTD, context)`` that gives the context of the loop; ``places`` are the core's."""
        raise NotImplementedError

    def cost(self, block: BlockConfig, shape: Shape, places: list[Place], memory: Memory) -> Cost:
        """Once a pass."""
        return Cost()

    def n_slots(self, n_loops: int) -> int:
        """Slots that each core layer fills when ``n_loops`` loops run: the cache grows by this many keys a token."""
        raise NotImplementedError

    def slot_loop(self, loop: int) -> int:
        """The loop whose slot loop ``loop`` (0-based) reads and writes."""
        raise NotImplementedError


class PerLoop(CoreKeys):
    """Each loop projects its own keys from what it reads, into a slot of its own (a plain transformer, unrolled)."""

    kind: Literal["per_loop"] = "per_loop"

    def build(self, block: BlockConfig, shape: Shape, places: list[Place], memory: Memory) -> PerLoopModule:
        return PerLoopModule()

    def n_slots(self, n_loops: int) -> int:
        return n_loops

    def slot_loop(self, loop: int) -> int:
        return loop


class AnchorKeys(CoreKeys):
    """One projection of the prelude's output e a core layer, made once, frozen, read by every loop (CART, papers.md
    2.1). Its form is the blocks' attention's (MLA: through the latent, as CART).

    Causal like any keys: a query sees the anchors of its own and earlier positions. (CART's first code let it see all.)
    The cache does not grow with the loops, and a token that leaves early leaves no hole in it.
    """

    kind: Literal["anchor"] = "anchor"
    own_keys: ClassVar[bool] = False
    carries_anchor: ClassVar[bool] = True
    rope: Bool = False
    """Whether rotary positions turn the core's queries and the anchors. CART's core has none."""

    def check(self, position_rotates: bool) -> None:
        if self.rope and not position_rotates:
            raise ValueError("keys.rope=true without rotary positions: set position to rope, or keys.rope to false")

    def rotates(self, position_rotates: bool) -> bool:
        return self.rope

    def build(self, block: BlockConfig, shape: Shape, places: list[Place], memory: Memory) -> PerLoopModule:
        return AnchorKeysModule(self, block, shape, places, memory)

    def cost(self, block: BlockConfig, shape: Shape, places: list[Place], memory: Memory) -> Cost:
        return total(*(block.key_cost(shape, place, memory) for place in places))

    def n_slots(self, n_loops: int) -> int:
        return 1

    def slot_loop(self, loop: int) -> int:
        return 0


class PerLoopModule(nn.Module):
    def forward(self, e_BTD: Tensor, context: Context) -> Context:
        """The context of the core's loops, made of the prelude's output ``e_BTD``."""
        return context

    def resume(self, context: Context, stored: Callable[[Slot], RowKeys]) -> Context:
        """The same, of tokens whose keys have been made: ``stored`` finds them."""
        return context


class AnchorKeysModule(PerLoopModule):
    def __init__(
        self, config: AnchorKeys, block: BlockConfig, shape: Shape, places: list[Place], memory: Memory
    ) -> None:
        super().__init__()
        self.rope = config.rope
        self.layers = nn.ModuleList(block.build_keys(shape, place, memory) for place in places)

    def forward(self, e_BTD: Tensor, context: Context) -> Context:
        rotation = context.rotation if self.rope else None
        frozen = tuple(
            context.keys(CORE, layer, *project(e_BTD, rotation, context)) for layer, project in enumerate(self.layers)
        )
        return replace(context, frozen=frozen, rotation=rotation)

    def resume(self, context: Context, stored: Callable[[Slot], RowKeys]) -> Context:
        """As `PerLoopModule.resume`."""
        frozen = tuple(stored((CORE, layer, 0)) for layer in range(len(self.layers)))
        return replace(context, frozen=frozen, rotation=context.rotation if self.rope else None)
