"""What exit rules read from files (safetensors): recorded depths, and a probe's weights."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from alcoda.errors import RunError, UsageError
from alcoda.files import disk

CodaKeys = Literal["at_exit", "per_loop"]
"""Coda keys are written once, at the exit; or after every loop, those of a token's last loop standing for all deeper
ones, as a rule that looks at logits must."""

Label = Literal["argmax_changes", "loss_falls"]

_HASHED = 1 << 24
"""Numbers that are hashed at one time."""


@dataclass(frozen=True)
class Trace:
    """Depths at which tokens left the loop, to be replayed.

    Attributes:
        depths_BT: loops of each token; 0 for padding.
        n_loops: that could have run.
        coda_keys: of the measurement: the same depths with other coda keys are another measurement.
    """

    depths_BT: Tensor
    n_loops: int
    coda_keys: CodaKeys

    def save(self, path: str | Path) -> None:
        """Write it as safetensors, whole or not at all."""
        _save(Path(path), {"depths": self.depths_BT}, {"n_loops": str(self.n_loops), "coda_keys": self.coda_keys})

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """What `save` wrote.

        Raises:
            UsageError: no such file, or not a trace.
            RunError: a damaged file.
        """
        tensors, said = _load(Path(path), "a trace of depths", ("depths",), ("n_loops", "coda_keys"))
        depths_BT, n_loops = tensors["depths"], said["n_loops"]
        is_trace = depths_BT.dim() == 2 and depths_BT.dtype == torch.long and n_loops.isdecimal()
        if not is_trace or said["coda_keys"] not in get_args(CodaKeys):
            raise UsageError(f"{path} is no trace of depths: whole numbers [rows, tokens], n_loops, known coda_keys")
        if depths_BT.numel() and not 0 <= int(depths_BT.min()) <= int(depths_BT.max()) <= int(n_loops):
            raise UsageError(f"{path} is no trace of depths: they must be 0 to its n_loops={n_loops}")
        return cls(depths_BT, int(n_loops), said["coda_keys"])  # pyrefly: ignore


@dataclass(frozen=True)
class ProbeWeights:
    """A logistic regression on the RMS-normed state, with a bias for each loop (papers.md 3.2).

    Attributes:
        weight_D, bias_R: of the logit that ``label`` is true.
        label: what it predicts: the argmax changes in a later loop; or, the control, a later loop lowers the loss by
            ``delta`` nats.
        delta: of the latter.
        model: `fingerprint` of the model that it was fitted to.
    """

    weight_D: Tensor
    bias_R: Tensor
    label: Label
    model: str
    delta: float = 0.0

    def save(self, path: str | Path) -> None:
        """Write it as safetensors, whole or not at all."""
        about = {"label": self.label, "model": self.model, "delta": repr(self.delta)}
        _save(Path(path), {"weight": self.weight_D, "bias": self.bias_R}, about)

    @classmethod
    def load(cls, path: str | Path) -> ProbeWeights:
        """What `save` wrote; errors as `Trace.load`."""
        tensors, said = _load(Path(path), "a probe", ("weight", "bias"), ("label", "model", "delta"))
        try:
            delta = float(said["delta"])
        except ValueError:
            delta = float("nan")
        if not math.isfinite(delta) or said["label"] not in get_args(Label):
            raise UsageError(
                f"{path} is no probe: a label ({', '.join(get_args(Label))}) and a number delta are needed"
            )
        return cls(tensors["weight"], tensors["bias"], said["label"], said["model"], delta)  # pyrefly: ignore


def fingerprint(model: nn.Module | Mapping[str, Tensor]) -> str:
    """SHA-256 of a model's weights (or of those that are given), by name, rounded to bf16: so that a model held in
    bf16, or packed, is the same. A model whose weights are gone may have it as its ``fingerprint``."""
    known = getattr(model, "fingerprint", None)
    if isinstance(known, str):
        return known
    digest = hashlib.sha256()
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        for part in weight.detach().contiguous().flatten().split(_HASHED):  # no second copy of a large one
            digest.update(part.to("cpu", torch.bfloat16).view(torch.int16).numpy())
    return digest.hexdigest()


def _save(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk(path):
            save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, temporary, about)
            temporary.replace(path)
    except SafetensorError as error:
        raise RunError(f"{path} could not be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _load(
    path: Path, what: str, names: tuple[str, ...], about: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file; {what} is needed there")
    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            held = set(file.keys()) | set(said)
            missing = [name for name in (*names, *about) if name not in held]
            if missing:
                raise UsageError(f"{path} is not {what}: it has no {', '.join(missing)}")
            return {name: file.get_tensor(name) for name in names}, said
    except SafetensorError as error:
        raise RunError(f"{path} cannot be read as {what}: {error}") from None
