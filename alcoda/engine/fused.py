"""Blocks of fewer and larger kernels, for the engine's launches: of a few rows, their number is most of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from alcoda.model.attention import AttentionModule, KeyProjection, attend, split_heads
from alcoda.model.keys import Context
from alcoda.model.memory import OwnKeys
from alcoda.model.norms import RMSNormModule
from alcoda.model.positions import rotate
from alcoda.model.precision import HeldLinear

Lay = Callable[[nn.Linear], nn.Module]
"""How the weights of a map are laid out."""


def is_plain(module: nn.Module) -> bool:
    """Whether it is a linear map that rounds as others do."""
    return type(module) in (nn.Linear, HeldLinear)


def fused(module: nn.Module, lay: Lay) -> nn.Module | None:
    """The same function as a part of a model, in fewer kernels or of weights that are laid out; None where there is
    none."""
    if is_plain(module):
        assert isinstance(module, nn.Linear)
        return lay(module)
    if type(module) is AttentionModule and _reads_own_keys(module):
        return FusedAttention(module, lay)
    if type(module) is RMSNormModule:
        return FusedNorm(module)
    return None


def _reads_own_keys(attention: AttentionModule) -> bool:
    keys = attention.keys
    return (
        type(keys) is KeyProjection
        and keys.values is None
        and type(keys.recall) is OwnKeys
        and all(type(one) is nn.Identity for one in (keys.latent, keys.k_norm, attention.q_norm))
        and all(is_plain(one) for one in (attention.q, keys.k, keys.v))
    )


class FusedAttention(nn.Module):
    """An `AttentionModule` with keys of its own, whose queries, keys and values are one product and are turned in one
    go. For inference."""

    def __init__(self, attention: AttentionModule, lay: Lay) -> None:
        super().__init__()
        assert attention.keys is not None
        maps = [attention.q, attention.keys.k, attention.keys.v]
        self.d_head, self.window = attention.d_head, attention.window
        self.n_heads = [one.out_features // attention.d_head for one in maps]
        self.qkv = lay(side_by_side(maps))
        self.out = lay(attention.out) if is_plain(attention.out) else attention.out

    def forward(self, x_BTD: Tensor, context: Context, stage: str, layer: int) -> Tensor:
        """As `AttentionModule`."""
        n_q, n_k, n_v = self.n_heads
        qk_BHTK, v_BGTK = split_heads(self.qkv(x_BTD), self.d_head).split((n_q + n_k, n_v), 1)
        q_BHTK, k_BGTK = rotate(qk_BHTK, context.rotation).split((n_q, n_k), 1)
        y_BHTK = attend(q_BHTK, *context.keys(stage, layer, k_BGTK, v_BGTK), context.views[self.window])
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class FusedNorm(nn.Module):
    """An `RMSNormModule` in three kernels for seven: ``(x, -x)`` has the mean 0 and the mean square of ``x``, so that
    `F.layer_norm`, for which torch has a kernel on a CPU, gives it. Of many rows, whose numbers take longer than their
    kernels, it is the norm as it is. For inference."""

    FEW = 32

    def __init__(self, norm: RMSNormModule) -> None:
        super().__init__()
        assert norm.eps is not None
        self.width, self.eps = norm.normalized_shape[-1], norm.eps
        weight_D = None if norm.weight is None else norm.weight.detach()
        self.weight = None if weight_D is None else nn.Parameter(torch.cat([weight_D, weight_D]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight is not None and weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if x.numel() > self.FEW * self.width:
            return torch.rms_norm(x, (self.width,), None if weight is None else weight[: self.width], self.eps)
        both = torch.layer_norm(torch.cat([x, -x], -1), (2 * self.width,), weight, None, self.eps)
        return both[..., : self.width]


def side_by_side(maps: Sequence[nn.Linear]) -> nn.Linear:
    """One map whose outputs are those of several, one after the other."""
    with torch.device("meta"):
        joined = nn.Linear(maps[0].in_features, sum(one.out_features for one in maps), bias=False)
    joined.weight = nn.Parameter(torch.cat([one.weight.detach() for one in maps]), requires_grad=False)
    if any(one.bias is not None for one in maps):
        biases = [one.weight.new_zeros(one.out_features) if one.bias is None else one.bias.detach() for one in maps]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
