"""Equality of what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(a: Any, b: Any, where: str = "", in_order: bool = True) -> None:
    """Equal to the bit, whatever they are made of.

    Args:
        in_order: whether dicts have to hold their keys in one order.
    """
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b) if in_order else sorted(a) == sorted(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}", in_order)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]", in_order)
    else:
        assert a == b, where
