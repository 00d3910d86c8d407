"""GGUF files, through transformers: it dequantises them, and what it makes of them is read like a folder of its own.

Needs the packages transformers, gguf and accelerate (``pip install 'alcoda[gguf]'``). Nothing is fetched.
"""

from __future__ import annotations

import io
import os
from contextlib import nullcontext, redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from torch import Tensor

from alcoda import progress
from alcoda.data.chat_template import alone
from alcoda.errors import RunError, UsageError, install
from alcoda.stderr import STDERR

MAGIC = b"GGUF"
NEEDS = ("transformers", "gguf", "accelerate")


def is_gguf(path: Path) -> bool:
    """Whether the file begins like one."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class Read(NamedTuple):
    """What a file holds.

    Attributes:
        weights: in float32, by transformers' names.
        tokenizer: if it can be made one of ours; with its chat template, if it has one.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    tokenizer: tokenizers.Tokenizer | None
    chat_template: str | None


def read(path: Path) -> Read:
    """A file through transformers.

    Raises:
        UsageError: a package is missing, or transformers does not read this architecture.
        RunError: the file is damaged.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{path} is a GGUF file, which is read through transformers, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: {install('gguf')}"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before it is imported: nothing is looked up
    transformers = import_module("transformers")
    how: Any = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    transformers.utils.logging.set_verbosity_error()
    progress.say(f"reading {path.name} through transformers {transformers.__version__}")
    try:
        # It draws bars of its own, which are of no use in a log.
        with nullcontext() if STDERR.isatty() else redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **how)
            tokenizer, template = _tokenizer(transformers, path, how)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UsageError(f"{path}: transformers {transformers.__version__} does not read it: {_first(error)}") from None
    except Exception as error:  # a file that is cut off gives half a dozen kinds
        raise RunError(f"{path} is damaged, or transformers cannot read it: {_first(error)}") from None
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Read(model.config.to_dict(), weights, tokenizer, template)


def _tokenizer(transformers: Any, path: Path, how: Any) -> tuple[tokenizers.Tokenizer | None, str | None]:
    try:
        made = transformers.AutoTokenizer.from_pretrained(str(path.parent), **how)
    except Exception:  # a model without a tokenizer that it knows: it is read for token ids
        return None, None
    inner, template = getattr(made, "backend_tokenizer", None), getattr(made, "chat_template", None)
    if not isinstance(inner, tokenizers.Tokenizer):
        return None, None
    return inner, alone(template, made.special_tokens_map) if isinstance(template, str) else None


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
