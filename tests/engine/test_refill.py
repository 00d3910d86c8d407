"""With refill, without it and on a recorded trace the same is decoded (invariant 6); counts are what was done (12)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import HOUSE, LOOPS, alone, check_alone, check_same, drive, engine_of, exits_of, mixed, small

from alcoda.depth.exiting import pick_coda_keys
from alcoda.depth.record import Trace
from alcoda.depth.rules import TraceRule
from alcoda.depth.watch import ExitTest, TraceTest
from alcoda.engine.engine import Engine
from alcoda.engine.request import Completion, Request
from alcoda.engine.scheduler import Core
from alcoda.engine.stats import flop_bound
from alcoda.model.cost import ledger
from alcoda.model.lm import RecurrentLM


def trace_of(model: RecurrentLM, test: ExitTest, ended: list[Completion]) -> Trace:
    """The depths of some completions, a row each."""
    rows = [[*c.prompt_loops, *(token.loops for token in c.tokens[1:])] for c in ended]
    width = max(map(len, rows))
    depths_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return Trace(depths_BT, test.n_loops, pick_coda_keys(test, None))


@pytest.mark.parametrize(("name", "kind"), [("grt", "state"), ("grt", "kl"), ("anchor", "state"), ("memory", "state")])
def test_refill_is_no_refill_is_the_trace(name: str, kind: str) -> None:
    model = small(**HOUSE[name])
    (test,) = exits_of(model, kind)
    requests = [replace(request, stop_ids=frozenset()) for request in mixed([test], 4)]
    ended = [c for (c,) in drive(engine_of(model), requests)]
    traced = TraceRule().build(model, LOOPS, trace_of(model, test, ended))
    again = [replace(request, test=traced, row=row) for row, request in enumerate(requests)]
    ways: list[tuple[dict[str, Any], list[Request]]] = [
        ({"refill": False}, requests),
        ({}, again),
        ({"refill": False}, again),
    ]
    if not model.config.memory.carries:
        ways.append(({"width": 8, "draft_loops": 1}, again))
    for options, asked in ways:
        engine = engine_of(model, **options)
        for (completion,), first in zip(drive(engine, asked), ended, strict=True):
            check_same(engine, completion, alone(model, first.request))


def test_control_a_trace_of_other_depths_is_noticed() -> None:
    model = small(**HOUSE["grt"])
    (test,) = exits_of(model, "state")
    requests = [replace(request, stop_ids=frozenset()) for request in mixed([test], 4)]
    trace = trace_of(model, test, [c for (c,) in drive(engine_of(model), requests)])
    other = Trace((trace.depths_BT % LOOPS) + 1, LOOPS, trace.coda_keys)
    engine = engine_of(model)
    again = [replace(r, test=TraceTest(model, test.bounds, other), row=row) for row, r in enumerate(requests)]
    (completion,) = drive(engine, again)[0]
    with pytest.raises(AssertionError, match="request"):
        check_same(engine, completion, alone(model, requests[0]))


def widths(engine: Engine) -> list[list[int]]:
    """Loops of the tokens of each launch of the loop, as they come."""
    found: list[list[int]] = []
    next_launch = engine.scheduler.next

    def noted() -> Any:
        launch = next_launch()
        if isinstance(launch, Core):
            found.append([item.loops for item in launch.items])
        return launch

    engine.scheduler.next = noted  # pyrefly: ignore
    return found


def test_without_refill_nobody_joins_those_in_the_loop() -> None:
    model = small(**HOUSE["grt"])
    requests = [Request((n,), 6, test=exits_of(model, "state")[0]) for n in range(6)]
    without, with_refill = engine_of(model, refill=False), engine_of(model, min_coda=1)
    found, refilled = widths(without), widths(with_refill)
    check_alone(without, requests, every=1)
    check_alone(with_refill, requests, every=1)
    assert all(len(set(loops)) == 1 for loops in found), "tokens of one wave are at one loop"
    assert any(len(set(loops)) > 1 for loops in refilled)
    mean = [sum(map(len, one)) / len(one) for one in (found, refilled)]
    assert mean[1] > 1.1 * mean[0], "refill fills launches"


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"refill": False}, {"width": 8, "draft_loops": 1}], ids=str)
def test_what_is_counted_is_what_was_done(options: dict[str, Any]) -> None:
    model = small(**HOUSE["grt"])
    requests = mixed([None, *exits_of(model, "state")], 6)
    engine = engine_of(model, **options)
    launched = widths(engine)
    ended = [c for (c,) in drive(engine, requests, every=2)]
    stats, tokens = engine.stats, [token for c in ended for token in c.tokens]
    assert stats.tokens == len(tokens)
    # A token that ended the text is not part of it, and what it was drawn from has run.
    ended_by = sum(c.finish == "stop" for c in ended)
    assert ended_by and sum(stats.loops.values()) == len(tokens) + ended_by
    assert stats.prompt_loops.total() == stats.prompt_tokens == sum(len(r.prompt) for r in requests)
    executed = sum(map(len, launched))
    assert stats.rows["core"] == executed and stats.launches["core"] == len(launched)
    report = stats.report(model.config, LOOPS)
    assert report["launches"]["core"] * report["mean_width"]["core"] == pytest.approx(executed)
    # All but the first token of each are drawn from one that ran in these launches.
    firsts = sum(c.prompt_loops[-1] for c in ended)
    in_loop = sum(loops * n for loops, n in stats.loops.items()) - firsts
    assert executed >= in_loop if stats.drafts else executed == in_loop
    fixed = LOOPS * stats.loops.total()
    assert fixed - sum(loops * n for loops, n in stats.loops.items()) == pytest.approx(
        (LOOPS - stats.mean_loops) * stats.loops.total()
    )


def test_the_bound_is_that_of_the_ledger() -> None:
    config = small(**HOUSE["grt"]).config
    flops = {n: ledger(config, n).forward_flops_per_token for n in (2, 4, 8)}
    assert flop_bound(config, 8, 4.0) == pytest.approx(flops[8] / flops[4])
    assert flop_bound(config, 8, 3.0) == pytest.approx(2 * flops[8] / (flops[2] + flops[4]))
    assert flop_bound(config, 8, 8.0) == 1.0


def test_control_a_launch_that_is_not_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    took = Engine._took

    def forgets(self: Engine, kind: str, rows: int, began: float) -> None:
        took(self, kind, rows - (kind == "core" and rows > 1), began)

    monkeypatch.setattr(Engine, "_took", forgets)
    with pytest.raises(AssertionError):
        test_what_is_counted_is_what_was_done({})
