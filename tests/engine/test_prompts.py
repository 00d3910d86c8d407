"""Prompts that are read together are what each is alone (invariants 1, 4), and a fault of one is its own (15)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import HOUSE, LOOPS, SAMPLINGS, Alone, Recorder, alone, check_same, drive, engine_of, exits_of, small

from alcoda.depth.exiting import pick_coda_keys
from alcoda.depth.record import Trace
from alcoda.depth.rules import Fixed, TraceRule
from alcoda.depth.watch import ExitTest, TraceTest
from alcoda.engine.cache import Arena
from alcoda.engine.prompts import Prompts
from alcoda.engine.request import Completion, Request
from alcoda.engine.sampling import NOT_FINITE
from alcoda.engine.scheduler import Piece
from alcoda.model.cache_policy import LastCache
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import ExactPrefill, ZeroPrefill

MODELS: dict[str, dict[str, Any]] = {
    **HOUSE,
    "gqa": {"block": {"attention": {"kind": "gqa", "n_kv_heads": 1}}},
    "final": {"memory": {"kind": "prev_token", "source": "final", "lag": 2}, "inject": "concat"},
}
EVEN, UNEVEN = (7, 7, 7, 7), (8, 7, 6, 8)
over_lengths = pytest.mark.parametrize("lengths", [EVEN, UNEVEN], ids=["even", "uneven"])


@pytest.fixture(autouse=True)
def _a_piece_is_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether anything else runs or not."""
    monkeypatch.setattr("alcoda.engine.scheduler.UNDISTURBED", 1)


def asked(lengths: tuple[int, ...], test: ExitTest | None = None, n_new: int = 4, **how: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))
    prompts = [tuple(torch.randint(1, 64, (n,), generator=generator).tolist()) for n in lengths]
    return [
        Request(prompt, n_new, sampling=SAMPLINGS[i % len(SAMPLINGS)], test=test, name=i, **how)
        for i, prompt in enumerate(prompts)
    ]


def reads(model: RecurrentLM, **options: Any) -> tuple[Recorder, list[list[Any]]]:
    """An engine that reads up to 40 tokens at one time, and whose prompts it reads in each launch, as they come."""
    engine = engine_of(model, **{"width": 6, "chunk_tokens": 40, **options})
    found: list[list[Any]] = []
    next_launch = engine.scheduler.next

    def noted() -> Any:
        launch = next_launch()
        if isinstance(launch, Piece):
            found.append([part.completion.request.name for part in launch.parts])
        return launch

    engine.scheduler.next = noted  # pyrefly: ignore
    return engine, found


def check_together(
    model: RecurrentLM, requests: list[Request], expected: list[Alone] | None = None
) -> list[Completion]:
    """All prompts are read in one launch, and each is what it is alone."""
    engine, found = reads(model)
    ended = [completion for (completion,) in drive(engine, requests)]
    assert found == [[request.name for request in requests]]
    for i, completion in enumerate(ended):
        check_same(engine, completion, alone(model, requests[i]) if expected is None else expected[i])
    assert engine.stats.launches["piece"] == 1
    assert engine.stats.rows["piece"] == engine.stats.prompt_tokens == sum(len(r.prompt) for r in requests)
    return ended


@over_lengths
@pytest.mark.parametrize("name", MODELS)
def test_together_is_alone(name: str, lengths: tuple[int, ...]) -> None:
    model = small(**MODELS[name])
    for test in (None, *exits_of(model, "state", "kl", "second_order")):
        ended = check_together(model, asked(lengths, test, n_new=2))
        assert test is None or len({n for completion in ended for n in completion.prompt_loops}) > 1


@over_lengths
@pytest.mark.parametrize("loops", [1, 3])
def test_of_fewer_loops(loops: int, lengths: tuple[int, ...]) -> None:
    model = small(**HOUSE["grt"])
    check_together(model, asked(lengths, loops=loops))
    check_together(model, asked(lengths, Fixed(loops=loops).build(model, LOOPS)))


@over_lengths
@pytest.mark.parametrize("kind", ["state", "kl"])
def test_each_has_its_row_of_a_trace(kind: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["grt"])
    (test,) = exits_of(model, kind)
    requests = asked(lengths, test)
    expected = [alone(model, request) for request in requests]
    rows = [[*one.prompt_loops, *one.loops[1:]] for one in expected]
    # Shorter than the longest prompt is padded: of padding no depths are asked.
    depths_BT = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    traced = TraceRule().build(model, LOOPS, Trace(depths_BT, LOOPS, pick_coda_keys(test, None)))
    again = [replace(request, test=traced, row=row) for row, request in enumerate(requests)]
    check_together(model, again[::-1], expected[::-1])

    of_rows = TraceTest.of_rows
    monkeypatch.setattr(TraceTest, "of_rows", lambda self, rows: of_rows(self, sorted(rows)))
    with pytest.raises(AssertionError, match="request"):
        check_together(model, again[::-1], expected[::-1])


def test_control_keys_that_are_not_put_in_their_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["grt"])
    fill = Arena.fill
    monkeypatch.setattr(Arena, "fill", lambda self, slots, texts: fill(self, slots, [(at, n - 1) for at, n in texts]))
    with pytest.raises(AssertionError, match="request"):
        check_together(model, asked(EVEN))


def test_control_padding_that_counts_as_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["memory"])
    padded = Prompts._padded
    monkeypatch.setattr(Prompts, "_padded", lambda self, texts: (padded(self, texts)[0], None))
    with pytest.raises(AssertionError, match="request"):
        check_together(model, asked(UNEVEN))


# -- who is read with whom --------------------------------------------------------------------------------------------


def check_reads(model: RecurrentLM, requests: list[Request], expected: list[list[int]], **options: Any) -> None:
    engine, found = reads(model, **options)
    for (completion,) in drive(engine, requests):
        check_same(engine, completion, alone(model, completion.request, cache=engine.options.cache))
    assert found == expected


def test_only_those_that_are_read_alike() -> None:
    model = small(**HOUSE["memory"])
    (test,) = exits_of(model, "state")
    first, *others = asked((5,) * 6)
    ways: list[dict[str, Any]] = [
        {},
        {"test": test},
        {"test": test},
        {"loops": 2},
        {"prefill": ZeroPrefill()},  # how it is cut would make a difference
    ]
    requests = [first, *(replace(one, **how) for one, how in zip(others, ways, strict=True))]
    check_reads(model, requests, [[0, 1], [2, 3], [4], [5]])
    exact = [replace(one, prefill=ExactPrefill()) for one in others[:3]]
    check_reads(model, exact, [[1, 2, 3]])


@pytest.mark.parametrize("options", [{"deterministic": True}, {"cache": LastCache()}, {"chunk_tokens": 7}], ids=str)
def test_each_alone(options: dict[str, Any]) -> None:
    model = small(**HOUSE["grt"])
    check_reads(model, asked((7, 7, 7)), [[0], [1], [2]], **options)


@pytest.mark.parametrize("options", [{"width": 2}, {"refill": False}, {"draft_loops": 1}, {"places": 3}], ids=str)
def test_whatever_the_engine_does_beside(options: dict[str, Any]) -> None:
    model = small(**HOUSE["grt"])
    for every in (0, 3):
        engine, found = reads(model, **options)
        requests = [r for test in (None, *exits_of(model, "kl")) for r in asked((5, 4, 5, 5), test, 6)]
        for (completion,) in drive(engine, requests, every=every):
            check_same(engine, completion, alone(model, completion.request))
        assert every or max(map(len, found)) > 1


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "state", "kl"])
def test_a_prompt_that_gives_no_numbers_fails_alone(kind: str | None) -> None:
    model = small(**HOUSE["grt"])
    with torch.no_grad():
        model.embed.weight[0] = float("nan")
    (test,) = [None] if kind is None else exits_of(small(**HOUSE["grt"]), kind)
    if test is not None:
        test.model = model
    requests = asked(UNEVEN, test)
    for broken in range(len(requests)):
        spoiled = list(requests)
        spoiled[broken] = replace(
            requests[broken], prompt=(*requests[broken].prompt[:2], 0, *requests[broken].prompt[3:])
        )
        engine, found = reads(model)
        ended = [completion for (completion,) in drive(engine, spoiled)]
        assert found == [[0, 1, 2, 3]]
        for i, completion in enumerate(ended):
            if i == broken:
                assert (completion.finish, completion.error, completion.tokens) == ("error", NOT_FINITE, [])
            else:
                check_same(engine, completion, alone(model, requests[i]))


@pytest.mark.parametrize("name", ["read", "begin"])
@pytest.mark.parametrize("after", [False, True])
def test_an_exception_fails_all_that_are_read_with_it(name: str, after: bool) -> None:
    model = small(**HOUSE["grt"])
    engine, found = reads(model, chunk_tokens=16)
    part, calls = getattr(engine.runner, name), iter(range(1_000_000))

    def run(*args: Any) -> Any:
        first = next(calls) == 0
        result = part(*args) if after or not first else None
        if first:
            raise RuntimeError("planted")
        return result

    setattr(engine.runner, name, run)
    ended = [completion for (completion,) in drive(engine, asked(UNEVEN))]
    assert found == [[0, 1], [2, 3]]
    assert [completion.error for completion in ended] == ["RuntimeError: planted"] * 2 + [None] * 2
    for completion in ended[2:]:
        check_same(engine, completion, alone(model, completion.request))


def test_a_halt_and_a_cancel_are_of_one_alone() -> None:
    model = small(**HOUSE["grt"])

    def halt(completion: Completion, token: int) -> bool:
        raise KeyError("nowhere")

    requests = asked(EVEN)
    requests[0] = replace(requests[0], halt=halt)
    for at, together in ((0, [0, 1, 3]), (1, [0, 1, 2, 3])):
        engine, found = reads(model)
        halted, one, gone, other = (completion for request in requests for completion in engine.submit(request))
        drive(engine, [], before=lambda n, at=at, gone=gone, engine=engine: engine.cancel(gone) if n == at else None)
        assert found == [together]
        assert halted.error == "halt: KeyError: 'nowhere'"
        assert gone.finish == "cancelled" and len(gone.tokens) == at
        for completion in (one, other):
            check_same(engine, completion, alone(model, completion.request))
