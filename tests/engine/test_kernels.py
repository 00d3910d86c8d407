"""Attention of a launch's rows in one call: it is torch's, row by row, and what cannot be made is done without."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engines import small
from torch import Tensor

from alcoda.engine import cache, kernels
from alcoda.engine.engine import Engine
from alcoda.engine.kernels import NAMES, RowAttention, RowPlaces, SlabRows, row_attention
from alcoda.engine.options import Options
from alcoda.engine.request import Request

TYPES = list(NAMES)
LENGTHS = (1, 2, 3, 4, 5, 31, 64, 97)
WITHIN = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Of fp64's attention over the same numbers; a bf16 result is rounded once, of values up to 2 in size."""
there = pytest.mark.skipif(row_attention(torch.float64) is None, reason="there is no C compiler")


@pytest.fixture
def anew() -> Iterator[None]:
    """What was compiled is forgotten, before and after."""
    row_attention.cache_clear()
    kernels._library.cache_clear()
    yield
    row_attention.cache_clear()
    kernels._library.cache_clear()


def kernel(dtype: torch.dtype) -> RowAttention:
    found = row_attention(dtype)
    assert found is not None
    return found


def drawn(
    dtype: torch.dtype, heads: int, groups: int, width: int = 24, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Tensor, SlabRows, SlabRows]:
    """Queries that are a part of wider rows, as a fused product gives them; texts one after the other, each in a slot
    of its own."""
    draws, n_slots, n_tokens = torch.Generator().manual_seed(0), 3, sum(lengths) + 2
    whole = torch.randn(len(lengths), heads + groups, 1, width, generator=draws).to(dtype)
    k, v = (torch.randn(n_slots, groups, n_tokens, width, generator=draws).to(dtype) for _ in range(2))
    starts = [1 + sum(lengths[:i]) for i in range(len(lengths))]
    first = [i % n_slots * k.stride(0) + start * width for i, start in enumerate(starts)]
    places = RowPlaces(first, lengths)
    return whole[:, :heads], SlabRows(k, places), SlabRows(v, places)


def exactly(q_WH1K: Tensor, k: SlabRows, v: SlabRows, window: int | None) -> Tensor:
    rows = []
    for q, k_1GSK, v_1GSK in zip(q_WH1K.split(1), k, v, strict=True):
        seen = slice(None) if window is None else slice(-window, None)
        k_1GSK, v_1GSK = (x[:, :, seen].double() for x in (k_1GSK, v_1GSK))
        rows.append(F.scaled_dot_product_attention(q.double(), k_1GSK, v_1GSK, enable_gqa=True))
    return torch.cat(rows)


@there
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 50, 1000])
def test_it_is_attention(dtype: torch.dtype, heads: int, groups: int, window: int | None) -> None:
    q, k, v = drawn(dtype, heads, groups)
    exact = exactly(q, k, v, window)
    found = kernel(dtype)(q, k, v, window)
    assert found.dtype == dtype and found.shape == (len(LENGTHS), heads, 1, 24) and found.is_contiguous()
    assert (found.double() - exact).abs().max() <= WITHIN[dtype]
    assert (kernel(dtype)(q, v, k, window).double() - exact).abs().max() > 100 * WITHIN[dtype]


@there
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 16, 64, 130])
def test_widths(dtype: torch.dtype, width: int) -> None:
    q, k, v = drawn(dtype, 2, 2, width)
    assert (kernel(dtype)(q, k, v, None).double() - exactly(q, k, v, None)).abs().max() <= 2 * WITHIN[dtype]


@there
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows are beside it, and however many threads there are."""
    q, k, v = drawn(dtype, 4, 2)
    together = kernel(dtype)(q, k, v, None)
    monkeypatch.setattr(kernels, "MANY", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(kernel(dtype)(q, k, v, None), together)
    torch.set_num_threads(threads)
    for i, (at, length) in enumerate(zip(k.places.first, k.places.lengths, strict=True)):
        one = RowPlaces([at], [length])
        alone = kernel(dtype)(q[i : i + 1], SlabRows(k.slab, one), SlabRows(v.slab, one), None)
        assert torch.equal(alone[0], together[i])


@there
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_stays_so_and_in_its_row(dtype: torch.dtype, poison: float) -> None:
    q, k, v = drawn(dtype, 2, 2)
    clean = kernel(dtype)(q, k, v, None)
    for keys in (k, v):
        row = keys[4]
        kept = row[0, 0, 2, 3].clone()
        row[0, 0, 2, 3] = poison
        found = kernel(dtype)(q, k, v, None)
        row[0, 0, 2, 3] = kept
        others = [i for i in range(len(LENGTHS)) if i != 4]
        assert torch.equal(found[others], clean[others]) and torch.equal(found[4, 1], clean[4, 1])
        assert not torch.isfinite(found[4, 0]).all() or (keys is k and not math.isnan(poison))
    far = RowPlaces(k.places.first, k.places.lengths)
    scores = kernel(dtype)(q * 1e4, SlabRows(k.slab, far), SlabRows(v.slab, far), None)
    assert torch.isfinite(scores).all()  # the largest score is taken from all before e^ of it


def tokens_and_logprobs() -> list[tuple[list[int], list[float | None]]]:
    engine = Engine(small(n_coda=1).double(), Options(width=4), dtype=torch.float64)
    found = engine.run([Request(tuple(range(1, 2 + n)), 9) for n in range(6)])
    engine.check_idle()
    return [(one.ids, [token.logprob for token in one.tokens]) for (one,) in found]


@there
def test_the_engine_says_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = RowAttention.__call__
    monkeypatch.setattr(RowAttention, "__call__", lambda self, *a: (calls.append(1), real(self, *a))[1])
    with_kernel = tokens_and_logprobs()
    n_calls = len(calls)
    monkeypatch.setattr(cache, "row_attention", lambda dtype: None)
    assert n_calls > 0 and tokens_and_logprobs() == with_kernel and len(calls) == n_calls


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("compiler", ["false", "true", "no-such-compiler -x", "cc 'unclosed"])
def test_without_a_compiler_it_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert row_attention(torch.float32) is None and not list(tmp_path.rglob("*.so*"))
    assert len(tokens_and_logprobs()) == 6


@there
@pytest.mark.usefixtures("anew")
def test_it_is_compiled_once_and_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path))
    monkeypatch.setenv(kernels.SWITCH, "off")
    assert row_attention(torch.float32) is None and not list(tmp_path.rglob("*.so*"))
    monkeypatch.delenv(kernels.SWITCH)
    for _ in range(2):
        row_attention.cache_clear()
        kernels._library.cache_clear()
        assert row_attention(torch.float32) is not None
        assert len(list(tmp_path.rglob("*.so*"))) == 1
        monkeypatch.setattr(kernels, "_compile", lambda *_: pytest.fail("it was there"))
    assert row_attention(torch.float16) is None


@there
@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("n_bytes", [0, 100, 4096])
def test_a_library_that_was_cut_off_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes: int
) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path))
    assert row_attention(torch.float32) is not None
    (kept,) = tmp_path.rglob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # the one that is loaded stays as it is
    kept.write_bytes(whole[:n_bytes])
    row_attention.cache_clear()
    kernels._library.cache_clear()
    assert row_attention(torch.float32) is not None and len(kept.read_bytes()) == len(whole)


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path))
    slow = tmp_path / "cc"
    slow.write_text('#!/bin/sh\necho >> "$0.calls"\nexec sleep 5\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(kernels, "COMPILE_S", 0.2)
    assert row_attention(torch.float32) is None
    assert (tmp_path / "cc.calls").read_text() == "\n"


@there
@pytest.mark.usefixtures("anew")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "file" / "cache"))
    assert row_attention(torch.float32) is not None


@there
@pytest.mark.usefixtures("anew")
def test_what_does_not_do_as_torch_does_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path))
    text = kernels.SOURCE.read_text()
    broken = tmp_path / "attend_rows.c"
    broken.write_text(text.replace("drawn[i] / sum", "drawn[i]"))
    assert broken.read_text() != text
    monkeypatch.setattr(kernels, "SOURCE", broken)
    assert all(row_attention(dtype) is None for dtype in TYPES)
