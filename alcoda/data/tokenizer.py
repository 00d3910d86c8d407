"""Text to tokens and back: one class over the ``tokenizers`` library for every kind of tokenizer.

Two things hold for all of them. Nothing in a text becomes a special token: ``<|endoftext|>`` in a document is
thirteen characters of text. And every token stands for a known number of bytes of UTF-8 (``token_bytes_V``), so that a
loss in nats a token can be told in bits a byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from alcoda.errors import UsageError

COMMON_EOTS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Tokens that are taken for the end of a text when none is named, in this order."""

_PIECE_CHARS = 1 << 19
"""Longer texts are encoded in pieces: the library needs about a hundred bytes a token while it works."""
_GROUP_CHARS = 1 << 22
# Where every byte-level pre-tokenizer in use begins a new word anyhow, so that a cut changes no token.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library, with its end-of-text token. Texts in, int32 ids out.

    ``kind`` says where it came from (byte, bpe, file). ``exact`` is True for a byte-level tokenizer that changes no
    byte: there ``decode_bytes(encode(text))`` is ``text.encode()``, and ``token_bytes_V`` sums to its length. For the
    other kinds (``▁``, ``##``, byte fallback) a token stands for what it adds to the decoded text, with a space
    for each ``▁``: the sum may differ from the text by the space before the first word and by what a normaliser did.

    ``bos`` is the token that a document begins with, from which its first one is predicted: most often ``eot`` again.

    ``unk`` is the token that stands for text which the others cannot spell, where there may be such text. How much
    text that is cannot be told from it, so it counts as 0 bytes, and a loss in bits a byte leaves that text out.
    """

    def __init__(self, inner: tokenizers.Tokenizer, eot: str, kind: str, bos: str | None = None) -> None:
        bos = eot if bos is None else bos
        eot_id, bos_id = inner.token_to_id(eot), inner.token_to_id(bos)
        if eot_id is None or bos_id is None:
            raise UsageError(f"tokenizer: it has no token {eot if eot_id is None else bos!r}; {_specials_text(inner)}")
        # They may not have been flagged so.
        inner.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in dict.fromkeys((eot, bos))])
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner, self.kind, self.eot_text, self.eot = inner, kind, eot, eot_id
        self.bos_text, self.bos = bos, bos_id
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        layout = json.loads(inner.to_str())
        self.byte_level = _mentions(layout["decoder"], "ByteLevel")
        prefix = any(part.get("add_prefix_space") for part in _parts(layout["pre_tokenizer"]))
        self.exact = self.byte_level and layout["normalizer"] is None and not prefix
        self.unk = None if self.byte_level else _unknown(inner, layout["model"])

    @staticmethod
    def load(path: str | Path, eot: str | None = None, kind: str = "file", bos: str | None = None) -> Tokenizer:
        """The tokenizer in the file ``path`` (or in ``tokenizer.json`` of that folder).

        ``eot`` is its end-of-text token; without it one of `COMMON_EOTS` that it has. ``bos``: where a document begins
        with another one.
        """
        path = Path(path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise UsageError(f"tokenizer: there is no file {path}")
        try:
            inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"tokenizer: {path} cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises bare Exceptions
            raise UsageError(
                f"tokenizer: {path} is no tokenizer.json ({error}). SentencePiece and tiktoken files are to be "
                "converted to that format first (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            ) from None
        if eot is None:
            eot = next((name for name in COMMON_EOTS if inner.token_to_id(name) is not None), None)
        if eot is None:
            raise UsageError(
                f"tokenizer: {path} has none of the end-of-text tokens {', '.join(COMMON_EOTS)}; "
                f"name its own with eot. {_specials_text(inner)}"
            )
        return Tokenizer(inner, eot, kind, bos)

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json``, whole or not at all. It has no ``eot_text`` and ``bos_text``: tell `load`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self._inner.to_str(pretty=True))
            os.chmod(name, 0o644)  # mkstemp makes it private
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @cached_property
    def specials(self) -> dict[str, int]:
        """The ids of tokens that no text is encoded into, by what they are called."""
        added = self._inner.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def sha256(self) -> str:
        """Of everything that decides which ids a text gets."""
        begins = "" if self.bos == self.eot else f"{self.bos_text}\n"
        return hashlib.sha256(f"{begins}{self.eot_text}\n{self._inner.to_str()}".encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The ids of ``text`` (int32), without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text (int32). Uses all cores (``TOKENIZERS_PARALLELISM=false``: one)."""
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        group: list[str] = []
        owners: list[int] = []
        held = 0
        for owner, text in enumerate(texts):
            for piece in self._pieces(text):
                group.append(piece)
                owners.append(owner)
                held += len(piece)
                if held > _GROUP_CHARS:
                    self._encode_group(group, owners, parts)
                    group, owners, held = [], [], 0
        self._encode_group(group, owners, parts)
        joined = [np.concatenate(of_text) if of_text else np.zeros(0, np.int32) for of_text in parts]
        return [self._no_special(text, ids_T) for text, ids_T in zip(texts, joined, strict=True)]

    def _encode_group(self, pieces: list[str], owners: list[int], parts: list[list[np.ndarray]]) -> None:
        """Encode ``pieces`` in parallel, each to the end of the list of the text that owns it."""
        try:
            encoded = self._inner.encode_batch_fast(pieces, add_special_tokens=False)
        except TypeError:
            raise UsageError("text: half of a surrogate pair is no Unicode character, and cannot be encoded") from None
        for owner, one in zip(owners, encoded, strict=True):
            parts[owner].append(np.array(one.ids, dtype=np.int32))

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while self.exact and len(text) - start > _PIECE_CHARS:
            cut = _CUT.search(text, start + _PIECE_CHARS // 2, start + _PIECE_CHARS)
            # Half a million characters without two words in a row: the cut costs at most one merge.
            end = cut.start() if cut else start + _PIECE_CHARS
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _no_special(self, text: str, ids_T: np.ndarray) -> np.ndarray:
        # Unigram models have the special among their pieces and find it in the text all the same: cut it in two.
        if self.byte_level or len(self.eot_text) < 2 or not (ids_T == self.eot).any():
            return ids_T
        first, *rest = text.split(self.eot_text)
        parts = [first + self.eot_text[:1] if rest else first]
        parts += [self.eot_text[1:] + part + self.eot_text[:1] for part in rest[:-1]]
        parts += [self.eot_text[1:] + rest[-1]] if rest else []
        encoded = self._inner.encode_batch_fast(parts, add_special_tokens=False)
        return np.concatenate([np.array(part.ids, dtype=np.int32) for part in encoded])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``ids``. Special tokens stand for nothing; bytes that are no UTF-8 become U+FFFD."""
        raw = self.decode_bytes(ids)
        return raw.decode(errors="replace") if self.byte_level else self._inner.decode(list(map(int, ids)))

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of ``ids``: those of a prefix are a prefix, so a stream can be decoded as it comes."""
        return b"".join(self._piece(int(i)) for i in ids)

    def _piece(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise UsageError(
                f"token {token} is not one of the tokenizer's {self.vocab_size} (0 to {self.vocab_size - 1})"
            )
        return self._bytes_V[token]

    @cached_property
    def token_bytes_V(self) -> np.ndarray:
        """How many bytes of UTF-8 each token stands for (int32, shape V); 0 for specials, ``unk`` and unused ids."""
        lengths_V = np.array([len(piece) for piece in self._bytes_V], dtype=np.int32)
        if self.unk is not None:
            lengths_V[self.unk] = 0
        lengths_V.setflags(write=False)
        return lengths_V

    @cached_property
    def _bytes_V(self) -> list[bytes]:
        added = self._inner.get_added_tokens_decoder()
        pieces = [b""] * self.vocab_size
        plain = {i: word for word, i in self._inner.get_vocab(with_added_tokens=True).items() if i not in added}
        if self.byte_level:
            byte_of = byte_alphabet()
            for i, word in plain.items():
                inside = all(char in byte_of for char in word)
                pieces[i] = bytes(byte_of[char] for char in word) if inside else word.encode()
        else:
            self._fill_by_decoding(pieces, plain)
        for i, token in added.items():
            pieces[i] = b"" if token.special else token.content.encode()
        return pieces

    def _fill_by_decoding(self, pieces: list[bytes], plain: dict[int, str]) -> None:
        # What a token adds behind another one; alone, a decoder strips the space in front of it.
        anchor = next((i for i, word in plain.items() if word.strip("▁").isalnum()), self.eot)
        before = self._inner.decode([anchor], skip_special_tokens=False)
        decoded = self._inner.decode_batch([[anchor, i] for i in plain], skip_special_tokens=False)
        for (i, word), text in zip(plain.items(), decoded, strict=True):
            fallback = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", word)
            pieces[i] = bytes([int(fallback[1], 16)]) if fallback else text[len(before) :].encode()


def byte_alphabet() -> dict[str, int]:
    """For byte-level vocabularies: the byte that each character stands for (GPT-2's bytes_to_unicode, turned round)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    assert table.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return table


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A component of tokenizer.json and those that it is a sequence of."""
    if component is not None:
        yield component
        for value in component.values():
            for part in value if isinstance(value, list) else ():
                if isinstance(part, dict):
                    yield from _parts(part)


def _mentions(component: dict[str, Any] | None, kind: str) -> bool:
    return any(part.get("type") == kind for part in _parts(component))


def _unknown(inner: tokenizers.Tokenizer, model: dict[str, Any]) -> int | None:
    """The id of the token that ``model`` of a tokenizer.json gives for what it does not know."""
    if model.get("unk_id") is not None:  # of a Unigram model; the others name the token
        return model["unk_id"]
    return inner.token_to_id(model["unk_token"]) if model.get("unk_token") else None


def _specials_text(inner: tokenizers.Tokenizer) -> str:
    specials = [token.content for _, token in sorted(inner.get_added_tokens_decoder().items())]
    return f"Its special tokens: {', '.join(specials)}" if specials else "It has no special tokens"
