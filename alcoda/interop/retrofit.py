"""A dense model made recurrent: some of its layers become the prelude, some the core, some the coda.

After "retrofitted recurrence" (McLeish et al., arXiv 2511.07384): the first layers are the prelude, the last ones the
coda, some of the middle the core, and the others are dropped. The injection is ``W [h; e]`` with ``W = [I | 0]``, the
first state the prelude's output, and the update overwrites: so the model at one loop is the source without the layers
that were dropped, and the source itself where none were. Which layers, and to start from the identity, is ours
(docs/retrofit.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alcoda.errors import RunError, UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.recurrence.inject import ConcatModule

TOLERANCE = 1e-5
"""Of logits in fp32 at one loop, relative to the largest: what they may differ from the source's by."""
INJECT = {"kind": "concat", "start": "identity"}


@dataclass(frozen=True)
class Split:
    """Which layers of the source go where, from 0; ``dropped`` go nowhere."""

    prelude: range
    core: range
    coda: range
    dropped: tuple[int, ...]

    @property
    def kept(self) -> list[int]:
        """In their order."""
        return [*self.prelude, *self.core, *self.coda]

    def to_json(self) -> dict[str, list[int]]:
        return {name: list(layers) for name, layers in vars(self).items()}

    def __str__(self) -> str:
        return "; ".join(f"{name} {layers}" for name, layers, _ in self.rows())

    def rows(self) -> list[list[str]]:
        """For a table: stage, layers of the source, how many."""
        stages = [(name, list(layers)) for name, layers in vars(self).items()]
        return [[name, spans(layers), str(len(layers))] for name, layers in stages]


def spans(layers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as "0-2, 5"; "-" for none."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][-1] + 1:
            found[-1].append(layer)
        else:
            found.append([layer])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in found) or "-"


def split(n_layers: int, prelude: int, core: int, coda: int, core_from: int | None = None) -> Split:
    """The first ``prelude`` layers, the last ``coda``, and ``core`` layers from ``core_from`` (None: right before the
    coda).

    Raises:
        UsageError: more layers than there are, no core, or a core that reaches into prelude or coda.
    """
    for name, n in (("prelude", prelude), ("coda", coda)):
        if n < 0:
            raise UsageError(f"--{name} {n}: 0 layers or more")
    middle = n_layers - prelude - coda
    if core < 1:
        raise UsageError(
            f"--core {core}: the core is what loops, and needs 1 layer or more"
            + (f" (1 to {middle} with prelude {prelude} and coda {coda})" if middle > 0 else "")
        )
    if core > middle:
        raise UsageError(
            f"--prelude {prelude} --core {core} --coda {coda} are {prelude + core + coda} layers, and the source has "
            f"{n_layers}: their sum is to be {n_layers} or less"
        )
    last = n_layers - coda - core
    first = last if core_from is None else core_from
    if not prelude <= first <= last:
        raise UsageError(
            f"--core-from {first}: a core of {core} layers between prelude and coda begins at layer {prelude} to {last}"
        )
    kept = {*range(prelude), *range(first, first + core), *range(n_layers - coda, n_layers)}
    dropped = tuple(layer for layer in range(n_layers) if layer not in kept)
    return Split(range(prelude), range(first, first + core), range(n_layers - coda, n_layers), dropped)


def check_dense(source: ModelConfig) -> None:
    """UsageError for a source that loops already, or has a memory."""
    if source.is_recurrent:
        raise UsageError(
            f"the source is recurrent already (n_core={source.n_core}): a dense model is needed. To train it on, "
            "alcoda train --init"
        )
    if source.memory.carries:
        raise UsageError(f"the source has a memory ({source.memory.kind!r}), which is not carried over to a loop")


def recurrent(source: ModelConfig, layers: Split, loops: int) -> ModelConfig:
    """The model that a dense one becomes, for so many loops."""
    if loops < 1:
        raise UsageError(f"--loops {loops}: at least 1")
    sizes = {"n_prelude": len(layers.prelude), "n_core": len(layers.core), "n_coda": len(layers.coda)}
    return source.model_copy(update={**sizes, "n_loops": loops, "inject": INJECT})


def without(source: ModelConfig, layers: Split) -> ModelConfig:
    """The dense model of the layers that are kept."""
    return source.model_copy(update={"n_prelude": len(layers.kept), "n_coda": 0})


def dense_weights(source: ModelConfig, weights: Mapping[str, Tensor], kept: list[int]) -> dict[str, Tensor]:
    """Of some layers of a dense model, in a row in its prelude."""
    place = {layer: f"prelude.layers.{i}" for i, layer in enumerate(kept)}
    return _placed(source, weights, place)


def retrofit_weights(source: ModelConfig, weights: Mapping[str, Tensor], layers: Split) -> dict[str, Tensor]:
    """By the names of the recurrent model, without the injection's."""
    stages = (("prelude", layers.prelude), ("core.stack", layers.core), ("coda", layers.coda))
    place = {layer: f"{stage}.layers.{i}" for stage, found in stages for i, layer in enumerate(found)}
    return _placed(source, weights, place)


def _placed(source: ModelConfig, weights: Mapping[str, Tensor], place: Mapping[int, str]) -> dict[str, Tensor]:
    """With each layer under another name; layers without one are left out."""
    first = {"prelude": 0, "coda": source.n_prelude}
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stage, _, rest = name.partition(".layers.")
        if stage not in first or not rest:
            found[name] = tensor
            continue
        layer, _, of_block = rest.partition(".")
        to = place.get(first[stage] + int(layer))
        if to is not None:
            found[f"{to}.{of_block}"] = tensor
    return found


def build(config: ModelConfig, weights: Mapping[str, Tensor]) -> RecurrentLM:
    """A model in evaluation mode that holds these tensors themselves; what is not among them starts as it starts.

    Raises:
        UsageError: a tensor too many or too few: a choice that gives single layers something of their own.
    """
    with torch.device("meta"):
        model = RecurrentLM(config)
    fresh = {name: p for name, p in model.named_parameters() if name not in weights}
    strange = sorted({name for name in fresh if not name.startswith("inject.")} | (weights.keys() - _names(model)))
    if strange:
        raise UsageError(
            f"the layers of the source are not all of one kind ({', '.join(strange[:5])}): with layers dropped they "
            "would not be what they were. Keep all of them (prelude + core + coda = its layers)"
        )
    model.load_state_dict(dict(weights), strict=False, assign=True)
    if fresh:
        assert isinstance(model.inject, ConcatModule)
        model.inject.to_empty(device=model.embed.weight.device)
        with torch.no_grad():
            model.inject.init_special()
    return model.eval()


def _names(model: RecurrentLM) -> set[str]:
    return set(model.state_dict())


@dataclass(frozen=True)
class Identity:
    """How far the recurrent model at one loop is from the dense model of the same layers, on random tokens in fp32.

    Attributes:
        n_tokens: compared.
        difference, largest: of the logits, and the largest of the source's.
        is_source: whether that dense model is the source itself: no layer was dropped.
    """

    n_tokens: int
    difference: float
    largest: float
    is_source: bool

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE * self.largest

    def __str__(self) -> str:
        of = "the source" if self.is_source else "the source without the dropped layers"
        return (
            f"at 1 loop its logits are those of {of}: largest difference {self.difference:.2g}, of logits up to "
            f"{self.largest:.3g} ({self.n_tokens} tokens, fp32)"
        )

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tolerance": TOLERANCE}


@torch.no_grad()
def check_identity(made: RecurrentLM, dense: RecurrentLM, is_source: bool, seed: int = 0) -> Identity:
    """RunError where the two differ by more than rounding.

    Args:
        made, dense: in fp32.
    """
    config = dense.config
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(config.vocab_size, (2, min(config.seq_len, 64)), generator=generator)
    ours_BTV, theirs_BTV = made(ids_BT, 1), dense(ids_BT, 1)
    found = Identity(
        ids_BT.numel(), float((ours_BTV - theirs_BTV).abs().max()), float(theirs_BTV.abs().max()), is_source
    )
    if not found.holds:
        raise RunError(
            f"the identity check failed: at 1 loop the logits differ from the source's by {found.difference:.3g}, of "
            f"{found.largest:.3g} at most ({TOLERANCE:g} of that is rounding); nothing was written"
        )
    return found
