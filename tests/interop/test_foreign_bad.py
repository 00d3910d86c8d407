"""What cannot be imported: one message each, that says what was found and what is needed; nothing is written."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import OURO, ouro_weights, write_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

import alcoda
from alcoda import api, cli
from alcoda.errors import RunError, UsageError


def said(path: Path, out: Path, kind: type[Exception]) -> str:
    """What importing says of it, having written nothing."""
    with pytest.raises(kind) as found:
        api.import_model(path, out)
    assert not out.exists()
    return str(found.value)


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None takes one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if key not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "plain", OURO, ouro_weights())


# -- folders ----------------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    assert "there is no folder" in said(tmp_path / "nothing", tmp_path / "out", UsageError)
    (tmp_path / "file").write_text("x")
    assert "is neither a GGUF file nor a checkpoint of llama2.c" in said(
        tmp_path / "file", tmp_path / "out", UsageError
    )


def test_no_config(plain: Path, tmp_path: Path) -> None:
    (plain / "config.json").unlink()
    text = said(plain, tmp_path / "out", UsageError)
    assert "has no config.json" in text and "model.safetensors" in text
    with pytest.raises(UsageError, match=r"has no config\.json"):
        alcoda.load(plain)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null"])
def test_a_config_that_is_none(plain: Path, tmp_path: Path, text: str) -> None:
    (plain / "config.json").write_text(text)
    assert "config.json" in said(plain, tmp_path / "out", RunError)


def test_another_architecture(plain: Path, tmp_path: Path) -> None:
    edit(plain, model_type="mamba", architectures=["MambaForCausalLM"], auto_map={"AutoModelForCausalLM": "x.Y"})
    text = said(plain, tmp_path / "out", UsageError)
    assert "'mamba'" in text and "huginn_raven" in text and "ouro" in text and "never run" in text
    edit(plain, model_type=None, architectures=None, auto_map=None)
    assert "never run" not in said(plain, tmp_path / "out", UsageError)


def test_no_weights(plain: Path, tmp_path: Path) -> None:
    (plain / "model.safetensors").unlink()
    text = said(plain, tmp_path / "out", UsageError)
    assert "has no weights" in text and "model.safetensors.index.json" in text
    (plain / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch it_was_run'\ntR.")
    text = said(plain, tmp_path / "out", UsageError)
    assert "pickled" in text and "pytorch_model.bin" in text and "safetensors are needed" in text


def test_shards(ouro: Path, tmp_path: Path) -> None:
    index = json.loads((ouro / "model.safetensors.index.json").read_text())

    def with_map(change: Callable[[dict[str, str]], Any]) -> None:
        files = dict(index["weight_map"])
        change(files)
        (ouro / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    with_map(lambda files: files.update({"lm_head.weight": "../elsewhere.safetensors"}))
    assert "names of safetensors files in that folder" in said(ouro, tmp_path / "out", UsageError)
    with_map(lambda files: files.update({"lm_head.weight": "pytorch_model.bin"}))
    assert "pytorch_model.bin" in said(ouro, tmp_path / "out", UsageError)
    with_map(lambda files: files.update({"more.weight": "model-00001-of-00003.safetensors"}))
    assert "more.weight" in said(ouro, tmp_path / "out", RunError)
    with_map(lambda files: files.clear())
    assert "no weight_map" in said(ouro, tmp_path / "out", RunError)
    with_map(lambda files: None)
    (ouro / "model-00002-of-00003.safetensors").unlink()
    assert "lacks 1 of its 3 shards: model-00002-of-00003" in said(ouro, tmp_path / "out", RunError)


def test_damaged_weights(plain: Path, tmp_path: Path) -> None:
    file = plain / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:50], b""):
        file.write_bytes(damaged)
        assert "is damaged" in said(plain, tmp_path / "out", RunError)


# -- weights that are not the config's --------------------------------------------------------------------------------


def test_missing_extra_and_wrong(plain: Path, tmp_path: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["model.norm.weight"]
        weights["model.layers.2.input_layernorm.weight"] = torch.ones(32)
        weights["lm_head.weight"] = torch.ones(300, 16)
        weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.int8)

    edit_weights(plain, spoil)
    text = said(plain, tmp_path / "out", RunError)
    assert "0 + 2 + 0 layers of width 32" in text
    assert "missing (1): model.norm.weight" in text
    assert "not expected (1): model.layers.2.input_layernorm.weight" in text
    assert "lm_head.weight is [300, 16] F32: [300, 32] is expected for head.weight" in text
    assert "model.layers.0.mlp.up_proj.weight is [48, 32] I8" in text and "quantised" in text
    with pytest.raises(RunError, match="missing"):
        alcoda.load(plain)


def test_a_long_list_is_cut(plain: Path, tmp_path: Path) -> None:
    edit(plain, num_hidden_layers=4)
    text = said(plain, tmp_path / "out", RunError)
    assert "missing (22): " in text and "and 14 more" in text and text.count("model.layers.") == 8


def test_fused_maps(huginn: Path, tmp_path: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["transformer.prelude.0.attn.Wqkv.weight"] = torch.ones(97, 32)
        weights["transformer.prelude.1.attn.Wqkv.weight"] = torch.ones(93, 32)
        weights["transformer.coda.0.attn.qk_bias"] = torch.ones(3, 1, 4, 8)

    edit_weights(huginn, spoil)
    text = said(huginn, tmp_path / "out", RunError)
    assert "its 97 rows are not 3 equal parts" in text
    assert "gives [31, 32], and [32, 32] is expected for prelude.layers.1.attention.q.weight" in text
    assert "use 64 of its 96 numbers" in text


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 64, "head_dim": 16}, {"intermediate_size": 40}, {"vocab_size": 200}, {"head_dim": 16}]
)
def test_a_config_of_another_size(plain: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    edit(plain, **changes)
    assert "do not fit its config.json" in said(plain, tmp_path / "out", RunError)


def test_a_tied_head_that_is_another(huginn: Path, plain: Path, tmp_path: Path) -> None:
    edit_weights(huginn, lambda weights: weights["lm_head.weight"].mul_(2))
    assert "lm_head.weight is transformer.wte.weight again" in said(huginn, tmp_path / "out", RunError)
    edit_weights(huginn, lambda weights: weights.update({"lm_head.weight": torch.ones(300, 32, dtype=torch.int8)}))
    assert "lm_head.weight is transformer.wte.weight again" in said(huginn, tmp_path / "out", RunError)
    edit(plain, tie_word_embeddings=True)
    assert "(tied), and the weights differ" in said(plain, tmp_path / "out", RunError)


# -- configs that have no counterpart ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "'silu'")),
        ({"sliding_window": 128}, ("sliding_window is 128",)),
        ({"layer_types": ["full_attention", "linear_attention"]}, ("layer_types is 'linear_attention'",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("'yarn'", "'default'")),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ("'llama3'",)),
        ({"hidden_size": None}, ("no hidden_size",)),
        ({"hidden_size": "32"}, ("hidden_size is '32'",)),
        ({"num_hidden_layers": True}, ("num_hidden_layers is True",)),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, ("n_heads=5 must divide",)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers is 0",)),
        ({"vocab_size": -1}, ("vocab_size",)),
        ({"rope_theta": "big"}, ("rope_theta is 'big'",)),
    ],
)
def test_ouro_configs(plain: Path, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    edit(plain, **changes)
    text = said(plain, tmp_path / "out", UsageError)
    assert all(word in text for word in words), text
    assert "layout ouro" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"injection_type": "add"}, ("injection_type is 'add'", "'linear'")),
        ({"block_class_name": "TransformerPreNormBlock"}, ("block_class_name",)),
        ({"bias": True}, ("bias is True",)),
        ({"test_time_noise": 0.1}, ("test_time_noise is 0.1",)),
        ({"num_key_value_heads": 2}, ("num_key_value_heads is 2",)),
        ({"init_values": {"std": 0.1, "embed_scale": 3.0}}, ("embed_scale is 3.0", "sqrt(n_embd)")),
        ({"tie_embeddings": False}, ("tie_embeddings is False",)),
        ({"n_embd": None}, ("no n_embd",)),
    ],
)
def test_huginn_configs(huginn: Path, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    edit(huginn, **changes)
    text = said(huginn, tmp_path / "out", UsageError)
    assert all(word in text for word in words), text
    assert "layout huginn" in text


# -- text, out, hub ---------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    weights = ouro_weights()
    small = {n: w[:200] if w.shape[0] == 300 else w for n, w in weights.items()}
    folder = write_folder(tmp_path / "small", OURO, small, tokenizer=True, vocab_size=200)
    assert "has 258 tokens and the model of config.json 200" in said(folder, tmp_path / "out", RunError)
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in said(folder, tmp_path / "out", UsageError)


def test_out(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        api.import_model(plain, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    with pytest.raises(UsageError, match="has one state"):
        alcoda.load(plain, checkpoint="step_00000001")


def test_an_interrupt_leaves_nothing(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("alcoda.interop.tensors.Tensors.sha256", property(stop))
    with pytest.raises(KeyboardInterrupt):
        api.import_model(plain, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]


def stub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str] | None) -> None:
    module = None if download is None else types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)  # pyrefly: ignore


def test_the_hub(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, Any]] = []

    def download(name: str, **how: Any) -> str:
        asked.append((name, how["allow_patterns"]))
        return str(plain)

    stub(monkeypatch, download)
    made = api.import_model("some-lab/Ouro-tiny")
    assert made.path == Path("runs/Ouro-tiny") and alcoda.load(made.path).n_loops == 4
    assert asked == [("some-lab/Ouro-tiny", ["*.json", "*.safetensors"])]  # no code, nothing pickled
    assert json.loads((made.path / "run.json").read_text())["imported"]["source"] == "some-lab/Ouro-tiny"

    assert alcoda.load("some-lab/Ouro-tiny").n_loops == 4 and len(asked) == 2
    # A path is a path: nothing is asked of the hub for what is missing there.
    for path in ("runs/nothing", tmp_path / "nothing"):
        with pytest.raises(UsageError):
            alcoda.load(path)
    assert len(asked) == 2

    def fails(name: str, **how: Any) -> str:
        raise OSError("no route to host\nand much more")

    stub(monkeypatch, fails)
    with pytest.raises(RunError, match=r"could not be fetched from the hub: no route to host$"):
        api.import_model("some-lab/other", tmp_path / "out")
    with pytest.raises(RunError, match="could not be fetched"):
        alcoda.load("some-lab/other")
    stub(monkeypatch, None)
    with pytest.raises(UsageError, match="pip install huggingface_hub"):
        api.import_model("some-lab/other", tmp_path / "out")
    with pytest.raises(UsageError, match="org/name"):
        api.import_model("../some/where", tmp_path / "out")


def test_command(
    huginn: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["alcoda", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    code, out, _ = run("import", huginn, "--out", tmp_path / "run", "--dtype", "bfloat16")
    assert code == 0 and "huginn" in out and "bfloat16" in out and "token ids alone" in out
    code, out, _ = run("import", plain, "--out", tmp_path / "other", "--json")
    assert code == 0 and json.loads(out)["layout"] == "ouro"
    code, _, err = run("generate", tmp_path / "run", "--prompt", "a")
    assert code == 2 and "no tokenizer" in err
    code, _, err = run("eval", tmp_path / "run")
    assert code == 2 and "no tokenizer" in err
    code, _, err = run("import", plain, "--out", tmp_path / "run")
    assert code == 2 and "not empty" in err
    edit_weights(plain, lambda weights: weights.pop("model.norm.weight"))
    code, _, err = run("import", plain, "--out", tmp_path / "new")
    assert code == 1 and "missing (1): model.norm.weight" in err
    code, _, err = run("calibrate", huginn)  # what it finds would have no place
    assert code == 2 and f"alcoda import {huginn}" in err
