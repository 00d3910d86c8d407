"""`benchmarks/lrt.py` at a toy size: it runs, and its last line says all that it promises. No speed is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lrt.py"
TOY = ["--width", "32", "--decode-width", "32", "--rows", "1", "--repeats", "1", "--context", "48", "--threads", "1"]


@pytest.mark.slow
def test_it_says_what_a_memory_costs() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *TOY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["targets"] == {"training": 2.5, "decoding": 1.15, "prefill": 2.5}
    above = []
    for what, target in result["targets"].items():
        for name in ("dense", "recurrent"):
            assert "float32" in result[what][name]
            for dtype, one in result[what][name].items():
                assert 0 < one["low"] <= one["ratio"] <= one["high"] and one["memory_s"] > 0 and one["plain_s"] > 0
                above += [f"{what}, {name}, {dtype}: {one['ratio']:.3f}"] if one["ratio"] > target else []
    assert result["above_target"] == above
    # Two passes, and what the memory itself costs.
    assert 2 < result["training"]["dense"]["float32"]["flops"] < 2.5
