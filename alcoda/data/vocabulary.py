"""The axis ``tokenizer`` of a data config: bytes, a BPE vocabulary trained on the training text, or a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import tokenizers
from pydantic import field_validator
from tokenizers import decoders, models, pre_tokenizers, trainers

from alcoda.config import Choice, PositiveInt
from alcoda.data.corpora import END_OF_TEXT
from alcoda.data.token_ids import TokenIds
from alcoda.data.tokenizer import Tokenizer, byte_alphabet

_SMALLEST = 257


class TokenizerConfig(Choice, axis="tokenizer"):
    """How text becomes tokens."""

    trained: ClassVar[bool] = False
    """Whether `build` needs text."""
    given: ClassVar[bool] = False
    """Whether it was made elsewhere, so that a file of tokens may have been made with it."""

    def build(self, documents: Iterable[str] = ()) -> Tokenizer:
        """The tokenizer; ``documents`` are what a trained one is trained on."""
        raise NotImplementedError

    def saved(self, path: Path) -> Tokenizer:
        """The tokenizer again that was built, saved in ``path``."""
        return Tokenizer.load(path, kind=self.kind)


class Byte(TokenizerConfig):
    """One token a byte of UTF-8: token ``1 + byte``, and 0 for the end of a text. No training, 257 tokens."""

    kind: Literal["byte"] = "byte"

    def build(self, documents: Iterable[str] = ()) -> Tokenizer:
        byte_to_char = {byte: char for char, byte in byte_alphabet().items()}
        vocab = {END_OF_TEXT: 0} | {byte_to_char[byte]: 1 + byte for byte in range(256)}
        inner = _byte_level(models.BPE(vocab=vocab, merges=[]))
        return Tokenizer(inner, END_OF_TEXT, self.kind)


class Bpe(TokenizerConfig):
    """Byte-level byte-pair encoding, trained on documents of the train split. ``<|endoftext|>`` is token 0."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: PositiveInt = 4096
    """Tokens wanted, at least 257. A small corpus gives fewer."""
    min_frequency: PositiveInt = 2
    """A pair of tokens that is met less often is not merged."""
    train_bytes: PositiveInt = 20_000_000
    """Bytes of text that it is trained on, at most; the documents are drawn from the whole train split."""

    trained: ClassVar[bool] = True

    @field_validator("vocab_size")
    @classmethod
    def _holds_bytes(cls, value: int) -> int:
        if value < _SMALLEST:
            raise ValueError(f"a byte-level vocabulary has at least {_SMALLEST} tokens: 256 bytes and {END_OF_TEXT}")
        return value

    def build(self, documents: Iterable[str] = ()) -> Tokenizer:
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(documents, trainer)
        return Tokenizer(inner, END_OF_TEXT, self.kind)


class File(TokenizerConfig):
    """A ``tokenizer.json`` of the tokenizers or transformers libraries."""

    kind: Literal["file"] = "file"
    path: str
    """The file, or a folder with a ``tokenizer.json`` in it."""
    eot: str | None = None
    """Its end-of-text token, where it is none of ``<|endoftext|> <|end_of_text|> </s> <eos>``."""
    bos: str | None = None
    """The token that a document begins with, where that is not its end-of-text token."""

    given: ClassVar[bool] = True

    def build(self, documents: Iterable[str] = ()) -> Tokenizer:
        return self.saved(Path(self.path))

    def saved(self, path: Path) -> Tokenizer:
        return Tokenizer.load(path, self.eot, self.kind, self.bos)


class NoTokenizer(TokenizerConfig):
    """None: the model takes token ids and gives them (an imported checkpoint that came without)."""

    kind: Literal["none"] = "none"
    vocab_size: PositiveInt
    """Ids that the model has."""

    def build(self, documents: Iterable[str] = ()) -> Tokenizer:
        return TokenIds(self.vocab_size)

    def saved(self, path: Path) -> Tokenizer:
        return self.build()


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner
