"""Fused parts of a block are the parts: in fp64, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import small
from torch import nn

from alcoda.engine import packed
from alcoda.engine.fused import FusedAttention, FusedNorm, fused
from alcoda.model.attention import AttentionModule
from alcoda.model.lm import RecurrentLM
from alcoda.model.norms import RMSNormModule

IDS_BT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
MANY_BT = IDS_BT.repeat(1 + FusedNorm.FEW // IDS_BT.numel(), 1)


def as_it_is(linear: nn.Linear) -> nn.Module:
    return linear


def count(model: nn.Module, kind: type) -> int:
    return sum(type(one) is kind for one in model.modules())


def pair(**fields: Any) -> tuple[RecurrentLM, RecurrentLM]:
    model = small(**fields).double()
    with torch.no_grad():
        for parameter in model.parameters():  # a norm's weight of one would hide that it is left out
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, packed._packed(model, lambda module: fused(module, as_it_is))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block": {"attention": {"kind": "gqa", "n_kv_heads": 1}}},
        {"block": {"attention": {"kind": "mha", "qk_bias": True}}},
        {"block": {"attention": {"kind": "mha", "v_bias": True}}},
        {"block": {"bias": True}},
        {"position": {"kind": "rope", "pairs": "interleaved"}},
        {"position": "none"},
        {"block": {"window": {"kind": "everywhere", "tokens": 3}}},
        {"block": {"norm": {"kind": "rmsnorm", "weight": False}}},
    ],
    ids=str,
)
def test_fused_parts_give_what_the_parts_give(fields: dict[str, Any]) -> None:
    model, other = pair(**fields)
    assert count(other, FusedAttention) == count(model, AttentionModule) > 0
    assert count(other, FusedNorm) == count(model, RMSNormModule) > 0
    with torch.no_grad():
        expected_BTV = model(IDS_BT)
        torch.testing.assert_close(other(IDS_BT), expected_BTV, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(other(MANY_BT), model(MANY_BT), atol=1e-12, rtol=1e-12)
        model.core.at(0).layers[0].attention.q.weight.mul_(1.001)
        assert float((model(IDS_BT) - expected_BTV).abs().max()) > 1e-6


@pytest.mark.parametrize(
    "fields",
    [{"block": {"attention": {"kind": "mha", "qk_norm": "before_rope"}}}, {"block": {"attention": "mla"}}],
    ids=str,
)
def test_what_is_more_than_one_product_is_left_alone(fields: dict[str, Any]) -> None:
    model, other = pair(**fields)
    assert count(other, FusedAttention) == 0 and count(model, AttentionModule) > 0
    with torch.no_grad():
        torch.testing.assert_close(other(IDS_BT), model(IDS_BT), atol=1e-12, rtol=1e-12)
