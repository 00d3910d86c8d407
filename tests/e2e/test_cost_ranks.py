"""``alcoda cost --ranks``: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Cli

GRT = Path(__file__).parents[2] / "recipes/mini/grt.yaml"
DENSE = GRT.with_name("dense.yaml")


def test_the_tables(run_cli: Cli) -> None:
    how = ("--ranks", 4, "--parallel", "fsdp", "--peak-tflops", 100, "--bandwidth-gbps", 50)
    out = run_cli.ok("cost", GRT, *how).out
    for text in (
        "memory of each of 4 ranks",
        "at a mean of 2.50 loops",
        "at the most, 4",
        "activations.core",
        "logits",
    ):
        assert text in out
    for text in ("all_gather", "reduce_scatter", "s of compute", "s of communication", "2,000 steps take", "estimates"):
        assert text in out
    found = run_cli.ok("cost", GRT, *how, "--json").json
    assert found["params"] > 0 and found["footprint"]["ranks"] == 4
    assert "footprint" not in run_cli.ok("cost", GRT, "--json").json
    own = ("cost", GRT, "--set", "parallel=fsdp", *how[:2], *how[4:], "--json")
    assert run_cli.ok(*own).json["footprint"] == found["footprint"]
    alone = run_cli.ok("cost", GRT, DENSE, "--ranks", 1).out
    assert alone.count("memory of each of 1 ranks") == 2 and "take" not in alone and "sends" not in alone


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ranks", 3), "ranks=3 must divide train.batch_size=16"),
        (("--ranks", -1), "ranks=-1: a whole number of 1 or more"),
        (("--ranks", 2, "--parallel", "zero"), "parallel='zero': there is no such kind"),
        (("--ranks", 2, "--peak-tflops", "nan"), "peak_tflops=nan: a number above 0"),
        (("--peak-tflops", 100), "go with --ranks N"),
        (("--parallel", "fsdp"), "go with --ranks N"),
        ((DENSE, "--ranks", 2, "--match", "flops", "--free", "d_ff"), "--ranks with --match"),
    ],
    ids=str,
)
def test_refused(arguments: tuple[object, ...], says: str, run_cli: Cli) -> None:
    run_cli.refused("cost", GRT, *arguments, says=(says,))
