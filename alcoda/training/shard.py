"""Tensors that are held in parts: to disk and back (torch.distributed.checkpoint), and cut out of whole ones.

Shards are safetensors files, one a process, whose headers say which part of which tensor they hold. Any number of
processes reads them, one included, and nothing is unpickled. torch's modules of such tensors are loaded where one
is met: they take as long to load as half of torch, and most runs are of one process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alcoda.errors import RunError
from alcoda.files import sha256
from alcoda.training.processes import Processes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.tensor import DTensor

MODEL, OPTIMIZERS = "model.", "optimizers."
"""What names of tensors begin with: ``model.NAME``, ``optimizers.I.P.KEY`` (optimizer, parameter, and what it is)."""


def is_part(x: Tensor) -> TypeGuard[DTensor]:
    """Whether it is held in parts."""
    known = sys.modules.get("torch.distributed.tensor")  # loaded by whoever made one
    return known is not None and isinstance(x, known.DTensor)


def split(whole: Tensor, held: DTensor) -> DTensor:
    """``whole``, which is there on every process, in parts as ``held`` is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)


def is_sharded(model: nn.Module) -> bool:
    """Whether the model is held in parts."""
    return any(is_part(p) for p in model.parameters())


def like(whole: Tensor, held: Tensor) -> Tensor:
    """``whole``, which is there on every process, as ``held`` is: the same part of it, where that is of its shape."""
    return split(whole.to(held.device), held) if is_part(held) and whole.shape == held.shape else whole


def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy whole tensors into the parameters of those names, one after another."""
    held = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors:
            held[name].copy_(like(tensor, held[name]))


def write(folder: Path, tensors: dict[str, Tensor], processes: Processes) -> dict[str, dict[str, Any]]:
    """Write what each process holds of ``tensors`` into ``folder``; its files by name, with their sizes and hashes.

    Raises:
        RunError: the disk refuses.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    failed: RunError | None = None
    try:
        dcp.save(tensors, storage_writer=writer, process_group=processes.prompt)
    except CheckpointException as error:  # on all of them
        failed = RunError(
            f"a checkpoint in {folder.parent} could not be written: {_reason(error)}. What was there before is "
            "untouched: mend that (is the disk full?) and go on with --resume"
        )
    _end(failed, processes)
    mine = sorted(folder.glob(f"shard-{processes.rank + 1:05d}-*.safetensors"))
    about = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in mine}
    return {name: one for files in processes.gather(about) for name, one in files.items()}


def metadata(folder: Path, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of the whole tensors in ``folder`` whose names begin so; names without that beginning."""
    import torch.distributed.checkpoint as dcp

    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name.removeprefix(prefix): (about.size, about.properties.dtype)
        for name, about in found.items()
        if name.startswith(prefix) and isinstance(about, dcp.TensorStorageMetadata)
    }


def read(folder: Path, prefix: str, into: dict[str, Tensor], processes: Processes) -> None:
    """Fill ``into``, whole tensors or parts of them, from the shards in ``folder``.

    Raises:
        RunError: they cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    alone = processes.world_size == 1
    wanted: dict[str, Any] = {f"{prefix}{name}": tensor for name, tensor in into.items()}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    failed: RunError | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be, of one process
            dcp.load(wanted, storage_reader=reader, process_group=processes.prompt, no_dist=alone)
    except CheckpointException as error:  # on all of them
        failed = RunError(f"the checkpoint {folder} cannot be read: {_reason(error)}")
    _end(failed, processes)


def _end(failed: RunError | None, processes: Processes) -> None:
    with processes.together():  # said once
        if failed is not None:
            raise failed


def _reason(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {one[0]}" for rank, one in error.failures.items())


def pack(states: Sequence[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """State dicts of optimizers as their tensors, by name, and what is left."""
    tensors = {
        f"{OPTIMIZERS}{i}.{p}.{key}": tensor
        for i, state in enumerate(states)
        for p, of in state["state"].items()
        for key, tensor in of.items()
    }
    return tensors, [{**state, "state": {}} for state in states]


def unpack(states: Sequence[dict[str, Any]], tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """What `pack` took apart; names without `OPTIMIZERS`."""
    whole: list[dict[str, Any]] = [{**state, "state": {}} for state in states]
    for name, tensor in tensors.items():
        i, p, key = name.split(".", 2)
        whole[int(i)]["state"].setdefault(int(p), {})[key] = tensor
    for state in whole:
        state["state"] = dict(sorted(state["state"].items()))
    return whole


def held(optimizers: Sequence[Optimizer], name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An unfilled tensor for ``I.P.KEY`` as the optimizers hold it: in parts where it has the shape of a parameter that
    is; whole where none are given."""
    i, p, _ = name.split(".", 2)
    if optimizers:
        parameters = [one for group in optimizers[int(i)].param_groups for one in group["params"]]
        parameter = parameters[int(p)]
        if is_part(parameter) and parameter.shape == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)
