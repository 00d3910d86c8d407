"""``alcoda cost A B --match``: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Cli

MINI = Path(__file__).parents[2] / "recipes" / "mini"
GRT, DENSE = MINI / "grt.yaml", MINI / "dense.yaml"
WIDE = ("--set", "model.d_ff=704")
"""The recipe meets dense already: as wide as dense it has something to solve."""


@pytest.mark.parametrize("by", ["flops", "params"])
def test_a_match_is_reproduced_by_its_settings(by: str, run_cli: Cli) -> None:
    done = run_cli.ok("cost", GRT, DENSE, "--match", by, "--free", "d_ff", "--json", *WIDE)
    found = done.json
    assert len(done.out.splitlines()) == 1 and abs(found["off_percent"]) < 0.5
    assert (found["match"], found["free"], found["recipe"]) == (by, "d_ff", str(GRT))
    field = {"flops": "training_flops_per_token", "params": "params"}[by]
    after = run_cli.ok("cost", GRT, "--json", *(part for one in found["set"] for part in ("--set", one))).json
    wanted = run_cli.ok("cost", DENSE, "--json").json
    assert after[field] == found["after"][field] == pytest.approx(wanted[field], rel=0.005)
    assert found["target"][field] == wanted[field]


def test_the_table(run_cli: Cli) -> None:
    settings = ("--set", "description=two words", "--set", "model.n_coda=2")
    done = run_cli.ok("cost", GRT, DENSE, "--match", "params", "--free", "d_ff", *settings)
    lines = done.out.splitlines()
    for text in ("grt.yaml, before", "grt.yaml, after", "dense.yaml", "effective params", "forward FLOPs", "5,868,800"):
        assert text in done.out
    # --set acted on the first recipe: the dense one has no core and would take n_coda all the same.
    assert lines[-1].startswith("--set 'description=two words' --set model.n_coda=2 --set model.d_ff=")
    assert lines[-2].startswith("parameters: ") and lines[-2].endswith("% of the second recipe's")
    tokens = run_cli.ok("cost", GRT, DENSE, "--match", "flops", "--free", "tokens", *WIDE).out
    assert "FLOPs of the run" in tokens and tokens.splitlines()[-1] == "--set model.d_ff=704 --set train.steps=1583"


def test_a_run_folder_can_be_matched(trained: Path, run_cli: Cli) -> None:
    found = run_cli.ok("cost", trained, DENSE, "--match", "params", "--free", "d_model", "--json").json
    assert found["set"][0].startswith("model.d_model=") and found["set"][1].startswith("model.n_heads=")


REFUSED = {
    "one recipe": ((GRT, "--match", "flops", "--free", "d_ff"), "--match takes two recipes, one to change"),
    "three": ((GRT, DENSE, DENSE, "--match", "flops", "--free", "d_ff"), "(got 3)"),
    "no free": ((GRT, DENSE, "--match", "flops"), "--match and --free go together (--at with them)"),
    "no match": ((GRT, DENSE, "--free", "d_ff"), "--match and --free go together (--at with them)"),
    "at alone": ((GRT, DENSE, "--at", "max"), "--match and --free go together (--at with them)"),
    "unknown": ((GRT, DENSE, "--match", "flops", "--free", "width"), "--free width: there is no such choice"),
    "loops": ((GRT, DENSE, "--match", "flops", "--free", "d_ff", "--loops", "3"), "--loops with --match"),
    "dense": ((DENSE, GRT, "--match", "flops", "--free", "n_loops"), "is dense (n_core=0) and has no loop"),
    "bound": ((GRT, DENSE, "--match", "params", "--free", "d_ff", "--set", "model.n_prelude=60"), "down to d_ff=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, run_cli: Cli) -> None:
    arguments, says = REFUSED[case]
    run_cli.refused("cost", *arguments, says=(says,))
