"""`benchmarks/replay.py` at a toy size: it runs, and its last line says all that it promises. No speed is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "replay.py"


@pytest.mark.slow
def test_it_says_what_replay_costs() -> None:
    toy = ["--width", "32", "--rows", "1", "--repeats", "1", "--threads", "1", "--lab", ""]
    done = subprocess.run([sys.executable, str(SCRIPT), *toy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["targets"] == {"never": 1.15, "leaving": 1.15, "seconds": 600.0, "peak_rss_mb": 3000.0}
    assert result["lab"] == {}
    above = []
    for name in ("elastic", "anchor"):
        assert "float32" in result[name]
        for dtype, one in result[name].items():
            assert set(one) == {"never", "leaving", "kl"} and 1 < one["leaving"]["mean_loops"] < result["loops"]
            assert one["kl"]["flops"] > 1
            for what in ("never", "leaving"):
                ratio = one[what]["ratio"]
                assert 0 < one[what]["low"] <= ratio <= one[what]["high"]
                above += [f"{name}, {dtype}, {what}: {ratio:.3f}"] if ratio > result["targets"][what] else []
    assert result["above_target"] == above
