"""The commands and the Python of the README run, as they stand, on a small quickstart run."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SMALL = ("--set", "train.steps=3", "--set", "train.schedule.warmup_steps=1", "--set", "eval.tokens=2000")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipes, docs and a finished quickstart run in it."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("recipes", "docs", "README.md"):
        (place / name).symlink_to(ROOT / name)
    done = run(place, "quickstart", *SMALL, "--set", "eval.loops=[1,8]", "--set", "data.max_bytes=1000000")
    assert done.returncode == 0, done.stderr
    return place


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ALCODA_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "alcoda", *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)


def test_it_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (listed,) = re.findall(r"-e '\.\[report\]'`; further extras\nare (.*?)\.\n", README, re.S)
    assert {"report", *re.findall(r"`(\w+)`", listed)} == set(extras)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_run(place: Path) -> None:
    assert len(commands()) >= 8
    for line in commands():
        arguments = shlex.split(line)
        assert arguments[0] == "alcoda", line
        small = SMALL if arguments[1] == "train" else ()
        done = run(place, *arguments[1:], *small)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (place / "runs/report.html").stat().st_size > 50_000


@pytest.mark.slow
def test_python_runs(place: Path) -> None:
    environment = {**os.environ, "ALCODA_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    assert len(blocks("python")) == 2
    for code in blocks("python"):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_folders_exist() -> None:
    named = re.findall(r"^\| `([a-z/]+)` \|", README, re.M)
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).is_dir()] == []


def test_parameter_totals_are_the_ledgers() -> None:
    from alcoda.training.recipe import load_recipe

    for recipe in ("grt_medium_isoflop", "grt_large_isoparam"):
        params = load_recipe(ROOT / f"recipes/papers/{recipe}.yaml").ledger().params
        assert f"{params:,}" in README, json.dumps({recipe: params})
