"""On a GPU the engine computes what it does on a CPU (invariant 13), and its pages are read by torch's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import HOUSE, drive, engine_of, exits_of, mixed, small
from torch import Tensor

import alcoda
from alcoda.engine import paged
from alcoda.engine.cache import RowStore, up
from alcoda.engine.kernels import TOLERANCE
from alcoda.engine.paged import FA2, Form, PagedArena, arena_of, paged_on
from alcoda.engine.request import Request
from alcoda.model.attention import attend
from alcoda.model.keys import CORE
from alcoda.model.lm import RecurrentLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
ampere = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8, reason="needs a GPU since Ampere"
)
PAGED: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"n_heads": 4, "block": {"attention": {"kind": "gqa", "n_kv_heads": 2}}},
    "window": {"block": {"window": {"kind": "everywhere", "tokens": 5}}},
    "gqa_window": {
        "n_heads": 4,
        "block": {"attention": {"kind": "gqa", "n_kv_heads": 1}, "window": {"kind": "everywhere", "tokens": 300}},
    },
    "anchor": {"keys": "anchor"},
}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    paged._probed.cache_clear()
    yield
    paged._probed.cache_clear()


@pytest.mark.parametrize("name", HOUSE)
def test_a_gpu_is_a_cpu(name: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = small(**HOUSE[name]).to(device)
        engine = engine_of(model, width=6, draft_loops=None if name == "memory" else 1)
        ended = drive(engine, [Request((3, 41, 7), 6), *mixed([None], 3)], every=2)
        found.append([(c.ids, engine.logits_TV(c).cpu()) for (c,) in ended])
    for (ids, logits_TV), (on_gpu, there_TV) in zip(*found, strict=True):
        assert ids == on_gpu and (logits_TV - there_TV).abs().max() < 1e-8


def test_exits_too() -> None:
    loops = []
    for device in ("cpu", "cuda"):
        model = small(**HOUSE["grt"])
        tests = exits_of(model, "state")
        model = model.to(device)
        rules = [type(test)(model, test.bounds) for test in tests]
        ended = drive(engine_of(model), mixed(rules, 3))
        loops.append([[token.loops for token in c.tokens] for (c,) in ended])
    assert loops[0] == loops[1]


# -- pages ------------------------------------------------------------------------------------------------------------


def of_pages(name: str) -> RecurrentLM:
    """Heads of 32, and texts of some pages."""
    fields = {"d_model": 32 * PAGED[name].get("n_heads", 2), "seq_len": 1200, **PAGED[name]}
    return small(**fields).to(GPU, torch.bfloat16)


@ampere
@pytest.mark.parametrize("name", PAGED)
def test_pages_are_padded_rows(name: str) -> None:
    """One call over pages, with NaN where no text is, against SDPA over padded keys."""
    config, draws = of_pages(name).config, torch.Generator().manual_seed(0)
    for deterministic in (False, True):
        arena = arena_of(config, 4, 4000, torch.bfloat16, GPU, deterministic=deterministic)
        assert isinstance(arena, PagedArena), arena.attends
        lengths = (1, 255, 256, 257, 700, 1100)
        spans = [arena.reserve(n) for n in lengths]
        for kv in arena.kv.values():
            kv[..., : arena.n_tokens, :] = torch.nan
        ends = [(span.start, span.start + n) for span, n in zip(spans, lengths, strict=True) if span is not None]
        n_slots = arena.kv[CORE].size(2)
        slots = [i % n_slots for i in range(len(ends))]
        for slot, (start, stop) in zip(slots, ends, strict=True):
            text = arena.kv[CORE][:, :, slot, :, start:stop]
            text.copy_(torch.randn(text.shape, generator=draws))
        store = RowStore(arena, ends, torch.zeros(len(ends), 1, device=GPU), {CORE: slots})
        q_WH1K = torch.randn(len(ends), config.shape.n_heads, 1, config.shape.d_head, generator=draws).to(text)
        for window in (None, *config.block.windows(), 1):
            view = store.view if window is None else store.view.within(window)
            found = attend(q_WH1K, *store.stored((CORE, 0, 0)), view)
            expected = attend(q_WH1K, *store.stored((CORE, 0, 0)), view._replace(kernel=None))
            assert (found - expected).abs().max() <= TOLERANCE[torch.bfloat16]


def second_logits(model: RecurrentLM, n_prompts: int, **options: Any) -> tuple[str, list[Tensor]]:
    """Of the token after the first that was decoded: prompts are read alike with pages and without."""
    engine = engine_of(model, torch.bfloat16, width=8, chunk_tokens=512, **options)
    draws = torch.Generator().manual_seed(3)
    texts = [torch.randint(64, (n,), generator=draws).tolist() for n in (3, 255, 256, 900)[:n_prompts]]
    ended = drive(engine, [Request(tuple(text), 2) for text in texts])
    assert all(one.error is None for (one,) in ended)
    return engine.attends.name, [engine.logits_TV(one)[1].float() for (one,) in ended]


@ampere
@pytest.mark.parametrize("name", PAGED)
def test_an_engine_on_pages_is_one_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_pages(name)
    varlen, found = second_logits(model, 4)
    monkeypatch.setattr(paged, "DEVICES", ())
    sdpa, expected = second_logits(model, 4)
    assert (varlen, sdpa) == ("varlen", "sdpa")
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 0.05 * other.abs().max()


@ampere
@pytest.mark.parametrize("name", ["mha", "gqa", "window"])
def test_a_deterministic_row_does_not_depend_on_others(name: str) -> None:
    model = of_pages(name)
    _, together = second_logits(model, 4, deterministic=True)
    _, alone = second_logits(model, 1, deterministic=True)
    assert torch.equal(together[0], alone[0])


@ampere
def test_nothing_is_compiled_or_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_pages("gqa")
    second_logits(model, 1)
    torch._dynamo.utils.counters.clear()
    probed = paged._probed.cache_info().misses
    second_logits(model, 4, draft_loops=1)
    assert paged._probed.cache_info().misses == probed == 1
    assert not torch._dynamo.utils.counters["frames"] and not torch._dynamo.utils.counters["stats"]


@ampere
def test_what_the_kernel_does_not_take_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = of_pages("mha").config
    assert paged_on(config, torch.bfloat16, GPU).page_tokens in (FA2.page_tokens, paged.OTHERS.page_tokens)
    for dtype in (torch.float32, torch.float64):
        found = paged_on(config, dtype, GPU)
        assert found.kernel is None and found.reason.startswith("varlen_attn: ")
    odd = small(d_model=24).config  # heads of 12
    assert odd.shape.d_head == 12 and paged_on(odd, torch.bfloat16, GPU).kernel is None
    if paged.implementation() == FA2:
        monkeypatch.setattr(paged, "implementation", lambda: Form(64, True))
        assert "256" in paged_on(config, torch.bfloat16, GPU).reason
        monkeypatch.undo()
    second, logits = second_logits(small(d_model=64, seq_len=1200).to(GPU, torch.float32), 2)
    assert second == "varlen" and all(one.isfinite().all() for one in logits)  # of fp32 weights, in passes of bf16


@ampere
def test_capacity_counts_pages() -> None:
    config = of_pages("mha").config
    found = alcoda.capacity(config, 10**8, lengths=[258])
    kernel = paged_on(config, torch.bfloat16, GPU).kernel
    assert kernel is not None and found.page_tokens == kernel.form.page_tokens
    for one in found.rooms:
        assert one.n_tokens % found.page_tokens == 0
        assert one.requests[258] == one.n_tokens // up(257, found.page_tokens)
