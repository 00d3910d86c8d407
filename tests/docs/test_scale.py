"""docs/scale.md: the table is what the command prints, and the commands name what there is."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alcoda.cli import app
from alcoda.show import days, gigabytes
from alcoda.training.footprint import footprint
from alcoda.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scale.md").read_text()
ASSUMED = ("--peak-tflops", "989", "--utilisation", "0.4", "--bandwidth-gbps", "400")


def table() -> list[dict[str, str]]:
    lines = re.search(r"^\| recipe \|.*\n(?:\|.*\n)+", PAGE, re.M)
    assert lines is not None
    head, _, *body = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [dict(zip(head, cells, strict=True)) for cells in body]


def printed(row: dict[str, str]) -> dict[str, str]:
    """The row as the command gives it."""
    sets = [part for one in row["--set"].split() for part in ("--set", one)]
    how = ("--ranks", row["ranks"], "--parallel", row["parallel"], *ASSUMED)
    done = CliRunner().invoke(app, ["cost", f"papers/{row['recipe']}", *sets, *how, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["footprint"]
    return {
        "rows": str(found["rows"]),
        "GB, mean": gigabytes(found["memory_bytes"]),
        "GB, most": gigabytes(found["memory_bytes_at_max"]),
        "GB sent": gigabytes(found["traffic_bytes"]),
        "compute s": f"{found['compute_s']:.3g}",
        "communication s": f"{found['communication_s']:.3g}",
        "run": days(found["run_s"]),
    }


@pytest.mark.parametrize("row", table(), ids=lambda row: " ".join(list(row.values())[:4]))
def test_numbers_are_the_commands(row: dict[str, str]) -> None:
    found = printed(row)
    assert {name: row[name] for name in found} == found


def test_every_design_of_the_papers_is_in_the_table() -> None:
    named = {re.split(r"[_\d]", row["recipe"])[0] for row in table()}
    assert {"gpt", "grt", "cart", "elastic", "mor", "parcae", "ouro", "huginn", "lrt"} <= named


def test_a_wrong_number_is_seen() -> None:
    row = table()[0]
    assert printed({**row, "ranks": "16", "--set": "train.micro_batches=5"})["GB sent"] != row["GB sent"]


def commands() -> list[list[str]]:
    text = PAGE.replace("\\\n", " ")
    found = [shlex.split(line) for line in re.findall(r"^    ((?:torchrun|sbatch|alcoda) .*)$", text, re.M)]
    assert len(found) >= 5
    return found


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[:6]))
def test_rows_divide_among_the_ranks_of_each_command(words: list[str]) -> None:
    def option(name: str, default: int) -> int:
        return int(words[words.index(name) + 1]) if name in words else default

    recipe = next(word for word in words if word.startswith("papers/"))
    sets = [b for a, b in pairwise(words) if a == "--set"]
    ranks = option("--ranks", option("--nnodes", option("--nodes", 1)) * option("--nproc-per-node", 8))
    assert footprint(load_recipe(recipe, sets), ranks).memory_bytes < 80e9


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
