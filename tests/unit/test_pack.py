"""A packed run: what inference needs, the same model to the bit, and nothing of the machine that trained it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import alcoda
from alcoda.config import validate
from alcoda.depth.record import fingerprint
from alcoda.errors import RunError, UsageError
from alcoda.files import read_json
from alcoda.training import checkpoint, run
from alcoda.training.loop import train
from alcoda.training.pack import pack
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder

MODEL = {"vocab_size": 257, "seq_len": 16, "d_model": 16, "n_heads": 2, "n_loops": 2, "inject": "concat"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    (folder / "words.txt").write_text("once upon a time there was a word and another word\n<|endoftext|>\n" * 1000)
    recipe: dict[str, Any] = {
        "name": "words",
        "description": "a few words",
        "model": MODEL,
        "depth": "uniform",
        "data": {"corpus": f"text:{folder / 'words.txt'}", "tokenizer": "byte"},
        "train": {"steps": 2, "batch_size": 2},
        "eval": {"tokens": 64, "loops": [1, 2]},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALCODA_CACHE", str(folder / "cache"))
        train(validate(Recipe, recipe), folder / "run")
    return folder / "run"


def test_a_packed_run_is_the_same_model(trained: Path, tmp_path: Path) -> None:
    packed = pack(trained, tmp_path / "packed")
    assert packed.train_step == 2 and packed.params == alcoda.load(trained).recipe.ledger().params
    assert packed.weights_bytes < 2 * packed.params + 4096 < packed.total_bytes
    whole, small = (alcoda.load(path, dtype="bfloat16") for path in (trained, packed.path))
    ids = torch.arange(12)[None] % 257
    # Linear maps are held in bf16 either way; embedding and norms are rounded by packing.
    assert torch.allclose(whole.logits(ids), small.logits(ids), atol=2e-2)
    weights = checkpoint.read_weights(tmp_path / "packed/checkpoints/step_00000002")
    for name, tensor in checkpoint.read_weights(trained / "checkpoints/step_00000002").items():
        assert torch.equal(weights[name], tensor.bfloat16()), name
    assert small.generate("once", max_tokens=3) is not None


def test_in_float32_nothing_changes(trained: Path, tmp_path: Path) -> None:
    pack(trained, tmp_path / "packed", dtype="float32")
    whole, small = (alcoda.load(path, dtype="float32") for path in (trained, tmp_path / "packed"))
    ids = torch.arange(12)[None] % 257
    assert torch.equal(whole.logits(ids), small.logits(ids))


def test_it_names_no_folder_of_the_machine(trained: Path, tmp_path: Path) -> None:
    pack(trained, tmp_path / "packed")
    texts = {
        path: path.read_text() for path in (tmp_path / "packed").rglob("*") if path.suffix in (".json", ".yaml", ".md")
    }
    assert len(texts) >= 5
    assert not [path for path, text in texts.items() if str(trained.parent) in text]
    assert str(trained.parent) in (trained / "recipe.yaml").read_text()  # the control
    assert "text:words.txt" in texts[tmp_path / "packed/recipe.yaml"]


def test_the_card_says_what_it_is(trained: Path, tmp_path: Path) -> None:
    (trained / "eval.json").write_text(
        json.dumps(
            {
                "train_step": 2,
                "data": "valid",
                "by_depth": [{"loops": 1, "bits_per_byte": 7.5, "low": 7.25, "high": 7.75}],
            }
        )
    )
    (trained / "samples.json").write_text(json.dumps([{"prompt": "once", "text": " upon"}]))
    (tmp_path / "about.md").write_text("It knows ten words.")
    pack(trained, tmp_path / "packed", about=tmp_path / "about.md")
    card = (tmp_path / "packed/README.md").read_text()
    for said in (
        "# words",
        "a few words",
        "It knows ten words.",
        "2 train steps, 64 tokens",
        "| 1 | 7.5000 | 7.2500 to 7.75",
    ):
        assert said in card, said
    assert (tmp_path / "packed/samples.json").exists()
    (trained / "eval.json").write_text(json.dumps({"train_step": 1, "by_depth": []}))
    pack(trained, tmp_path / "again")
    assert not (tmp_path / "again/eval.json").exists()  # of another checkpoint
    assert not (tmp_path / "again/samples.json").exists()


def test_exits_go_along_where_they_are_of_its_weights(trained: Path, tmp_path: Path) -> None:
    model = alcoda.load(trained, dtype="float32").model
    (trained / "exits.json").write_text(json.dumps({"model": fingerprint(model)}))
    pack(trained, tmp_path / "packed")
    assert (tmp_path / "packed/exits.json").exists()
    assert fingerprint(alcoda.load(tmp_path / "packed").model) == fingerprint(model)  # so they hold there too
    (trained / "exits.json").write_text(json.dumps({"model": "another"}))
    pack(trained, tmp_path / "again")
    assert not (tmp_path / "again/exits.json").exists()


def test_it_is_begun_from_and_not_resumed(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    pack(trained, tmp_path / "packed")
    recipe = RunFolder(trained).recipe()
    moved = RunFolder(tmp_path / "packed").recipe().model_copy(update={"data": recipe.data})
    with pytest.raises(
        UsageError, match=r"is packed, weights without a train state: begin a new run from it \(--init\)"
    ):
        train(moved, tmp_path / "packed", resume=True)
    begun = recipe.model_copy(
        update={
            "init_from": validate(
                Recipe, {**recipe.model_dump(), "init_from": {"run": str(tmp_path / "packed")}}
            ).init_from
        }
    )
    assert train(begun, tmp_path / "new").status == "finished"


def test_a_damaged_one_is_refused(trained: Path, tmp_path: Path) -> None:
    pack(trained, tmp_path / "packed")
    file = tmp_path / "packed/checkpoints/step_00000002/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match="damaged"):
        alcoda.load(tmp_path / "packed")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"dtype": "int8"}, "unknown dtype 'int8'. Allowed: bfloat16, float32"),
        ({"which": "step_00000009"}, "give best, last, or one of"),
        ({"about": "missing.md"}, "give a Markdown file"),
    ],
)
def test_bad_input(trained: Path, tmp_path: Path, how: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pack(trained, tmp_path / "packed", **how)
    assert not (tmp_path / "packed").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        pack(trained, tmp_path / "full")
    assert (tmp_path / "full/mine.txt").read_text() == "mine"


def test_a_model_of_the_package_is_found_by_its_name(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SHIPPED", tmp_path / "shipped")
    with pytest.raises(
        UsageError, match=r"there is no run at tiny: give the folder that alcoda train wrote \(--out\)$"
    ):
        alcoda.load("tiny")
    (tmp_path / "shipped").mkdir()
    pack(trained, tmp_path / "shipped/tiny")
    monkeypatch.chdir(tmp_path)
    assert alcoda.load("tiny").recipe.name == "words"
    with pytest.raises(UsageError, match=r"or the name of a model that comes with alcoda \(tiny\)"):
        alcoda.load("tinny")
    (tmp_path / "tiny").mkdir()  # a folder of one's own comes first
    with pytest.raises(UsageError, match="it has no recipe"):
        alcoda.load("tiny")


def test_its_record_says_where_it_comes_from(trained: Path, tmp_path: Path) -> None:
    pack(trained, tmp_path / "packed")
    record = read_json(tmp_path / "packed/run.json")
    manifest = checkpoint.check(trained / "checkpoints/step_00000002")
    assert record["packed"] == {
        "checkpoint": "step_00000002",
        "weights": checkpoint.digest(manifest),
        "dtype": "bfloat16",
    }
    assert "command" not in record and record["status"] == "packed"


def test_text_goes_along_and_is_measured_where_the_corpus_is_not(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = alcoda.evaluate(trained, [2])
    packed = pack(trained, tmp_path / "packed", dtype="float32", keep={"valid": 10_000})
    corpus = trained.parent / "words.txt"
    text = corpus.read_text()
    corpus.unlink()
    try:
        after = alcoda.evaluate(packed.path, [2])
        assert (after.n_bytes, after.bits_per_byte) == (before.n_bytes, before.bits_per_byte)
        assert alcoda.lab(packed.path, tokens=64, loops=2).n_tokens > 0
        with pytest.raises(UsageError, match="there is no file or folder"):
            alcoda.evaluate(packed.path, [2], "calib")
    finally:
        corpus.write_text(text)
    few = pack(trained, tmp_path / "few", keep={"valid": 20})
    assert alcoda.evaluate(few.path, [2]).n_bytes < before.n_bytes
    with pytest.raises(UsageError, match="split 'vaild': there is none"):
        pack(trained, tmp_path / "bad", keep={"vaild": 20})
    with pytest.raises(UsageError, match="keep 'valid/nouns': of the split 'valid' there is no source 'nouns'"):
        pack(trained, tmp_path / "bad", keep={"valid/nouns": 20})
    assert not (tmp_path / "bad").exists()


def test_one_source_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "words.txt").write_text("once upon a time there was a word\n<|endoftext|>\n" * 400)
    words = {"corpus": f"text:{tmp_path / 'words.txt'}", "name": "words"}
    hops = {"corpus": "hops:nodes=6,ends=2,hops=2,docs=300", "name": "hops"}
    recipe: dict[str, Any] = {
        "name": "two",
        "model": MODEL,
        "depth": "uniform",
        "data": {"mix": [words, hops], "tokenizer": "byte"},
        "train": {"steps": 2, "batch_size": 2},
        "eval": {"tokens": 64, "loops": [1, 2]},
    }
    train(validate(Recipe, recipe), tmp_path / "run")
    packed = pack(tmp_path / "run", tmp_path / "packed", keep={"valid/hops": 500})
    assert set(RunFolder(packed.path).kept("valid")) == {"hops"}
    assert "no text of words went along" in str(alcoda.evaluate(packed.path, [1]).note)


def test_measurements_of_a_model_of_the_package_go_to_a_copy(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SHIPPED", tmp_path / "shipped")
    shipped = pack(trained, tmp_path / "shipped/tiny", keep={"valid": 10_000}).path
    files = sorted(path.relative_to(shipped) for path in shipped.rglob("*"))
    monkeypatch.chdir(tmp_path)
    tiers = alcoda.calibrate("tiny", data="valid")
    own = tmp_path / "runs/tiny"
    assert (own / "exits.json").exists() and alcoda.load(own).loaded.exit(tiers.tiers[0].name).tier
    alcoda.lab("tiny", tokens=64, loops=2)
    assert (own / "lab/lab.json").exists()
    assert alcoda.write_report("tiny", tmp_path / "page.html").exists() and (own / "samples.json").exists()
    assert sorted(path.relative_to(shipped) for path in shipped.rglob("*")) == files
    (own / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="holds something else"):
        alcoda.lab("tiny", tokens=64, loops=2)
