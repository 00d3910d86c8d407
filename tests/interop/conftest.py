"""Equality holds for one thread: sums are then taken in one order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from foreign import HUGINN, OURO, huginn_weights, ouro_weights, write_folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def huginn(tmp_path: Path) -> Path:
    """A folder in Huginn's layout, without a tokenizer."""
    return write_folder(tmp_path / "huginn", HUGINN, huginn_weights())


@pytest.fixture
def ouro(tmp_path: Path) -> Path:
    """A folder in Ouro's layout, in three shards, with a tokenizer."""
    return write_folder(tmp_path / "ouro", OURO, ouro_weights(), shards=3, tokenizer=True)
