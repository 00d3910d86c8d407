"""SentencePiece vocabularies of the BPE kind as a ``tokenizers`` tokenizer: a ``.model``, or llama2.c's ``.bin``.

Both list pieces with scores. Text gets a space in front, spaces become ``▁``, and of all pairs of neighbours that are a
piece the one with the best score is merged, until none is. A BPE whose merges are ranked by those scores does the same.
What no piece spells becomes its bytes, where the vocabulary has them, else ``<unk>``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import UsageError

SPACE, UNK, BOS, EOS = "▁", "<unk>", "<s>", "</s>"
EOT = BOS
"""What stands between documents: the models of llama2.c are trained on documents that each begin with it."""


class Piece(NamedTuple):
    text: str
    score: float


def read(path: Path) -> Tokenizer:
    """The tokenizer in a ``tokenizer.bin`` of llama2.c, or in a ``.model`` of SentencePiece.

    Raises:
        UsageError: another kind of file, or a vocabulary that is not of the BPE kind.
    """
    data = path.read_bytes()
    try:
        pieces = list(_of_model(data) if path.suffix == ".model" else _of_bin(data))
    except (struct.error, UnicodeDecodeError, IndexError):
        pieces = []
    names = [piece.text for piece in pieces]
    if names[:3] != [UNK, BOS, EOS] or len(set(names)) != len(names):
        raise UsageError(
            f"tokenizer: {path} is no vocabulary of llama2.c (tokenizer.bin) or SentencePiece (.model): pieces that "
            f"are all different, the first of them {UNK}, {BOS}, {EOS}"
        )
    return Tokenizer(_build(pieces), EOT, "file")


def _of_bin(data: bytes) -> Iterator[Piece]:
    """``max_token_length``, then by piece its score, its length and its bytes; spaces as spaces."""
    at, number = 4, 0
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        if length < 0 or at + 8 + length > len(data):
            raise IndexError
        text = data[at + 8 : at + 8 + length].decode()
        # The first three are written as they decode, with line breaks around <s> and </s>.
        yield Piece((UNK, BOS, EOS)[number] if number < 3 else text.replace(" ", SPACE), score)
        at, number = at + 8 + length, number + 1


def _of_model(data: bytes) -> Iterator[Piece]:
    """Of the protobuf ``ModelProto``: field 1, a message a piece, with its text (1) and score (2)."""
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            one = dict(_fields(value))
            text, score = one[1], one.get(2, b"\0\0\0\0")
            assert isinstance(text, bytes) and isinstance(score, bytes)
            yield Piece(text.decode(), struct.unpack("<f", score)[0])


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            if kind != 2:
                raise IndexError
            size, at = _varint(data, at)
        if at + size > len(data):
            raise IndexError
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _build(pieces: list[Piece]) -> tokenizers.Tokenizer:
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, score in pieces[3:]:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], (left, right)))
    has_bytes = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    model = models.BPE(
        vocab=ids, merges=[pair for *_, pair in sorted(merges)], unk_token=UNK, fuse_unk=True, byte_fallback=has_bytes
    )
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (UNK, BOS, EOS)])
    return inner
