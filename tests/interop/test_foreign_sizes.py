"""Entries of config.json that are no sizes, or contradict each other or the weights: one message each, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense_folders
import pytest
from foreign import HUGINN, OURO, VOCAB, huginn_weights, ouro_weights, write_folder

import alcoda
from alcoda import api
from alcoda.errors import RunError, UsageError
from alcoda.interop.foreign import open_foreign
from alcoda.interop.layouts import LAYOUTS

DENSE = dense_folders.config("llama", head_dim=8)
DENSE_SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
]
SIZES = {
    "huginn": [
        "n_embd",
        "n_heads",
        "intermediate_size",
        "n_layers_in_prelude",
        "n_layers_in_recurrent_block",
        "n_layers_in_coda",
        "mean_recurrence",
        "block_size",
        "padded_vocab_size",
    ],
    "ouro": [*DENSE_SIZES, "total_ut_steps"],
    "llama": DENSE_SIZES,
}
MAY_BE_MISSING = {"num_key_value_heads", "head_dim", "total_ut_steps"}
MAY_BE_ZERO = {"n_layers_in_prelude", "n_layers_in_coda", "n_layers_in_recurrent_block"}
STRANGE: list[Any] = [
    0,
    -1,
    1,
    1.5,
    32.0,
    float("nan"),
    "x",
    "32",
    True,
    None,
    [],
    {},
    [1],
    {"a": 1},
    1 << 30,
    1 << 100,
]


def huginn_folder(path: Path) -> Path:
    return write_folder(path, HUGINN, huginn_weights())


def ouro_folder(path: Path) -> Path:
    return write_folder(path, OURO, ouro_weights())


def llama_folder(path: Path) -> Path:
    return dense_folders.write(path, "llama", head_dim=8)


FOLDERS: dict[str, Callable[[Path], Path]] = {"huginn": huginn_folder, "ouro": ouro_folder, "llama": llama_folder}
CONFIGS: dict[str, dict[str, Any]] = {"huginn": HUGINN, "ouro": OURO, "llama": DENSE}


def edit(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("layout", SIZES)
def test_every_size_is_a_whole_number_of_one_or_more(layout: str, tmp_path: Path) -> None:
    folder = FOLDERS[layout](tmp_path / "folder")
    for name in SIZES[layout]:
        for value in (0, -1, 1.5, 32.0, "32", True, [], {}, 1 << 30):
            if value == 0 and name in MAY_BE_ZERO:
                continue
            edit(folder, CONFIGS[layout], **{name: value})
            with pytest.raises(UsageError) as said:
                open_foreign(folder, LAYOUTS)
            assert f"layout {layout}" in str(said.value) and f"{name} is {value!r}" in str(said.value)
            assert "is needed" in str(said.value) and "\n" not in str(said.value)
        if name not in MAY_BE_MISSING:
            config = {key: value for key, value in CONFIGS[layout].items() if key != name}
            with pytest.raises(UsageError, match=f"config.json has no {name}"):
                open_foreign(edit(folder, config), LAYOUTS)
    # Control: without a change it is read.
    assert open_foreign(edit(folder, CONFIGS[layout]), LAYOUTS).layout.name == layout


@pytest.mark.parametrize("layout", SIZES)
def test_no_entry_of_a_config_gives_anything_but_a_message(layout: str, tmp_path: Path) -> None:
    folder = FOLDERS[layout](tmp_path / "folder")
    others = {"layer_types", "rope_scaling", "rope_parameters", "init_values", "padding_multiple", "n_layers"}
    refused = 0
    for name in sorted({*CONFIGS[layout], *others}):
        for value in STRANGE:
            edit(folder, CONFIGS[layout], **{name: value})
            try:
                open_foreign(folder, LAYOUTS)
            except (UsageError, RunError):
                refused += 1
    assert refused > 5 * len(SIZES[layout])


def test_nothing_is_written_or_loaded(tmp_path: Path) -> None:
    folder = edit(huginn_folder(tmp_path / "folder"), HUGINN, n_embd=0)
    message = r"n_embd is 0: a whole number from 1 to 16,777,216 is needed"
    with pytest.raises(UsageError, match=message):
        api.import_model(folder, tmp_path / "out")
    with pytest.raises(UsageError, match=message):
        alcoda.load(folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("huginn", {"n_layers": 6}, "n_layers is 6, and n_layers_in_prelude, .* say 5: one of them"),
        ("huginn", {"head_dim": 16}, "head_dim is 16, and n_embd and n_heads say 8"),
        ("huginn", {"vocab_size": VOCAB + 1}, "vocab_size is 301, and padded_vocab_size 300"),
        ("huginn", {"vocab_size": 200, "padding_multiple": 100}, "vocab_size is 200, and padded_vocab_size 300"),
        ("huginn", {"vocab_size": 0}, "vocab_size is 0"),
        ("ouro", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, and num_hidden_layers is 2"),
        ("llama", {"layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": 4}, None),
    ],
)
def test_entries_that_contradict_each_other(
    layout: str, changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    folder = edit(FOLDERS[layout](tmp_path / "folder"), CONFIGS[layout], **changes)
    with pytest.raises(UsageError, match=message or "layer_types has 1 entries, and num_hidden_layers is 4"):
        open_foreign(folder, LAYOUTS)


def test_entries_that_agree(tmp_path: Path) -> None:
    folder = huginn_folder(tmp_path / "folder")
    for changes in ({"n_layers": 5, "head_dim": 8}, {"vocab_size": 201, "padding_multiple": 100}, {"vocab_size": 250}):
        assert open_foreign(edit(folder, HUGINN, **changes), LAYOUTS).model.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("huginn", {"n_layers_in_coda": 2}),
        ("huginn", {"n_layers_in_recurrent_block": 1}),
        ("huginn", {"n_layers_in_coda": 1 << 24}),
        ("huginn", {"padded_vocab_size": 296, "vocab_size": 296}),
        ("ouro", {"num_hidden_layers": 1}),
        ("ouro", {"num_hidden_layers": 1 << 24}),
        ("ouro", {"vocab_size": 299}),
        ("ouro", {"num_attention_heads": 1 << 24, "num_key_value_heads": 1 << 24, "head_dim": 1 << 24}),
        ("llama", {"num_hidden_layers": 1 << 24}),
        ("llama", {"vocab_size": 96}),
    ],
)
def test_sizes_that_are_not_those_of_the_weights(layout: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = edit(FOLDERS[layout](tmp_path / "folder"), CONFIGS[layout], **changes)
    with pytest.raises(RunError, match=r"do not fit its config\.json"):
        open_foreign(folder, LAYOUTS)
