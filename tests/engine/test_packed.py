"""Weights laid out for a CPU: products and tokens are those of the model as it is, and of no weights that are old."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from engines import small
from torch import Tensor, nn

from alcoda.engine import packed
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.request import Request
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import HeldLinear

pytestmark = pytest.mark.skipif(not packed.is_there(), reason="this torch has no such kernels")

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9)]


def in_bf16(**fields: object) -> RecurrentLM:
    return small(**fields).bfloat16()


@pytest.mark.parametrize("n_rows", [1, 3, 8, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_equal_to_the_bit(n_rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND, weight_ED, bias_E = (torch.randn(*n, generator=generator).bfloat16() for n in ((n_rows, 64), (96, 64), (96,)))
    expected_NE = F.linear(x_ND, weight_ED, bias_E if bias else None)
    assert torch.equal(packed.product(x_ND, packed.lay_out(weight_ED), bias_E if bias else None), expected_NE)
    assert not torch.equal(packed.product(x_ND, packed.lay_out(weight_ED * 2), None), expected_NE)


def tokens(model: RecurrentLM) -> list[list[int]]:
    """Greedy, one launch as wide as another."""
    engine = Engine(model, Options(width=4, deterministic=True))
    found = engine.run([Request(prompt, 12) for prompt in PROMPTS])
    assert all(one.error is None for (one,) in found)
    return [one.ids for (one,) in found]


def off(logits_BTV: torch.Tensor, exact_BTV: torch.Tensor) -> float:
    return float((logits_BTV.double() - exact_BTV).norm() / exact_BTV.norm())


@pytest.mark.parametrize(("head", "most", "kind"), [
    ("tied", packed.HELD_TWICE, packed.PackedHead),
    ("tied", 0, packed.PlainHead),  # a large one, in a small test
    ("untied", 0, packed.PackedHead),
])  # fmt: skip
def test_what_is_served_is_as_exact_as_the_model(
    head: str, most: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "HELD_TWICE", most)
    model, ids_BT = in_bf16(head=head), torch.arange(24)[None]
    served = packed.served(model, torch.float32)
    assert type(served.head) is kind
    assert isinstance(served.core.at(0).layers[0].mlp, packed.PackedSwiGlu)
    with torch.no_grad():
        exact_BTV, plain_BTV, served_BTV = (one(ids_BT) for one in (in_bf16(head=head).double(), model, served))
    assert 0 < off(served_BTV, exact_BTV) <= 1.25 * off(plain_BTV, exact_BTV)
    assert off(plain_BTV.roll(1, -1), exact_BTV) > 20 * off(plain_BTV, exact_BTV)


def test_weights_that_change_are_laid_out_anew() -> None:
    model = in_bf16()
    before = packed.served(model, torch.float32)
    assert packed.served(model, torch.float32) is before
    with torch.no_grad():
        model.head.weight.mul_(-1)
    assert packed.served(model, torch.float32) is not before


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_released_weights_are_held_once(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "HELD_TWICE", 0)
    model, other = in_bf16(head=head), in_bf16(head=head)
    whole, said = packed.held_bytes(model, torch.float32), tokens(model)
    released = packed.release(model, torch.float32)
    held = packed.held_bytes(released, torch.float32)
    assert held < whole and tokens(released) == said
    # Map by map, of a model that no engine has served.
    released = packed.release(other, torch.float32)
    assert packed.held_bytes(released, torch.float32) == held and tokens(released) == said


def test_while_weights_are_released_no_more_than_a_part_of_a_block_is_there_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = in_bf16()
    maps = [m for m in model.modules() if type(m) in (nn.Linear, HeldLinear)]
    dropped: list[int] = []
    lay_out = packed.lay_out

    def watched(weight: Tensor, *dtype: torch.dtype) -> Tensor:
        dropped.append(sum(not m.weight.numel() for m in maps))
        return lay_out(weight, *dtype)

    monkeypatch.setattr(packed, "lay_out", watched)
    packed.release(model, torch.float32)
    # An attention has four maps, an MLP three.
    assert dropped[0] == 0 and dropped[-1] >= len(maps) - 4
    assert all(0 <= after - before <= 4 for before, after in pairwise(dropped))


def test_other_types_are_left_alone() -> None:
    model = small()
    assert packed.served(model, torch.float64) is model
