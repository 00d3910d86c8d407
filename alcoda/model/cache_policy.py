"""The decode cache: how many slots of core keys a token leaves behind, and what lies in them.

`per_loop` is the model as it was trained. The others are cheaper and are other models: a token at loop r reads of every
earlier token one key a layer, whatever r is. So each token must have left the loop before the next one enters it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from alcoda.config import Choice
from alcoda.errors import UsageError, did_you_mean
from alcoda.model.config import ModelConfig
from alcoda.model.exit_keys import CopiedKeys, LastLoopKeys, MeanKeys


class CachePolicy(Choice, axis="cache"):
    """What a token leaves in the core's slots of the cache."""

    is_parallel: ClassVar[bool] = False
    """Whether a pass may hold several tokens of a row: a text can be read at once, and an engine may let a token into
    the loop before the one ahead of it has left."""
    averages: ClassVar[bool] = False
    """Whether what a token leaves is a mean, so that sums are kept of those in the loop."""

    def n_slots(self, n_loops: int) -> int:
        """Slots of each core layer, where the model fills ``n_loops`` of them."""
        return 1

    def store(self, n_slots: dict[str, int], capacity_tokens: int) -> CopiedKeys:
        """An empty one; arguments as `CopiedKeys`."""
        raise NotImplementedError

    def check(self, config: ModelConfig) -> None:
        """UsageError where the loops of such a model cannot share a slot."""
        if not config.is_recurrent:
            raise UsageError(f"cache {self.kind!r}: this model is dense (n_core=0) and keeps no keys of loops")
        if not config.keys.own_keys:
            return  # loops share one slot as it is
        if config.has_weights_by_loop:
            part = f"route {config.route.kind!r}" if config.sharing.is_tied else f"sharing {config.sharing.kind!r}"
            raise UsageError(
                f"cache {self.kind!r}: with {part}, loops have weights of their own, so that keys of one loop mean "
                "nothing to another. Decode with cache per_loop, or train with sharing tied"
            )
        if config.route.gathers:
            raise UsageError(
                f"cache {self.kind!r}: with route {config.route.kind!r}, a loop reads only the tokens that ran it, "
                "which one slot for all loops cannot tell. Decode with cache per_loop, or train with route none"
            )


class PerLoopCache(CachePolicy):
    """A slot a loop; those of loops that a token did not run hold copies of its last (copy-on-exit)."""

    kind: Literal["per_loop"] = "per_loop"
    is_parallel: ClassVar[bool] = True

    def n_slots(self, n_loops: int) -> int:
        return n_loops

    def store(self, n_slots: dict[str, int], capacity_tokens: int) -> CopiedKeys:
        return CopiedKeys(n_slots, capacity_tokens)

    def check(self, config: ModelConfig) -> None:
        """Every model can."""


class MeanCache(CachePolicy):
    """The mean over the loops that the token ran, of keys and of values (GRT, papers.md 1.4 and 5.3)."""

    kind: Literal["mean"] = "mean"
    averages: ClassVar[bool] = True

    def store(self, n_slots: dict[str, int], capacity_tokens: int) -> CopiedKeys:
        return MeanKeys(n_slots, capacity_tokens)


class LastCache(CachePolicy):
    """Those of the last loop that the token ran (Ouro's reuse in decoding, papers.md 5.3)."""

    kind: Literal["last"] = "last"

    def store(self, n_slots: dict[str, int], capacity_tokens: int) -> CopiedKeys:
        return LastLoopKeys(n_slots, capacity_tokens)


PER_LOOP = PerLoopCache()


def caches() -> dict[str, CachePolicy]:
    """Every registered choice by its name, with its own defaults; `per_loop` first."""
    made = {kind: choice.model_validate({"kind": kind}) for kind, choice in CachePolicy.choices.items()}
    return {kind: choice for kind, choice in made.items() if isinstance(choice, CachePolicy)}


def pick_cache(choice: CachePolicy | str | None, config: ModelConfig) -> CachePolicy:
    """A choice or its name, `per_loop` where None; UsageError where there is none, or the model cannot have it."""
    found = choice if isinstance(choice, CachePolicy) else PER_LOOP if choice is None else caches().get(choice)
    if found is None:
        raise UsageError(f"cache {choice!r}{did_you_mean(str(choice), caches())}")
    found.check(config)
    return found
