"""Engine == replay, on texts that it wrote (invariant 2). `benchmarks/engine_replay.py` does so on a trained model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_replay import compare
from engines import HOUSE, copy_wrongly, engine_of, exits_of, small

from alcoda.engine.cache import Arena


def run(fields: dict[str, Any], kind: str, n: int = 4, **options: Any) -> dict[str, Any]:
    model = small(**fields)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(64, (1 + i % 7,), generator=generator).tolist() for i in range(n)]
    told: list[int] = []
    found = compare(engine_of(model, **options), prompts, 8, exits_of(model, kind)[0], told.append)
    assert told == list(range(1, n + 1))
    return found


@pytest.mark.parametrize("kind", ["state", "kl"])
@pytest.mark.parametrize("name", HOUSE)
def test_the_engine_is_replay(name: str, kind: str) -> None:
    drafts = {} if name == "memory" else {"draft_loops": 1, "width": 6}
    found = run(HOUSE[name], kind, **drafts)
    assert found["equal"], found
    assert (found["texts"], found["tokens"], found["near_ties"], found["failed"]) == (4, 32, 0, 0)
    assert found["logits_off"] < 1e-9 and len(found["loops"]) > 1


def test_control_other_keys_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "copy_deeper", copy_wrongly)
    found = run(HOUSE["grt"], "state")
    assert not found["equal"] and found["logits_off"] > 1e-9
