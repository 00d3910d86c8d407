"""Checkpoints: whole or not there, found in order, pruned."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from alcoda.config import validate
from alcoda.errors import RunError, UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint

CONFIG = {"vocab_size": 20, "seq_len": 8, "d_model": 8, "n_heads": 2, "n_core": 1, "inject": "add"}


def model(seed: int = 0, **changes: object) -> RecurrentLM:
    return RecurrentLM(validate(ModelConfig, {**CONFIG, **changes})).init(seed)


def save(folder: Path, *steps: int) -> None:
    for train_step in steps:
        checkpoint.save(folder, train_step, model(train_step), {"train_step": train_step}, {"tokens": train_step})


def names(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.listed(folder)]


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_round_trip(tmp_path: Path, head: str) -> None:
    written = model(3, head=head)
    path = checkpoint.save(tmp_path, 7, written, {"rng": torch.get_rng_state(), "n": 7}, {"tokens": 9, "best": None})
    assert path.name == "step_00000007" and checkpoint.check(path)["tokens"] == 9
    read = checkpoint.build(written.config, torch.device("cpu"))
    checkpoint.load_weights(path, read)
    for name, tensor in written.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name
    assert checkpoint.load_train_state(path)["n"] == 7


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/pwned",)

    path = checkpoint.save(tmp_path, 1, model(), {"evil": Evil()}, {})
    with pytest.raises(RunError, match=r"train_state\.pt cannot be read"):
        checkpoint.load_train_state(path)
    assert not (tmp_path / "pwned").exists()


def test_listed(tmp_path: Path) -> None:
    assert checkpoint.listed(tmp_path / "none") == []
    save(tmp_path, 30, 4, 100)
    for name in (".step_00000200.77.tmp", "step_5", "step_00000300.old", "other"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == [4, 30, 100]
    with pytest.raises(UsageError, match="step_5 is not a checkpoint"):
        checkpoint.step_of(tmp_path / "step_5")


@pytest.mark.parametrize(
    ("keep", "best", "left"), [(1, None, [5]), (2, 1, [1, 4, 5]), (3, 4, [3, 4, 5]), (9, 2, [1, 2, 3, 4, 5])]
)
def test_prune(tmp_path: Path, keep: int, best: int | None, left: list[int]) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    checkpoint.prune(tmp_path, keep, best)
    assert names(tmp_path) == left


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def refuse(*arguments: object, **kwargs: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(RuntimeError, match="something else"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_step_is_written_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint.save(tmp_path, 1, model(9), {"train_step": 1}, {"tokens": 5})
    assert checkpoint.check(tmp_path / "step_00000001")["tokens"] == 5 and names(tmp_path) == [1]


def test_the_way_out_names_the_newest_whole_one(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for train_step in (2, 3):
        os.truncate(tmp_path / f"step_0000000{train_step}/model.safetensors", 10)
    with pytest.raises(RunError, match=r"has 10 bytes of .* Remove that folder to go on from step_00000001"):
        checkpoint.check(tmp_path / "step_00000003")


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    files = json.loads((tmp_path / "step_00000001/checkpoint.json").read_text())["files"]
    assert set(files) == {path.name for path in (tmp_path / "step_00000001").iterdir()} - {"checkpoint.json"}
