"""The corpus form ``bin``: files of raw uint16 tokens, as nanoGPT writes them. There is no text in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from alcoda.data.corpora import FileCorpus, form
from alcoda.errors import UsageError

_BLOCK_TOKENS = 1 << 22


@form("bin")
class Bin(FileCorpus):
    """Little-endian uint16 tokens. A document ends at the tokenizer's end-of-text token, and at the end of a file."""

    suffixes = (".bin",)
    has_text = False

    def __init__(self, spec: str, rest: str) -> None:
        super().__init__(spec, rest)
        for path in self.files:
            size = path.stat().st_size
            if size % 2:
                raise UsageError(
                    f"corpus {spec!r}: {path} has an odd number of bytes ({size}), so it is no file of uint16 tokens; "
                    "write it anew, with 2 bytes a token"
                )

    def documents(self, max_bytes: int | None = None) -> Iterator[str]:
        raise UsageError(
            f"corpus {self.spec!r} is tokens already and has no text; give the tokenizer that it was made with "
            "(tokenizer: {kind: file, path: tokenizer.json})"
        )

    def token_documents(self, eot: int, vocab_size: int) -> Iterator[np.ndarray]:
        """The documents without ``eot`` (uint16, views of the file that are read as they are used); none is empty."""
        found = False
        for path in (path for path in self.files if path.stat().st_size):
            tokens_N = np.memmap(path, dtype="<u2", mode="r")
            start = 0
            for end in self._ends(tokens_N, eot, vocab_size, str(path)):
                if end > start:
                    found = True
                    yield tokens_N[start:end]
                start = end + 1
        if not found:
            raise UsageError(f"corpus {self.spec!r}: there is nothing but end-of-text tokens (id {eot}) in it")

    def _ends(self, tokens_N: np.ndarray, eot: int, vocab_size: int, path: str) -> Iterator[int]:
        """Where ``eot`` stands, and the end of the file."""
        for start in range(0, len(tokens_N), _BLOCK_TOKENS):
            block_N = np.asarray(tokens_N[start : start + _BLOCK_TOKENS])
            if block_N.max() >= vocab_size:
                at = int(np.argmax(block_N >= vocab_size))
                raise UsageError(
                    f"corpus {self.spec!r}: {path} has token {block_N[at]} at position {start + at}, and the tokenizer "
                    f"has {vocab_size} tokens; give the tokenizer that the file was made with"
                )
            yield from (start + np.flatnonzero(block_N == eot)).tolist()
        yield len(tokens_N)
