"""What stands for torch's `varlen_attn` where there is no GPU: the same arguments, held against what FlashAttention 2
asks of them; each row's keys are gathered and read by SDPA. And what the engine says with it, held against what it says
without pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from engines import Recorder, drive, engine_of, poison
from torch import Tensor

from alcoda.engine import paged
from alcoda.engine.paged import Form, PagedArena
from alcoda.engine.request import Completion, Request
from alcoda.model.lm import RecurrentLM

PAGE = 4
"""Tokens: so small that texts of a few tokens cross it."""
WITHIN = 1e-12
"""Logits of both."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Of one query a row, over pages."""
    assert seqused_k is not None and block_table is not None
    rows, (n_pages, page_tokens, n_groups, width) = len(seqused_k), key.shape
    for numbers in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert numbers is None or (numbers.dtype == torch.int32 and numbers.is_contiguous())
        assert numbers is None or numbers.device == query.device
    assert query.shape == (rows, query.size(1), width) and value.shape == key.shape
    assert query.dtype == key.dtype == value.dtype
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert query.size(1) % n_groups == 0 and enable_gqa == (query.size(1) != n_groups)
    assert max_q == 1 and cu_seq_q.tolist() == list(range(rows + 1))
    assert cu_seq_k is None or cu_seq_k.shape == cu_seq_q.shape
    wide = block_table.size(1)
    assert block_table.shape == (rows, wide) and block_table.min() >= 0 and block_table.max() < n_pages
    assert seqused_k.min() >= 1 and seqused_k.max() <= max_k <= wide * page_tokens
    assert num_splits in (None, 1)
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    found = []
    for q_HK, pages, n in zip(query, block_table.tolist(), seqused_k.tolist(), strict=True):
        seen = slice(max(n - 1 - left, 0) if left >= 0 else 0, n)
        k_1GSK, v_1GSK = (
            torch.cat([pool[page] for page in pages])[seen].transpose(0, 1)[None] for pool in (key, value)
        )
        y_1H1K = F.scaled_dot_product_attention(q_HK[None, :, None], k_1GSK, v_1GSK, enable_gqa=enable_gqa)
        found.append(y_1H1K[0, :, 0])
    return torch.stack(found)


def on_pages(
    patch: pytest.MonkeyPatch, page_tokens: int = PAGE, call: Callable[..., Any] = varlen_attn, starts: bool = True
) -> None:
    """From now on a CPU's cache is paged, and this reads it."""
    paged._probed.cache_clear()
    patch.setattr(paged, "DEVICES", ("cpu", "cuda"))
    patch.setattr(paged, "implementation", lambda: Form(page_tokens, starts))
    patch.setattr(paged, "load_varlen_attn", lambda: call)


class Told(NamedTuple):
    """What a completion said."""

    ids: list[int]
    loops: list[int]
    prompt_loops: list[int]
    finish: str | None
    logits_TV: Tensor


def run(model: RecurrentLM, requests: Sequence[Request], every: int = 2, cancel: int = 0, **options: Any) -> list[Told]:
    """Everything that is said, with free tokens of the cache poisoned before each launch.

    Args:
        cancel: of the requests that run, the first is cancelled before so many launches; 0: none.
    """
    engine = engine_of(model, **{"chunk_tokens": 3, **options})

    def before(n: int) -> None:
        poison(engine)
        if cancel and n == cancel:
            engine.cancel(min((c for c in engine.running if c.tokens), key=lambda c: c.request.name))

    ended = drive(engine, requests, every, before)
    assert (engine.attends.name == "varlen") == isinstance(engine.runner.arena, PagedArena)
    return [told(engine, completion) for completions in ended for completion in completions]


def told(engine: Recorder, completion: Completion) -> Told:
    assert completion.error is None, f"request {completion.request.name} failed: {completion.error}"
    loops = [token.loops for token in completion.tokens]
    return Told(completion.ids, loops, completion.prompt_loops, completion.finish, engine.logits_TV(completion))


def check_both(
    patch: pytest.MonkeyPatch, model: RecurrentLM, requests: Sequence[Request], page_tokens: int = PAGE, **how: Any
) -> list[Told]:
    """On pages all is what it is where keys lie together."""
    expected = run(model, requests, **how)
    with patch.context() as inner:
        on_pages(inner, page_tokens)
        found = run(model, requests, **how)
        assert isinstance(engine_of(model).runner.arena, PagedArena)
    for one, other in zip(found, expected, strict=True):
        assert one[:4] == other[:4]
        off = float((one.logits_TV - other.logits_TV).abs().max())
        assert off <= WITHIN, f"logits are off by {off:.3g}"
    return found
