"""What fits beside the weights: consistent with the arena that the engine makes, and with weights as they are held."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import alcoda
from alcoda.engine.cache import Arena
from alcoda.engine.options import Options
from alcoda.errors import UsageError
from alcoda.model.cache_policy import caches
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in
from alcoda.options import parse_size
from alcoda.training import device

CPU = torch.device("cpu")


def config(**changes: Any) -> ModelConfig:
    shape = {"vocab_size": 48, "seq_len": 32, "d_model": 16, "n_heads": 2, "d_ff": 24, "n_loops": 3}
    return ModelConfig.model_validate(shape | {"n_prelude": 1, "n_core": 2, "n_coda": 1} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"keys": {"kind": "anchor"}},
        {"n_coda": 0},
        {"block": {"attention": {"kind": "gqa", "n_kv_heads": 1}}},
        {"n_core": 0, "n_loops": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_arena_takes_what_is_said(changes: dict[str, Any], dtype: str) -> None:
    shape, memory = config(**changes), 300_000
    found = alcoda.capacity(shape, memory, lengths=[32, 9], dtype=dtype)
    model = RecurrentLM(shape)
    if dtype == "bfloat16":
        hold_in(model, torch.bfloat16)
    assert found.weights_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    for room in found.rooms:
        policy, by_loop = caches()[room.cache], room.coda_keys == "per_loop"
        for n_tokens in (room.n_tokens, room.n_tokens + 1):
            arena = Arena(shape, found.loops, n_tokens, getattr(torch, dtype), CPU, by_loop, policy)
            held = sum(kv.numel() * kv.element_size() for kv in arena.kv.values())
            assert held == room.bytes_per_token * (n_tokens + 1)
            # What is left holds so many tokens, and not one more.
            assert (found.weights_bytes + held <= memory) == (n_tokens == room.n_tokens)
        assert room.bytes_per_token == arena.size.bytes_per_token
        assert list(room.requests) == [9, 32]
        for length, n in room.requests.items():
            # Of the last token no keys are kept.
            assert n * (length - 1) <= room.n_tokens < (n + 1) * (length - 1)
    named = {(room.cache, room.coda_keys) for room in found.rooms}
    kinds = ["per_loop"] if not shape.is_recurrent else ["per_loop", "mean", "last"]
    codas = ["at_exit", "per_loop"] if shape.n_coda and shape.n_loops > 1 else ["at_exit"]
    assert named == {(kind, coda) for kind in kinds for coda in codas} and len(named) == len(found.rooms)
    if shape.keys.kind == "anchor":
        assert len({(room.bytes_per_token, room.coda_keys) for room in found.rooms}) == 2


def test_by_hand() -> None:
    gib = parse_size("1GiB")
    found = alcoda.capacity("engine/d512", gib, lengths=[1024, 128], dtype="bfloat16")
    # 2 (keys and values) x 4 layers x 8 loops x 512 numbers of 2 bytes.
    per_loop, mean, last = found.rooms
    assert (per_loop.cache, per_loop.bytes_per_token) == ("per_loop", 2 * 4 * 8 * 512 * 2)
    assert mean.bytes_per_token == last.bytes_per_token == per_loop.bytes_per_token / 8
    room = (gib - found.weights_bytes) // 65_536
    assert per_loop.n_tokens == room - 1 and per_loop.requests == {128: (room - 1) // 127, 1024: (room - 1) // 1023}
    assert alcoda.capacity("engine/d512", gib, loops=16, dtype="bfloat16").rooms[0].bytes_per_token == 2 * 65_536
    assert alcoda.capacity("engine/d512", gib).rooms[0].requests.keys() == {1024}
    # The ledger counts keys in bf16, and the coda's once.
    by_cache = alcoda.cost(config()).kv_bytes_by_cache
    at_exit = [
        room for room in alcoda.capacity(config(), 300_000, dtype="bfloat16").rooms if room.coda_keys == "at_exit"
    ]
    assert {room.cache: room.bytes_per_token for room in at_exit} == by_cache


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_dtype_is_the_one_that_the_engine_decodes_in(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_fast_bf16", lambda on: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wide = "bfloat16" if has_bf16 else "float32"
    memory = parse_size("1GB")
    small, large = alcoda.capacity("mini", memory), alcoda.capacity("engine/d512", memory)
    # Models of a width up to 256 decode in fp32 on a CPU.
    assert (small.dtype, large.dtype, large.what) == ("float32", wide, "engine/d512")
    in_fp32 = alcoda.capacity("engine/d512", memory, settings=["train.dtype=float32"])
    assert (in_fp32.dtype, in_fp32.what) == ("float32", "engine/d512 --set train.dtype=float32")
    assert alcoda.capacity("engine/d512", memory, dtype="bfloat16").dtype == "bfloat16"
    for dtype in ("auto", "bfloat16"):
        lm = alcoda.load("mini", dtype=dtype)
        (kv, *_) = lm.new_engine(Options(cache_tokens=8)).runner.arena.kv.values()
        found = alcoda.capacity(lm, memory)
        assert kv.dtype == getattr(torch, found.dtype) and found.what == "mini"
        # Weights once, as they are multiplied.
        config = lm.recipe.model
        with torch.device("meta"):
            model = RecurrentLM(config)
        if kv.dtype == torch.bfloat16:
            hold_in(model, kv.dtype)
        assert found.weights_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert small == alcoda.capacity(alcoda.load("mini"), memory)


def test_what_cannot_be_is_refused() -> None:
    for how, says in (
        ({"lengths": [33]}, "tokens=33: of a request, from 2 (a prompt and one more) to 32"),
        ({"lengths": [1]}, "tokens=1"),
        ({"loops": 0}, "loops"),
        ({"dtype": "float16"}, "dtype 'float16'; did you mean"),
        ({"memory_bytes": 1000}, "the weights alone take"),
    ):
        with pytest.raises(UsageError, match=re.escape(says)):
            alcoda.capacity(config(), **{"memory_bytes": 300_000} | how)
    with pytest.raises(UsageError, match="cannot serve this model"):
        alcoda.capacity(config(sharing={"kind": "untied"}), 300_000)
    for missing, says in (("mini/gtr", "near it: mini/grt"), ("runs/none", "runs/none is neither a run")):
        with pytest.raises(UsageError, match=says):
            alcoda.capacity(missing, 300_000)


def test_sizes() -> None:
    assert parse_size("24GB") == 24 * 10**9 and parse_size("24GiB") == 24 * 2**30
    assert parse_size("512MB") == 512 * 10**6 and parse_size(" 1.5 kib ") == 1536 and parse_size("2TB") == 2 * 10**12
    for text in ("24", "GB", "24B", "24Gb/s", "-1GB", "1e3GB", "nan GB", "0GB", "0.0001kB", "24 G", ""):
        with pytest.raises(UsageError, match=re.escape(f"--memory {text}: ")):
            parse_size(text)
