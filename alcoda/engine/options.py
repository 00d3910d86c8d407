"""How an engine works, as whoever makes one says it."""

from __future__ import annotations

from dataclasses import dataclass

from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy

CACHE_TOKENS = 32_768
"""Of an engine's cache where nothing is said, at most."""


@dataclass(frozen=True)
class Options:
    """How an engine works.

    Attributes:
        width: tokens of a launch, at most.
        places: completions that run at one time; None: as many as ``width``.
        cache_tokens: room for keys, in tokens of all completions that run (on a GPU in whole pages, of the cache and of
            each completion: `alcoda.engine.paged`); None: for ``places`` whole contexts, and no more than
            `CACHE_TOKENS`.
        refill: whether tokens that begin join those in the loop; else they wait until all of those are out.
        min_coda: tokens that have left wait for so many; None: as many as pays, by what launches have taken so far.
        chunk_tokens: of a prompt that are read at one time, or of several prompts that are read together.
        draft_loops: drafts of the next token after so many loops, where a launch has room to spare (the wavefront);
            None: none.
        deterministic: every launch is filled up to ``width`` and each prompt is read alone, so that a completion does
            not depend on others to the bit.
        cache: what a token leaves in the cache; another than per_loop reads prompts token by token, and drafts nothing.
    """

    width: int = 32
    places: int | None = None
    cache_tokens: int | None = None
    refill: bool = True
    min_coda: int | None = None
    chunk_tokens: int = 256
    draft_loops: int | None = None
    deterministic: bool = False
    cache: CachePolicy = PER_LOOP

    def __post_init__(self) -> None:
        for name in ("width", "places", "cache_tokens", "min_coda", "chunk_tokens", "draft_loops"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: at least 1")
        if self.draft_loops is not None and not self.cache.is_parallel:
            raise UsageError(
                f"draft_loops={self.draft_loops} with cache {self.cache.kind!r}: a token must have left the loop when "
                "the next one enters it; leave draft_loops out, or set cache to per_loop"
            )
        if not self.refill and self.draft_loops is not None:
            raise UsageError(
                f"draft_loops={self.draft_loops} with refill=False: drafts join tokens in the loop; set refill to true"
            )
