"""Models of the Hugging Face hub, by name (extra ``hf``)."""

from __future__ import annotations

import re
from pathlib import Path

from alcoda import progress
from alcoda.errors import RunError, UsageError

FILES = ("*.json", "*.safetensors")
"""Nothing else is fetched: no code, no pickled weights."""


_NAME = r"[\w-][\w.-]*/[\w-][\w.-]*"


def is_hub_name(path: str | Path) -> bool:
    """Whether ``path`` is a string that names a model of the hub. It names a folder where the first part of it is one:
    what is missing there is looked for nowhere else."""
    return isinstance(path, str) and re.fullmatch(_NAME, path) is not None and not Path(path).parent.exists()


def find_folder(path: str | Path) -> Path:
    """The folder ``path``; or, where there is none, that of the hub's model of this name (``org/name``), fetched.

    Raises:
        UsageError: neither; or huggingface_hub is not installed.
        RunError: the hub cannot be reached, or has no such model.
    """
    if Path(path).exists():
        return Path(path)
    name = str(path)
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"there is no folder {path}: give one with config.json and safetensors, or the name of a model of the "
            "Hugging Face hub (org/name)"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            f"there is no folder {path}, and models of the hub need huggingface_hub: pip install huggingface_hub"
        ) from None
    try:
        with progress.bar(f"fetching {name}", None):
            return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # the library raises a dozen kinds, and those of its HTTP client
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(
            f"there is no folder {path}, and the model {name} could not be fetched from the hub: {why[0]}"
        ) from None
