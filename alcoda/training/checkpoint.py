"""Checkpoints: weights as safetensors, the train state beside them, written whole or not at all.

Nothing is unpickled without ``weights_only``. A checkpoint lists its files with their sizes and hashes, so that a
truncated one is known before it is used.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from alcoda.errors import RunError, UsageError
from alcoda.files import read_json, sha256, whole_folder
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM

FORMAT = "alcoda-checkpoint-1"
WEIGHTS, TRAIN_STATE, MANIFEST = "model.safetensors", "train_state.pt", "checkpoint.json"
_NAME = re.compile(r"step_(\d{8})")


def save(folder: Path, train_step: int, model: RecurrentLM, train_state: dict[str, Any], about: dict[str, Any]) -> Path:
    """Write ``folder/step_XXXXXXXX``; ``about`` goes into its manifest."""
    path = folder / f"step_{train_step:08d}"
    with whole_folder(path) as temporary:
        weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        _as_oserror(save_file, weights, temporary / WEIGHTS, metadata={"format": FORMAT})
        _as_oserror(torch.save, train_state, temporary / TRAIN_STATE)
        files = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": sha256(temporary / name)}
            for name in (WEIGHTS, TRAIN_STATE)
        }
        manifest = {"format": FORMAT, "train_step": train_step, **about, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return path


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
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
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
    if not isinstance(files, dict) or files.keys() != {WEIGHTS, TRAIN_STATE}:
        raise RunError(f"the checkpoint {path} is damaged: {MANIFEST} does not list {WEIGHTS} and {TRAIN_STATE}")
    return files


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


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's weights, on the CPU."""
    return _read(path, WEIGHTS, load_file)


def load_weights(path: Path, model: RecurrentLM) -> None:
    """Fill ``model`` from a checkpoint, name by name."""
    have, want = read_weights(path), model.state_dict()
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
    # Copying, not assigning: the model keeps its own storage (and whatever the optimizer holds of it).
    model.load_state_dict(have)


def load_train_state(path: Path) -> dict[str, Any]:
    """Optimizer, data position and random state of a checkpoint."""
    return _read(path, TRAIN_STATE, lambda file: torch.load(file, map_location="cpu", weights_only=True))


def prune(folder: Path, keep_last: int, best_step: int | None) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and the best one."""
    for path in listed(folder)[:-keep_last]:
        if step_of(path) != best_step:
            shutil.rmtree(path)


def build(config: ModelConfig, device: torch.device) -> RecurrentLM:
    """An unfilled model on ``device``."""
    with torch.device("meta"):
        model = RecurrentLM(config)
    return model.to_empty(device=device)
