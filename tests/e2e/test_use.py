"""A trained run, used: evaluation, generation, logits, report, through the command line and the API."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Cli, metrics, recipe, snapshot, untouched, write_corpus, write_recipe

import alcoda
from alcoda import api
from alcoda.config import validate
from alcoda.data.prepare import open_corpus, prepare
from alcoda.model.cost import ledger
from alcoda.training import begin, checkpoint
from alcoda.training.loop import Trainer
from alcoda.training.recipe import Recipe, load_recipe
from alcoda.training.score import Scored


@pytest.fixture(scope="module")
def run(trained_once: Path) -> Path:
    return trained_once


@pytest.fixture(scope="module")
def lm(run: Path) -> api.LM:
    return alcoda.load(run)


def slow_score(lm: api.LM, tokens: np.ndarray, loops: int) -> tuple[np.ndarray, np.ndarray]:
    """Nats and bytes of each token but the first, a row of the context at a time, from `LM.logits` alone."""
    nats, n_bytes = [], []
    seq_len = lm.recipe.model.seq_len
    for start in range(0, len(tokens) - 1, seq_len):
        row = tokens[start : start + seq_len + 1].astype(np.int64)
        log_p_TV = F.log_softmax(lm.logits(row[:-1], loops).double(), -1)
        for t, target in enumerate(row[1:]):
            size = len(lm.tokenizer.decode_bytes([target]))
            nats.append(-float(log_p_TV[t, target]) if size else 0.0)
            n_bytes.append(size)
    return np.array(nats), np.array(n_bytes)


def test_eval_prints_a_table_and_json(run: Path, run_cli: Cli) -> None:
    with untouched(run):
        done = run_cli.ok("eval", run, "--loops", "1,3,2")
        assert list(done.json["bits_per_byte"]) == ["1", "2", "3"]
        assert "bits/byte" in done.out and len(done.out.splitlines()) > 5
        only = run_cli.ok("eval", run, "--loops", "1,2,3", "--json")
    assert len(only.out.splitlines()) == 1 and only.err == ""
    assert only.json == done.json
    assert done.json["unit"] == "blocks" and done.json["note"] in done.err


def test_bits_per_byte_by_hand(run: Path, lm: api.LM) -> None:
    result = api.evaluate(run, [1, 2, 5], batch_size=3)
    stream = prepare(lm.recipe.data, lm.tokenizer).split("valid")["words"]
    tokens = stream.read(0, stream.n_tokens)
    for depth in result.by_depth:
        nats, n_bytes = slow_score(lm, tokens, depth.loops)
        assert depth.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / n_bytes.sum(), rel=1e-6)
        assert depth.loss == pytest.approx(nats.sum() / (n_bytes > 0).sum(), rel=1e-6)
        assert depth.low < depth.bits_per_byte < depth.high
    assert result.n_bytes == n_bytes.sum() and result.n_tokens == (n_bytes > 0).sum()
    assert [gain.to_loops for gain in result.gain] == [2, 5]
    assert result.by_source["words"] == pytest.approx(result.bits_per_byte)
    # How rows are put together does not matter.
    assert api.evaluate(lm, [1, 2, 5], batch_size=8).bits_per_byte == pytest.approx(result.bits_per_byte, rel=1e-6)


def test_a_corpus_is_scored_whole_by_documents(run: Path, lm: api.LM, tmp_path: Path, run_cli: Cli) -> None:
    path = write_corpus(tmp_path / "other.txt", n_documents=31, n_words=7, seed=3)
    result = run_cli.ok("eval", run, "--data", f"text:{path}", "--loops", "1,3", "--json").json
    documents = path.read_text().split("<|endoftext|>\n")
    assert result["unit"] == "documents" and result["n_units"] == len(documents) == 31 and result["note"] is None
    assert result["n_bytes"] == sum(len(document.encode()) for document in documents)
    stream = open_corpus(f"text:{path}", lm.tokenizer)
    tokens = stream.read(0, stream.n_tokens)
    scores = {loops: slow_score(lm, tokens, loops) for loops in (1, 3)}
    for loops, (nats, n_bytes) in scores.items():
        expected = nats.sum() / math.log(2) / n_bytes.sum()
        assert result["bits_per_byte"][str(loops)] == pytest.approx(expected, rel=1e-6)
    # Positive is better at the deeper one; paired, the interval is that of the difference by document.
    (gain,) = result["gain"]
    bits = result["bits_per_byte"]
    assert (gain["from_loops"], gain["to_loops"]) == (1, 3)
    assert gain["bits_per_byte"] == pytest.approx(bits["1"] - bits["3"], abs=1e-12)
    assert gain["low"] <= gain["bits_per_byte"] <= gain["high"]
    at_1 = result["by_depth"][0]
    assert gain["high"] - gain["low"] < (at_1["high"] - at_1["low"]) / 2
    ends = np.cumsum([len(document) for document in stream.documents()])
    unit = np.searchsorted(ends, np.arange(1, len(tokens)), side="right")
    saved = np.bincount(unit, scores[1][0] - scores[3][0])
    by_document = saved / math.log(2) / np.bincount(unit, scores[1][1])
    assert by_document.min() < gain["low"] and gain["high"] < by_document.max()


def test_notes_on_units(run: Path, tmp_path: Path, run_cli: Cli, corpus: Path) -> None:
    few = write_corpus(tmp_path / "few.txt", n_documents=5)
    result = run_cli.ok("eval", run, "--data", f"text:{few}", "--json").json
    assert result["unit"] == "blocks" and result["n_units"] == 50
    assert result["note"] == "5 documents are too few: intervals are over 50 contiguous blocks of tokens"
    part = run_cli.ok("eval", run, "--data", f"text:{corpus}", "--max-tokens", "101", "--json").json
    assert part["n_tokens"] <= 100 and part["note"].startswith("only part of it was scored: intervals are over 50")
    more = run_cli.ok("eval", run, "--data", f"text:{corpus}", "--max-tokens", str(10**9), "--json").json
    assert more["unit"] == "documents" and more["note"] is None


def test_a_mix_is_trained_and_validated_by_source(tmp_path: Path, run_cli: Cli) -> None:
    a = write_corpus(tmp_path / "a.txt", n_documents=28)
    b = write_corpus(tmp_path / "b.txt", n_documents=28, seed=1)
    mix = [{"corpus": f"text:{a}", "weight": 3}, {"corpus": f"text:{b}", "name": "bee"}]
    file = write_recipe(tmp_path / "mix.yaml", a, data__corpus=None, data__mix=mix, train__steps=12)
    run = tmp_path / "run"
    run_cli.ok("train", file, "--out", run)
    logged = [(line["source"], line["loops"]) for line in metrics(run) if line["type"] == "eval"]
    assert logged[:6] == [(name, loops) for name in ("a", "bee") for loops in (1, 2, 3)]
    sources = checkpoint.load_train_state(run / "checkpoints/step_00000012")["batches"]["sources"]
    assert sources[0]["drawn_tokens"] / sources[1]["drawn_tokens"] == pytest.approx(3, rel=0.2)
    result = run_cli.ok("eval", run, "--data", "train", "--json").json
    assert set(result["by_source"]) == {"a", "bee"}
    # Each source has too few documents, both together would have enough.
    assert result["unit"] == "blocks" and "documents are too few" in result["note"]
    best = json.loads((run / "checkpoints/step_00000012/checkpoint.json").read_text())["best"]
    at_nominal = [
        line["bits_per_byte"]
        for line in metrics(run)
        if line["type"] == "eval" and line["loops"] == 2 and line["train_step"] == best["train_step"]
    ]
    assert best["bits_per_byte"] == pytest.approx(sum(at_nominal) / 2)


def test_validation_is_evaluation(run: Path) -> None:
    logged = {line["loops"]: line for line in metrics(run) if line["type"] == "eval" and line["train_step"] == 8}
    result = api.evaluate(run, checkpoint="step_00000008", max_tokens=200)
    assert list(logged) == [1, 2, 3] == list(result.bits_per_byte)
    for depth in result.by_depth:
        assert depth.bits_per_byte == pytest.approx(logged[depth.loops]["bits_per_byte"], rel=1e-12)
        assert depth.loss == pytest.approx(logged[depth.loops]["loss"], rel=1e-12)


def test_a_run_in_float32_is_measured_in_float32(run: Path) -> None:
    assert alcoda.load(run).loaded.dtype == torch.float32
    assert alcoda.load(run, dtype="bfloat16").loaded.dtype == torch.bfloat16


def test_executed_flops_by_hand(run: Path) -> None:
    config = load_recipe(run / "recipe.yaml")
    cost = {term.name: term.forward_flops for term in ledger(config.model, 1).terms}
    looped = sum(
        flops for name, flops in cost.items() if name.split(".")[0] in ("inject", "core", "update", "loop_norm")
    )
    rest = sum(cost.values()) - looped
    total, lines = 0, [line for line in metrics(run) if line["type"] == "train"]
    for line in lines:
        plan = config.depth.draw(config.train.seed, line["train_step"] - 1, config.train.batch_size)
        assert line["loops"] == plan.n_loops
        total += (3 * rest + looped * (plan.n_loops + 2 * plan.n_grad)) * 2 * 16
        assert line["executed_flops"] == pytest.approx(total, rel=1e-12) and line["tokens"] == line["train_step"] * 32
    assert len({line["loops"] for line in lines}) > 1


def test_what_is_logged(run: Path) -> None:
    lines = metrics(run)
    kinds = [(line["type"], line["train_step"]) for line in lines]
    assert kinds == [("train", n) for n in range(1, 9)] + [("diagnostics", 8)] * 2 + [("eval", 8)] * 3
    config = load_recipe(run / "recipe.yaml").train
    for line in lines[:8]:
        factor = config.schedule.factor(line["train_step"] - 1, 8)
        assert line["lr"] == pytest.approx(0.01 * factor) and line["mean_loops"] == line["loops"]
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished" and record["seeds"] == {"train": 0, "data": 0}
    assert record["versions"]["alcoda"] == alcoda.__version__ and record["machine"]["dtype"] == "float32"
    assert record["data"]["sources"][0]["corpus"].startswith("text:")


def test_loss_falls(tmp_path: Path, corpus: Path) -> None:
    result = api.train(validate(Recipe, recipe(corpus, train__steps=60, eval__every=20)), tmp_path / "run")
    bits = [
        line["bits_per_byte"] for line in metrics(tmp_path / "run") if line["type"] == "eval" and line["loops"] == 2
    ]
    assert bits[-1] < bits[0] < 8 and result.best_bits_per_byte == min(bits) and result.loss is not None


def test_the_last_and_the_best_checkpoints_stay(
    tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats = iter([5.0, 3.0, 4.0, 4.5])

    def score(model: Any, stream: Any, sizes: Any, loops: Any, **kwargs: Any) -> Any:
        yield Scored(1, np.full((len(loops), 1), next(nats)), np.array([1]))

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("alcoda.training.validate.score", score)
        settings = [f"train.{s}" for s in ("steps=16", "checkpoint_every=3", "keep_checkpoints=2")] + ["eval.every=4"]
        done = run_cli.ok("train", tiny, "--out", run, *(part for s in settings for part in ("--set", s)))
    assert done.json["best_bits_per_byte"] == pytest.approx(3 / math.log(2))
    kept = [checkpoint.step_of(path) for path in checkpoint.listed(run / "checkpoints")]
    assert kept == [8, 15, 16]
    assert run_cli.ok("eval", run, "--json").json["train_step"] == 8
    assert run_cli.ok("eval", run, "--checkpoint", "last", "--json").json["train_step"] == 16
    assert run_cli.ok("eval", run, "--checkpoint", "step_00000015", "--json").json["train_step"] == 15


def test_cost_of_recipes_and_runs(run: Path, tiny: Path, run_cli: Cli) -> None:
    one = run_cli.ok("cost", run, "--json").json
    weights = checkpoint.load_train_state(run / "checkpoints/step_00000008")["tokens"]
    assert weights == 256 and one["params"] == sum(p.numel() for p in alcoda.load(run).model.parameters())
    two = run_cli.ok("cost", run, tiny, "--json", "--loops", "3", "--set", "model.head=untied").json
    assert [item["recipe"] for item in two] == [str(run), str(tiny)] and two[0]["loops"] == 3
    assert [item["what"] for item in two] == [f"{path} --set model.head=untied" for path in (run, tiny)]
    table = run_cli.ok("cost", tiny)
    assert "core.attention" in table.out and table.out.splitlines()[-1].startswith("convention: ")


def test_report_of_two_runs(trained: Path, corpus: Path, tmp_path: Path, run_cli: Cli) -> None:
    other = write_recipe(tmp_path / "gated.yaml", corpus, model__update="gate", train__steps=2)
    run_cli.ok("train", other, "--out", tmp_path / "gated")
    page = tmp_path / "pages/report.html"
    done = run_cli.ok("report", trained, tmp_path / "gated", "--out", page)
    assert done.out == "" and str(page) in done.err
    html = page.read_text()
    assert "2 runs compared" in html and "tiny" in html and "gated" in html
    for run in (trained, tmp_path / "gated"):
        assert set(json.loads((run / "eval.json").read_text())["bits_per_byte"]) == {"1", "2", "3"}
        samples = json.loads((run / "samples.json").read_text())
        assert {sample["loops"] for sample in samples} == {1, 2, 3}
    kept = {run: snapshot(run) for run in (trained, tmp_path / "gated")}
    run_cli.ok("report", trained, tmp_path / "gated", "--out", page)
    assert kept == {run: snapshot(run) for run in kept}  # measured once


def test_a_report_follows_the_training(
    tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tmp_path / "run", Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == 5:
            signal.raise_signal(signal.SIGINT)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        run_cli.ok("train", tiny, "--out", run)
    page = tmp_path / "report.html"
    run_cli.ok("report", run, "--out", page)
    measured = run / "eval.json", run / "samples.json"
    before = [path.stat().st_mtime_ns for path in measured]
    assert json.loads(measured[0].read_text())["train_step"] == 6
    run_cli.ok("train", tiny, "--out", run, "--resume")
    run_cli.ok("report", run, "--out", page)
    assert json.loads(measured[0].read_text())["train_step"] == 8
    assert all(path.stat().st_mtime_ns > then for path, then in zip(measured, before, strict=True))


def test_the_corpus_may_move_away_after_training(tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "words.txt")
    file = write_recipe(tmp_path / "tiny.yaml", corpus, train__steps=1)
    run_cli.ok("train", file, "--out", tmp_path / "run")
    corpus.unlink()
    run_cli.ok("generate", tmp_path / "run", "--prompt", "one")
    run_cli.refused("eval", tmp_path / "run", says=(f"there is no file or folder {corpus}",))
    run_cli.refused("train", file, "--out", tmp_path / "run", "--resume", says=("there is no file or folder",))
    shutil.rmtree(tmp_path / "run")


def test_a_bpe_run(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    file = write_recipe(
        tmp_path / "bpe.yaml",
        corpus,
        model__vocab_size=320,
        data__tokenizer={"kind": "bpe", "vocab_size": 300},
        train__steps=3,
        model__head="untied",
    )
    run = tmp_path / "run"
    run_cli.ok("train", file, "--out", run)
    lm = alcoda.load(run)
    assert lm.tokenizer.vocab_size <= 300 < lm.recipe.model.vocab_size == lm.logits([1]).shape[-1]
    result = api.evaluate(lm, [2])
    stream = prepare(lm.recipe.data, lm.tokenizer).split("valid")["words"]
    nats, n_bytes = slow_score(lm, stream.read(0, stream.n_tokens), 2)
    assert result.bits_per_byte[2] == pytest.approx(nats.sum() / math.log(2) / n_bytes.sum(), rel=1e-6)
    for seed in range(3):  # ids that only pad the embedding are never drawn
        lm.generate("one über", temperature=50.0, seed=seed)


def test_what_the_user_should_know_before_the_first_step(
    tmp_path: Path, tiny: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(begin, "SMALL_VALID_BYTES", 20_000)
    done = run_cli("train", tiny, "--out", tmp_path / "run", "--set", "train.schedule.warmup_steps=50")
    assert done.code == 0, done.err
    assert "bytes to validate on" in done.err
    assert "the warm-up of 50 steps (train.schedule.warmup_steps) is not over after" in done.err


def test_scores_of_a_text_that_has_changed_are_refused(tmp_path: Path, run_cli: Cli) -> None:
    corpus = write_corpus(tmp_path / "words.txt")
    run = tmp_path / "run"
    assert run_cli("train", write_recipe(tmp_path / "r.yaml", corpus), "--out", run).code == 0
    corpus.write_text("one more document\n<|endoftext|>\n" + corpus.read_text())
    done = run_cli("eval", run)
    assert done.code == 2 and "has changed since" in done.err
    # The text may have moved: then the run is told where it is.
    (tmp_path / "elsewhere").mkdir()
    moved = write_corpus(tmp_path / "elsewhere" / "words.txt")
    corpus.unlink()
    assert run_cli("eval", run).code == 2
    resumed = run_cli("train", run / "recipe.yaml", "--out", run, "--resume", "--set", f"data.corpus=text:{moved}")
    assert resumed.code == 0, resumed.err
    assert run_cli("eval", run).code == 0


def test_divergence_is_a_failure_and_never_the_best(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    run = tmp_path / "run"
    path = write_recipe(tmp_path / "r.yaml", corpus)
    wild = ("--set", "train.optimizer.lr=1e38", "--set", "train.schedule.warmup_steps=0", "--set", "train.steps=1")
    done = run_cli("train", path, "--out", run, *wild)
    assert done.code == 1 and "the model diverged" in done.err and "Traceback" not in done.err
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
