"""`benchmarks/variants.py` at a toy size: it runs, and its last line says all that it promises. No speed is judged."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "variants.py"
pytestmark = pytest.mark.slow
TOY = ["--width", "32", "--rows", "1", "--repeats", "1", "--context", "32", "--threads", "1"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), *TOY, "--only", "gate,token_choice"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_says_how_fast_each_variant_is(result: dict[str, Any]) -> None:
    assert result["target"] == 0.85
    assert result["machine"]["threads"] == 1
    by_dtype = result["training_over_plain"]
    assert "float32" in by_dtype
    for by_variant in by_dtype.values():
        assert set(by_variant) == {"gate", "token_choice"}
        for found in by_variant.values():
            assert found["low"] <= found["ratio"] <= found["high"]
            assert found["executed"] > 0
    assert by_dtype["float32"]["gate"]["plain_loops"] == 8
    assert by_dtype["float32"]["token_choice"]["plain_loops"] < 8, "a loop that tokens skip costs less"
    assert set(result["decoding_over_plain"]) == {"gate"}, "a route has no decoding of its own to compare"


def test_it_names_what_is_below_the_target_and_nothing_else(result: dict[str, Any]) -> None:
    slow = [
        dtype
        for dtype, by_variant in result["training_over_plain"].items()
        if min(by_variant["gate"]["ratio"], by_variant["gate"]["executed"]) < result["target"]
    ]
    assert [line.split(":")[0] for line in result["below_target"]] == [f"gate in {dtype}" for dtype in slow]


def test_anchor_keys_take_the_same_bytes_at_every_depth_and_keys_per_loop_do_not(result: dict[str, Any]) -> None:
    by_keys: dict[str, list[int]] = {"anchor": [], "per_loop": []}
    loops = []
    for row in result["key_bytes_per_token"]:
        assert row["store"] == row["ledger"], row
        assert row["resident"] >= 0
        by_keys[row["keys"]].append(row["ledger"])
        loops.append(row["loops"])
    assert loops == [1, 4, 16, 1, 4, 16]
    block = 2 * 32 * 4  # keys and values of a block, in float32
    assert by_keys["anchor"] == [4 * block] * 3
    assert by_keys["per_loop"] == [(2 + 2 * n) * block for n in (1, 4, 16)]


def test_it_refuses_a_variant_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    variants = importlib.import_module("variants")
    with pytest.raises(SystemExit) as refused:
        variants.main(["--only", "gate,gates"])
    assert refused.value.code == 2
    assert "unknown gates. Allowed: gate, lti" in capsys.readouterr().err
