"""Llama, Mistral, Qwen2 and Qwen3 folders: our model with their weights gives transformers' logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dense_folders as theirs
import pytest
import torch
from torch import Tensor

from alcoda.errors import RunError, UsageError
from alcoda.interop.foreign import Foreign, open_foreign
from alcoda.interop.layouts import LAYOUTS
from alcoda.model.lm import RecurrentLM

IDS_BT = torch.randint(theirs.V, (2, 33), generator=torch.Generator().manual_seed(1))
TOLERANCE = 1e-4
"""Of logits in fp32."""

EXPECTED: dict[str, list[float]] = {
    "llama": [-1.73456, -1.920766, -1.043744, 1.313481],
    "llama-new": [-1.73413, -1.920866, -1.043977, 1.313911],
    "llama-tied": [-0.699272, -2.524477, 3.027603, -1.544788],
    "llama-mha": [0.020876, -2.159965, -1.624036, 1.160202],
    "llama-bias": [1.383239, -1.534424, 1.3574, 3.416796],
    "mistral": [-3.159758, -3.327839, 2.308761, 2.984483],
    "mistral-window": [0.125124, -0.787029, 1.063506, 4.252726],
    "qwen2": [-0.058403, -1.571044, 0.402694, 0.046164],
    "qwen2-window": [-0.002749, 2.200026, 0.521954, 0.280606],
    "qwen3": [0.913694, 0.194414, 2.837303, -0.18948],
}
"""The first four logits after the last token of the first row, as transformers 5.24.0 has them."""


def ours(found: Foreign) -> RecurrentLM:
    model = RecurrentLM(found.model)
    model.load_state_dict(dict(found.weights()))
    return model.eval()


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return ours(open_foreign(folder, LAYOUTS))(IDS_BT, 1)


@pytest.mark.parametrize("kind", theirs.KINDS)
def test_logits_are_those_that_transformers_gave(kind: str, tmp_path: Path) -> None:
    found = logits(theirs.write(tmp_path, kind))[0, -1, :4]
    torch.testing.assert_close(found, torch.tensor(EXPECTED[kind]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", theirs.KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs.write(tmp_path, kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS_BT).logits
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("llama", "position"),
        ("llama", "eps"),
        ("mistral-window", "window"),
        ("qwen2", "v_bias"),
        ("qwen3", "qk_norm"),
    ],
)
def test_control_the_comparison_sees_each_part(kind: str, field: str, tmp_path: Path) -> None:
    found = open_foreign(theirs.write(tmp_path, kind), LAYOUTS)
    block = found.model.block
    changed: dict[str, Any] = {
        "position": {"position": {"kind": "rope", "base": 50_000.0, "pairs": "interleaved"}},
        "eps": {"block": block.model_copy(update={"norm": {"kind": "rmsnorm", "eps": 1e-2}})},
        "window": {"block": block.model_copy(update={"window": {"kind": "pattern", "pattern": "S", "tokens": 5}})},
        "v_bias": {"block": block.model_copy(update={"attention": {**block.attention.model_dump(), "v_bias": False}})},
        "qk_norm": {
            "block": block.model_copy(update={"attention": {**block.attention.model_dump(), "qk_norm": "none"}})
        },
    }
    other = RecurrentLM(found.model.model_copy(update=changed[field]))
    other.load_state_dict(dict(found.weights()), strict=False)
    with torch.no_grad():
        far = (other.eval()(IDS_BT, 1)[0, -1, :4] - torch.tensor(EXPECTED[kind])).abs().max()
    assert far > 10 * TOLERANCE


def test_a_tied_head_that_is_there_twice_is_compared(tmp_path: Path) -> None:
    said = theirs.config("llama-tied")
    tensors = theirs.weights(said)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    theirs.write(tmp_path, "llama-tied", tensors)
    assert open_foreign(tmp_path, LAYOUTS).model.head.kind == "tied"
    tensors["lm_head.weight"] += 1
    theirs.write(tmp_path, "llama-tied", tensors)
    with pytest.raises(RunError, match=r"lm_head.weight is model.embed_tokens.weight again \(tied\), and the weights"):
        open_foreign(tmp_path, LAYOUTS)


def test_an_old_buffer_of_angles_is_no_weight(tmp_path: Path) -> None:
    tensors = theirs.weights(theirs.config("llama"))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    theirs.write(tmp_path, "llama", tensors)
    assert "inv_freq" not in str(open_foreign(tmp_path, LAYOUTS).takes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rotary positions are scaled \('linear'\)"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            r"scaled \('llama3'\).*Allowed: 'default'",
        ),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, r"scaled \('yarn'\)"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5.*Allowed: 1.0"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act is 'gelu'.*Allowed: 'silu'"),
        ("llama", {"attention_bias": True}, r"attention_bias is True and mlp_bias False.*Allowed: both, or none"),
        ("llama", {"num_hidden_layers": "many"}, r"num_hidden_layers is 'many': int is needed"),
        ("llama", {"hidden_size": None}, r"hidden_size is None: int is needed"),
        ("llama", {"num_key_value_heads": 3}, r"n_kv_heads=3 must divide n_heads=4"),
        ("qwen2-window", {"max_window_layers": 2}, r"2 of 4 layers have a sliding window.*Allowed: all or none"),
        ("qwen3", {"rms_norm_eps": 1e-5}, r"rms_norm_eps is 1e-05.*Allowed: 1e-06"),
        (
            "llama",
            {"model_type": "gpt2"},
            r"model_type 'gpt2'.*not known here. Known: .*llama or mistral",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    said = theirs.config(kind)
    theirs.write(tmp_path, kind, theirs.weights(said), **changes)
    with pytest.raises(UsageError, match=re.compile(message, re.S)):
        open_foreign(tmp_path, LAYOUTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing \(1\): model.layers.1.mlp.up_proj.weight"),
        ("extra", r"not expected \(1\): model.layers.0.self_attn.q_proj.bias"),
        ("shape", r"wrong \(1\): model.norm.weight is \[5\] F32: \[32\] is expected for final_norm.weight"),
    ],
)
def test_weights_that_do_not_fit(change: str, message: str, tmp_path: Path) -> None:
    tensors = theirs.weights(theirs.config("llama"))
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "extra":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(theirs.D)
    else:
        tensors["model.norm.weight"] = torch.ones(5)
    theirs.write(tmp_path, "llama", tensors)
    with pytest.raises(RunError, match=message):
        open_foreign(tmp_path, LAYOUTS)


def test_fewer_layers_in_the_config_than_in_the_weights(tmp_path: Path) -> None:
    theirs.write(tmp_path, "llama", theirs.weights(theirs.config("llama")), num_hidden_layers=3)
    with pytest.raises(RunError, match=r"not expected \(9\): model.layers.3"):
        open_foreign(tmp_path, LAYOUTS)
