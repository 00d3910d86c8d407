"""Models that were loaded to decode only: what they write is what whole ones write, and all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import small
from serving import ask, serving, tiny, web

import alcoda
from alcoda import api
from alcoda.depth.record import fingerprint
from alcoda.depth.rules import Gate, Kl, StateChange
from alcoda.engine import packed
from alcoda.engine.engine import Engine
from alcoda.engine.llm import LM
from alcoda.engine.options import Options
from alcoda.engine.packed import Released, release
from alcoda.engine.request import Request
from alcoda.errors import UsageError
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9)]


def of_type(dtype: torch.dtype, **fields: Any) -> RecurrentLM:
    """As `alcoda.load` holds it."""
    if dtype != torch.bfloat16:
        return small(**fields).to(dtype)
    model = small(**fields).float()
    hold_in(model, dtype)
    return model


def written(model: RecurrentLM, dtype: torch.dtype, rule: Any = None) -> list[tuple[list[int], list[int]]]:
    """Ids and loops of each token."""
    test = None if rule is None else rule.build(model, 4)
    found = Engine(model, Options(width=4, deterministic=True), dtype=dtype).run(
        [Request(prompt, 10, test=test) for prompt in PROMPTS]
    )
    assert all(one.error is None for (one,) in found), [one.error for (one,) in found]
    return [(one.ids, [token.loops for token in one.tokens]) for (one,) in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize(
    "rule",
    [None, StateChange(threshold=0.6), Gate(threshold=0.3), Kl(threshold=0.01)],
    ids=["all", "state", "gate", "kl"],
)
def test_it_writes_what_the_whole_model_writes(dtype: torch.dtype, head: str, rule: Any) -> None:
    """float64 is laid out nowhere: there the weights stay as they are."""
    fields = {"head": head, "exit_gate": "linear"}
    model = of_type(dtype, **fields)
    said = written(model, dtype, rule)
    whole = fingerprint(model)
    released = release(of_type(dtype, **fields), dtype)
    assert written(released, dtype, rule) == said and fingerprint(released) == whole
    assert written(release(model, dtype), dtype, rule) == said, "of a model that an engine has served"
    assert rule is None or len({loops for _, loops in said for loops in loops}) > 1


@pytest.mark.skipif(not packed.is_there(), reason="this torch has no such kernels")
def test_weights_are_there_once() -> None:
    model = of_type(torch.bfloat16, d_model=64, vocab_size=64)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    assert packed.held_bytes(model, torch.bfloat16) > 1.7 * own
    released = release(model, torch.bfloat16)
    assert packed.held_bytes(released, torch.bfloat16) < 1.1 * own


IDS = torch.arange(6)[None]


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(IDS),
        lambda model: next(model.readouts(IDS, [2])),
        lambda model: model.begin(IDS, 2),
        lambda model: model.logits(model.embed(IDS)),
        lambda model: model.head_weight_VD,
        lambda model: model.state_dict(),
        lambda model: list(model.parameters()),
        lambda model: model.core,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_its_weights_are_gone(use: Callable[[RecurrentLM], Any], dtype: torch.dtype) -> None:
    use(of_type(dtype))
    with pytest.raises(UsageError, match=r"loaded to decode only.*without decode_only"):
        use(release(of_type(dtype), dtype))
    with pytest.raises(AttributeError):
        _ = release(of_type(dtype), dtype).no_such_thing


def test_a_run_to_decode_only(tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 0.7, "seed": 3}
    whole, lm = alcoda.load("mini"), alcoda.load("mini", decode_only=True)
    assert lm.decodes_only and not whole.decodes_only
    for more in ({}, {"exit": "balanced"}, {"exit": "state:0.1"}, {"exit": "kl:0.1"}, {"logprobs": 2}, {"trace": True}):
        one, other = (x.generate("Once upon", details=True, **how, **more) for x in (whole, lm))
        assert one.text == other.text and one.mean_loops == other.mean_loops
    assert "".join(lm.stream("Once upon", **how)) == whole.generate("Once upon", **how)
    ids = [1, 2, 3]
    for refused in (
        lambda: lm.logits(ids),
        lambda: lm.trace(ids),
        lambda: lm.save_pretrained(tmp_path / "out"),
        lambda: api.evaluate(lm, [1], max_tokens=100),
        lambda: api.lab(lm, tokens=100, out=tmp_path / "lab"),
        lambda: api.frontier(lm, ["state"], max_tokens=100),
        lambda: api.evaluate_exit(lm, "balanced", max_tokens=100),
        lambda: api.harness(lm, ["piqa"]),
        lambda: api.bench_engine(lm, tokens=2),
        lambda: api.fit_probe(lm, data="valid", out=tmp_path / "probe.safetensors"),
    ):
        with pytest.raises(UsageError, match="loaded to decode only"):
            refused()
    assert not list(tmp_path.iterdir())


def test_what_the_engine_does_not_serve_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = alcoda.load("mini")
    monkeypatch.setattr("alcoda.engine.llm.refuses", lambda model: "as a test would have it")
    lm = alcoda.load("mini", decode_only=True)
    assert not lm.decodes_only
    assert lm.generate("Once", max_tokens=8) == whole.generate("Once", max_tokens=8)


def decodes_only(lm: LM) -> LM:
    return LM(replace(lm.loaded, model=release(lm.model, lm.loaded.decode_dtype)))


def test_a_server_that_decodes_only(tmp_path: Path) -> None:
    lm = tiny(tmp_path)
    with serving(lm) as made:
        expected = ask(made, model="tiny:fast", max_tokens=8)["choices"][0]["text"]
    with serving(decodes_only(lm)) as made:
        assert ask(made, model="tiny:fast", max_tokens=8)["choices"][0]["text"] == expected
        assert ask(made, max_tokens=4, echo=True)["choices"][0]["text"].startswith("What")
        body = {"prompt": "What", "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = web.post(f"{made.url}/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs"
        assert "decodes only" in answer.json()["error"]["message"]


def test_an_audit_needs_the_whole_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="decodes only"), serving(decodes_only(tiny(tmp_path)), audit=0.5):
        pass


def test_released_twice_is_released() -> None:
    model = release(small(), torch.float64)
    assert isinstance(model, Released) and release(model, torch.float64) is model
