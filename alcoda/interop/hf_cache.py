"""The cache that transformers' ``generate`` carries from call to call: a reader of ours, with its key store."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from alcoda.errors import UsageError
from alcoda.model.prefill import Reader

try:
    from transformers import Cache
except ImportError as error:
    raise UsageError(f"transformers 5 is needed ({error}): pip install 'alcoda[transformers]'") from None


class AlcodaCache(Cache):
    """Keys of every loop of earlier tokens.

    Args:
        reader: empty, or one that has read.
        depth: loops and exit that it is of; a cache serves one depth.
    """

    def __init__(self, reader: Reader, depth: tuple[int, str | None]) -> None:
        super().__init__(layers=[])
        self.reader, self.depth = reader, depth

    def check(self, depth: tuple[int, str | None]) -> None:
        """UsageError where a call asks for another depth."""
        if depth != self.depth:
            was, now = (f"num_loops={n_loops}, exit={exit!r}" for n_loops, exit in (self.depth, depth))
            raise UsageError(f"{now} with a cache of {was}: keys of one depth are not those of another; begin anew")

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        """Tokens a row, padding included."""
        return self.reader.store.n_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: it grows."""
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """Of its layers; one stands for all: transformers asks this where it would cut off tokens that were read."""
        return [False]

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; one may come several times."""
        store = self.reader.store
        store.slots = {slot: (k[indices], v[indices]) for slot, (k, v) in store.slots.items()}
        store.ran_BS = {loop: ran_BS[indices] for loop, ran_BS in store.ran_BS.items()}
        store.pos_BS = None if store.pos_BS is None else store.pos_BS[indices]
        store.live_BS = None if store.live_BS is None else store.live_BS[indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The rows that beams go on from."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times, one after the other."""
        store = self.reader.store
        (k_BGSK, _) = next(iter(store.slots.values()))
        rows = k_BGSK.new_ones(k_BGSK.size(0)).nonzero()[:, 0]
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def crop(self, *_: Any, **__: Any) -> NoReturn:
        """UsageError: what was read stays read (assisted generation would need otherwise)."""
        raise UsageError("the cache of a looped model cannot be cut: assisted generation is not served")

    def reset(self) -> NoReturn:
        """UsageError: leave the cache out to begin anew."""
        raise UsageError("the cache of a looped model is not used again: leave it out, and the first call makes one")
