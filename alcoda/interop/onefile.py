"""Checkpoints that are one file: GGUF, and llama2.c's. Their tokenizers lie in the file, or beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tokenizers
from torch import Tensor

from alcoda.data.tokenizer import COMMON_EOTS, Tokenizer
from alcoda.errors import UsageError, some
from alcoda.interop import gguf, llama2c, sentencepiece
from alcoda.interop.foreign import Foreign, fit
from alcoda.interop.layouts import LAYOUTS
from alcoda.interop.tensors import FLOATS, About, Tensors

_NAMES = {dtype: name for name, dtype in FLOATS.items()}


class Held(Tensors):
    """Tensors that are in memory, or mapped into it, already."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.folder, self.files, self._held = path.parent, [path], tensors
        self.about = {
            name: About(tuple(x.shape), _NAMES.get(x.dtype, str(x.dtype)), path) for name, x in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._held[name]


def open_file(path: Path) -> Foreign:
    """The checkpoint in a file, checked as `alcoda.interop.foreign.open_foreign` checks a folder. Its tokenizer is that
    of the GGUF file, or what lies beside one of llama2.c (`beside`).

    Raises:
        UsageError: another kind of file, or one that we cannot express.
        RunError: a damaged file.
    """
    if gguf.is_gguf(path):
        config, tensors, inner, template = gguf.read(path)
        tokenizer = None if inner is None else _of_gguf(inner, config, path)
        found = fit(path, config, Held(path, tensors), LAYOUTS)
        return replace(found, tokenizer=tokenizer, chat_template=template)
    if path.suffix == ".bin" or llama2c.is_llama2c(path):
        config, tensors = llama2c.read(path)
        return replace(fit(path, config, Held(path, tensors), LAYOUTS), tokenizer=beside(path))
    raise UsageError(
        f"{path} is neither a GGUF file nor a checkpoint of llama2.c (version 0): give one of these, or a folder with "
        "config.json and safetensors"
    )


def _of_gguf(inner: tokenizers.Tokenizer, config: dict[str, object], path: Path) -> Tokenizer:
    named = next((name for name in COMMON_EOTS if inner.token_to_id(name) is not None), None)
    of_config = config.get("eos_token_id")
    eot = named if named is not None or not isinstance(of_config, int) else inner.id_to_token(of_config)
    if eot is None:
        raise UsageError(f"{path}: its tokenizer has none of the end-of-text tokens {', '.join(COMMON_EOTS)}")
    first = inner.encode("").ids  # what it puts before a text, if it does
    return Tokenizer(inner, eot, "file", inner.id_to_token(first[0]) if first else None)


def beside(path: Path) -> Tokenizer | None:
    """The one vocabulary in the folder of a llama2.c checkpoint: ``tokenizer.json``, ``tok*.bin`` or ``*.model``.

    Raises:
        UsageError: there are several, or it is no vocabulary.
    """
    if (path.parent / "tokenizer.json").is_file():
        return Tokenizer.load(path.parent / "tokenizer.json")
    found = sorted({*path.parent.glob("tok*.bin"), *path.parent.glob("*.model")} - {path})
    if len(found) > 1:
        raise UsageError(
            f"{path.parent} has several vocabularies ({some([p.name for p in found])}): leave the one of {path.name} "
            "there alone"
        )
    return sentencepiece.read(found[0]) if found else None
