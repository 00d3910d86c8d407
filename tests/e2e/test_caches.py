"""Decode caches measured and used: against scoring by hand from the definition, and from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Cli, recipe, snapshot, untouched, write_corpus

import alcoda
from alcoda import api
from alcoda.config import validate
from alcoda.data.prepare import open_corpus
from alcoda.errors import UsageError
from alcoda.laws.caches import slowly
from alcoda.measure import caches
from alcoda.measure.bootstrap import paired_gain
from alcoda.model.cache_policy import LastCache, MeanCache
from alcoda.training.recipe import Recipe

SEQ_LEN, LOOPS = 16, 3
ONE: dict[str, Any] = {"depth": {"kind": "fixed", "loops": 1}, "eval__loops": [1]}
NAMES = ["per_loop", "mean", "last"]


@pytest.fixture(scope="module")
def lm(trained_once: Path) -> api.LM:
    """Of the shared run, in fp64, with a core so loud that its keys differ from loop to loop."""
    lm = alcoda.load(trained_once)
    lm.model.double()
    with torch.no_grad():
        for p in lm.model.core.parameters():
            p.mul_(6)
    return lm


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Short; its last row is not full."""
    path = write_corpus(tmp_path_factory.mktemp("text") / "short.txt", n_documents=31, n_words=1, seed=5)
    return f"text:{path}"


@pytest.fixture
def mine(trained_once: Path, tmp_path: Path) -> Path:
    """The run, to write to; its checkpoints are those of the shared one."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for path in trained_once.iterdir():
        (mine / path.name).symlink_to(path)
    return mine


@torch.no_grad()
def by_hand(lm: api.LM, data: str, cache: Any, loops: int = LOOPS) -> tuple[np.ndarray, np.ndarray]:
    """Nats and bytes of each token but the first, a row at a time, from the slow reference of the law."""
    stream = open_corpus(data, lm.tokenizer)
    tokens, nats = torch.from_numpy(stream.read(0, stream.n_tokens).astype(np.int64)), []
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        row = tokens[start : start + SEQ_LEN + 1]
        ids_BT = row[None, :-1]
        if cache is None:
            logits_BTV = lm.model(ids_BT, loops)
        else:
            logits_BTV = slowly(lm.model, ids_BT, cache, torch.full_like(ids_BT, loops))
        nats.append(F.cross_entropy(logits_BTV[0], row[1:], reduction="none"))
    sizes = np.array([len(lm.tokenizer.decode_bytes([token])) for token in tokens[1:].tolist()])
    return torch.cat(nats).numpy() * (sizes > 0), sizes


def test_all_caches(lm: api.LM, text: str) -> None:
    result = alcoda.evaluate_caches(lm, LOOPS, text, batch_size=5)
    assert [one.name for one in result.by_cache] == NAMES
    expected = [by_hand(lm, text, cache)[0] for cache in (None, MeanCache(), LastCache())]
    sizes = by_hand(lm, text, None)[1]
    ends = np.cumsum([len(document) for document in open_corpus(text, lm.tokenizer).documents()])
    unit = np.searchsorted(ends, np.arange(1, len(sizes) + 1), side="right")
    by_unit = [np.bincount(unit, nats) for nats in expected]
    bytes_U = np.bincount(unit, sizes)
    for one, nats, nats_U in zip(result.by_cache, expected, by_unit, strict=True):
        assert one.bits.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / sizes.sum(), rel=1e-7)
        assert one.loss == pytest.approx(nats.sum() / (sizes > 0).sum(), rel=1e-7)
        assert one.read_s > 0 and one.s_per_token == pytest.approx(one.read_s / len(nats))
        if one.name != "per_loop":
            gap = (one.bits.gap, one.bits.gap_low, one.bits.gap_high)
            assert gap == pytest.approx(tuple(paired_gain(nats_U, by_unit[0], bytes_U)), abs=1e-6)
            assert abs(gap[0] or 0) > 1e-4  # the control: they are other models
        alone = api.evaluate(lm, [LOOPS], text, cache=one.name)
        assert alone.bits_per_byte[LOOPS] == pytest.approx(one.bits.bits_per_byte, rel=1e-9)
        assert alone.cache == one.cache and alone.prefill is None
    assert len({round(one.bits.bits_per_byte, 5) for one in result.by_cache}) == 3
    of = api.cost(lm.recipe, LOOPS)
    assert [one.bytes_per_token for one in result.by_cache] == [of.kv_bytes_by_cache[name] for name in NAMES]
    assert of.kv_bytes_by_cache["per_loop"] == of.kv_bytes_per_token
    core = sum(term.kv_bytes for term in of.terms if term.name.startswith("core"))
    assert of.kv_bytes_per_token - of.kv_bytes_by_cache["mean"] == core - core // LOOPS > 0
    assert (result.unit, result.n_units, result.loops) == ("documents", 31, LOOPS)


def test_one_loop_is_one_cache(lm: api.LM, text: str) -> None:
    first, *others = alcoda.evaluate_caches(lm, 1, text).by_cache
    assert all(one.bits.bits_per_byte == first.bits.bits_per_byte and one.bits.gap == 0 for one in others)


def test_caches_with_exits(lm: api.LM, text: str) -> None:
    def of(cache: str, rule: str = "state:0.2") -> api.ExitResult:
        return api.evaluate_exit(lm, rule, LOOPS, text, cache=cache)

    plain, mean = api.evaluate_exit(lm, "state:0.2", LOOPS, text), of("mean")
    assert of("per_loop") == plain and plain.cache == {"kind": "per_loop"} and mean.cache == {"kind": "mean"}
    # All tokens at all loops, with the same cache.
    assert mean.deepest == pytest.approx(api.evaluate(lm, [LOOPS], text, cache="mean").bits_per_byte[LOOPS], rel=1e-9)
    assert of("mean", "fixed").gap == pytest.approx(0, abs=1e-9) and of("mean", "fixed:1").mean_loops == 1
    assert of("mean", "fixed:1").bits_per_byte == pytest.approx(of("last", "fixed:1").bits_per_byte, rel=1e-9)
    assert len({round(one.deepest, 6) for one in (plain, mean, of("last"))}) == 3


def test_logits_and_generation_agree(lm: api.LM) -> None:
    prompt, ids = "one two three", [lm.tokenizer.eot, *lm.tokenizer.encode("one two three").tolist()]
    assert torch.equal(lm.logits(ids), lm.logits(ids, cache="per_loop"))
    for name in NAMES:
        logits_TV = lm.logits(ids, loops=LOOPS, cache=name)
        best = int(logits_TV[-1, : lm.tokenizer.vocab_size].argmax())
        if best != lm.tokenizer.eot:
            text = lm.generate(prompt, loops=LOOPS, max_tokens=1, cache=name)
            assert text == lm.tokenizer.decode_bytes([best]).decode(errors="replace")
        left = lm.generate(prompt, loops=LOOPS, max_tokens=5, cache=name, exit="fixed:2", details=True)
        assert left.text == lm.generate(prompt, loops=2, max_tokens=5, cache=name)
        assert {*left.prompt_loops, *(token.loops for token in left.tokens)} == {2}
    # [B, T], and the first token has nothing before it that could differ.
    both = [lm.logits([ids, ids], loops=LOOPS, cache=name) for name in NAMES]
    assert both[0].shape == both[1].shape == (2, len(ids), lm.model.config.vocab_size)
    assert torch.allclose(both[1][:, 0], both[0][:, 0]) and (both[1][:, 2] - both[0][:, 2]).abs().max() > 1e-6
    assert torch.allclose(both[1][0], lm.logits(ids, loops=LOOPS, cache="mean"))


def test_from_the_command_line(mine: Path, text: str, run_cli: Cli) -> None:
    done = run_cli.ok("eval", mine, "--cache", "all", "--data", text, "--loops", LOOPS, "--json")
    assert len(done.out.splitlines()) == 1 and done.err == ""
    assert done.json == json.loads((mine / "caches.json").read_text())
    fields = ["data", "train_step", "loops", "batch_size", "unit", "n_units", "n_tokens", "n_bytes", "note", "by_cache"]
    assert list(done.json) == fields
    fields = ["name", "cache", "loss", "bits", "bytes_per_token", "read_s", "s_per_token"]
    assert [list(one) for one in done.json["by_cache"]] == [fields] * 3
    table = run_cli.ok("eval", mine, "--cache", "all", "--data", text, "--max-tokens", 60)
    assert "gap to per_loop" in table.out and "KV bytes/token" in table.out and "only part" in table.err
    one = run_cli.ok("eval", mine, "--cache", "mean", "--data", text, "--loops", "1,2")
    assert "rows read token by token, with cache mean" in one.out and one.json["cache"] == {"kind": "mean"}
    left = run_cli.ok("eval", mine, "--cache", "last", "--exit", "fixed:1", "--data", text)
    assert "with cache last, also where all tokens run" in left.out and left.json["cache"] == {"kind": "last"}
    page = mine / "report.html"
    run_cli.ok("report", mine, "--out", page)
    assert "Bar chart of the gap to a slot a loop" in page.read_text()
    said = run_cli.ok("cost", mine / "recipe.yaml").out
    assert "KV bytes a token by decode cache: per_loop" in said
    lm = alcoda.load(mine)
    done = run_cli.ok("generate", mine, "--prompt", "one two", "--max-tokens", 4, "--cache", "mean", "--json")
    assert done.json["text"] == lm.generate("one two", max_tokens=4, cache="mean") and done.json["cache"] == "mean"


def test_an_interrupted_comparison_leaves_the_run_as_it_was(
    mine: Path, text: str, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cli.ok("eval", mine, "--cache", "all", "--data", text, "--max-tokens", 60)
    real = caches.score

    def interrupted(*arguments: Any, **how: Any) -> Any:
        yield next(real(*arguments, **how))
        raise KeyboardInterrupt

    monkeypatch.setattr(caches, "score", interrupted)
    before = snapshot(mine)
    done = run_cli("eval", mine, "--cache", "all", "--data", text, "--batch-size", 2)
    assert done.code == 130 and done.out == "" and "nothing that was finished is lost" in done.err
    assert snapshot(mine) == before


def test_frozen_keys_say_that_caches_are_one(corpus: Path, text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    api.train(validate(Recipe, recipe(corpus, name="anchored", model__keys="anchor")), run)
    result = alcoda.evaluate_caches(run, 2, text)
    first, *others = result.by_cache
    assert result.note is not None and "keys anchor: all loops read one slot as it is" in result.note
    assert all(one.bits.bits_per_byte == first.bits.bits_per_byte for one in others)
    assert len({one.bytes_per_token for one in result.by_cache}) == 1


def test_a_memory_goes_with_them(corpus: Path, text: str, tmp_path: Path, run_cli: Cli) -> None:
    run = tmp_path / "run"
    api.train(validate(Recipe, recipe(corpus, name="lrt", model__memory="prev_token")), run)
    lm = alcoda.load(run)
    lm.model.double()
    found = [one.bits.bits_per_byte for one in alcoda.evaluate_caches(lm, 2, text).by_cache]
    assert found[0] == pytest.approx(api.evaluate(lm, [2], text).bits_per_byte[2], rel=1e-9)
    nats, sizes = by_hand(lm, text, MeanCache(), 2)
    assert found[1] == pytest.approx(nats.sum() / math.log(2) / sizes.sum(), rel=1e-7)
    assert api.evaluate(lm, [2], text, cache="mean").prefill == {"kind": "exact"}
    assert lm.generate("one", max_tokens=2, cache="last") == lm.generate(
        "one", max_tokens=2, cache="last", prefill="exact"
    )
    with pytest.raises(UsageError, match="prefill 'zero' with cache 'mean': it is filled token by token"):
        lm.generate("one", cache="mean", prefill="zero")
    run_cli.refused("eval", run, "--cache", "mean", "--prefill", "zero", says=("filled token by token",))
    run_cli.refused("eval", run, "--cache", "mean", "--chunk", 4, says=("filled token by token",))
    run_cli.refused("eval", run, "--cache", "mean", "--prefill", "all", says=("leave --cache out",))


def test_refusals(trained_once: Path, run_cli: Cli) -> None:
    lm = alcoda.load(trained_once)
    with untouched(trained_once):
        run_cli.refused("eval", trained_once, "--cache", "meen", says=("did you mean 'mean'?", "Allowed: all, last"))
        run_cli.refused("eval", trained_once, "--cache", "", says=("--cache ''",))
        run_cli.refused("generate", trained_once, "--prompt", "a", "--cache", "all", says=("cache 'all'", "per_loop"))
        run_cli.refused("eval", trained_once, "--cache", "all", "--exit", "kl", says=("without --prefill, --chunk",))
        run_cli.refused("eval", trained_once, "--cache", "all", "--loops", "1,2", says=("caches are compared at one",))
        run_cli.refused("eval", trained_once, "--cache", "mean", "--chunk", 4, says=("leave prefill and chunk out",))
    with pytest.raises(UsageError, match="cache 'lst'; did you mean 'last'"):
        lm.logits([1, 2], cache="lst")
    with pytest.raises(UsageError, match="cache mean is named twice"):
        alcoda.evaluate_caches(lm, caches=["mean", MeanCache()])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model__sharing": "untied", "model__n_loops": 3}, "with sharing 'untied', loops have weights of their own"),
        ({"model__n_core": 0, "model__n_loops": 1, "model__inject": "none", **ONE}, "this model is dense"),
    ],
)
def test_models_that_cannot(corpus: Path, tmp_path: Path, run_cli: Cli, fields: dict[str, Any], says: str) -> None:
    run = tmp_path / "run"
    api.train(validate(Recipe, recipe(corpus, name="other", **fields)), run)
    for command in (("eval", run, "--cache", "mean"), ("eval", run, "--cache", "all")):
        run_cli.refused(*command, says=("cache 'mean'", says))
    run_cli.refused("generate", run, "--prompt", "a", "--cache", "last", says=("cache 'last'", says))
    assert list(api.cost(alcoda.load(run).recipe).kv_bytes_by_cache) == ["per_loop"]
