"""Their weights, one tensor at a time: a folder of safetensors, sharded or not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alcoda.errors import RunError, UsageError, some
from alcoda.files import read_json, sha256
from alcoda.training import stream

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class About(NamedTuple):
    """A tensor that was not read. ``dtype`` as safetensors spells it: F32, BF16, ..."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class Tensors:
    """The tensors of a folder; none is read before it is asked for, and none is kept.

    Attributes:
        about: shape, dtype and file of each, by name.

    Raises:
        UsageError: no safetensors there.
        RunError: damaged ones, or shards that are not those which the index lists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files, listed = _files(folder)
        self.about: dict[str, About] = {}
        for file in self.files:
            self.about |= _headers(file)
        if listed is not None and (gone := [n for n, file in listed.items() if _not_in(self.about, n, file)]):
            raise RunError(
                f"{folder / INDEX} lists {some(gone)}, and the files that it names do not hold them: the folder is not "
                "whole; copy it again"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        file = self.about[name].file
        try:
            return stream.read(file, name)
        except (SafetensorError, OSError) as error:
            raise RunError(f"{file} is damaged: {name} cannot be read ({error}); copy it again") from None

    @property
    def sha256(self) -> str:
        """What tells the weights apart: the hash of their file, or of the hashes of the shards."""
        hashes = [sha256(file) for file in self.files]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _not_in(about: dict[str, About], name: str, file: str) -> bool:
    return name not in about or about[name].file.name != file


def _files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of the weights, and which tensor is in which, if an index says so."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    if not (folder / INDEX).is_file():
        found = sorted(p.name for p in folder.iterdir() if p.is_file())
        if pickled := [name for name in found if name.endswith(PICKLED)]:
            raise UsageError(
                f"{folder} has pickled weights alone ({some(pickled)}), which can run code when they are read: "
                f"safetensors are needed ({WEIGHTS}, or shards with {INDEX})"
            )
        raise UsageError(f"{folder} has no weights: {WEIGHTS}, or shards with {INDEX}, is needed; it has {some(found)}")
    index = read_json(folder / INDEX)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise RunError(f"{folder / INDEX} is damaged: it has no weight_map of tensors to files")
    names = sorted(set(listed.values()))
    if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise UsageError(
            f"{folder / INDEX} names {some(strange)}: names of safetensors files in that folder are needed"
        )
    if gone := [name for name in names if not (folder / name).is_file()]:
        raise RunError(f"{folder} lacks {len(gone)} of its {len(names)} shards: {some(gone)}; copy it again")
    return [folder / name for name in names], listed


def _headers(file: Path) -> dict[str, About]:
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: About(tuple(s.get_shape()), s.get_dtype(), file) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise RunError(f"{file} is damaged: it cannot be read ({error}); copy it again") from None
