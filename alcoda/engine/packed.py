"""Weights laid out as a CPU's matrix kernels read them.

A product in bf16 on a CPU first lays out its weights anew, which for the few rows of a launch takes longer than the
product. Laid out once, the products are the same to the bit and take a third to a half of the time. In fp32, weights
whose inputs stand together take down to half of it (docs/LOG.md).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.engine.fused import fused, is_plain
from alcoda.model.head import TiedHead
from alcoda.model.lm import RecurrentLM
from alcoda.model.mlp import SwiGluModule
from alcoda.training.device import is_small

ROWS = 8
"""Of a product that a layout is chosen for; it serves others."""

_SERVED: WeakKeyDictionary[RecurrentLM, tuple[Any, RecurrentLM]] = WeakKeyDictionary()


def lay_out(weight: Tensor) -> Tensor:
    """A weight in bf16 as the kernels read it: only `product` reads it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(torch.bfloat16).contiguous(), ROWS)


def product(x: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in bf16, of a weight from `lay_out`."""
    return torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), laid_out, bias, "none", [], "")


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
    """A head in bf16 of the weights as they are, which are not held twice: a matrix of so many outputs times a few
    columns is as fast as if it were laid out. For inference."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD.detach().to(torch.bfloat16), requires_grad=False)

    def logits(self, y_BTD: Tensor, embed: nn.Embedding) -> Tensor:
        y_ND = y_BTD.to(torch.bfloat16).flatten(0, -2)
        one = y_ND.size(0) == 1
        logits_NV = torch.mv(self.weight, y_ND[0])[None] if one else torch.mm(self.weight, y_ND.t()).t()
        return logits_NV.unflatten(0, y_BTD.shape[:-1])


class TurnedHead(TiedHead):
    """A tied head in fp32, the weights of each input side by side in memory. For inference."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.weight = _side_by_side(weight_VD)

    def logits(self, y_BTD: Tensor, embed: nn.Embedding) -> Tensor:
        return F.linear(y_BTD, self.weight)


def served(model: RecurrentLM, dtype: torch.dtype) -> RecurrentLM:
    """The model for the engine's passes: itself, or, on a CPU, the same with its weights laid out once more. It is kept
    for as long as the model's weights are what they were.

    Args:
        dtype: of the passes (autocast); a model whose weights are bf16 computes in it anyway.
    """
    weight = model.embed.weight
    in_bf16 = torch.bfloat16 in (dtype, weight.dtype)
    lays_out = is_there() if in_bf16 else dtype == weight.dtype == torch.float32 and is_small(model.config)
    if weight.device.type != "cpu" or not lays_out:
        return model
    state = _state(model), in_bf16
    found = _SERVED.get(model)
    if found is None or found[0] != state:
        packed = _packed(model, _part_in_bf16 if in_bf16 else partial(fused, lay=_turned))
        if in_bf16:
            packed.head = PlainHead(model.head_weight_VD)
        elif type(model.head) is TiedHead:
            packed.head = TurnedHead(model.head_weight_VD)
        found = _SERVED[model] = (state, packed)
    return found[1]


def release(model: RecurrentLM, dtype: torch.dtype) -> None:
    """Drop the weights that the engine reads in its own layout: engines still run the model, nothing else can."""
    packed = served(model, dtype)
    if packed is model:
        return
    in_bf16 = torch.bfloat16 in (dtype, model.embed.weight.dtype)
    for module in model.modules():
        if is_plain(module):
            module.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
    _SERVED[model] = ((_state(model), in_bf16), packed)


def held_bytes(model: RecurrentLM, dtype: torch.dtype) -> int:
    """Bytes of the weights that an engine of the model holds: its own, and those laid out once more."""
    packed = served(model, dtype)
    own = {p.data_ptr(): p.numel() * p.element_size() for m in (model, packed) for p in m.parameters()}
    return sum(own.values()) + sum(2 * m.laid_out.numel() for m in packed.modules() if isinstance(m, PackedLinear))


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
