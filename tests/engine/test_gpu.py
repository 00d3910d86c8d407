"""On a GPU the engine computes what it does on a CPU (invariant 13)."""

from __future__ import annotations

import pytest
import torch
from engines import HOUSE, drive, engine_of, exits_of, mixed, small

from alcoda.engine.request import Request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
