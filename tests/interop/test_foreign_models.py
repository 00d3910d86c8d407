"""Imported checkpoints against the equations of their projects; in memory, as runs, and in all that works on runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import FF, HUGINN, OURO, VOCAB, D, huginn_logits, huginn_weights, ouro_logits, ouro_weights, write_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

import alcoda
from alcoda import api
from alcoda.config import validate
from alcoda.engine.options import Options
from alcoda.engine.request import Request
from alcoda.engine.sampling import Sampling
from alcoda.errors import UsageError
from alcoda.files import read_json
from alcoda.training import checkpoint
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder

ATOL = 1e-5
DATA = os.environ.get("ALCODA_DATA")
ORACLES = Path(DATA or ".") / "oracles"


def ids(seed: int = 1, n: int = 17) -> Tensor:
    return torch.randint(256, (2, n), generator=torch.Generator().manual_seed(seed))


def doubles(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in weights.items()}


def exact(lm: alcoda.LM, loops: int) -> Tensor:
    """Logits in fp64, in which nothing but the equations tells two models apart."""
    with torch.inference_mode():
        return lm.model.double()(ids(), loops)


def test_huginn_is_its_equations(huginn: Path) -> None:
    lm = alcoda.load(huginn)
    for loops in (1, 2, 5):
        expected = huginn_logits(doubles(huginn_weights()), ids(), loops)
        torch.testing.assert_close(exact(lm, loops), expected, rtol=0, atol=1e-9)
    assert lm.n_loops == 3 and lm.recipe.model.state_init.kind == "noise"  # of which evaluation sees zeros


def test_huginn_from_noise_if_asked(huginn: Path, tmp_path: Path) -> None:
    """Noise of the place, so that a longer text begins as the shorter one did; from which the model goes elsewhere."""
    api.import_model(huginn, tmp_path / "zeros")
    api.import_model(huginn, tmp_path / "run", noise=True)
    zeros = alcoda.load(tmp_path / "zeros").logits(ids(), loops=1)
    lm = alcoda.load(tmp_path / "run")
    noise = lm.logits(ids(), loops=1)
    assert (noise - zeros).abs().max() > 0.1
    assert torch.equal(alcoda.load(huginn, noise=True).logits(ids(), loops=1), noise), "in memory the same"
    assert torch.equal(alcoda.load(huginn).logits(ids(), loops=1), zeros)
    torch.testing.assert_close(lm.logits(ids()[:, :5], loops=1), noise[:, :5], rtol=0, atol=ATOL)


def test_noise_of_a_model_that_has_none(ouro: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not begin as noise"):
        api.import_model(ouro, tmp_path / "run", noise=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="does not begin as noise"):
        alcoda.load(ouro, noise=True)
    with pytest.raises(UsageError, match=r"is a run, whose recipe says.*alcoda import --noise"):
        alcoda.load("mini", noise=True)


def test_ouro_is_its_equations(ouro: Path) -> None:
    lm = alcoda.load(ouro)
    for loops in (1, 2, 4):
        expected, gates = ouro_logits(doubles(ouro_weights()), ids(), loops)
        torch.testing.assert_close(exact(lm, loops), expected, rtol=0, atol=1e-9)
        with torch.inference_mode():
            *_, last = lm.model.readouts(ids(), [loops])
            found = torch.sigmoid(lm.model.exit_gate(last.state.h_BTD))
        torch.testing.assert_close(found, gates[-1], rtol=0, atol=1e-9)
    lm = alcoda.load(ouro)
    one = lm.generate("abc", exit="gate", threshold=0.5, max_tokens=12, details=True, ignore_eot=True)
    assert 1 <= one.mean_loops < 4


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (OURO, {"rope_theta": 500.0}),
        (OURO, {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        (OURO, {"rms_norm_eps": 0.1}),
        (HUGINN, {"rope_base": 500}),
        (HUGINN, {"init_values": {"std": 0.1, "embed_scale": 1}}),
    ],
)
def test_the_config_is_heeded(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
    weights = ouro_weights() if config is OURO else huginn_weights()
    one, other = (
        alcoda.load(write_folder(tmp_path / name, config, weights, **said)).logits(ids())
        for name, said in (("one", {}), ("other", changes))
    )
    assert (one - other).abs().max() > 100 * ATOL


def test_a_tied_ouro(tmp_path: Path) -> None:
    weights = ouro_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    expected, _ = ouro_logits(doubles(weights), ids(), 4)
    there = write_folder(tmp_path / "there", OURO, weights, tie_word_embeddings=True)
    del weights["lm_head.weight"]
    left_out = write_folder(tmp_path / "left_out", OURO, weights, tie_word_embeddings=True)
    for folder in (there, left_out):
        lm = alcoda.load(folder)
        assert lm.recipe.model.head.kind == "tied"
        torch.testing.assert_close(exact(lm, 4), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["huginn", "ouro"])
def test_decoding_is_the_full_pass(name: str, request: pytest.FixtureRequest) -> None:
    """Of a folder with no tokenizer too: the engine takes token ids."""
    lm = alcoda.load(request.getfixturevalue(name))
    prompt = tuple(ids()[0, :9].tolist())
    for loops in (1, lm.n_loops):
        asked = Request(prompt, max_tokens=12, sampling=Sampling(logprobs=0), loops=loops)
        engine = lm.engine([asked], Options(deterministic=True))
        (made,) = engine.submit(asked)
        for _ in engine.steps():
            pass
        tokens = [token.token for token in made.tokens]
        assert len(tokens) == 12
        # Ids that the tokenizer does not have are never drawn.
        full = lm.logits([*prompt, *tokens], loops=loops)[len(prompt) - 1 : -1, : lm.tokenizer.vocab_size]
        full = full.log_softmax(-1)
        assert full.argmax(-1).tolist() == tokens
        found = torch.tensor([token.logprob for token in made.tokens])
        torch.testing.assert_close(found, full.max(-1).values, rtol=0, atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("config", [HUGINN, OURO], ids=["huginn", "ouro"])
def test_laws_hold(tmp_path: Path, config: dict[str, Any]) -> None:
    weights = ouro_weights() if config is OURO else huginn_weights()
    found = alcoda.check_laws(alcoda.load(write_folder(tmp_path / "theirs", config, weights)).recipe)
    assert found.hold, [r for r in found.results if r.status == "broken"]
    assert sum(r.status == "holds" for r in found.results) > 20


def test_loading_writes_nothing_and_runs_nothing(ouro: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in ouro.iterdir()}
    lm = alcoda.load(ouro)  # a module of theirs would end the process
    lm.generate("abc", max_tokens=4)
    with pytest.raises(UsageError, match="alcoda import"):
        lm.loaded.run.writable()  # where measurements go
    assert {path.name: path.stat().st_mtime_ns for path in ouro.iterdir()} == before


def test_shards_change_nothing(ouro: Path, tmp_path: Path) -> None:
    one = write_folder(tmp_path / "one", OURO, ouro_weights())
    assert torch.equal(alcoda.load(one).logits(ids()), alcoda.load(ouro).logits(ids()))


def test_as_a_run(ouro: Path, tmp_path: Path) -> None:
    made = api.import_model(ouro, tmp_path / "run")
    assert made.layout == "ouro" and made.has_tokenizer and made.dtype == "float32"
    lm, again = alcoda.load(ouro), alcoda.load(tmp_path / "run")
    assert torch.equal(lm.logits(ids()), again.logits(ids()))
    assert again.tokenizer.sha256 == lm.tokenizer.sha256
    record = read_json(tmp_path / "run/run.json")
    assert record["status"] == "imported" and record["imported"]["source"] == "ouro"
    assert len(record["imported"]["files"]) == 3 and len(record["imported"]["weights"]) == 64
    texts = [p.read_text() for p in (tmp_path / "run").rglob("*") if p.suffix in (".json", ".yaml")]
    assert len(texts) >= 4 and not [text for text in texts if str(tmp_path) in text]
    assert made.params == sum(p.numel() for p in again.model.parameters())


def test_dtypes(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in ouro_weights().items()}
    folder = write_folder(tmp_path / "bf16", OURO, weights)
    half = write_folder(tmp_path / "fp16", OURO, {name: tensor.half() for name, tensor in ouro_weights().items()})

    def types(run: Path) -> set[torch.dtype]:
        return {t.dtype for t in checkpoint.read_weights(RunFolder(run).checkpoints / "step_00000000").values()}

    assert api.import_model(folder, tmp_path / "as_it_is").dtype == "bfloat16"
    assert types(tmp_path / "as_it_is") == {torch.bfloat16}
    assert api.import_model(half, tmp_path / "half").dtype == "float32"
    assert types(tmp_path / "half") == {torch.float32}
    api.import_model(folder, tmp_path / "fp32", dtype="float32")
    assert types(tmp_path / "fp32") == {torch.float32}
    expected, _ = ouro_logits(doubles(weights), ids(), 4)
    for path in (folder, tmp_path / "as_it_is"):
        torch.testing.assert_close(exact(alcoda.load(path, dtype="float32"), 4), expected, rtol=0, atol=1e-9)
    held = alcoda.load(folder, dtype="bfloat16").model
    assert held.core.stack.layers[0].mlp.gate.weight.dtype == torch.bfloat16
    assert torch.equal(held.core.stack.layers[0].mlp.gate.weight, weights["model.layers.0.mlp.gate_proj.weight"])
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        api.import_model(folder, tmp_path / "int8", dtype="int8")


def test_what_works_on_runs_works_on_it(ouro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "words.txt"
    text.write_text("<|endoftext|>\n".join(f"one two three {i} four five\n" * 3 for i in range(40)))
    data = f"text:{text}"
    run = tmp_path / "run"
    api.import_model(ouro, run)
    scores = api.evaluate(run, data=data, max_tokens=2000)
    assert sorted(scores.bits_per_byte) == [1, 2, 4]
    in_memory = api.evaluate(alcoda.load(ouro), data=data, max_tokens=2000)
    assert in_memory.bits_per_byte == scores.bits_per_byte
    api.calibrate(run, rule="gate", data=data, held_out=data, max_tokens=1000)
    assert alcoda.load(run).generate("one", exit="exact", max_tokens=4) is not None
    assert api.lab(run, data, tokens=400, loops=6).to_json()
    packed = api.pack(run, tmp_path / "packed")
    assert alcoda.load(packed.path).tokenizer.bos_text == "<|begin|>"
    assert "Imported, not trained here: the ouro checkpoint ouro." in (packed.path / "README.md").read_text()
    recipe = {
        "name": "healed",
        "model": alcoda.load(run).recipe.model,
        "data": {
            "corpus": data,
            "tokenizer": {"kind": "file", "path": str(run), "eot": "<|end|>", "bos": "<|begin|>"},
        },
        "objective": {"kind": "per_loop"},
        "train": {"steps": 2, "batch_size": 2, "dtype": "float32"},
        "eval": {"tokens": 100, "loops": [1]},
        "init_from": {"run": str(run)},
    }
    unnamed = {**recipe, "data": {"corpus": data, "tokenizer": {"kind": "file", "path": str(run), "eot": "<|end|>"}}}
    with pytest.raises(UsageError, match=r'tokenizer\.json, eot: "<\|end\|>", bos: "<\|begin\|>"\}'):
        api.train(validate(Recipe, unnamed), tmp_path / "unnamed")
    assert api.train(validate(Recipe, recipe), tmp_path / "healed").train_step == 2
    assert read_json(tmp_path / "healed/run.json")["init_from"]["fresh"] == []


def test_where_a_text_begins_and_ends(ouro: Path, huginn: Path, tmp_path: Path) -> None:
    lm = alcoda.load(ouro)
    assert (lm.tokenizer.bos_text, lm.tokenizer.eot_text) == ("<|begin|>", "<|end|>")
    request = lm.request("ab", max_tokens=3)
    assert request.prompt[0] == 256 and request.stop_ids == {257}
    assert lm.tokenizer.decode([256, *lm.tokenizer.encode("ab"), 257]) == "ab"
    plain = json.loads((ouro / "tokenizer.json").read_text()) | {"post_processor": None}
    (ouro / "tokenizer.json").write_text(json.dumps(plain))
    again = alcoda.load(ouro)
    assert again.tokenizer.bos_text == again.tokenizer.eot_text == "<|end|>"
    (ouro / "tokenizer_config.json").unlink()
    (ouro / "generation_config.json").write_text('{"eos_token_id": [257, 3]}')
    assert alcoda.load(ouro).tokenizer.eot_text == "<|end|>"
    (ouro / "generation_config.json").unlink()
    with pytest.raises(UsageError, match="name its own with eot"):
        alcoda.load(ouro)
    api.import_model(ouro, tmp_path / "named", eot="<|begin|>")
    assert alcoda.load(tmp_path / "named").tokenizer.eot_text == "<|begin|>"


def test_without_a_tokenizer(huginn: Path, tmp_path: Path) -> None:
    api.import_model(huginn, tmp_path / "run")
    for lm in (alcoda.load(huginn), alcoda.load(tmp_path / "run")):
        assert lm.logits([1, 2, 3], loops=2).shape == (3, VOCAB)
        assert lm.trace([1, 2, 3], loops=2)["argmax"].shape == (3, 2)
        for use in (
            lambda lm=lm: lm.generate("a"),
            lambda lm=lm: lm.tokenizer.encode("a"),
            lambda lm=lm: lm.tokenizer.eot,
        ):
            with pytest.raises(UsageError, match="no tokenizer"):
                use()
    assert not (tmp_path / "run/tokenizer.json").exists()


MEASURE = """
import sys
from pathlib import Path
import torch._dynamo, alcoda  # torch itself would import it on the way
from alcoda import api
what, folder, out = sys.argv[1:]
def memory(which):  # VmHWM: the most that there was, VmRSS: now
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(which)) * 1024
before = memory("VmRSS")
kept = alcoda.load(folder) if what == "load" else api.import_model(folder, out)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_loading_and_importing(tmp_path: Path) -> None:
    """The model is loaded in 1.2 times its weights, and imported in less than half of them."""
    sizes = {D: 1024, FF: 6_000}
    weights = {
        name: torch.zeros([sizes.get(n, n) for n in tensor.shape], dtype=torch.float32)
        for name, tensor in ouro_weights().items()
    }
    folder = write_folder(
        tmp_path / "wide", OURO, weights, shards=2, hidden_size=1024, intermediate_size=6_000, head_dim=256
    )
    n_bytes = sum(4 * tensor.numel() for tensor in weights.values())
    assert n_bytes > 1.5e8
    for what, most in (("load", 1.2), ("import", 0.5)):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, what, str(folder), str(tmp_path / "out")],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-1]) < most * n_bytes, (what, done.stdout, n_bytes)


@pytest.mark.skipif(not DATA or not ORACLES.is_dir(), reason="ALCODA_DATA names no folder with oracles/ in it")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("huginn_tiny", {n: f"logits_r{n}" for n in (1, 2, 4, 9)}),
        ("ouro_tiny", {n: f"logits_exit{n - 1}" for n in (1, 2, 3, 4)}),
    ],
)
def test_oracles(name: str, expected: dict[int, str], tmp_path: Path) -> None:
    theirs = load_file(ORACLES / name / "expected.safetensors")
    api.import_model(ORACLES / name, tmp_path / "run")
    for lm in (alcoda.load(ORACLES / name), alcoda.load(tmp_path / "run")):
        for loops, key in expected.items():
            found = lm.logits(theirs["input_ids"], loops=loops)
            torch.testing.assert_close(found, theirs[key], rtol=0, atol=ATOL)


def test_a_folder_that_is_both_is_a_run(ouro: Path, tmp_path: Path) -> None:
    api.import_model(ouro, tmp_path / "run")
    (tmp_path / "run/config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "run/model.safetensors")
    assert torch.equal(alcoda.load(tmp_path / "run").logits(ids()), alcoda.load(ouro).logits(ids()))
