"""A trained run, used: generation and logits, through the command line and the API."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Cli

import alcoda
from alcoda import api
from alcoda.engine import engine
from alcoda.engine.decode import decode
from alcoda.engine.sampling import Drawn, Row
from alcoda.errors import RunError, UsageError


@pytest.fixture(scope="module")
def run(trained_once: Path) -> Path:
    return trained_once


@pytest.fixture(scope="module")
def lm(run: Path) -> api.LM:
    return alcoda.load(run)


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize("prompt", ["", "one two", "über 漢"])
def test_cached_decoding_is_the_argmax_of_the_full_logits(lm: api.LM, loops: int, prompt: str) -> None:
    ids = [lm.tokenizer.eot, *lm.tokenizer.encode(prompt).tolist()]
    decoded = decode(lm.model, ids, loops=loops, max_tokens=99, n_vocab=lm.tokenizer.vocab_size)
    for token in decoded:
        assert token == int(lm.logits(ids, loops)[-1].argmax())
        ids.append(token)
    assert len(ids) == lm.recipe.model.seq_len  # to the end of the context
    text = lm.generate(prompt, loops=loops)
    expected = lm.tokenizer.decode_bytes(ids).decode(errors="replace")
    assert prompt + text == expected or ids[-1] == lm.tokenizer.eot


def test_generation(lm: api.LM, run: Path, run_cli: Cli) -> None:
    draw = {"temperature": 1.0, "max_tokens": 12}
    first, again, other = (lm.generate("one", seed=seed, **draw) for seed in (3, 3, 4))
    assert first == again != other
    assert lm.generate("one", seed=3, **draw, top_k=1) == lm.generate("one", max_tokens=12)
    assert "".join(lm.stream("one", seed=3, **draw)) == first
    done = run_cli.ok("generate", run, "--prompt", "one", "--seed", 3, "--temperature", 1, "--max-tokens", 12)
    assert done.out == f"one{first}\n" and done.err == ""
    done = run_cli.ok("generate", run, "--prompt", "one", "--max-tokens", 12, "--loops", 3, "--json")
    text = lm.generate("one", loops=3, max_tokens=12)
    told = {"prompt": "one", "text": text, "loops": 3, "temperature": 0.0, "seed": 0, "finish": "length"}
    assert {name: done.json[name] for name in told} == told and done.json["engine"]["tokens"] == 12
    assert len(done.out.splitlines()) == 1


def test_options_of_drawing(lm: api.LM, run: Path, run_cli: Cli) -> None:
    draw: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": 3}
    text = lm.generate("one", **draw)
    best = lm.generate("one", max_tokens=12)
    assert text != best
    eot = lm.tokenizer.eot
    assert lm.generate("one", **draw, top_p=1e-9) == lm.generate("one", **draw, min_p=0.999999) == best
    forced = lm.tokenizer.encode("#").tolist()[0]
    assert lm.generate("one", **draw, logit_bias={forced: 100}) == "#" * 12
    assert lm.generate("one", **draw, logit_bias={eot: 100}) == ""
    for penalty in ({"repetition_penalty": 1e6}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        flat: dict[str, Any] = {"max_tokens": 8, "logit_bias": {forced: 20, forced + 1: 19.9}}
        assert lm.generate("one", **flat) == "#" * 8 != lm.generate("one", **flat, **penalty)
    with pytest.raises(UsageError, match="there is no token 257: the ids are 0 to 256"):
        lm.generate("one", logit_bias={257: 1.0})
    with pytest.raises(UsageError, match="presence_penalty: a number from -2 to 2"):
        lm.stream("one", presence_penalty=3.0)
    for option, value in (("top_p", 1e-9), ("min_p", 0.999999), ("repetition_penalty", 1e-3)):
        arguments = ("--temperature", 1, "--seed", 3, "--max-tokens", 12, f"--{option.replace('_', '-')}", value)
        done = run_cli.ok("generate", run, "--prompt", "one", *arguments, "--json")
        assert done.json["text"] == lm.generate("one", **draw, **{option: value}) != text


def test_text_ends_before_a_stop_string(lm: api.LM, run: Path, run_cli: Cli) -> None:
    text = lm.generate("one", max_tokens=30)
    stop = text[5:8]
    assert len(stop) == 3
    expected = text.split(stop)[0]
    assert lm.generate("one", max_tokens=30, stop=stop) == expected == lm.generate("one", stop=["no such", stop])
    assert "".join(lm.stream("one", max_tokens=30, stop=[stop])) == expected
    assert lm.generate("one", max_tokens=30, stop="no such") == text
    done = run_cli.ok("generate", run, "--prompt", "one", "--max-tokens", 30, "--stop", "no such", "--stop", stop)
    assert done.out == f"one{expected}\n"
    cut, whole = (lm.generate("one", max_tokens=30, stop=one, details=True) for one in (stop, "no such"))
    assert len(cut.tokens) < len(whole.tokens) and cut.finish == "stop"
    lm.generate("one", max_tokens=30, stop=stop)
    assert lm.stats is not None and lm.stats["tokens"] < 30  # what comes after a stop string is not computed
    with pytest.raises(UsageError, match="stop: 5 strings"):
        lm.stream("one", stop=list("abcde"))


def test_streamed_pieces_are_whole_characters(lm: api.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "aï漢🎉!"
    tokens = lm.tokenizer.encode(text).tolist()
    assert len(tokens) == len(text.encode())
    script: list[int] = []

    def scripted(logits_NV: torch.Tensor, rows: list[Row], n_vocab: int | None) -> list[Drawn | str]:
        return [Drawn(script[len(row.output)], None, ()) for row in rows]

    monkeypatch.setattr(engine, "draw", scripted)
    script[:] = tokens
    assert list(lm.stream("x", max_tokens=len(tokens))) == list(text)
    assert lm.generate("x", max_tokens=len(tokens) - 2) == "aï漢\ufffd"  # cut inside a character


def test_tokens_leave_early(run: Path, run_cli: Cli, lm: api.LM) -> None:
    text = lm.generate("one", max_tokens=12)
    assert lm.generate("one", max_tokens=12, exit="state") == lm.generate("one", max_tokens=12, exit="kl:0") == text
    one = lm.generate("one", max_tokens=12, exit="state", threshold=1e9, details=True)
    assert {*one.prompt_loops, *(token.loops for token in one.tokens)} == {1}
    left = one.text
    assert left == lm.generate("one", max_tokens=12, exit="fixed:1") == lm.generate("one", max_tokens=12, loops=1)
    done = run_cli.ok("generate", run, "--prompt", "one", "--max-tokens", 12, "--exit", "state:1e9", "--json")
    assert done.json["text"] == left and done.json["exit"] == "state:1e9" and done.json["mean_loops"] == 1.0
    done = run_cli.ok("generate", run, "--prompt", "one", "--max-tokens", 12, "--exit", "argmax_stable")
    assert done.out == f"one{text}\n"


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("stat", "unknown exit 'stat'; did you mean 'state'?"),
        ("state:no", "threshold"),
        ("fixed:99", "exit.loops=99"),
        ("gate:0.1", "this model has no exit gate"),
        ("probe", "has none; alcoda probe"),
        ("trace:nowhere", "nowhere: no such file"),
    ],
)
def test_exits_that_cannot_be(run: Path, run_cli: Cli, rule: str, says: str) -> None:
    run_cli.refused("generate", run, "--prompt", "one", "--exit", rule, says=(says,))


def test_damaged_weights_do_not_generate(trained: Path) -> None:
    broken = alcoda.load(trained)
    with torch.no_grad():
        broken.model.embed.weight.fill_(math.nan)
    with pytest.raises(RunError, match="logits are not finite"):
        broken.generate("one")


def test_logits(lm: api.LM) -> None:
    ids = lm.tokenizer.encode("one two").tolist()
    one = lm.logits(ids)
    assert one.shape == (7, 257) and one.dtype == torch.float32 and not one.requires_grad
    both = lm.logits([ids, ids[::-1]], loops=3)
    assert both.shape == (2, 7, 257)
    torch.testing.assert_close(both[0], lm.logits(ids, loops=3))
    for same in (tuple(ids), np.array(ids, np.uint16), np.array(ids, np.int32), torch.tensor(ids, dtype=torch.uint8)):
        assert torch.equal(lm.logits(same), one)
    bad: list[tuple[Any, str]] = [
        ([], "whole numbers"),
        ([[1, 2], [3]], "one length"),
        ([1.5, 2.0], "float64"),
        ([True, False], "bool"),
        (["one"], "whole numbers"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        (5, r"shape \(\)"),
        ([-1], "ids from -1 to -1: this model has the ids 0 to 256"),
        ([257], "ids from 257 to 257"),
    ]
    for given, says in bad:
        with pytest.raises(UsageError, match=says):
            lm.logits(given)
    with pytest.raises(UsageError, match="loops=0"):
        lm.logits(ids, loops=0)
