"""Many random requests with cancels and faults: none is lost, none is wrong. The same with 10,000 of them on a trained
model is `benchmarks/engine_many.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_many import Known, known, many
from engine_replay import between_scores
from engines import HOUSE, LOOPS, small

from alcoda.depth.rules import read_rule
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.laws.subject import tokens
from alcoda.model.lm import RecurrentLM


def pool_of(model: RecurrentLM, n: int) -> list[Known]:
    rng = random.Random(1)
    prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 10))] for _ in range(n)]
    texts = tokens(4, 12, seed=5)
    rules = [between_scores(model, read_rule(kind), texts, LOOPS) for kind in ("state", "kl")]
    return known(model, prompts, [None, *rules], LOOPS, most_new=8)


def run(n: int, name: str = "grt", n_pool: int = 12, **more: Any) -> dict[str, Any]:
    model = small(**HOUSE[name])
    how = Options(6, cache_tokens=60, chunk_tokens=4, draft_loops=None if name == "memory" else 1)
    return many(Engine(model, how, dtype=torch.float64), pool_of(model, n_pool), n, **more)


def check(found: dict[str, Any], n: int) -> None:
    assert found["requests"] == n == sum(found["ended"].values())
    assert (found["lost"], found["duplicated"], found["wrong"], found["kept_banks"]) == (0, 0, 0, 0)
    assert found["good"] and found["free_slots"] == found["slots"] == 60
    assert found["ended"]["cancelled"] and found["ended"]["error"] and found["ended"]["stop"] and found["raised"]


@pytest.mark.parametrize("name", ["grt", "memory"])
def test_hundreds(name: str) -> None:
    check(run(60, name, fault_rate=0.01), 60)


@pytest.mark.slow
def test_thousands_in_flat_memory() -> None:
    found = run(3000, n_pool=40)
    check(found, 3000)
    assert found["growth_mb"] < 20


def test_control_what_is_wrong_is_counted() -> None:
    model = small(**HOUSE["grt"])
    pool = [
        one._replace(tokens=[1 + one.tokens[0], *one.tokens[1:]] if one.tokens else [1]) for one in pool_of(model, 3)
    ]
    engine = Engine(model, Options(4), dtype=torch.float64)
    found = many(engine, pool, 10, fault_rate=0.0, cancel_rate=0.0)
    assert found["wrong"] == 10 and not found["good"]


def test_control_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(**HOUSE["grt"])
    engine = Engine(model, Options(4), dtype=torch.float64)
    step, seen = engine.step, set()

    def forgets() -> Any:
        changed = step()
        if changed and not seen:
            seen.update(c for c in changed if c.finish is not None)
            return [c for c in changed if c not in seen]
        return changed

    engine.step = forgets  # pyrefly: ignore
    found = many(engine, pool_of(model, 3), 10, fault_rate=0.0, cancel_rate=0.0)
    assert found["lost"] >= 1 and not found["good"]
