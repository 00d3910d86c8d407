"""One thread, a cache of its own, and one trained run that the tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import Cli, recipe, write_corpus, write_recipe

from alcoda import api
from alcoda.config import validate
from alcoda.training import begin
from alcoda.training.recipe import Recipe


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("ALCODA_CACHE")
    os.environ["ALCODA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["ALCODA_CACHE"]
    else:
        os.environ["ALCODA_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _no_note_on_small_texts() -> Iterator[None]:
    """The texts here are tiny, and most tests look at all that is said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(begin, "SMALL_VALID_BYTES", 0)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A finished run with checkpoints at steps 4 and 8; nobody writes to it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    api.train(validate(Recipe, recipe(corpus, name="tiny")), run)
    return run


@pytest.fixture
def trained(tmp_path: Path, trained_once: Path) -> Path:
    """A copy of the finished run, to spoil."""
    run = tmp_path / "trained"
    shutil.copytree(trained_once, run)
    return run


@pytest.fixture
def tiny(tmp_path: Path, corpus: Path) -> Path:
    """The recipe of `trained`, as a file."""
    return write_recipe(tmp_path / "tiny.yaml", corpus)


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)
