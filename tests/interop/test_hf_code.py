"""The code that goes along with an exported model: the same model where there is no alcoda."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import hf_answers
import pytest
import torch
from hf_answers import answers
from hf_models import MODELS, small

import alcoda
from alcoda import plugins
from alcoda.config import validate
from alcoda.files import read_json
from alcoda.interop import hf_code
from alcoda.model.config import ModelConfig
from alcoda.model.recurrence.inject import Add


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A Python that keeps transformers' copies of code in ``folder``."""
    variables = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-I", *command], capture_output=True, text=True, env=variables)


def test_the_same_model_without_alcoda(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("alcoda.interop.hf")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    expected = {}
    for name, changes in MODELS.items():
        small(tmp_path, **changes).save_pretrained(tmp_path / name)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        expected[name] = answers(model, transformers.AutoTokenizer.from_pretrained(tmp_path / name))
    folders = [str(tmp_path / name) for name in MODELS]
    done = run(tmp_path, hf_answers.__file__, str(tmp_path / "found.pt"), str(tmp_path / "again"), *folders)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    # The control: exits change what is read.
    assert not torch.allclose(found["grt"]["exit"][0], found["grt"]["logits"], atol=1e-3)
    # What transformers writes there carries the code on, and is ours.
    again = tmp_path / "again"
    assert {path.name for path in again.glob("*.py")} == set(hf_code.files())
    assert alcoda.load(again).model.config == alcoda.load(folders[-1]).model.config


def test_alcoda_is_preferred_and_passes_the_code_on(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    hf = pytest.importorskip("alcoda.interop.hf")
    small(tmp_path, **MODELS["grt"]).save_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model) is hf.AlcodaForCausalLM
    model.save_pretrained(tmp_path / "again")
    assert read_json(tmp_path / "again/config.json")["auto_map"] == hf_code.AUTO_MAP
    for name, text in hf_code.files().items():
        assert (tmp_path / "again" / name).read_text() == text


def test_a_calibrated_tier_of_a_model_of_the_hub(tmp_path: Path) -> None:
    """As it lies in the hub's cache; without alcoda."""
    pytest.importorskip("transformers", minversion="5.0")
    lm, commit = alcoda.load("mini", dtype="float32"), 40 * "0"
    cached = tmp_path / "home/hub/models--me--mini"
    lm.save_pretrained(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    code = """
import sys; sys.modules["alcoda"] = None
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("me/mini", trust_remote_code=True, dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained("me/mini", trust_remote_code=True)
batch = tokenizer(["The old man"], return_tensors="pt")
made = model.eval().generate(**batch, max_new_tokens=8, exit="balanced")
print(tokenizer.decode(made[0, batch["input_ids"].size(1) :]), end="")
"""
    done = run(tmp_path, "-c", code)
    assert done.stdout == lm.generate("The old man", max_tokens=8, exit="balanced"), done.stderr


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    small(tmp_path, **MODELS["grt"]).save_pretrained(tmp_path / "hf")
    load = f"transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'hf')!r}, trust_remote_code=True)"
    done = run(tmp_path, "-c", f"import sys; sys.modules['pydantic'] = None\nimport transformers\n{load}")
    assert done.returncode != 0 and "pydantic" in done.stderr.splitlines()[-1], done.stderr


def test_the_code_needs_little() -> None:
    """Of ours only what lies in the folder; of others what the card says."""
    files, allowed = hf_code.files(), {"torch", "transformers", "pydantic", "pydantic_core", "safetensors"}
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                tops = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                tops = [str(node.module).partition(".")[0]]
            elif isinstance(node, ast.ImportFrom):
                assert f"{node.module}.py" in files, f"{name}: {node.module}"
                continue
            else:
                continue
            assert set(tops) <= allowed | sys.stdlib_module_names, f"{name}: {tops}"
            assert "alcoda" not in tops


def test_a_choice_of_a_plugin_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from typing import Literal\nfrom alcoda.model.recurrence.inject import Add\n"
        "class Mine(Add):\n    kind: Literal['mine_of_a_test'] = 'mine_of_a_test'\n"
    )
    plugins.load(tmp_path / "mine.py")
    try:
        lm = small(tmp_path, inject="mine_of_a_test")
        saved = lm.save_pretrained(tmp_path / "hf")
    finally:
        del Add.choices["mine_of_a_test"]
    assert not saved.has_code and not list((tmp_path / "hf").glob("*.py"))
    assert "auto_map" not in read_json(tmp_path / "hf/config.json")
    assert "its inject is of a plugin" in (tmp_path / "hf/README.md").read_text()
    assert hf_code.outside(validate(ModelConfig, {})) == []
