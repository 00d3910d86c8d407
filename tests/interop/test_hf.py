"""Our models in transformers: the same logits, the same text as the engine's, padding honoured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, SIZES, small

import alcoda
from alcoda.depth.record import fingerprint
from alcoda.errors import RunError, UsageError
from alcoda.model.config import ModelConfig

transformers = pytest.importorskip("transformers", minversion="5.0")
hf = pytest.importorskip("alcoda.interop.hf")
hf_model = pytest.importorskip("alcoda.interop.hf_model")

PROMPTS = ["once upon a time", "b", "def main(x):"]
N_NEW = 10


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def auto(folder: Path, **how: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def ids(rows: int = 2, tokens: int = 11) -> torch.Tensor:
    return torch.randint(1, 257, (rows, tokens), generator=torch.Generator().manual_seed(1))


def cache_of(out: Any) -> Any:
    return out[hf_model.CACHE]


@pytest.mark.parametrize("name", MODELS)
def test_logits_padding_and_generation(name: str, tmp_path: Path) -> None:
    lm = small(tmp_path, **MODELS[name])
    lm.save_pretrained(tmp_path / "hf")
    model = auto(tmp_path / "hf")
    assert fingerprint(model.model) == fingerprint(lm.model)
    depths = (1, lm.n_loops) if lm.model.config.max_loops is not None else (1, lm.n_loops, 5)
    with torch.no_grad():
        for loops in dict.fromkeys(depths):
            found = model(ids(), num_loops=loops).logits
            torch.testing.assert_close(found, lm.logits(ids(), loops), rtol=0, atol=1e-6)
        torch.testing.assert_close(model(ids()).logits, lm.logits(ids()), rtol=0, atol=1e-6)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert not batch["attention_mask"].all()
    # Left-padded rows are those rows alone; in fp64, with and without a cache.
    model.double()
    for use_cache in (False, True):
        with torch.no_grad():
            together = model(**batch, use_cache=use_cache).logits
        for row, prompt in enumerate(PROMPTS):
            one = tokenizer([prompt], return_tensors="pt")
            with torch.no_grad():
                alone = model(**one, use_cache=use_cache).logits[0]
            torch.testing.assert_close(together[row, -alone.size(0) :], alone, rtol=0, atol=1e-9)
            assert one["input_ids"][0].tolist() == [lm.tokenizer.bos, *lm.tokenizer.encode(prompt).tolist()]
    # generate, with and without a cache, is the engine.
    model.float()
    expected = lm.generate(PROMPTS, max_tokens=N_NEW, ignore_eot=True, details=True)
    for use_cache in (True, False):
        made = model.generate(**batch, max_new_tokens=N_NEW, eos_token_id=-1, use_cache=use_cache)
        new = made[:, batch["input_ids"].size(1) :].tolist()
        assert new == [[token.token for token in one.tokens] for one in expected]


def test_depth_and_exits_in_generate(tmp_path: Path) -> None:
    lm = small(tmp_path, **MODELS["grt"])
    lm.save_pretrained(tmp_path / "hf")
    model, tokenizer = auto(tmp_path / "hf"), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    texts = {}
    for ours, theirs in (
        ({"loops": 1}, {"num_loops": 1}),
        ({"loops": 6}, {"num_loops": 6}),
        ({"exit": "state:0.4", "loops": 6}, {"exit": "state:0.4", "num_loops": 6}),
        ({"exit": "kl:0.05"}, {"exit": "kl:0.05"}),
    ):
        expected = lm.generate(PROMPTS, max_tokens=N_NEW, ignore_eot=True, details=True, **ours)
        made = model.generate(**batch, max_new_tokens=N_NEW, eos_token_id=-1, **theirs)
        new = made[:, batch["input_ids"].size(1) :].tolist()
        assert new == [[token.token for token in one.tokens] for one in expected]
        texts[str(ours)] = str(new)
        if "exit" in ours:  # the control: some tokens left early
            assert any(token.loops < 6 for one in expected for token in one.tokens)
    assert len(set(texts.values())) == len(texts)


def test_a_calibrated_tier(tmp_path: Path) -> None:
    lm = alcoda.load("mini", dtype="float32")
    lm.save_pretrained(tmp_path / "hf")
    model = auto(tmp_path / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = tokenizer(["The old man", "Once"], return_tensors="pt", padding=True)
    made = model.generate(**batch, max_new_tokens=8, exit="balanced")
    texts = lm.generate(["The old man", "Once"], max_tokens=8, exit="balanced")
    assert [lm.tokenizer.decode(row[batch["input_ids"].size(1) :]) for row in made.numpy()] == texts


def test_beams_chunks_and_sampling(tmp_path: Path) -> None:
    lm = small(tmp_path, **MODELS["grt"])
    lm.save_pretrained(tmp_path / "hf")
    model, tokenizer = auto(tmp_path / "hf"), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    how = {**batch, "max_new_tokens": 6, "eos_token_id": -1}
    assert torch.equal(
        model.generate(**how, num_beams=3, use_cache=True), model.generate(**how, num_beams=3, use_cache=False)
    )
    transformers.set_seed(3)
    several = model.generate(**how, do_sample=True, num_return_sequences=2)
    assert several.shape[0] == 2 * len(PROMPTS) and int(several.max()) < lm.tokenizer.vocab_size
    with torch.no_grad():
        whole = model(ids()).logits
        first = model(ids()[:, :4])
        assert cache_of(first).get_seq_length() == 4
        rest = model(ids()[:, 4:], **{hf_model.CACHE: cache_of(first)}).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=0, atol=1e-5)
    assert model(ids(), logits_to_keep=2, use_cache=False).logits.shape[1] == 2


def test_what_looks_ahead_is_read_and_not_decoded(tmp_path: Path) -> None:
    lm = small(tmp_path, route={"kind": "expert_choice", "auxiliary": "none"})
    lm.save_pretrained(tmp_path / "hf")
    model = auto(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, lm.logits(ids()), rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="cannot decode"):
        model.generate(ids(), max_new_tokens=2)


def test_it_trains(tmp_path: Path) -> None:
    lm = small(tmp_path, **MODELS["grt"])
    lm.save_pretrained(tmp_path / "hf")
    model = auto(tmp_path / "hf")
    labels = ids().clone()
    labels[:, :3] = -100
    out = model(ids(), labels=labels)
    expected = torch.nn.functional.cross_entropy(lm.logits(ids())[:, 2:-1].flatten(0, 1), ids()[:, 3:].flatten())
    torch.testing.assert_close(out.loss, expected, rtol=0, atol=1e-6)
    out.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    fresh = transformers.AutoModelForCausalLM.from_config(model.config)
    assert fingerprint(fresh.model) != fingerprint(model.model)
    # What transformers writes is ours too.
    with torch.no_grad():
        model.model.embed.weight.add_(1.0)
    model.save_pretrained(tmp_path / "again")
    again = alcoda.load(tmp_path / "again")
    assert fingerprint(again.model) == fingerprint(model.model) != fingerprint(lm.model)


def test_in_bf16_it_is_ours_in_bf16(tmp_path: Path) -> None:
    small(tmp_path, **MODELS["grt"]).save_pretrained(tmp_path / "hf", dtype="bfloat16")
    ours, model = alcoda.load(tmp_path / "hf", dtype="bfloat16"), auto(tmp_path / "hf")
    assert model.config.dtype == torch.bfloat16 and model.model.embed.weight.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, ours.logits(ids()), rtol=0, atol=1e-6)
        exact = auto(tmp_path / "hf", dtype=torch.float32)(ids()).logits
        assert not torch.equal(exact, model(ids()).logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(ids(), num_loops=0), "at least 1 loop"),
        (lambda m: m(ids(), exit="stat:0.1"), "unknown exit"),
        (lambda m: m(ids(), exit="balanced"), "alcoda calibrate"),
        (lambda m: m(ids(), exit=0.1), "the name of a rule"),
        (lambda m: m(ids(), attention_mask=torch.ones(2, 3)), "attention_mask of shape"),
        (lambda m: m(ids(), position_ids=torch.arange(3)[None]), "position_ids of shape"),
        (lambda m: m(ids(), past_key_values=transformers.DynamicCache()), "DynamicCache"),
        (lambda m: m(ids(), num_loops=2, **{hf_model.CACHE: cache_of(m(ids(), use_cache=True))}), "begin anew"),
        (lambda m: m(inputs_embeds=torch.zeros(1, 2, 32)), "input_ids are needed"),
        (lambda m: m(ids(), output_hidden_states=True), "output_hidden_states"),
        (lambda m: m.half()(ids()), "cast to torch.float16"),
    ],
)
def test_bad_calls(call: Any, message: str, tmp_path: Path) -> None:
    small(tmp_path, **MODELS["grt"]).save_pretrained(tmp_path / "hf")
    with pytest.raises(UsageError, match=message):
        call(auto(tmp_path / "hf"))


def test_bad_folders(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    small(tmp_path, **MODELS["grt"]).save_pretrained(tmp_path / "hf")
    with pytest.raises(UsageError, match="dtype"):
        auto(tmp_path / "hf", dtype=torch.float16)
    file = tmp_path / "hf/model.safetensors"
    weights = load_file(file)
    gone = weights.pop("model.core.stack.layers.0.mlp.down.weight", None)
    assert gone is not None
    save_file(weights, file, {"format": "pt"})
    for read in (auto, alcoda.load):
        with pytest.raises(RunError, match=r"mlp\.down"):
            read(tmp_path / "hf")
    memory = {**SIZES, "memory": "prev_token"}
    config = hf.AlcodaConfig(alcoda={"model": ModelConfig.model_validate(memory).model_dump(mode="json")})
    with pytest.raises(UsageError, match="memory"):
        hf.AlcodaForCausalLM(config)


def test_who_is_imported_first(tmp_path: Path) -> None:
    """alcoda does not import transformers, and is known to it where that was there before it."""
    small(tmp_path, **MODELS["grt"]).save_pretrained(tmp_path / "hf")
    known = f"assert transformers.AutoConfig.from_pretrained({str(tmp_path / 'hf')!r}).num_loops == 3"
    for code in (
        f"import transformers, alcoda; {known}",
        "import sys, alcoda; alcoda.load; assert 'transformers' not in sys.modules; "
        f"import transformers, alcoda.interop.hf; {known}",
    ):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
