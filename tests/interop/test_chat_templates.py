"""A chat template goes where the model goes: import, pack, training from it, export; and says the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import alcoda
from alcoda import api
from alcoda.data.chat_template import alone, find_template
from alcoda.errors import RunError
from alcoda.interop import gguf
from alcoda.serve.chat import Chat, _compile
from alcoda.serve.protocol import Message
from alcoda.training.run import RunFolder

BODY = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEMPLATE = "{{ bos_token }}" + BODY
SPECIALS = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "unk_token": None}
ALONE = '{% set bos_token = "<|begin|>" %}\n{% set eos_token = "<|end|>" %}\n' + TEMPLATE
SAID = [Message.model_validate({"role": "user", "content": "abc"})]


def test_a_template_that_stands_alone() -> None:
    assert alone(TEMPLATE, SPECIALS) == ALONE
    assert alone(ALONE, {"bos_token": "<other>", "eos_token": "<other>"}) == ALONE, "it says so already"
    assert alone("{{ messages }}", SPECIALS) == "{{ messages }}"
    assert alone("{{ my_bos_token }}", SPECIALS) == "{{ my_bos_token }}"
    # What is set is what was called so, and white space around it stays.
    quoted = {"bos_token": '<"b\\">', "eos_token": "\n"}
    for start in ("", "\n", "  \n", "  {% if true %}\n  {% endif %}"):
        told = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": True}
        text = start + TEMPLATE
        ours, plain = _compile(alone(text, quoted)), _compile(text)
        assert ours.render(**told, bos_token="", eos_token="") == plain.render(**told, **quoted)


def with_template(folder: Path, **more: Any) -> Path:
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**said, "bos_token": "<|begin|>", "eos_token": "<|end|>", **more}))
    return folder


@pytest.fixture(params=["in its config", "several", "a file"])
def source(ouro: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "a file":
        (ouro / "chat_template.jinja").write_text(TEMPLATE)
        return with_template(ouro, chat_template="another")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    return with_template(ouro, chat_template=named if request.param == "several" else TEMPLATE)


def test_it_goes_along(source: Path, tmp_path: Path) -> None:
    lm = alcoda.load(source)
    expected = Chat(lm.tokenizer, lm.loaded.chat_template).prompt(SAID)
    specials = lm.tokenizer.specials
    assert expected[0] == specials["<|begin|>"] and list(expected).count(specials["<|end|>"]) == 1
    api.import_model(source, tmp_path / "run")
    api.pack(tmp_path / "run", tmp_path / "packed")
    api.export(tmp_path / "packed", tmp_path / "out")
    lm.save_pretrained(tmp_path / "saved")
    api.import_model(tmp_path / "out", tmp_path / "again")
    for name in ("run", "packed", "out", "saved", "again"):
        assert (tmp_path / name / "chat_template.jinja").read_text() == ALONE, name
        other = alcoda.load(tmp_path / name)
        assert Chat(other.tokenizer, other.loaded.chat_template).prompt(SAID) == expected, name


def test_transformers_says_the_same(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    alcoda.load(source).save_pretrained(tmp_path / "out")
    told = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]
    how = {"tokenize": False, "add_generation_prompt": True}
    theirs, ours = (
        transformers.PreTrainedTokenizerFast.from_pretrained(str(path)) for path in (source, tmp_path / "out")
    )
    text = ours.apply_chat_template(told, **how)
    assert text == theirs.apply_chat_template(told, **how) and text.startswith("<|begin|>user: abc<|end|>\n")


def test_a_model_without_one(ouro: Path, tmp_path: Path) -> None:
    api.import_model(ouro, tmp_path / "run")
    lm = alcoda.load(tmp_path / "run")
    lm.save_pretrained(tmp_path / "out")
    assert lm.loaded.chat_template is None
    assert not any((tmp_path / name / "chat_template.jinja").exists() for name in ("run", "out"))


def test_training_from_it_keeps_it(source: Path, tmp_path: Path) -> None:
    run, corpus = tmp_path / "run", tmp_path / "text.txt"
    api.import_model(source, run)
    corpus.write_text("The cat sat on the mat, and the dog did not. \n\n" * 400)
    settings = [
        "train.steps=1",
        "train.batch_size=1",
        "train.schedule.warmup_steps=0",
        "model.seq_len=16",
        f"data.corpus=text:{corpus}",
        f"data.tokenizer.path={run / 'tokenizer.json'}",
        "eval.tokens=64",
    ]
    recipe = api.load_recipe(run / "recipe.yaml", settings).model_copy(update={"init_from": {"run": str(run)}})
    api.train(recipe, tmp_path / "tuned")
    assert RunFolder(tmp_path / "tuned").chat_template.read_text() == ALONE


def test_of_a_gguf_file(ouro: Path, tmp_path: Path) -> None:
    """It is in the file; what transformers makes of it is what is kept."""
    import tokenizers

    class Made:
        backend_tokenizer = tokenizers.Tokenizer.from_file(str(ouro / "tokenizer.json"))
        chat_template, special_tokens_map = TEMPLATE, SPECIALS

    class Auto:
        from_pretrained: Callable[..., Any] = staticmethod(lambda *a, **k: Made)

    class Library:
        AutoTokenizer = Auto

    assert gguf._tokenizer(Library, tmp_path / "x.gguf", {}) == (Made.backend_tokenizer, ALONE)


def test_a_damaged_one(ouro: Path, tmp_path: Path) -> None:
    (ouro / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match=r"chat_template\.jinja cannot be read as text.*put back"):
        api.import_model(ouro, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert find_template(tmp_path) is None
