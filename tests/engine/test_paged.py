"""A cache of pages is one whose slabs lie together, whatever the engine does; what reads it is a reference here, and
on a GPU torch's kernel (test_gpu)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import HOUSE, LOOPS, check_alone, drive, engine_of, exits_of, mixed, small
from torch import Tensor
from varlen import PAGE, check_both, on_pages, run, varlen_attn

import alcoda
from alcoda import show
from alcoda.engine import paged
from alcoda.engine.cache import Arena, Attends, RowStore, Span, bytes_per_token, up
from alcoda.engine.capacity import check_room
from alcoda.engine.engine import Engine
from alcoda.engine.kernels import row_attention
from alcoda.engine.options import Options
from alcoda.engine.paged import FA2, PagedArena, PagedAttention, PageTables, arena_of, paged_on, room
from alcoda.engine.request import Request
from alcoda.errors import UsageError
from alcoda.model.attention import attend
from alcoda.model.cache_policy import LastCache, MeanCache, caches
from alcoda.model.keys import CORE
from alcoda.options import parse_size

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    **HOUSE,
    "gqa": {"n_heads": 4, "block": {"attention": {"kind": "gqa", "n_kv_heads": 2}}},
    "windows": {"n_core": 2, "block": {"window": {"kind": "everywhere", "tokens": 5}}},
    "gqa_window": {
        "n_heads": 4,
        "block": {"attention": {"kind": "gqa", "n_kv_heads": 1}, "window": {"kind": "everywhere", "tokens": 1}},
    },
    "mla": {"block": {"attention": {"kind": "mla", "latent": 5}}},
}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """What was probed with a reference is forgotten."""
    yield
    paged._probed.cache_clear()


@pytest.mark.parametrize("name", MODELS)
def test_pages_are_slabs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of cache: with drafts where there may be some, pieces, exits, prompts that are read together."""
    model = small(**MODELS[name])
    requests = mixed([None, *exits_of(model, "state", "kl")], 6)
    drafts = None if name == "memory" else 1
    found = check_both(monkeypatch, model, requests, width=6, draft_loops=drafts)
    assert len({loops for one in found for loops in one.loops}) > 1
    assert max(len(r.prompt) + r.max_tokens for r in requests) > 2 * PAGE
    check_both(monkeypatch, model, requests[:4], every=0, chunk_tokens=40, width=5)
    for cache in (MeanCache(), LastCache()):
        check_both(monkeypatch, model, requests[1:4], cache=cache)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 256])
def test_pages_of_any_size(page_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["window"])
    requests = mixed([None, *exits_of(model, "state")], 4, longest=14, most_new=12)
    check_both(monkeypatch, model, requests, page_tokens, width=6, draft_loops=2)


def test_requests_that_are_cancelled_give_their_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["grt"])
    requests = [replace(one, stop_ids=frozenset(), max_tokens=8) for one in mixed(exits_of(model, "state"), 5)]
    found = check_both(monkeypatch, model, requests, every=1, cancel=9, width=6, draft_loops=1)
    assert [one.finish for one in found].count("cancelled") == 1


def test_where_requests_wait_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["grt"])
    requests = mixed([None, *exits_of(model, "state")], 8)
    on_pages(monkeypatch)
    engine = engine_of(model, cache_tokens=5 * PAGE - 1)
    assert engine.runner.arena.n_tokens == 5 * PAGE
    check_alone(engine, requests, every=1)


def test_a_prompt_that_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["grt"])
    prompt = tuple(torch.randint(64, (23,), generator=torch.Generator().manual_seed(2)).tolist())
    requests = [Request(prompt, 6, test=test) for test in (None, *exits_of(model, "state", "kl"))]
    for chunk_tokens in (1, 5, 64):
        check_both(monkeypatch, model, requests, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("name", ["grt", "gqa", "window"])
def test_deterministic_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is told so, and divides its work alike whatever rows there are."""
    calls: list[tuple[int, int | None, int]] = []

    def noted(query: Tensor, *args: Any, **how: Any) -> Tensor:
        calls.append((len(query), how["num_splits"], args[5]))
        return varlen_attn(query, *args, **how)

    model = small(**MODELS[name])
    requests = mixed([None, *exits_of(model, "state")], 4)
    check_both(monkeypatch, model, requests, deterministic=True, width=5)
    on_pages(monkeypatch, call=noted)
    run(model, requests, width=5)
    assert {one[1] for one in calls[-5:]} == {None} and len({one[2] for one in calls}) > 1
    engine = engine_of(model, deterministic=True, width=5)
    calls.clear()
    drive(engine, requests, 2)
    assert {*calls} == {(5, 1, up(model.config.seq_len, PAGE))}
    found = [engine.logits_TV(one) for (one,) in drive(engine, requests[:2])]
    for request, logits_TV in zip(requests, found, strict=False):
        ((one,),) = drive(engine, [request])
        assert torch.equal(engine.logits_TV(one), logits_TV)


# -- controls ---------------------------------------------------------------------------------------------------------


def test_control_a_wrong_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of another slot, and that of another text."""
    model = small(**HOUSE["grt"])
    requests = mixed([None, *exits_of(model, "state")], 4)
    made = PageTables.__init__

    def of_first_slot(self: PageTables, slab: Tensor, slots: Sequence[int], *args: Any) -> None:
        made(self, slab, [0] * len(slots), *args)

    def of_first_text(self: PageTables, slab: Tensor, slots: Sequence[int], ends: Any, *args: Any) -> None:
        start = ends[0][0]
        made(self, slab, slots, [(start, start + stop - own) for own, stop in ends], *args)

    for wrong in (of_first_slot, of_first_text):
        with monkeypatch.context() as inner:
            kernel = paged.Paged(PagedAttention(varlen_attn, paged.Form(PAGE, True)))
            inner.setattr(paged, "paged_on", lambda *args, kernel=kernel: kernel)
            inner.setattr(PageTables, "__init__", wrong)
            engine = engine_of(model, width=6)
            with pytest.raises(AssertionError, match="request"):
                check_alone(engine, requests)
            assert isinstance(engine.runner.arena, PagedArena)


# -- the arena --------------------------------------------------------------------------------------------------------


def arenas(**changes: Any) -> tuple[Arena, PagedArena]:
    config = small(**changes).config
    kernel = PagedAttention(varlen_attn, paged.Form(PAGE, True))
    held: tuple[Any, ...] = (config, 3, 18, torch.float64, CPU)
    return Arena(*held), PagedArena(*held, kernel)


@pytest.mark.parametrize("name", ["grt", "anchor", "gqa"])
def test_both_arenas_hold_the_same(name: str) -> None:
    """Whatever is put, copied and replaced."""
    both, draws = arenas(**MODELS[name]), random.Random(3)
    for kv in (kv for arena in both for kv in arena.kv.values()):
        kv.zero_()  # what is never written is a number too
    spans = [[arena.reserve(n) for n in (5, 7)] for arena in both]
    assert spans[0] == [(0, 5), (5, 12)] and spans[1] == [(0, 8), (8, 16)]
    numbers = torch.Generator().manual_seed(0)
    for _ in range(60):
        stage, span = draws.choice(sorted(both[0].kv)), draws.randrange(2)
        _, layers, slots, heads, _, width = both[0].kv[stage].shape
        slot, at, layer = draws.randrange(slots), draws.randrange(5), draws.randrange(layers)
        keys = tuple(torch.randn(1, heads, 1, width, generator=numbers, dtype=torch.float64) for _ in range(2))
        texts = torch.randn(1, heads, 6, width, generator=numbers, dtype=torch.float64)
        for arena, own in zip(both, spans, strict=True):
            start = own[span].start
            arena.put(stage, layer, arena.places(stage, [slot], [start + at]), keys)
            arena.copy_deeper(stage, [(slot, start + at)])
            if slots == 1:
                arena.replace(stage, [start + at], 2 * arena.newest(stage, [start + at]))
            arena.fill({(stage, layer, slot): (texts, texts)}, [(start, 5 - at)])
    for index in range(2):
        together, on_pages = (arena.slots(own[index]) for arena, own in zip(both, spans, strict=True))
        assert together.keys() == on_pages.keys()
        for slot, keys in together.items():
            for x_1GSK, y_1GSK in zip(keys, on_pages[slot], strict=True):
                n_tokens = x_1GSK.size(2)
                assert torch.equal(x_1GSK, y_1GSK[:, :, :n_tokens]) and not y_1GSK[:, :, n_tokens:].any()
        assert all(any(x.any() for x in keys) for keys in together.values())


def test_rows_of_a_pool_are_what_the_kernel_reads() -> None:
    _, arena = arenas(**HOUSE["grt"])
    for kv in arena.kv.values():
        kv.copy_(torch.randn(kv.shape, dtype=torch.float64))
    spans = [arena.reserve(n) for n in (3, 9)]
    assert spans == [Span(0, 4), Span(4, 16)]
    ends = [(0, 3), (4, 13), (4, 9), (arena.filling.start, arena.filling.stop)]
    store = RowStore(arena, ends, torch.zeros(4, 1), {CORE: [0, 2, 1, 0]})
    k, v = store.stored((CORE, 1, 0))
    tables = store._read[CORE]
    assert isinstance(tables, PageTables) and k.pool.data_ptr() == arena.kv[CORE][0, 1].data_ptr()
    for keys in (k, v):
        for row, pages, n in zip(keys, tables.pages_WN.tolist(), tables.used_W.tolist(), strict=True):
            gathered = torch.cat([keys.pool[page] for page in pages])[:n]
            assert torch.equal(gathered.transpose(0, 1)[None], row)
    assert (arena.kv[CORE][..., arena.n_tokens :, :] != 0).any() and arena.n_tokens == 20
    assert tables.most == 3 * PAGE and [stop - start for start, stop in ends] == tables.lengths


def test_pages_are_reserved_whole_and_given_back() -> None:
    _, arena = arenas(**HOUSE["grt"])
    assert (arena.n_tokens, arena.size.n_tokens, arena.n_free) == (20, 20, 20)
    one, two = arena.reserve(1), arena.reserve(PAGE + 1)
    assert one == (0, PAGE) and two == (PAGE, 3 * PAGE) and arena.n_free == arena.largest_free == 2 * PAGE
    assert arena.reserve(2 * PAGE + 1) is None
    arena.free(one)
    assert arena.n_free == 3 * PAGE and arena.largest_free == 2 * PAGE
    arena.free(two)
    assert arena.n_free == arena.largest_free == 20
    with pytest.raises(UsageError, match="a cache of 20"):
        arena.reserve(21)


def test_memory_is_what_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`alcoda capacity`, in pages: what is left holds so many, and not one more."""
    config, memory = small(n_heads=2).config, parse_size("200kB")
    plain = alcoda.capacity(config, memory, lengths=[PAGE + 2, 9], dtype="float32")
    assert plain.page_tokens == 1
    show.print_capacity(plain)
    assert "pages" not in capsys.readouterr().out
    on_pages(monkeypatch)
    found = alcoda.capacity(config, memory, lengths=[PAGE + 2, 9], dtype="float32")
    assert found.page_tokens == PAGE and {room.coda_keys for room in found.rooms} == {"at_exit", "per_loop"}
    assert found.weights_bytes == plain.weights_bytes
    show.print_capacity(found)
    assert f"in pages of {PAGE} tokens: a request takes whole pages" in capsys.readouterr().out
    kernel = paged_on(config, torch.float32, CPU).kernel
    assert kernel is not None
    for one in found.rooms:
        policy = caches()[one.cache]
        for n_tokens in (one.n_tokens, one.n_tokens + 1):
            how = kernel, one.coda_keys == "per_loop", policy
            arena = PagedArena(config, found.loops, n_tokens, torch.float32, CPU, *how)
            held = sum(kv.numel() * kv.element_size() for kv in arena.kv.values())
            assert held == one.bytes_per_token * (up(n_tokens, PAGE) + PAGE)
            assert arena.size.n_bytes == one.bytes_per_token * up(n_tokens, PAGE)
            assert (found.weights_bytes + held <= memory) == (n_tokens == one.n_tokens)
        # Of requests that read PAGE + 1 and 8 tokens.
        assert one.requests == {PAGE + 2: one.n_tokens // (2 * PAGE), 9: one.n_tokens // (2 * PAGE)}


def test_a_cache_beyond_the_memory_is_refused_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    size = bytes_per_token(model.config, LOOPS, torch.float64, True)
    how: tuple[Any, ...] = (model, Options(1, cache_tokens=3 * PAGE - 1), LOOPS, torch.float64)
    rest = 100_000  # of a launch
    check_room(*how, (3 * PAGE - 1) * size + rest)
    with pytest.raises(UsageError, match=rf"cache_tokens={3 * PAGE - 1}: .* {3 * PAGE - 2} fit at most"):
        check_room(*how, (3 * PAGE - 1) * size - 1)
    on_pages(monkeypatch)
    check_room(*how, 3 * PAGE * size + rest)
    with pytest.raises(UsageError, match=rf"cache_tokens={3 * PAGE - 1}: .* {2 * PAGE} fit at most"):
        check_room(*how, 3 * PAGE * size - 1)


def test_a_cache_that_is_not_set_has_whole_pages_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    assert room(model, torch.float64, [5, 4, 1]) == 10
    assert engine_of(model, places=3).runner.arena.n_tokens == 3 * 32
    on_pages(monkeypatch, 24)
    assert room(model, torch.float64, [25, 24, 1]) == 96
    assert engine_of(model, places=3).runner.arena.n_tokens == 3 * 48


# -- the probe --------------------------------------------------------------------------------------------------------


def choice(dtype: torch.dtype = torch.float64) -> tuple[Attends, bool]:
    arena = arena_of(small().config, 2, 9, dtype, CPU)
    return arena.attends, isinstance(arena, PagedArena)


def test_a_kernel_that_does_as_torch_does_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice() == (Attends("rows kernel"), False)
    calls = []
    for starts in (True, False):
        on_pages(monkeypatch, call=lambda *a, **b: (calls.append(a[4]), varlen_attn(*a, **b))[1], starts=starts)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for _ in range(2):
                assert choice(dtype) == (Attends("varlen"), True)
        assert len(calls) == 3 * 2 * 4, "once a type: two ways of dividing the work, four windows"
        assert all((one is not None) == starts for one in calls)
        calls.clear()


def broken(how: str) -> Any:
    """A kernel that does something wrong."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Any, most: int, max_k: int, **more: Any
    ) -> Any:
        match how:
            case "reads behind the end":
                more["seqused_k"] = (more["seqused_k"] + 1).clamp(max=max_k)
            case "another page":
                more["block_table"] = more["block_table"].flip(0).contiguous()
            case "no window":
                more["window_size"] = (-1, -1)
            case "a window of one more":
                left, right = more["window_size"]
                more["window_size"] = (left + 1, right) if left >= 0 else (left, right)
            case "scale":
                query = 1.1 * query
            case _:
                if how == "deterministic" and more["num_splits"] is None:
                    return varlen_attn(query, key, value, cu_q, cu_k, most, max_k, **more)
                raise {"types": TypeError, "deterministic": RuntimeError}[how]("only fp16 and bf16\nat flash_api.cpp")
        return varlen_attn(query, key, value, cu_q, cu_k, most, max_k, **more)

    return call


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "how",
    ["reads behind the end", "another page", "no window", "a window of one more", "scale", "types", "deterministic"],
)
def test_a_kernel_that_does_not_is_not(how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    on_pages(monkeypatch, call=broken(how))
    attends, is_paged = choice(dtype)
    assert attends.name == "sdpa" and not is_paged
    says = "varlen_attn: only fp16 and bf16" if how in ("types", "deterministic") else "varlen_attn: off by"
    assert attends.reason.startswith(says) and "\n" not in attends.reason


def test_torchs_own_is_not_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked as an engine asks it, and says why not: a kernel without a GPU, whatever the type."""
    own = paged.load_varlen_attn
    on_pages(monkeypatch)
    monkeypatch.setattr(paged, "load_varlen_attn", own)
    monkeypatch.setattr(paged, "implementation", lambda: FA2)
    for dtype in (torch.bfloat16, torch.float32):
        attends, is_paged = choice(dtype)
        assert attends.name == "sdpa" and attends.reason.startswith("varlen_attn: ") and not is_paged
        assert "CPU" in attends.reason and len(attends.reason) < 200


def test_torchs_own_takes_what_it_is_given() -> None:
    """By its own checks, and in no more than shapes: there is no GPU."""
    meta, call = torch.device("meta"), paged.load_varlen_attn()
    for deterministic, window in ((False, None), (True, 3)):
        kernel = PagedAttention(call, FA2, deterministic)
        arena = PagedArena(small(**MODELS["gqa"]).config, 3, 600, torch.bfloat16, meta, kernel)
        store = RowStore(arena, [(0, 5), (256, 520)], torch.zeros(2, 1, device=meta), {CORE: [2, 0]})
        view = store.view if window is None else store.view.within(window)
        q_WH1K = torch.empty(2, 4, 1, 4, dtype=torch.bfloat16, device=meta)
        y_WH1K = attend(q_WH1K, *store.stored((CORE, 0, 0)), view)
        assert y_WH1K.shape == q_WH1K.shape and y_WH1K.dtype == torch.bfloat16
    with pytest.raises(TypeError):
        call(q_WH1K[:, :, 0], q_WH1K, q_WH1K, pages=None)


def test_a_type_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    on_pages(monkeypatch)
    assert choice(torch.float16) == (Attends("sdpa", "varlen_attn: not tried in torch.float16"), False)


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_pages(monkeypatch)

    def missing() -> Any:
        raise ImportError("cannot import name 'varlen_attn'")

    monkeypatch.setattr(paged, "load_varlen_attn", missing)
    assert choice() == (Attends("sdpa", "varlen_attn: cannot import name 'varlen_attn'"), False)


def test_the_implementation_that_torch_uses_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paged.implementation() == FA2
    for active, form in ((None, FA2), ("FA2", FA2), ("FA3", paged.OTHERS)):
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda active=active: active)
        assert paged.implementation() == form


def test_an_engine_and_its_benchmark_say_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = small().config
    how: dict[str, Any] = {"shape": shape, "concurrency": [2], "tokens": 4, "prompt_tokens": 4, "rounds": 1}
    how |= {"dtype": "float32", "mean_depth": 2.0}
    on_pages(monkeypatch)
    found = alcoda.bench_engine(**how, deterministic=True)
    assert (found.machine["attention"], found.machine["attention_reason"]) == ("varlen", None)
    assert not found.tokens_differ
    # Two requests of 7 tokens that are read, in two pages each.
    assert found.scores[0].cache_bytes == 2 * 2 * PAGE * bytes_per_token(shape, LOOPS, torch.float32, True)
    assert Engine(small(), Options(), dtype=torch.float64).attends == Attends("varlen")
    on_pages(monkeypatch, call=broken("scale"))
    found = alcoda.bench_engine(**how)
    assert found.machine["attention"] == "sdpa"
    show.print_bench(found)
    said = capsys.readouterr().out
    assert "attention sdpa" in said and found.machine["attention_reason"] in said


@pytest.mark.parametrize(("dtype", "says"), [(torch.float64, "ALCODA_KERNELS is off"), (torch.float16, "float16")])
def test_a_cpu_says_why_it_attends_row_by_row(dtype: torch.dtype, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row_attention.cache_clear()
    with monkeypatch.context() as inner:
        inner.setenv("ALCODA_KERNELS", "off")
        attends, _ = choice(dtype)
    row_attention.cache_clear()
    assert attends.name == "sdpa" and says in attends.reason
