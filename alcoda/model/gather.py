"""Some tokens of each sequence, taken out and put back."""

from __future__ import annotations

from torch import Tensor


def tokens_at(x: Tensor, index_BK: Tensor) -> Tensor:
    """Some tokens of each sequence: ``[B, T, ...]`` as ``[B, K, ...]``."""
    return x.gather(1, _widened(index_BK, x))


def put_tokens(x: Tensor, index_BK: Tensor, new: Tensor) -> Tensor:
    """``x`` with ``new`` at those tokens."""
    return x.scatter(1, _widened(index_BK, x), new.to(x.dtype))


def _widened(index_BK: Tensor, like: Tensor) -> Tensor:
    return index_BK.view(*index_BK.shape, *[1] * (like.dim() - 2)).expand(-1, -1, *like.shape[2:])
