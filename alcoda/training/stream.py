"""A safetensors file, written and read one tensor at a time: weights need not fit into memory twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write(
    path: Path, like: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write ``tensors``, which come in any order, each once.

    Args:
        like: a tensor of the shape and type of each, which may be on the meta device.

    Raises:
        ValueError: a tensor that is not in ``like``, or not like that; or one that did not come.
    """
    # The widest types first, so that every tensor begins at a multiple of its numbers' size.
    order = sorted(like, key=lambda name: (-like[name].element_size(), name))
    ends = dict(zip(order, accumulate(like[name].numel() * like[name].element_size() for name in order), strict=True))
    begins = {name: ends[name] - like[name].numel() * like[name].element_size() for name in order}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name in order:
        header[name] = {
            "dtype": NAMES[like[name].dtype],
            "shape": list(like[name].shape),
            "data_offsets": [begins[name], ends[name]],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    left = set(order)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for name, tensor in tensors:
            if name not in left or tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
                raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} was not announced so, or came before")
            left.remove(name)
            file.seek(start + begins[name])
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    if left:
        raise ValueError(f"{', '.join(sorted(left))} did not come")


def shapes(path: Path) -> dict[str, Tensor]:
    """Tensors of the meta device for those in a file."""
    types = {spelled: dtype for dtype, spelled in NAMES.items()}
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return {
            name: torch.empty(tuple(one.get_shape()), dtype=types[one.get_dtype()], device="meta")
            for name, one in slices.items()
        }


def read(path: Path, name: str) -> Tensor:
    """One tensor of a file, on the CPU."""
    # Opened anew each time: what was read of a mapped file counts as memory of the process while the file is open.
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)
