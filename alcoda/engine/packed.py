"""Weights laid out as a CPU's matrix kernels read them.

A product in bf16 on a CPU first lays out its weights anew, which for the few rows of a launch takes longer than the
product. Laid out once, the products are the same to the bit and take a third to a half of the time. In fp32 the head's,
of which there are many, take down to a third of it, and of other maps weights whose inputs stand together down to half
(docs/LOG.md).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.depth.record import fingerprint
from alcoda.engine.fused import fused, is_plain
from alcoda.errors import UsageError
from alcoda.model.head import TiedHead, UntiedHead
from alcoda.model.lm import RecurrentLM
from alcoda.model.mlp import SwiGluModule
from alcoda.training.device import give_back_freed_memory, is_small

ROWS = 8
"""Of a product that a layout is chosen for; it serves others."""
HELD_TWICE = 64 * 2**20
"""Bytes of a tied head, at most, that is laid out beside the embedding whose weights it has; a larger one is read as it
stands there, at two thirds to half the speed (docs/LOG.md)."""

_SERVED: WeakKeyDictionary[RecurrentLM, tuple[Any, RecurrentLM]] = WeakKeyDictionary()


def lay_out(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A weight, in bf16 or fp32, as the kernels read it: only `product` reads it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous(), ROWS)


def product(x: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a weight from `lay_out`, in its type."""
    return torch.ops.mkldnn._linear_pointwise(x.to(laid_out.dtype), laid_out, bias, "none", [], "")


@functools.cache
def is_there() -> bool:
    """Whether this build of torch has such kernels, and they give what `F.linear` gives. They are those that
    torch.compile uses."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in (3, 96))
    try:
        return torch.equal(product(x, lay_out(weight), None), F.linear(x, weight))
    except (AttributeError, RuntimeError):
        return False


class PackedLinear(nn.Module):
    """A linear map in bf16 of weights that are laid out. For inference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.laid_out = lay_out(linear.weight)
        self.bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.laid_out, self.bias)


class PackedSwiGlu(nn.Module):
    """A `SwiGluModule` in bf16 of weights that are laid out, its activation and its product made as the maps before
    them are. For inference."""

    def __init__(self, mlp: SwiGluModule) -> None:
        super().__init__()
        self.gate, self.up, self.down = PackedLinear(mlp.gate), PackedLinear(mlp.up), PackedLinear(mlp.down)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD, (gate, up) = x_BTD.to(torch.bfloat16), (self.gate, self.up)
        y_BTF = torch.ops.mkldnn._linear_pointwise(x_BTD, gate.laid_out, gate.bias, "swish", [], "")
        y_BTF = torch.ops.mkldnn._linear_pointwise.binary(x_BTD, y_BTF, up.laid_out, up.bias, "mul")
        return self.down(y_BTF)


class PlainHead(TiedHead):
    """A head in bf16 of the weights as they are, which are not held twice. For inference."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD.detach().to(torch.bfloat16), requires_grad=False)

    def logits(self, y_BTD: Tensor, embed: nn.Embedding) -> Tensor:
        y_ND = y_BTD.to(torch.bfloat16).flatten(0, -2)
        one = y_ND.size(0) == 1
        logits_NV = torch.mv(self.weight, y_ND[0])[None] if one else torch.mm(self.weight, y_ND.t()).t()
        return logits_NV.unflatten(0, y_BTD.shape[:-1])


class PackedHead(TiedHead):
    """A head of weights that are laid out. For inference."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.laid_out = lay_out(weight_VD, dtype)

    def logits(self, y_BTD: Tensor, embed: nn.Embedding) -> Tensor:
        return product(y_BTD, self.laid_out, None)


class Released(RecurrentLM):
    """A model that engines still run and nothing else can: its weights are there as they are laid out alone. What asks
    it for a part that is gone, or for its weights, is told so (UsageError).

    Attributes:
        served: what engines run.
        fingerprint: `alcoda.depth.record.fingerprint` of its weights, which calibrated exits are checked against.
    """

    served: RecurrentLM
    fingerprint: str

    def __init__(self, model: RecurrentLM, served: RecurrentLM, fingerprint: str) -> None:
        nn.Module.__init__(self)
        self._gone = frozenset(name for name, _ in model.named_children())
        self.config, self.fingerprint = model.config, fingerprint
        # What requests and exit rules look at beside the engine.
        self.embed, self.exit_gate = model.embed, model.exit_gate
        self.__dict__["served"] = served  # no part of it

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_gone", ()) and name not in self._modules:
            raise UsageError(DECODES_ONLY)
        return super().__getattr__(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(DECODES_ONLY)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(DECODES_ONLY)


DECODES_ONLY = (
    "this model was loaded to decode only (decode_only): it generates, and its own weights, which logits, traces, "
    "measurements and saving read, are gone. Load it whole for them: alcoda.load(PATH), without decode_only"
)


def served(model: RecurrentLM, dtype: torch.dtype) -> RecurrentLM:
    """The model for the engine's passes: itself, or, on a CPU, the same with its weights laid out once more. It is kept
    for as long as the model's weights are what they were.

    Args:
        dtype: of the passes (autocast); a model whose weights are bf16 computes in it anyway.
    """
    if isinstance(model, Released):
        return model.served
    in_bf16 = _in_bf16(model, dtype)
    if in_bf16 is None:
        return model
    state = _state(model), in_bf16
    found = _SERVED.get(model)
    if found is None or found[0] != state:
        found = _SERVED[model] = (state, _laid_out(model, in_bf16, keeps=True))
    return found[1]


def release(model: RecurrentLM, dtype: torch.dtype) -> Released:
    """The model for engines alone: its weights are laid out as by `served`, and each is dropped as it is done, so that
    ``model`` itself is of no use any more.

    Where it was not served before, no more memory is needed than its weights take and the largest part of a block, or
    the head, once more. Where nothing is laid out, the weights stay as they are, and what `Released` refuses is the
    same.
    """
    if isinstance(model, Released):
        return model
    known, in_bf16 = fingerprint(model), _in_bf16(model, dtype)
    if in_bf16 is None:
        return Released(model, model, known)
    found = _SERVED.pop(model, None)
    if found is None or found[0] != (_state(model), in_bf16):
        give_back_freed_memory()
        packed = _laid_out(model, in_bf16, keeps=False)
    else:
        packed = found[1]
        for module in model.modules():
            if is_plain(module) or (type(module) is UntiedHead and in_bf16):
                _drop(module)
    return Released(model, packed, known)


def _in_bf16(model: RecurrentLM, dtype: torch.dtype) -> bool | None:
    """Whether weights are laid out in bf16, or in fp32; None: they are not."""
    weight = model.embed.weight
    in_bf16 = torch.bfloat16 in (dtype, weight.dtype)
    lays_out = is_there() if in_bf16 else dtype == weight.dtype == torch.float32 and is_small(model.config)
    return in_bf16 if weight.device.type == "cpu" and lays_out else None


def _laid_out(model: RecurrentLM, in_bf16: bool, keeps: bool) -> RecurrentLM:
    """The model with its weights laid out; without ``keeps`` its own are dropped, part by part."""
    done: dict[nn.Module, nn.Module | None] = {}  # one may be in several places

    def part(module: nn.Module) -> nn.Module | None:
        if module not in done:
            done[module] = _part_in_bf16(module) if in_bf16 else fused(module, _turned)
            if done[module] is not None and not keeps:
                for linear in filter(is_plain, module.modules()):
                    _drop(linear)
                give_back_freed_memory()  # laid out, weights seldom fit into the room of those before
        return done[module]

    head = _head(model, in_bf16)
    if in_bf16 and not keeps and type(model.head) is UntiedHead:  # first: it is the largest, and in fp32
        _drop(model.head)
        give_back_freed_memory()
    packed = _packed(model, part)
    if head is not None:
        packed.head = head
    return packed


def _head(model: RecurrentLM, in_bf16: bool) -> nn.Module | None:
    """The head that is served; None: its own, laid out as other maps are."""
    weight_VD, is_tied = model.head_weight_VD, type(model.head) is TiedHead
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    fits = weight_VD.numel() * dtype.itemsize <= HELD_TWICE
    if is_there() and (fits if is_tied else in_bf16):
        return PackedHead(weight_VD, dtype)
    return PlainHead(weight_VD) if in_bf16 else None


def _drop(linear: nn.Module) -> None:
    linear.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)


def held_bytes(model: RecurrentLM, dtype: torch.dtype) -> int:
    """Bytes of the weights that an engine of the model holds: its own, and those laid out once more."""
    packed = served(model, dtype)
    models = (packed,) if isinstance(model, Released) else (model, packed)
    laid_out = [m.laid_out for m in packed.modules() if isinstance(m, PackedLinear | PackedHead)]
    biases = [m.bias for m in packed.modules() if isinstance(m, PackedLinear) and m.bias is not None]
    held = [*biases, *(p for m in models for p in m.parameters())]
    own = {p.data_ptr(): p.numel() * p.element_size() for p in held}
    return sum(own.values()) + sum(x.numel() * x.element_size() for x in laid_out)


def _state(model: RecurrentLM) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in model.parameters()]


def _part_in_bf16(module: nn.Module) -> nn.Module | None:
    if type(module) is SwiGluModule and all(map(is_plain, (module.gate, module.up, module.down))):
        return PackedSwiGlu(module)
    return fused(module, PackedLinear)


def _packed(module: Any, part: Callable[[nn.Module], nn.Module | None]) -> Any:
    """A copy of a module tree that shares all but those of which there is another ``part``."""
    found = part(module)
    if found is not None:
        return found
    new = copy.copy(module)
    new._modules = {name: None if child is None else _packed(child, part) for name, child in module._modules.items()}
    return new


def _turned(linear: nn.Linear) -> nn.Linear:
    """A map in fp32, the weights of each input side by side in memory."""
    with torch.device("meta"):
        new = nn.Linear(linear.in_features, linear.out_features, bias=False)
    new.weight = _side_by_side(linear.weight)
    if linear.bias is not None:
        new.bias = nn.Parameter(linear.bias.detach().float(), requires_grad=False)
    return new


def _side_by_side(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().float().t().contiguous().t(), requires_grad=False)
