"""Their tokenizer: a tokenizer.json, and what else the folder says of where a text begins and ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from alcoda.data.chat_template import find_template
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import File, NoTokenizer, TokenizerConfig
from alcoda.errors import RunError, UsageError
from alcoda.files import read_json
from alcoda.interop.foreign import Foreign

TOKENIZER = "tokenizer.json"
_SAYS = ("tokenizer_config.json", "special_tokens_map.json")
_IDS = ("generation_config.json", "config.json")


def tokenizer_of(found: Foreign, eot: str | None = None) -> tuple[TokenizerConfig, Tokenizer]:
    """The tokenizer of a checkpoint, as a recipe has it, and itself; arguments and errors as of the two below."""
    given, vocab_size = found.tokenizer, found.model.vocab_size
    if given is None and found.folder.is_file():
        config: TokenizerConfig = NoTokenizer(vocab_size=vocab_size)
        return config, config.build()
    if given is None:
        config = find_tokenizer(found.folder, vocab_size, eot)
        return config, build_tokenizer(config, vocab_size, found.folder)
    if eot is not None:
        raise UsageError(f"eot {eot!r}: the tokenizer of {found.folder} says itself that it is {given.eot_text!r}")
    check_vocabulary(given, vocab_size, found.folder)
    return File(path=TOKENIZER, eot=given.eot_text, bos=None if given.bos == given.eot else given.bos_text), given


def template_of(found: Foreign) -> str | None:
    """The chat template of a checkpoint, if it has one."""
    return found.chat_template if found.folder.is_file() else find_template(found.folder)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """RunError where a tokenizer has ids that the model has not."""
    if tokenizer.vocab_size > vocab_size:
        raise RunError(
            f"the tokenizer of {path} has {tokenizer.vocab_size:,} tokens and the model {vocab_size:,}: one of the two "
            "is of another model"
        )


def find_tokenizer(folder: Path, vocab_size: int, eot: str | None = None) -> TokenizerConfig:
    """The tokenizer of a folder, as a recipe has it; token ids alone where there is no tokenizer.json.

    Args:
        vocab_size: of the model.
        eot: its end-of-text token; where None, what the folder says.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return NoTokenizer(vocab_size=vocab_size)
    layout = _mapping(path)
    eot = eot or _named(folder, "eos_token") or _by_id(folder, layout)
    bos = _begins(folder, layout)
    return File(path=str(path), eot=eot, bos=None if bos == eot else bos)


def build_tokenizer(config: TokenizerConfig, vocab_size: int, folder: Path) -> Tokenizer:
    """The tokenizer itself; RunError where it has ids that the model has not."""
    tokenizer = config.build()
    if tokenizer.vocab_size > vocab_size:
        raise RunError(
            f"{folder / TOKENIZER} has {tokenizer.vocab_size:,} tokens and the model of config.json {vocab_size:,}: "
            "one of the two files is of another model"
        )
    return tokenizer


def _mapping(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _named(folder: Path, name: str) -> str | None:
    """A token that the folder names, as a string or as ``{"content": ...}``."""
    for file in _SAYS:
        said = _mapping(folder / file).get(name)
        said = said.get("content") if isinstance(said, dict) else said
        if isinstance(said, str):
            return said
    return None


def _by_id(folder: Path, layout: dict[str, Any]) -> str | None:
    """The end-of-text token that the folder names by its id."""
    for file in _IDS:
        said = _mapping(folder / file).get("eos_token_id")
        said = said[0] if isinstance(said, list) and said else said
        for token in layout.get("added_tokens") or ():
            if isinstance(said, int) and token.get("id") == said:
                return token.get("content")
    return None


def _begins(folder: Path, layout: dict[str, Any]) -> str | None:
    """The token that is put before a text, if one is."""
    for part in _processors(layout.get("post_processor")):
        first = next(iter(part.get("single") or ()), None)
        if isinstance(first, dict) and "SpecialToken" in first:
            return first["SpecialToken"].get("id")
    return _named(folder, "bos_token") if _mapping(folder / _SAYS[0]).get("add_bos_token") is True else None


def _processors(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        inner: Iterable[Any] = part.get("processors") or ()
        for one in inner:
            yield from _processors(one)
