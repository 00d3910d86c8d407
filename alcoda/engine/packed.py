"""Weights laid out as a CPU's matrix kernels read them.

A product in bf16 on a CPU first lays out its weights anew, which for the few rows of a launch takes longer than the
product. Laid out once, the products are the same to the bit and take a third to a half of the time (docs/LOG.md).
"""

from __future__ import annotations

import copy
import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.model.head import TiedHead
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import HeldLinear

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


class PackedHead(TiedHead):
    """A head in bf16 whose weights are laid out. For inference."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.laid_out = lay_out(weight_VD)

    def logits(self, y_BTD: Tensor, embed: nn.Embedding) -> Tensor:
        return product(y_BTD, self.laid_out, None)


def served(model: RecurrentLM, dtype: torch.dtype) -> RecurrentLM:
    """The model for the engine's passes: itself, or, where a CPU computes in bf16, the same with its weights laid out
    once more. It is kept for as long as the model's weights are what they were.

    Args:
        dtype: of the passes (autocast); a model whose weights are bf16 computes in it anyway.
    """
    weight = model.embed.weight
    in_bf16 = torch.bfloat16 in (dtype, weight.dtype)
    if weight.device.type != "cpu" or not in_bf16 or not is_there():
        return model
    state = _state(model)
    found = _SERVED.get(model)
    if found is None or found[0] != state:
        packed = _packed(model)
        packed.head = PackedHead(model.head_weight_VD)
        found = _SERVED[model] = (state, packed)
    return found[1]


def release(model: RecurrentLM, dtype: torch.dtype) -> None:
    """Drop the weights that the engine reads in its own layout: engines still run the model, nothing else can."""
    packed = served(model, dtype)
    if packed is model:
        return
    for module in model.modules():
        if type(module) in (nn.Linear, HeldLinear):
            module.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
    _SERVED[model] = (_state(model), packed)


def held_bytes(model: RecurrentLM, dtype: torch.dtype) -> int:
    """Bytes of the weights that an engine of the model holds: its own, and those laid out once more."""
    packed = served(model, dtype)
    own = {p.data_ptr(): p.numel() * p.element_size() for m in (model, packed) for p in m.parameters()}
    laid_out = [m.laid_out for m in packed.modules() if isinstance(m, PackedLinear | PackedHead)]
    return sum(own.values()) + sum(2 * x.numel() for x in laid_out)


def _state(model: RecurrentLM) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in model.parameters()]


def _packed(module: Any) -> Any:
    """A copy of a module tree that shares all but the weights of its linear maps."""
    if type(module) in (nn.Linear, HeldLinear):  # others round in their own way
        return PackedLinear(module)
    new = copy.copy(module)
    new._modules = {name: None if child is None else _packed(child) for name, child in module._modules.items()}
    return new
