"""A model with a memory, measured: exactly, by each prefill, in chunks, and after a prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
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
from alcoda.data.prepare import open_corpus, prepare
from alcoda.errors import UsageError
from alcoda.measure import prefills
from alcoda.measure.bootstrap import paired_gain
from alcoda.measure.text import buckets
from alcoda.model.keys import KeyStore
from alcoda.model.prefill import ExactPrefill, InterleavedPrefill, IteratedPrefill, Reading, ZeroPrefill
from alcoda.training.recipe import Recipe
from alcoda.training.score import score

SEQ_LEN = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Nobody writes to it."""
    run = tmp_path_factory.mktemp("memory") / "run"
    api.train(validate(Recipe, recipe(corpus, name="lrt", model__memory="prev_token")), run)
    return run


@pytest.fixture(scope="module")
def lm(run: Path) -> api.LM:
    """Of that run, in fp64."""
    lm = alcoda.load(run)
    lm.model.double()
    return lm


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """So short that reading it token by token is quick; its last row is not full."""
    path = write_corpus(tmp_path_factory.mktemp("text") / "short.txt", n_documents=31, n_words=1, seed=5)
    return f"text:{path}"


@pytest.fixture(scope="module")
def exactly(lm: api.LM, text: str) -> dict[int, list[tuple[int, float, int]]]:
    """`by_hand` token by token, by loops."""
    return {loops: list(by_hand(lm, text, loops)) for loops in (1, 2)}


@torch.no_grad()
def by_hand(lm: api.LM, data: str, loops: int, n_zero: int = 0) -> Iterator[tuple[int, float, int]]:
    """Position, nats and bytes of each token but the first, from `RecurrentLM.readouts` alone: a row at a time, its
    first ``n_zero`` tokens in one pass with zero memories, the rest token by token."""
    stream = open_corpus(data, lm.tokenizer)
    tokens = stream.read(0, stream.n_tokens).astype(np.int64)
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        row = torch.from_numpy(tokens[start : start + SEQ_LEN + 1])
        store, ys = KeyStore(), []
        memory_11D = torch.zeros(1, 1, lm.recipe.model.d_model, dtype=torch.float64)
        parts = [row[:-1][:n_zero], *row[:-1][n_zero:].split(1)]
        for i, part in enumerate(part for part in parts if len(part)):
            memory = None if n_zero and i == 0 else memory_11D
            found = next(lm.model.readouts(part[None], [loops], store=store, memory_BTD=memory))
            assert found.source_BTD is not None
            memory_11D = found.source_BTD[:, -1:]
            ys.append(found.y_BTD[0])
        nats_T = F.cross_entropy(lm.model.logits(torch.cat(ys)), row[1:], reduction="none")
        for position, (target, nats) in enumerate(zip(row[1:].tolist(), nats_T.tolist(), strict=True)):
            size = len(lm.tokenizer.decode_bytes([target]))
            yield position, nats if size else 0.0, size


def bits(found: list[tuple[int, float, int]], begin: int = 0, end: int = SEQ_LEN) -> float:
    here = [(nats, size) for position, nats, size in found if begin <= position < end]
    return sum(nats for nats, _ in here) / math.log(2) / sum(size for _, size in here)


def test_rows_are_read_token_by_token(lm: api.LM, text: str, exactly: dict[int, list[tuple[int, float, int]]]) -> None:
    result = api.evaluate(lm, [1, 2], text, batch_size=7)
    for loops, found in exactly.items():
        assert result.bits_per_byte[loops] == pytest.approx(bits(found), rel=1e-7)
        for part in result.by_position:
            assert part.bits_per_byte[loops] == pytest.approx(bits(found, part.start, part.stop), rel=1e-7)
            assert part.n_bytes == sum(size for at, _, size in found if part.start <= at < part.stop)
    assert result.prefill == {"kind": "exact"} and result.chunk_tokens is None
    # The control: the memory is worth telling, so that another prefill gives other numbers.
    assert abs(api.evaluate(lm, [2], text, prefill="zero").bits_per_byte[2] - result.bits_per_byte[2]) > 1e-4


def test_zero_memory_is_the_first_pass(lm: api.LM, text: str) -> None:
    result = api.evaluate(lm, [1, 3], text, prefill="zero")
    for loops in (1, 3):
        assert result.bits_per_byte[loops] == pytest.approx(bits(list(by_hand(lm, text, loops, SEQ_LEN))), rel=1e-7)
    assert result.prefill == {"kind": "zero"}


def test_chunks(lm: api.LM, text: str) -> None:
    def of(**how: Any) -> float:
        return api.evaluate(lm, [2], text, **how).bits_per_byte[2]

    exact = of()
    assert of(prefill="exact", chunk_tokens=5) == exact
    # Of one token a second pass knows all that there is to know.
    assert of(prefill="interleaved", chunk_tokens=1) == pytest.approx(exact, rel=1e-7)
    assert of(prefill="iterated", chunk_tokens=1) == pytest.approx(exact, rel=1e-7)
    assert of(prefill="zero", chunk_tokens=5) == pytest.approx(of(prefill="zero"), rel=1e-7)
    # As many passes as tokens are exact.
    assert of(prefill=IteratedPrefill(tolerance=1e-300, max_passes=SEQ_LEN)) == pytest.approx(exact, rel=1e-7)
    result = api.evaluate(lm, [2], text, prefill="interleaved", chunk_tokens=5)
    assert result.chunk_tokens == 5 and result.prefill == {"kind": "interleaved", "subsets": 2}
    assert abs(result.bits_per_byte[2] - of(prefill="interleaved")) > 1e-6


def test_all_prefills(lm: api.LM, text: str, exactly: dict[int, list[tuple[int, float, int]]]) -> None:
    result = alcoda.evaluate_prefills(lm, 2, text, batch_size=5)
    exact, *others = result.by_prefill
    assert [one.name for one in result.by_prefill] == ["exact", "zero", "interleaved", "iterated"]
    assert exact.whole.gap is None and exact.continuation.gap is None
    for one in result.by_prefill:
        alone = api.evaluate(lm, [2], text, prefill=one.name, batch_size=5)
        assert one.whole.bits_per_byte == pytest.approx(alone.bits_per_byte[2], rel=1e-12)
        assert one.prefill == alone.prefill
        assert (one.whole.low, one.whole.high) == (alone.by_depth[0].low, alone.by_depth[0].high)
        assert one.read_s > 0 and one.tokens_per_s * one.read_s == pytest.approx(exact.tokens_per_s * exact.read_s)
    for one in others:
        for measured, base in ((one.whole, exact.whole), (one.continuation, exact.continuation)):
            assert measured.gap == pytest.approx(measured.bits_per_byte - base.bits_per_byte, abs=1e-12)
            assert measured.gap_low <= measured.gap <= measured.gap_high
    # The interval is of the documents' own differences, resampled together.
    ends = np.cumsum([len(document) for document in open_corpus(text, lm.tokenizer).documents()])
    unit = np.searchsorted(ends, np.arange(1, len(exactly[2]) + 1), side="right")
    nats = [
        np.bincount(unit, [nats for _, nats, _ in found]) for found in (list(by_hand(lm, text, 2, SEQ_LEN)), exactly[2])
    ]
    by_document = paired_gain(*nats, np.bincount(unit, [size for *_, size in exactly[2]]))
    zero = others[0].whole
    assert (zero.gap, zero.gap_low, zero.gap_high) == pytest.approx(by_document, rel=1e-6)
    # What follows a prompt is read token by token and is all that counts.
    half = SEQ_LEN // 2
    assert result.prompt_tokens == half
    after_zero = list(by_hand(lm, text, 2, half))
    assert exact.continuation.bits_per_byte == pytest.approx(bits(exactly[2], half), rel=1e-7)
    assert others[0].continuation.bits_per_byte == pytest.approx(bits(after_zero, half), rel=1e-7)
    assert bits(after_zero, half) != pytest.approx(bits(exactly[2], half), rel=1e-5)
    assert (result.unit, result.n_units, result.note) == ("documents", 31, None)


def test_prefills_of_ones_choice(lm: api.LM, text: str) -> None:
    choices = ["zero", IteratedPrefill(tolerance=0.5), IteratedPrefill(max_passes=1), InterleavedPrefill(subsets=3)]
    result = alcoda.evaluate_prefills(lm, data=text, prefills=choices, chunk_tokens=5, max_tokens=60)
    assert [one.name for one in result.by_prefill] == ["exact", "zero", "iterated", "iterated", "interleaved"]
    assert result.by_prefill[-1].prefill["subsets"] == 3 and result.chunk_tokens == 5 and result.loops == 2
    with pytest.raises(UsageError, match="named twice"):
        alcoda.evaluate_prefills(lm, data=text, prefills=["zero", ZeroPrefill()])
    with pytest.raises(UsageError, match="batch_size=0"):
        alcoda.evaluate_prefills(lm, data=text, batch_size=0)
    with pytest.raises(UsageError, match="second half of a row"):
        alcoda.evaluate_prefills(lm, data=text, max_tokens=9)


@pytest.fixture
def mine(run: Path, tmp_path: Path) -> Path:
    """The run, to write to; its checkpoints are those of `run`."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for path in run.iterdir():
        (mine / path.name).symlink_to(path)
    return mine


def test_prefills_from_the_command_line(mine: Path, text: str, run_cli: Cli) -> None:
    done = run_cli.ok("eval", mine, "--prefill", "all", "--data", text, "--loops", 1, "--json")
    assert len(done.out.splitlines()) == 1 and done.err == ""
    assert done.json == json.loads((mine / "prefills.json").read_text())
    assert list(done.json) == [
        "data",
        "train_step",
        "loops",
        "chunk_tokens",
        "prompt_tokens",
        "batch_size",
        "unit",
        "n_units",
        "n_tokens",
        "n_bytes",
        "note",
        "by_prefill",
    ]
    assert [list(one) for one in done.json["by_prefill"]] == [
        ["name", "prefill", "whole", "continuation", "read_s", "tokens_per_s"]
    ] * 4
    assert list(done.json["by_prefill"][1]["whole"]) == ["bits_per_byte", "low", "high", "gap", "gap_low", "gap_high"]
    assert done.json["loops"] == 1 and done.json["batch_size"] == 64
    table = run_cli.ok("eval", mine, "--prefill", "all", "--data", text, "--max-tokens", 60)
    assert "gap to exact" in table.out and "interleaved (subsets 2)" in table.out and "only part" in table.err
    one = run_cli.ok("eval", mine, "--prefill", "interleaved", "--chunk", 4, "--data", text)
    assert "rows read by interleaved (subsets 2) prefill, 4 tokens at a time" in one.out
    assert "14-15" in one.out and one.json["chunk_tokens"] == 4
    page = mine / "report.html"
    run_cli.ok("report", mine, "--out", page)
    html = page.read_text()
    assert "Bar chart of the gap to exact prefill" in html and "Rows were read by exact prefill" in html
    assert "Line plot of bits per byte against the position in the row. 1 loop: from" in html


def test_what_cannot_be_kept_is_said_first(mine: Path, text: str, run_cli: Cli) -> None:
    (mine / "prefills.json").mkdir()
    done = run_cli("eval", mine, "--prefill", "all", "--data", text, "--max-tokens", 60)
    assert done.code == 1 and "prefills.json could not be written" in done.err and len(done.json["by_prefill"]) == 4


def test_an_interrupted_comparison_leaves_the_run_as_it_was(
    mine: Path, text: str, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cli.ok("eval", mine, "--prefill", "all", "--data", text, "--max-tokens", 60)
    real = prefills.score

    def interrupted(*arguments: Any, **how: Any) -> Any:
        yield next(real(*arguments, **how))
        raise KeyboardInterrupt

    monkeypatch.setattr(prefills, "score", interrupted)
    before = snapshot(mine)
    done = run_cli("eval", mine, "--prefill", "all", "--data", text, "--batch-size", 2)
    assert done.code == 130 and done.out == "" and "nothing that was finished is lost" in done.err
    assert snapshot(mine) == before


def test_refusals(run: Path, trained_once: Path, run_cli: Cli) -> None:
    with untouched(run), untouched(trained_once):
        for command in (("eval",), ("generate", "--prompt", "one")):
            run_cli.refused(*command, run, "--prefill", "itreated", says=("did you mean 'iterated'?", "interleaved"))
            run_cli.refused(*command, run, "--prefill", "", says=("prefill ''", "exact, interleaved"))
            for name in ("zero", "iterated"):
                run_cli.refused(*command, trained_once, "--prefill", name, says=(f"'{name}'", "has no memory"))
        run_cli.refused("eval", run, "--prefill", "itreated", says=("Allowed: all, exact",))
        run_cli.refused("eval", trained_once, "--prefill", "all", says=("has no memory",))
        run_cli.refused("eval", trained_once, "--prefill", "interleaved", says=("has no memory",))
        run_cli.refused("eval", trained_once, "--chunk", 4, says=("chunk of 4 tokens", "has no memory"))
        run_cli.refused("eval", run, "--chunk", 0, says=("chunk of 0 tokens: at least 1",))
        run_cli.refused("eval", run, "--prefill", "all", "--chunk", -2, says=("chunk of -2 tokens",))
        run_cli.refused("eval", run, "--prefill", "all", "--loops", "1,2", says=("at one depth",))
        run_cli.refused("eval", run, "--prefill", "all", "--loops", "0", says=("loops=0",))
        # The only one that there is may be named.
        assert run_cli.ok("eval", trained_once, "--prefill", "exact", "--json").json["prefill"] is None


def test_generation_by_prefill(run: Path, run_cli: Cli) -> None:
    lm = alcoda.load(run)
    prompt = "one two three"
    texts = {name: lm.generate(prompt, max_tokens=4, prefill=name) for name in ("exact", "zero", "interleaved")}
    for name, text in texts.items():
        done = run_cli.ok("generate", run, "--prompt", prompt, "--max-tokens", 4, "--prefill", name, "--json")
        assert done.json["text"] == text
    assert lm.generate(prompt, max_tokens=4) == texts["interleaved"]


def test_positions_of_a_plain_run_add_up(trained_once: Path) -> None:
    result = api.evaluate(trained_once)
    assert result.prefill is None
    assert [part.start for part in result.by_position] == list(range(0, SEQ_LEN, 2))
    assert [part.stop for part in result.by_position] == list(range(2, SEQ_LEN + 1, 2))
    assert sum(part.n_tokens for part in result.by_position) == result.n_tokens
    assert sum(part.n_bytes for part in result.by_position) == result.n_bytes
    for loops, total in result.bits_per_byte.items():
        parts = [part.bits_per_byte[loops] * part.n_bytes for part in result.by_position]
        assert sum(parts) / result.n_bytes == pytest.approx(total, rel=1e-12)
        assert max(parts) > min(parts)


def test_buckets() -> None:
    assert buckets(16).tolist() == list(range(0, 17, 2))
    assert buckets(3).tolist() == [0, 1, 2, 3] and buckets(1).tolist() == [0, 1]
    assert set(np.diff(buckets(1023))) == {127, 128} and buckets(1023)[-1] == 1023


def test_chunks_of_a_reading() -> None:
    def parts(n_tokens: int, reading: Reading) -> list[tuple[int, int, str]]:
        return [(part.start, part.stop, prefill.kind) for part, prefill in reading.chunks(n_tokens)]

    assert parts(70, Reading(ZeroPrefill())) == [(0, 70, "zero")]
    assert parts(9, Reading(ZeroPrefill(), 4)) == [(0, 4, "zero"), (4, 8, "zero"), (8, 9, "zero")]
    # A prompt is not read beyond its end, and what follows is read token by token.
    assert parts(9, Reading(ZeroPrefill(), 4, 6)) == [(0, 4, "zero"), (4, 6, "zero"), (6, 9, "exact")]
    assert parts(9, Reading(ZeroPrefill(), None, 12)) == [(0, 9, "zero")]
    assert parts(2, Reading(ZeroPrefill(), None, 0)) == [(0, 2, "exact")]
    assert [part[:2] for part in parts(70, Reading(ExactPrefill()))] == [(0, 32), (32, 64), (64, 70)]


@pytest.mark.parametrize("reading", [None, Reading(ZeroPrefill()), Reading(InterleavedPrefill(), 3, 8)])
def test_progress_adds_up_to_the_text(run: Path, trained_once: Path, reading: Reading | None) -> None:
    for path in (run, trained_once):
        lm = alcoda.load(path)
        stream = prepare(lm.recipe.data, lm.tokenizer).split("valid")["words"]
        told: list[float] = []
        how = {"batch_size": 2, "max_tokens": 75, "reading": reading, "tell": told.append}
        n_read = sum(len(part.bytes_N) for part in score(lm.model, stream, lm.tokenizer.token_bytes_V, [1, 2], **how))
        assert sum(told) == pytest.approx(n_read) and len(told) >= 6
