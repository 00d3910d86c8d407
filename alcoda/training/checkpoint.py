"""Checkpoints: weights as safetensors, the train state beside them, written whole or not at all.

Nothing is unpickled without ``weights_only``. A checkpoint lists its files with their sizes and hashes, so that a
truncated one is known before it is used.

A model that several processes hold in parts is written in parts (``shard.py``). Either kind is read by any number of
processes, to the bit: weights and optimizer do not know by how many they were written.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from alcoda.errors import RunError, UsageError
from alcoda.files import disk, read_json, sha256, whole_folder
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in
from alcoda.training import shard, stream
from alcoda.training.processes import ALONE, Processes

FORMAT, SHARDED, PACKED = "alcoda-checkpoint-1", "alcoda-checkpoint-sharded-1", "alcoda-weights-1"
"""Of a model that one file holds; that processes hold in parts; and weights alone, without a train state."""
WEIGHTS, TRAIN_STATE, MANIFEST = "model.safetensors", "train_state.pt", "checkpoint.json"
_NAME = re.compile(r"step_(\d{8})")


def save(
    folder: Path,
    train_step: int,
    model: RecurrentLM,
    train_state: dict[str, Any],
    about: dict[str, Any],
    processes: Processes = ALONE,
) -> Path:
    """Write ``folder/step_XXXXXXXX``; ``about`` goes into its manifest. All processes call it, and none goes on before
    the checkpoint is whole; of a model that each holds whole, the main one writes."""
    path = folder / f"step_{train_step:08d}"
    sharded = shard.is_sharded(model)
    with ExitStack() as held:
        with processes.together():
            mine = held.enter_context(whole_folder(path)) if processes.is_main else path
        temporary = processes.gather(mine)[0]
        files: dict[str, Any] = {}
        if sharded:
            tensors = {f"{shard.MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
            of_optimizers, left = shard.pack(train_state["optimizers"])
            train_state = {**train_state, "optimizers": left}
            files = shard.write(temporary, {**tensors, **of_optimizers}, processes)
        with processes.together(), disk(path):
            if processes.is_main:
                if not sharded:
                    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
                    _as_oserror(save_file, weights, temporary / WEIGHTS, metadata={"format": FORMAT})
                    files |= _about(temporary, WEIGHTS)
                _as_oserror(torch.save, train_state, temporary / TRAIN_STATE)
                files |= _about(temporary, TRAIN_STATE)
                kind = SHARDED if sharded else FORMAT
                manifest = {"format": kind, "train_step": train_step, **about, "files": files}
                (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            held.close()  # here the folder gets its name
    return path


def save_weights(
    folder: Path,
    train_step: int,
    like: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    about: dict[str, Any],
) -> Path:
    """Write ``folder/step_XXXXXXXX`` with weights alone: it can be read, and not gone on from.

    Args:
        like: a tensor of the shape and type of each, which may be on the meta device.
        weights: each once, in any order; none is held longer than it takes to write it.
    """
    path = folder / f"step_{train_step:08d}"
    with disk(path), whole_folder(path) as temporary:
        stream.write(temporary / WEIGHTS, like, weights, {"format": PACKED})
        manifest = {"format": PACKED, "train_step": train_step, **about, "files": _about(temporary, WEIGHTS)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return path


def _about(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}}


def _as_oserror(write: Any, value: Any, path: Path, **kwargs: Any) -> None:
    # Both libraries report a full disk in words of their own, without the number that the caller looks for.
    try:
        write(value, path, **kwargs)
    except (RuntimeError, SafetensorError) as error:
        text = str(error)
        if "No space left" in text or "os error 28" in text or shutil.disk_usage(path.parent).free < 1 << 20:
            raise OSError(28, "No space left on device") from error
        raise


def listed(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, oldest first."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name)] if folder.exists() else []
    return sorted(found)


def last_good(folder: Path) -> str:
    """A sentence on the checkpoint in ``folder`` to go on from."""
    good = listed(folder)
    return f"The last good checkpoint is {good[-1]}" if good else "There is no checkpoint yet"


def step_of(path: Path) -> int:
    """The train step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UsageError(f"{path} is not a checkpoint: its name is not step_ and eight digits")
    return int(match.group(1))


def check(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there in full; RunError otherwise."""
    try:
        return _manifest(path)
    except RunError as error:
        raise RunError(f"{error}.{_way_out(path)}") from None


def _manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).exists():
        raise RunError(f"{path} is not a checkpoint: it has no {MANIFEST}")
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, SHARDED, PACKED):
        raise RunError(f"{path} is not a checkpoint of this project: its {MANIFEST} does not say {FORMAT}")
    for name, about in _files(path, manifest).items():
        file = path / name
        found, expected = file.stat().st_size if file.exists() else None, about["bytes"]
        if found != expected:
            have = "is missing" if found is None else f"has {found:,} bytes of {expected:,}"
            raise RunError(f"the checkpoint {path} is damaged: {name} {have}")
    return manifest


def _files(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    files = manifest.get("files")
    names = set(files) if isinstance(files, dict) else set()
    weights, has_state = names - {TRAIN_STATE}, manifest["format"] != PACKED
    if (
        (TRAIN_STATE in names) is not has_state
        or not weights
        or (manifest["format"] != SHARDED and weights != {WEIGHTS})
    ):
        listed = f"{WEIGHTS} and {TRAIN_STATE}" if has_state else WEIGHTS
        raise RunError(f"the checkpoint {path} is damaged: {MANIFEST} does not list {listed}")
    return manifest["files"]


def digest(manifest: dict[str, Any]) -> str:
    """What tells the weights of a checkpoint apart: a hash of their file, or of the hashes of its shards."""
    hashes = [about["sha256"] for name, about in sorted(manifest["files"].items()) if name != TRAIN_STATE]
    return hashes[0] if manifest["format"] != SHARDED else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _way_out(path: Path) -> str:
    others = [p for p in listed(path.parent) if p != path and _is_whole(p)]
    if not others:
        return " There is no other whole checkpoint beside it: train again"
    return f" Remove that folder to go on from {others[-1].name}, the newest of the others that are whole"


def _is_whole(path: Path) -> bool:
    try:
        _manifest(path)
    except RunError:
        return False
    return True


def _read(path: Path, name: str, load: Callable[[Path], Any]) -> Any:
    """A file of a checkpoint, after a look at its hash: a damaged one of the right size would load as nonsense."""
    expected = check(path)["files"][name]["sha256"]
    try:
        if sha256(path / name) != expected:
            raise RunError("its bytes are not those that were written")
        return load(path / name)
    except Exception as error:  # torch raises half a dozen kinds here
        raise RunError(f"the checkpoint {path} is damaged: {name} cannot be read ({error}).{_way_out(path)}") from None


def _shards(path: Path, prefix: str, processes: Processes, make: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The tensors of a sharded checkpoint whose names begin so, after a look at the hashes, into what
    ``make(name, shape, dtype)`` gives for each. All processes call it."""
    found: dict[str, Tensor] = {}
    with processes.together():  # before any of them reads a header
        for name in (n for n in check(path)["files"] if n != TRAIN_STATE and processes.is_main):
            _read(path, name, lambda file: None)
    with processes.together():
        try:
            found = {name: make(name, *about) for name, about in shard.metadata(path, prefix).items()}
        except SafetensorError as error:
            raise RunError(f"the checkpoint {path} is damaged: {error}.{_way_out(path)}") from None
    shard.read(path, prefix, found, processes)
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's weights, whole, on the CPU."""
    if check(path)["format"] == SHARDED:
        return _shards(path, shard.MODEL, ALONE, _whole)
    return _read(path, WEIGHTS, load_file)


def _whole(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def load_weights(path: Path, model: RecurrentLM, processes: Processes = ALONE) -> None:
    """Fill ``model``, which processes may hold in parts, from a checkpoint, name by name. All of them call it."""
    want = model.state_dict()
    if check(path)["format"] == SHARDED:

        def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            # A tensor that does not fit is refused below; it is read as it is.
            return want[name] if name in want and want[name].shape == shape else _whole(name, shape, dtype)

        have = _shards(path, shard.MODEL, processes, place)
        with processes.together():
            _check_fit(path, have, want)
        return
    with processes.together():
        have = _read(path, WEIGHTS, stream.shapes)
        _check_fit(path, have, want)
    # Copying, not assigning: the model keeps its own storage (and whatever the optimizer holds of it). The largest
    # first, while there is least of the model: a tensor is there twice until it is copied.
    order = sorted(have, key=lambda name: -have[name].numel())
    shard.fill(model, ((name, stream.read(path / WEIGHTS, name)) for name in order))


def _check_fit(path: Path, have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    wrong = [f"missing {name}" for name in want if name not in have]
    wrong += [f"unknown {name}" for name in have if name not in want]
    wrong += [
        f"{name} is {tuple(have[name].shape)}, not {tuple(want[name].shape)}"
        for name in want
        if name in have and have[name].shape != want[name].shape
    ]
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise RunError(f"the checkpoint {path} does not fit the run's recipe: {shown}.{_way_out(path)}")


def load_train_state(path: Path, optimizers: Sequence[Optimizer] = (), processes: Processes = ALONE) -> dict[str, Any]:
    """Optimizer, data position and random state of a checkpoint. All processes call it.

    Args:
        optimizers: those that the state is for, which may hold theirs in parts; none: it comes whole.
    """
    with processes.together():
        if check(path)["format"] == PACKED:
            raise UsageError(
                f"{path} is packed, weights without a train state: begin a new run from it (--init), or resume the run "
                "that it was packed from"
            )
        state = _read(path, TRAIN_STATE, lambda file: torch.load(file, map_location="cpu", weights_only=True))
    if check(path)["format"] == SHARDED:
        tensors = _shards(path, shard.OPTIMIZERS, processes, lambda *about: shard.held(optimizers, *about))
    elif not optimizers:
        return state
    else:
        tensors, state["optimizers"] = shard.pack(state["optimizers"])
        tensors = {name.removeprefix(shard.OPTIMIZERS): tensor for name, tensor in tensors.items()}
        tensors = {
            name: shard.like(tensor, shard.held(optimizers, name, tensor.shape, tensor.dtype))
            for name, tensor in tensors.items()
        }
    return {**state, "optimizers": shard.unpack(state["optimizers"], tensors)}


def prune(folder: Path, keep_last: int, best_step: int | None) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and the best one."""
    for path in listed(folder)[:-keep_last]:
        if step_of(path) != best_step:
            shutil.rmtree(path)


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> RecurrentLM:
    """An unfilled model on ``device``; its linear maps are held in ``dtype`` (`hold_in`)."""
    with torch.device("meta"):
        model = RecurrentLM(config)
    if dtype != torch.float32:
        hold_in(model, dtype)
    # As `to_empty`, whose empty_like of a tensor on the meta device imports sympy: half a second.
    return model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
