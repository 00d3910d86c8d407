"""A folder (or file) of another project: recognised, checked against its layout, and read parameter by parameter."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alcoda import progress
from alcoda.config import validate
from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import RunError, UsageError, some
from alcoda.files import read_json
from alcoda.interop.hub import is_hub_name
from alcoda.interop.layout import MOST, Layout, Take
from alcoda.interop.tensors import FLOATS, PICKLED, Tensors
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.training.run import RunFolder

CONFIG = "config.json"


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another project that fits its layout.

    Attributes:
        folder: where it lies; the file itself, of one that is a single file.
        layout, config: whose it is, and what its config.json says.
        model: the same architecture as a point of our design space.
        takes: where each parameter of ours comes from.
        tensors: their weights, unread.
        tokenizer, chat_template: of a single file, if it has them; those of a folder are other files there.
    """

    folder: Path
    layout: Layout
    config: dict[str, Any]
    model: ModelConfig
    takes: dict[str, Take]
    tensors: Tensors
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None

    def dtype(self, name: str) -> torch.dtype:
        """What a parameter of ours is held in over there."""
        return FLOATS[self.tensors.about[self.takes[name].name].dtype]

    def weight(self, name: str) -> Tensor:
        """One parameter of ours, as it is held over there, on the CPU.

        Raises:
            RunError: a damaged file, or numbers that are none.
        """
        take = self.takes[name]
        tensor = self.tensors.read(take.name)
        mine = tensor if take.change is None else take.change(tensor)
        check_finite(self.folder, take.name, mine)
        return mine

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of ours with its name, one at a time, those of the largest tensors first; with a bar.

        Raises:
            RunError: as `weight`.
        """
        with progress.bar(f"reading {self.folder.name}", len(self.takes)) as advance:
            # A tensor is there twice until it is copied: the large ones had better be while there is little else.
            for name in sorted(
                self.takes, key=lambda name: -math.prod(self.tensors.about[self.takes[name].name].shape)
            ):
                yield name, self.weight(name)
                advance()


def open_foreign(path: str | Path, layouts: Sequence[Layout]) -> Foreign:
    """The checkpoint in a folder with config.json and safetensors, checked: every tensor of theirs is used once or is
    no weight, every parameter of ours is filled, and all shapes are right. No weights are read for it, but for those of
    tensors that are there twice.

    Raises:
        UsageError: no such checkpoint, or one that we cannot express.
        RunError: damaged files, or weights that are not what the config says.
    """
    folder = Path(path)
    return fit(folder, read_config(folder), Tensors(folder), layouts)


def fit(folder: Path, config: dict[str, Any], tensors: Tensors, layouts: Sequence[Layout]) -> Foreign:
    """As `open_foreign`, of a config and tensors wherever they come from."""
    layout = find_layout(folder, config, layouts)
    try:
        model = validate(ModelConfig, layout.model(config), f"the config of {folder}")
    except UsageError as error:
        raise UsageError(f"{_said(folder)} (layout {layout.name}): {error}") from None
    _check_size(folder, model, tensors)
    found = Foreign(folder, layout, config, model, layout.takes(model, config), tensors)
    check(found)
    return found


def _check_size(folder: Path, model: ModelConfig, tensors: Tensors) -> None:
    """RunError where a model is far larger than its weights: to spell out all its tensors would take for ever."""
    n_layers, n_tensors, width = model.n_prelude + model.n_core + model.n_coda, len(tensors.about), model.shape
    if n_layers > n_tensors or width.n_heads * width.d_head > MOST:
        raise RunError(
            f"the weights in {folder} do not fit its {CONFIG}, which describes {n_layers:,} layers with "
            f"{width.n_heads:,} heads of width {width.d_head:,}: {n_tensors:,} tensors were found"
        )


def _said(path: Path) -> Path:
    """What says which model it is."""
    return path if path.is_file() else path / CONFIG


def is_foreign(path: str | Path) -> bool:
    """Whether ``path`` is a file of weights, a folder of another project or what is left of one, or a name of the hub's
    (`is_hub_name`); no run of ours."""
    folder = Path(path)
    if is_hub_name(path):
        return True
    if folder.is_file():
        return folder.suffix not in (".yaml", ".yml", ".json")  # a recipe, most likely
    if not folder.is_dir() or RunFolder(folder).exists:
        return False
    return (folder / CONFIG).is_file() or any(p.suffix in (".safetensors", *PICKLED) for p in folder.iterdir())


def read_config(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says; UsageError or RunError where it says nothing."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: one with {CONFIG} and safetensors is needed")
    if not (folder / CONFIG).is_file():
        found = sorted(p.name for p in folder.iterdir())
        raise UsageError(
            f"{folder} has no {CONFIG}, which says what its weights are; it has {some(found) or 'no files'}"
        )
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise RunError(f"{folder / CONFIG} is damaged: it holds no mapping")
    return config


def find_layout(folder: Path, config: dict[str, Any], layouts: Sequence[Layout]) -> Layout:
    """The layout that a config.json is of; UsageError where there is none, with those that there are."""
    kind, named = config.get("model_type"), config.get("architectures") or []
    if not isinstance(kind, str | None) or not isinstance(named, list):
        raise UsageError(
            f"{_said(folder)}: model_type is {kind!r} and architectures {named!r}: a name and a list of names are "
            "needed"
        )
    found = next((layout for layout in layouts if layout.recognises(config)), None)
    if found is None:
        known = "; ".join(f"{layout.name} (model_type {' or '.join(layout.model_types)})" for layout in layouts)
        code = f" The code that it names ({CONFIG}: auto_map) is never run." if "auto_map" in config else ""
        raise UsageError(
            f"{_said(folder)}: model_type {config.get('model_type')!r}, architectures "
            f"{config.get('architectures')!r}: this architecture is not known here. Known: {known}.{code}"
        )
    return found


def check(found: Foreign) -> None:
    """RunError where the weights are not those of the config."""
    layout, about = found.layout, found.tensors.about
    with torch.device("meta"):
        ours = {name: tuple(tensor.shape) for name, tensor in RecurrentLM(found.model).state_dict().items()}
    if ours.keys() != found.takes.keys():
        raise AssertionError(
            f"layout {layout.name}: its takes are not our parameters: {ours.keys() ^ found.takes.keys()}"
        )
    copies = {
        name: of for name, of in layout.copies(found.model, found.config).items() if name in about and of in about
    }
    wanted = {take.name for take in found.takes.values()}
    missing = sorted(wanted - about.keys())
    extra = [name for name in sorted(about.keys() - wanted - copies.keys()) if not _matches(name, layout.ignored)]
    wrong = [
        f"{name} is {list(about[name].shape)} {about[name].dtype}: {trouble}"
        for name in sorted(wanted & about.keys())
        if (trouble := _trouble(found, name, ours))
    ]
    lines = [
        f"{title} ({len(names)}): {some(names)}"
        for title, names in (("missing", missing), ("not expected", extra), ("wrong", wrong))
        if names
    ]
    if lines:
        m = found.model
        raise RunError(
            f"the weights in {found.folder} do not fit its {CONFIG}, which describes {layout.name} with "
            f"{m.n_prelude} + {m.n_core} + {m.n_coda} layers of width {m.d_model}, {m.n_heads} heads, MLP width "
            f"{m.shape.d_ff}, a vocabulary of {m.vocab_size:,} ({len(wanted)} tensors; {len(about)} were found):\n  "
            + "\n  ".join(lines)
        )
    for name, of in copies.items():
        copy, original = found.tensors.read(name), found.tensors.read(of)
        if not torch.equal(copy, original):
            check_finite(found.folder, name, copy)  # NaN equals nothing
            check_finite(found.folder, of, original)
            raise RunError(
                f"{found.folder}: by its {CONFIG} {name} is {of} again (tied), and the weights differ: one of the two "
                "files is of another model"
            )


LARGEST = torch.finfo(torch.bfloat16).max
"""What every type that weights are held in here can say."""


def check_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """RunError where a tensor holds what is no number, or one too large for bf16. One pass over it, no copy."""
    low, high = (float(x) for x in torch.aminmax(tensor))  # NaN where one is
    if low >= -LARGEST and high <= LARGEST:
        return
    n_nan = int(tensor.isnan().sum())
    n_large = int((tensor.to(torch.promote_types(tensor.dtype, torch.float32)).abs() > LARGEST).sum())
    raise RunError(
        f"the weights in {folder}: of the {tensor.numel():,} numbers of {name} {n_nan:,} are NaN and {n_large:,} "
        "infinite or too large for float32. Such a model predicts nothing: copy the folder again, or take an earlier "
        "checkpoint"
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _trouble(found: Foreign, theirs: str, ours: dict[str, tuple[int, ...]]) -> str | None:
    """What is wrong with a tensor of theirs, for a message; None where nothing is."""
    shape, dtype, _ = found.tensors.about[theirs]
    if dtype not in FLOATS:
        return f"numbers of type {', '.join(FLOATS)} are needed (quantised weights are not read)"
    users = [(name, take.change) for name, take in found.takes.items() if take.name == theirs]
    sizes: Counter[str] = Counter()
    for name, change in users:
        whole = torch.empty(shape, dtype=FLOATS[dtype], device="meta")
        try:
            made = tuple((whole if change is None else change(whole)).shape)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"{name} {list(ours[name])} cannot be made of it ({str(error).splitlines()[0]})"
        if made != ours[name]:
            of_it = "" if change is None else f" gives {list(made)}, and"
            return f"{of_it} {list(ours[name])} is expected for {name}".strip()
        sizes[theirs] += math.prod(made)
    used, there = sizes[theirs], math.prod(shape)
    if used != there:
        return f"{', '.join(name for name, _ in users)} use {used:,} of its {there:,} numbers"
    return None
