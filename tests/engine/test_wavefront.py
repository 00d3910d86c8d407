"""The wavefront: drafts are checked, so that what comes is what comes without them (invariants 5 and 9)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import HOUSE, alone, check_alone, check_same, drive, engine_of, exits_of, mixed, poison, small

from alcoda.engine import sampling
from alcoda.engine.engine import Engine
from alcoda.engine.request import Request
from alcoda.engine.sampling import Sampling
from alcoda.engine.scheduler import Scheduler
from alcoda.model.lm import RecurrentLM

WITH_DRAFTS = {name: fields for name, fields in HOUSE.items() if name != "memory"}
WITH_DRAFTS["prelude_memory"] = {
    "memory": {"kind": "prev_token", "source": "prelude.0", "mean_of": 2},
    "inject": "concat",
    "n_prelude": 2,
}


def often_right() -> RecurrentLM:
    """Loops that change little, so that most drafts are right."""
    model = small()
    with torch.no_grad():
        for p in model.core.parameters():
            p.mul_(0.3)
    return model


@pytest.mark.parametrize(
    ("fields", "draft_loops"), [(f, 1 + i % 2) for i, f in enumerate(WITH_DRAFTS.values())], ids=WITH_DRAFTS
)
def test_with_drafts_is_without(fields: dict[str, Any], draft_loops: int) -> None:
    """Greedy and seeded, with penalties, at a fixed depth and with exits."""
    model = small(**fields)
    engine = engine_of(model, width=8, draft_loops=draft_loops)
    check_alone(engine, mixed([None, *exits_of(model, "state", "kl")], 4, seed=draft_loops), every=3)
    assert engine.stats.drafts >= engine.stats.accepted
    assert engine.stats.drafts or draft_loops > 1, "nothing was drafted"


def test_drafts_are_often_right_and_save_launches() -> None:
    model = often_right()
    requests = [
        Request((5, 9), 16, sampling=sampling)
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=4), Sampling(repetition_penalty=1.3))
    ]
    launches = []
    for draft_loops in (None, 1):
        engine = engine_of(model, width=16, draft_loops=draft_loops)
        check_alone(engine, requests)
        launches.append(engine.stats.launches["core"])
    assert engine.stats.accepted > 0.3 * engine.stats.drafts
    assert launches[1] < 0.8 * launches[0]


def test_a_full_launch_has_no_drafts() -> None:
    model = often_right()
    requests = [Request((5, 9, n), 4 + n) for n in range(8)]
    engine = engine_of(model, width=4, places=4, draft_loops=1)
    widths = []
    next_launch = engine.scheduler.next

    def noted() -> Any:
        launch = next_launch()
        if hasattr(launch, "items"):
            widths.append((len(launch.items), sum(item.parent is not None for item in launch.items)))
        return launch

    engine.scheduler.next = noted  # pyrefly: ignore
    check_alone(engine, requests)
    assert all(width <= 4 for width, _ in widths)
    assert all(drafts == 0 for width, drafts in widths if width - drafts == 4)
    assert any(drafts for _, drafts in widths), "there is room at the end"


def test_seeds_do_not_depend_on_batch_mates_and_drafts() -> None:
    """And of one seed, streams differ."""
    model = often_right()
    request = Request((5, 9), 10, sampling=Sampling(temperature=1.5, seed=11), n=2)
    expected = [alone(model, request, stream) for stream in (0, 1)]
    assert expected[0].tokens != expected[1].tokens
    other = replace(request, sampling=Sampling(temperature=1.5, seed=12), n=1)
    assert alone(model, other).tokens != expected[0].tokens
    for options in ({"width": 1}, {"width": 12, "draft_loops": 1}, {"width": 12, "draft_loops": 2, "min_coda": 2}):
        engine = engine_of(model, **options)
        _, completions, _ = drive(engine, [other, request, replace(other, prompt=(8,))], every=2)
        for completion, alike in zip(completions, expected, strict=True):
            check_same(engine, completion, alike)


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_control_a_draft_that_is_not_checked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Engine._commit

    def believes(self: Engine, item: Any, drawn: Any) -> Any:
        if item.child is not None and not isinstance(drawn, str):
            drawn = drawn._replace(token=item.child.token)
            self._newest = [(drawn, logits_V) for _, logits_V in self._newest]  # pyrefly: ignore
        return commit(self, item, drawn)

    monkeypatch.setattr(Engine, "_commit", believes)
    with pytest.raises(AssertionError, match="other tokens"):
        check_alone(engine_of(small(), width=8, draft_loops=1), [Request((5, 9), 12)])


def test_control_a_child_that_overtakes_its_parent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads keys that its parent has not made."""

    def all_of_them(self: Scheduler, n: int) -> list[Any]:
        return [item for item in self.drafts if not item.left][: max(n, 0)]

    monkeypatch.setattr(Scheduler, "_spare", all_of_them)
    # One launch in two has room for drafts only, so that a child runs on while its parent waits.
    core = Engine._core

    def drafts_first(self: Engine, items: list[Any]) -> None:
        heads = [item for item in items if item.parent is None]
        if len(heads) < len(items) and self.stats.launches["core"] % 2:
            self.stats.launches["core"] += 1
            self.scheduler.ready.extendleft(reversed(heads))
            items = [item for item in items if item.parent is not None]
        core(self, items)

    monkeypatch.setattr(Engine, "_core", drafts_first)
    with pytest.raises(AssertionError, match="request"):
        engine = engine_of(often_right(), width=8, draft_loops=1)
        check_alone(engine, [Request((5, 9), 12)], before=lambda n: poison(engine))


def test_control_noise_of_the_call_and_not_of_the_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10_000))
    gumbel = sampling.gumbel

    def of_the_call(seed: int, stream: int, position: int, n: int) -> np.ndarray:
        return gumbel(seed, stream, next(calls), n)

    monkeypatch.setattr(sampling, "gumbel", of_the_call)
    with pytest.raises(AssertionError, match="other tokens"):
        check_alone(engine_of(small()), [Request((5, 9), 10, sampling=Sampling(temperature=1.5, seed=11))])
