"""Options that take more memory than there is: refused, with what they take and what fits."""

from __future__ import annotations

import re

import pytest
import torch
from loaded import loaded

from alcoda.engine.cache import Arena
from alcoda.engine.capacity import ROW_BYTES, check_room
from alcoda.engine.options import Options
from alcoda.errors import UsageError
from alcoda.training.device import free_memory_bytes

MODEL = loaded().model
D, V, ROOM = MODEL.config.d_model, MODEL.config.vocab_size, 32_768
BANK, LAUNCH = ROW_BYTES + 8 * D, 4 * V


def check(free_bytes: int | None, **options: int | bool) -> None:
    check_room(MODEL, Options(**options), 4, torch.float32, free_bytes)


def fits(free_bytes: int, **options: int | bool) -> int:
    """What the refusal says."""
    with pytest.raises(UsageError, match=r"^(width|cache_tokens)=[\d,]+: .* take .* GB .* are free") as found:
        check(free_bytes, **options)
    return int(re.findall(r"([\d,]+) fit at most", str(found.value))[0].replace(",", ""))


def test_the_widest_that_fits() -> None:
    free_bytes = 1_000_000_000
    assert fits(free_bytes, width=10**9) == (free_bytes - ROOM * LAUNCH) // (2 * BANK)
    assert fits(free_bytes, width=10**9, deterministic=True) == free_bytes // (2 * BANK + LAUNCH)
    assert fits(free_bytes, width=10**9, places=1) == (free_bytes - ROOM * LAUNCH) // BANK - 1
    for how in ({}, {"deterministic": True}):
        most = fits(free_bytes, width=10**9, **how)
        check(free_bytes, width=most, **how)
        assert fits(free_bytes, width=most + 1, **how) == most


def test_room_for_keys() -> None:
    size = sum(kv[..., 0, :].numel() * kv.element_size() for kv in arena().kv.values())
    free_bytes = 1_000_000
    assert fits(free_bytes, cache_tokens=10**9) == free_bytes // size
    check(free_bytes, cache_tokens=100, width=1)
    check(free_bytes, width=1, deterministic=True)  # what is not asked for is taken as it is written


def test_room_for_more_loops_than_the_model_has() -> None:
    def check_loops(n_loops: int, free_bytes: int, **options: int) -> None:
        check_room(MODEL, Options(width=1, **options), n_loops, torch.float32, free_bytes)

    for n_loops in (10**9, 10**22):
        with pytest.raises(UsageError, match=r"^loops=[\d,]+: keys of .* are free: lower loops"):
            check_loops(n_loops, 10**10)
    check_loops(2 * MODEL.config.n_loops, 10**10)
    check_loops(10**5, 10**10, cache_tokens=2)


def test_a_width_beyond_all_numbers() -> None:
    assert fits(10**9, width=10**30) == fits(10**9, width=10**9)
    assert fits(10**9, width=10**400) == fits(10**9, width=10**9)


def arena() -> Arena:
    return Arena(MODEL.config, 4, 8, MODEL.embed.weight.dtype, torch.device("cpu"))


def test_memory_that_is_not_known_refuses_nothing() -> None:
    check(None, width=10**15)


def test_free_memory() -> None:
    found = free_memory_bytes(torch.device("cpu"))
    assert found is None or 1e6 < found < 1e15
