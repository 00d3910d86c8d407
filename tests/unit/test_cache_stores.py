"""Stores of one slot for all loops, on numbers worked out by hand, and decoding with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from alcoda.config import validate
from alcoda.depth.exiting import Exits
from alcoda.depth.replay import replay
from alcoda.depth.rules import NEVER, StateChange
from alcoda.depth.sequential import ExitReader
from alcoda.engine.decode import decode
from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy, LastCache, MeanCache, caches, pick_cache
from alcoda.model.config import ModelConfig
from alcoda.model.exit_keys import CopiedKeys, LastLoopKeys, MeanKeys
from alcoda.model.keys import CORE
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reader, ZeroPrefill

CPU = torch.device("cpu")
R = 4
SMALL: dict[str, Any] = {"vocab_size": 20, "seq_len": 16, "d_model": 16, "n_heads": 1, "n_loops": R, "init_std": 0.5}


def lm(**fields: Any) -> RecurrentLM:
    return RecurrentLM(validate(ModelConfig, SMALL | fields)).double().init(0).eval()


def keys(*values: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """One key a row, of width 1; its value is ten times that."""
    k_BGTK = torch.tensor(values, dtype=dtype).view(-1, 1, 1, 1)
    return k_BGTK, 10 * k_BGTK


def run_token(store: CopiedKeys, loops: list[tuple[float, ...]], leaves: list[list[bool]] | None = None) -> list[Any]:
    """Keys that one token a row has in each loop; what its queries read of them, ``[loop][row][key]``."""
    store.open(1, len(loops), None, None, CPU)
    read = []
    for loop, values in enumerate(loops):
        k_BGSK, v_BGSK = store.write((CORE, 0, loop), *keys(*values))
        assert torch.equal(v_BGSK, 10 * k_BGSK)
        read.append(k_BGSK[:, 0, :, 0].tolist())
        if leaves is not None:
            store.leave(loop, torch.tensor(leaves[loop])[:, None])
            store.active_BT = ~torch.tensor(leaves[: loop + 1]).any(0)[:, None]
    store.active_BT = None
    return read


def test_a_mean_is_over_the_loops_and_the_own_key_is_that_of_the_loop() -> None:
    store = MeanKeys({CORE: 9}, capacity_tokens=1)
    assert run_token(store, [(1,), (2,), (6,)]) == [[[1]], [[2]], [[6]]]
    assert run_token(store, [(7,), (8,), (0,)]) == [[[3, 7]], [[3, 8]], [[3, 0]]]
    assert run_token(store, [(4,), (4,), (4,)])[-1] == [[3, 5, 4]]
    assert list(store.slots) == [(CORE, 0, 0)]
    assert store.n_bytes() == 3 * 2 * 8  # three tokens, a key and a value each, in fp64


def test_the_last_loop_stays() -> None:
    store = LastLoopKeys({CORE: 9}, capacity_tokens=1)
    assert run_token(store, [(1,), (2,), (6,)]) == [[[1]], [[2]], [[6]]]
    assert run_token(store, [(7,), (8,), (0,)]) == [[[6, 7]], [[6, 8]], [[6, 0]]]
    assert run_token(store, [(4,), (4,), (4,)])[-1] == [[6, 0, 4]]


@pytest.mark.parametrize(("store", "left"), [(MeanKeys({}), [1.0, 3.0]), (LastLoopKeys({}), [1.0, 6.0])])
def test_what_is_out_keeps_what_it_had(store: CopiedKeys, left: list[float]) -> None:
    """Of two rows the first leaves after one loop, and what is written for it later is dropped."""
    leaves = [[True, False], [False, False], [False, True]]
    run_token(store, [(1, 1), (50, 2), (60, 6)], leaves)
    read = run_token(store, [(0, 0)] * 3)
    assert [row[0] for row in read[0]] == left


def test_means_of_bf16_are_taken_in_fp32() -> None:
    store = MeanKeys({})
    store.open(1, 3, None, None, CPU)
    for loop, value in enumerate((256.0, 1.0, 1.0)):  # in bf16, 256 + 1 = 256
        store.write((CORE, 0, loop), *keys(value, dtype=torch.bfloat16))
    store.open(1, 3, None, None, CPU)
    k_BGSK, _ = store.write((CORE, 0, 0), *keys(0.0, dtype=torch.bfloat16))
    assert k_BGSK.dtype == torch.bfloat16 and float(k_BGSK[0, 0, 0, 0]) == 86.0


def test_other_stages_keep_their_slots() -> None:
    store = LastLoopKeys({CORE: 2, "coda": 2})
    store.open(1, 2, None, None, CPU)
    for loop in range(2):
        store.write((CORE, 0, loop), *keys(loop + 1.0))
        store.write(("coda", 0, loop), *keys(loop + 5.0))
    assert set(store.slots) == {(CORE, 0, 0), ("coda", 0, 0), ("coda", 0, 1)}


@pytest.mark.parametrize("cache", [MeanCache(), LastCache()], ids=lambda cache: cache.kind)
def test_what_a_store_refuses(cache: CachePolicy) -> None:
    store = cache.store({}, 4)
    with pytest.raises(ValueError, match=r"a pass of 2 tokens a row .* run them one by one"):
        store.open(2, 3, None, None, CPU)
    store.open(1, 3, None, None, CPU)
    with pytest.raises(ValueError, match="one store serves one number of loops"):
        store.open(1, 4, None, None, CPU)


def test_names() -> None:
    config = lm().config
    assert list(caches()) == ["per_loop", "mean", "last"]
    assert pick_cache(None, config) == PER_LOOP == pick_cache("per_loop", config)
    assert pick_cache("mean", config) == MeanCache() and pick_cache(LastCache(), config) == LastCache()
    assert [cache.is_parallel for cache in caches().values()] == [True, False, False]
    with pytest.raises(UsageError, match="cache 'maen'; did you mean 'mean'"):
        pick_cache("maen", config)


@pytest.mark.parametrize("cache", caches().values(), ids=caches())
@pytest.mark.parametrize("rule", [None, StateChange(threshold=0.4)], ids=["all loops", "state"])
def test_decoding_is_replay(cache: CachePolicy, rule: StateChange | None) -> None:
    """Greedy tokens are those that reading the text again, token by token, gives."""
    model, depths, prompt = lm(), list[Tensor](), [3, 1, 4]
    how: dict[str, Any] = {"rule": rule, "depths": depths, "cache": cache, "dtype": torch.float64}
    new = list(decode(model, prompt, loops=R, max_tokens=6, **how))
    found = replay(model, torch.tensor([prompt + new[:-1]]), rule or NEVER, R, cache=cache)
    assert model.logits(found.y_BTD)[0, 2:].argmax(-1).tolist() == new
    if rule is not None:
        assert torch.cat(depths, 1).tolist() == found.depths_BT.tolist()
        assert len(set(found.depths_BT.flatten().tolist())) > 1


def test_chunks_change_nothing() -> None:
    model, ids_BT = lm(), torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    with torch.no_grad():
        whole = Reader(model, R, cache=MeanCache()).read(ids_BT)
        reader = Reader(model, R, cache=MeanCache())
        assert torch.equal(torch.cat([reader.read(chunk) for chunk in ids_BT.split([2, 3], 1)], 1), whole)


def test_what_does_not_go_with_them() -> None:
    model, ids_BT = lm(), torch.tensor([[0, 1, 2]])
    with pytest.raises(UsageError, match="recompute_keys with cache 'mean'"):
        replay(model, ids_BT, NEVER, recompute_keys=True, cache=MeanCache())
    with pytest.raises(UsageError, match="readout_only of tokens that are read one after the other"):
        replay(model, ids_BT, NEVER, readout_only=True, cache=MeanCache())
    told = lm(memory="prev_token")
    for rule, says in ((None, "with cache 'last'"), (NEVER, "with an exit rule")):
        with pytest.raises(UsageError, match=f"prefill 'zero' {says}"):
            decode(told, [1, 2], loops=R, max_tokens=2, prefill=ZeroPrefill(), cache=LastCache(), rule=rule)
    with pytest.raises(UsageError, match="cache 'last': with sharing 'untied'"):
        decode(lm(sharing="untied"), [1, 2], loops=R, max_tokens=2, cache=LastCache())
    with pytest.raises(UsageError, match="with route 'token_choice', a loop reads only"):
        routed = lm(route="token_choice")
        ExitReader(routed, Exits(NEVER.build(routed, R), "at_exit", cache=MeanCache()))
