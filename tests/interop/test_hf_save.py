"""The folder that save_pretrained writes: read back to the bit, complete, and refused where it contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_models import MODELS, small
from typer.testing import CliRunner

import alcoda
from alcoda.cli import app
from alcoda.errors import UsageError
from alcoda.files import read_json, write_json


@pytest.mark.parametrize("name", MODELS)
def test_the_round_trip_is_bitwise(name: str, tmp_path: Path) -> None:
    lm = small(tmp_path, **MODELS[name])
    saved = lm.save_pretrained(tmp_path / "hf")
    again = alcoda.load(tmp_path / "hf")
    assert again.recipe.model == lm.recipe.model and saved.params == lm.recipe.ledger().params
    ours, theirs = lm.model.state_dict(), again.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(ours[key].dtype == theirs[key].dtype for key in ours)
    ids = torch.arange(20)
    assert torch.equal(lm.logits(ids), again.logits(ids))
    assert lm.generate("once", max_tokens=5) == again.generate("once", max_tokens=5)
    assert again.tokenizer.bos == lm.tokenizer.bos and again.tokenizer.eot == lm.tokenizer.eot


def test_shards(tmp_path: Path) -> None:
    lm = small(tmp_path, **MODELS["grt"])
    saved = lm.save_pretrained(tmp_path / "hf", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == saved.n_shards > 3 and files[0] == f"model-00001-of-{saved.n_shards:05d}.safetensors"
    index = read_json(tmp_path / "hf/model.safetensors.index.json")
    assert set(index["weight_map"].values()) == set(files)
    again = alcoda.load(tmp_path / "hf")
    assert all(torch.equal(x, again.model.state_dict()[key]) for key, x in lm.model.state_dict().items())


def test_bf16_where_it_loses_nothing(tmp_path: Path) -> None:
    lm = small(tmp_path, **MODELS["grt"])
    assert lm.save_pretrained(tmp_path / "a").dtype == "float32"
    small_one = lm.save_pretrained(tmp_path / "b", dtype="bfloat16")
    assert small_one.dtype == "bfloat16" and 2 * small_one.params <= small_one.weights_bytes < 2.3 * small_one.params
    rounded = alcoda.load(tmp_path / "b", dtype="float32")
    again = rounded.save_pretrained(tmp_path / "c")
    assert again.dtype == "bfloat16"
    for key, x in alcoda.load(tmp_path / "c", dtype="float32").model.state_dict().items():
        assert torch.equal(x, rounded.model.state_dict()[key])


def test_the_shipped_model_by_the_command(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    done = CliRunner().invoke(app, ["export", "mini", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["has_exits"] is True
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and 'exit="balanced"' in card
    config = read_json(out / "config.json")
    assert config["model_type"] == "alcoda" and config["vocab_size"] == 4096 and config["hidden_size"] == 192
    one, other = alcoda.load("mini", dtype="float32"), alcoda.load(out, dtype="float32")
    how = {"exit": "balanced", "max_tokens": 8}
    assert one.generate("The old man", **how) == other.generate("The old man", **how)
    imported = alcoda.import_model(out, tmp_path / "run")
    assert imported.layout == "alcoda"


def test_what_cannot_be(tmp_path: Path) -> None:
    lm = small(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").write_text("mine")
    for how, message in (
        ({"folder": tmp_path / "full"}, "not empty"),
        ({"folder": tmp_path / "x", "dtype": "int8"}, "unknown dtype"),
        ({"folder": tmp_path / "x", "max_shard_bytes": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            lm.save_pretrained(**how)
    assert (tmp_path / "full/a").read_text() == "mine" and not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match="has a memory"):
        small(tmp_path, memory="prev_token").save_pretrained(tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(hidden_size=48), "hidden_size is 48, and 32"),
        (lambda c: c.pop("alcoda"), "no alcoda"),
        (lambda c: c["alcoda"].pop("model"), "alcoda.model is missing"),
        (lambda c: c["alcoda"]["model"].update(update={"kind": "nonsense"}), "nonsense"),
        (lambda c: c["alcoda"].update(recipe=3), "alcoda.recipe"),
    ],
)
def test_a_bad_config(change, message: str, tmp_path: Path) -> None:
    small(tmp_path).save_pretrained(tmp_path / "hf")
    config = read_json(tmp_path / "hf/config.json")
    change(config)
    write_json(tmp_path / "hf/config.json", config)
    with pytest.raises(UsageError, match=message):
        alcoda.load(tmp_path / "hf")
