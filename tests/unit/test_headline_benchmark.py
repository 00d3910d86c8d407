"""`benchmarks/headline.py` at a toy size: it runs, and its last line says all that it promises. No speed is judged."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from alcoda.model.lm import RecurrentLM

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "headline.py"
SIZES = ["model.d_model=32", "model.n_heads=2", "model.vocab_size=64", "model.seq_len=16"]
TOY = [word for size in SIZES for word in ("--set", size)]
TOY += ["--tokens", "8", "--prompt-tokens", "3", "--rounds", "2", "--batch", "2"]


@pytest.fixture
def headline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("headline")


def test_it_says_what_grt_takes_beside_gpt2(
    headline: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two processes more would take longer than all else.
    held = {"grt": {"resident_bytes": 42, "peak_bytes": 60}, "gpt2": {"resident_bytes": 100, "peak_bytes": 120}}
    monkeypatch.setattr(headline, "measured_apart", lambda options, design: held[design])
    headline.main(TOY)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])

    grt, gpt2, anchor = (result["designs"][name] for name in ("grt", "gpt2", "grt_anchor"))
    # 1 + 5 x 6 + 5 blocks have as many slots as 36; a slot is a key and a value of 32 numbers in bf16.
    assert grt["cache_bytes"] == gpt2["cache_bytes"] == 8 * 36 * 2 * 32 * 2
    assert anchor["cache_bytes"] == 8 * (1 + 5 + 5) * 2 * 32 * 2
    assert (grt["recipe"], grt["settings"]) == ("papers/grt_large_isoflop", [])
    assert (anchor["recipe"], anchor["settings"]) == ("papers/grt_large_isoflop", ["model.keys=anchor"])
    for design in (grt, gpt2, anchor):
        assert design["weights_and_cache_bytes"] == design["weights_bytes"] + design["cache_bytes"]
        assert design["weights_bytes"] >= 2 * design["params"]
    assert set(result["lower"]) == set(headline.LOWER)
    assert result["lower"]["params"] == 1 - grt["params"] / gpt2["params"]
    assert (result["lower"]["resident_bytes"], result["lower"]["peak_bytes"]) == (pytest.approx(0.58), 0.5)

    latency = result["latency"]
    assert latency["rounds"] == 2 and latency["median"] > 0 and latency["low"] <= latency["median"] <= latency["high"]
    assert min(latency["seconds_a_token"][name] for name in ("grt", "gpt2")) > 0
    batch = result["batch"]
    assert (batch["rows"], batch["rounds"]) == (2, 1)
    bytes_of = {(row["design"], row["cache"]): row["cache_bytes"] for row in batch["table"]}
    assert bytes_of == {
        ("gpt2", "per_loop"): 2 * gpt2["cache_bytes"],
        ("grt", "per_loop"): 2 * grt["cache_bytes"],
        ("grt", "mean"): 2 * anchor["cache_bytes"],
        ("grt_anchor", "per_loop"): 2 * anchor["cache_bytes"],
    }
    assert all(row["tokens_per_s"]["median"] > 0 and row["seconds"] > 0 for row in batch["table"])
    assert result["machine"]["dtype"] == "bfloat16" and result["versions"]["torch"] == torch.__version__
    assert result["targets"]["params"] == {"grt": 290_196_480, "gpt2": 773_582_080}
    missed = [line.split(":")[0] for line in result["missed"]]
    assert missed[:3] == ["parameters of grt", "parameters of gpt2", "resident_bytes"]
    assert ("latency" in missed) == (latency["median"] > 1.1)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(headline: ModuleType) -> None:
    options = argparse.Namespace(tokens=8, prompt_tokens=3, set=SIZES)
    found = headline.measured_apart(options, "grt")
    assert set(found) == {"baseline_bytes", "weights_resident_bytes", "resident_bytes", "peak_bytes"}
    # What passes leave behind is at most as much as below; freed memory goes back to the system before each release.
    assert found["baseline_bytes"] > 100e6 and found["resident_bytes"] < 24e6


def test_weights_and_keys_are_found_in_what_a_process_holds(headline: ModuleType) -> None:
    """Of 33 million parameters; what passes leave behind is more beside those of a toy. Weights held twice show."""
    sizes = ["model.d_model=256", "model.n_heads=4", "model.vocab_size=4096", "model.seq_len=64", "model.n_prelude=30"]
    found = headline.memory("grt", sizes, headline.Size(1, 4, 12))
    if not found:
        pytest.skip("the system does not say")
    config = headline.shape("grt", sizes)
    _, own = headline.held(config)
    counted = own["weights_bytes"] + headline.cache_bytes(config, "per_loop", 15)
    assert counted > 60e6
    assert 0.9 * counted < found["resident_bytes"] < counted + 24e6
    assert found["peak_bytes"] > 0.9 * counted


def test_the_parameters_are_those_of_the_papers(headline: ModuleType) -> None:
    for name, n in headline.PARAMS.items():
        with torch.device("meta"):
            model = RecurrentLM(headline.shape(name, []))
        assert sum(p.numel() for p in model.parameters()) == n
    assert 1 - headline.PARAMS["grt"] / headline.PARAMS["gpt2"] == pytest.approx(0.625, abs=5e-4)


@pytest.mark.parametrize(("design", "cache"), [("gpt2", "per_loop"), ("grt", "per_loop"), ("grt", "mean")])
def test_the_keys_that_are_counted_are_those_that_are_written(headline: ModuleType, design: str, cache: str) -> None:
    """Into memory that held no numbers before."""
    config = headline.shape(design, SIZES)
    model, _ = headline.held(config)
    engine, requests = headline.ready(model, headline.Size(2, 3, 5), cache)
    kept = engine.runner.arena.kv.values()
    for kv in kept:
        kv.fill_(torch.nan)
        kv[..., engine.runner.arena.n_tokens, :] = 0
    headline.decode(engine, requests)
    n_tokens = 2 * (3 + 5 - 1)
    assert engine.runner.arena.n_tokens == n_tokens
    written = sum(int(kv[..., :n_tokens, :].isfinite().sum()) for kv in kept)
    assert 2 * written == headline.cache_bytes(config, cache, n_tokens)


def test_weights_are_filled(headline: ModuleType) -> None:
    model = RecurrentLM(headline.shape("grt", SIZES)).bfloat16()
    for p in model.parameters():
        torch.nn.init.constant_(p, torch.nan)
    headline.fill(model)
    assert all(p.isfinite().all() for p in model.parameters())
    up = next(p.detach().float() for name, p in model.named_parameters() if name.endswith("mlp.up.weight"))
    assert float(up.std()) == pytest.approx(0.02, rel=0.1) and torch.linalg.matrix_rank(up) == 32
    assert all(bool((p == 1).all()) for name, p in model.named_parameters() if name.endswith("norm.weight"))


def test_latency_is_a_ratio_of_seconds_in_the_same_round(headline: ModuleType) -> None:
    """4 tokens behind the first of 5, in what is left of the seconds without the prompt's."""
    grt = [headline.Timing(3.0, 1.0, 1, 5), headline.Timing(5.0, 1.0, 1, 5), headline.Timing(7.0, 1.0, 1, 5)]
    gpt2 = [headline.Timing(3.0, 1.0, 1, 5), headline.Timing(2.0, 0.0, 1, 5), headline.Timing(3.0, 1.0, 1, 5)]
    found = headline.latency({"grt": grt, "gpt2": gpt2})
    assert (found["median"], found["low"], found["high"]) == (2, 1, 3)
    assert found["seconds_a_token"] == {"grt": 1.0, "gpt2": 0.5}


def test_sides_take_turns(headline: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def decode(name: str, size: Any) -> Any:
        order.append((name, size.n_new))
        return headline.Timing(2.0, 1.0, size.rows, size.n_new)

    monkeypatch.setattr(headline, "ready", lambda model, size, cache: (f"{model} {cache}", size))
    monkeypatch.setattr(headline, "decode", decode)
    found = headline.in_turn({"a": ("x", "mean"), "b": ("y", "last")}, headline.Size(1, 4, 9), 3)
    assert order == [("x mean", 3), ("y last", 3), *[("x mean", 9), ("y last", 9)] * 3]
    assert [len(timings) for timings in found.values()] == [3, 3]


def test_it_names_what_is_missed_and_nothing_else(headline: ModuleType) -> None:
    def design(params: int, counted: float, resident: float) -> dict[str, Any]:
        return {"params": params, "weights_and_cache_bytes": counted, "resident_bytes": resident}

    gpt2 = design(773_582_080, 100, 200)
    assert headline.missed({"grt": design(290_196_480, 41, 82), "gpt2": gpt2}, 1.1) == []
    assert headline.missed({"grt": design(290_196_481, 42, 83), "gpt2": gpt2}, 1.11) == [
        "parameters of grt: 290,196,481, not 290,196,480",
        "weights_and_cache_bytes: 0.420 of GPT-2's",
        "resident_bytes: 0.415 of GPT-2's",
        "latency: 1.110 of GPT-2's",
    ]
    unsaid = {name: {"params": n, "weights_and_cache_bytes": 1} for name, n in headline.PARAMS.items()}
    assert headline.missed(unsaid, 1.0) == ["weights_and_cache_bytes: 1.000 of GPT-2's"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--rounds", "0"], "--rounds, --batch and --batch-rounds are at least 1"),
        (["--tokens", "17"], "--tokens 17: at least 2 more than --prompt-tokens 16"),
        (["--tokens", "2000"], "--tokens 2000: the context holds 1024"),
        (["--set", "model.d_modle=4"], "d_modle"),
        (["--set", "model.n_core=0"], "n_core"),
    ],
)
def test_it_refuses_what_it_cannot_do(
    headline: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        headline.main(options)
    assert refused.value.code == 2
    assert why in capsys.readouterr().err
