"""In place of a tokenizer, of a model that has none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import UsageError


class TokenIds(Tokenizer):
    """Token ids below ``vocab_size``, and no text: whatever needs text raises a UsageError."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.kind, self.byte_level, self.exact = vocab_size, "none", False, False
        self.unk: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("eot", "eot_text", "bos", "bos_text"):
            _refuse()
        raise AttributeError(name)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(f"no tokenizer, {self.vocab_size} ids".encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Nothing: there is no file."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        _refuse()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        _refuse()

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        _refuse()

    @cached_property
    def token_bytes_V(self) -> np.ndarray:
        _refuse()


def _refuse() -> NoReturn:
    raise UsageError(
        "this model has no tokenizer, and so no text: it takes token ids (lm.logits(ids), lm.trace(ids)). A folder "
        "with a tokenizer.json beside its config.json has one"
    )
