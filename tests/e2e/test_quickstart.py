"""`alcoda quickstart` at a tiny size: done once, done again, anew, and after a stop."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import Cli, Done, snapshot, untouched

import alcoda
from alcoda.data.prepare import prepare
from alcoda.measure.bigram import Bigram
from alcoda.quickstart import PROMPT, SHOWN, TIER
from alcoda.training import run as run_module
from alcoda.training.loop import Trainer
from alcoda.training.recipe import load_recipe

SETTINGS = (
    "model.d_model=16",
    "model.n_heads=2",
    "model.seq_len=32",
    "model.vocab_size=300",
    "data.tokenizer.vocab_size=300",
    "train.steps=6",
    "train.batch_size=2",
    "train.checkpoint_every=3",
    "train.dtype=float32",
    "train.schedule.warmup_steps=2",
    "eval.every=6",
    "eval.tokens=200",
    "eval.loops=[1,8]",
)


def quickstart(run_cli: Cli, corpus: Path, out: Path, *more: str) -> Done:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return run_cli("quickstart", "--out", out, *settings, "--set", f"data.corpus=text:{corpus}", *more)


def weights(run: Path) -> int:
    return (run / "checkpoints/step_00000006/model.safetensors").stat().st_mtime_ns


@pytest.fixture(autouse=True)
def nothing_is_shipped(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Showing the model of the package takes longer than all else here."""
    monkeypatch.setattr(run_module, "SHIPPED", tmp_path_factory.mktemp("shipped"))


def test_once_again_and_anew(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    run = tmp_path / "quick"
    done = quickstart(run_cli, corpus, run)
    assert done.code == 0, done.err
    result = done.json
    assert result["run"] == str(run) and Path(result["report"]) == run / "report.html"
    assert result["status"] == "finished" and result["tokens"] == 6 * 2 * 32
    lm = alcoda.load(run)
    assert result["params"] == sum(p.numel() for p in lm.model.parameters())
    assert list(result["bits_per_byte"]) == ["1", "8"]
    gain, bits = result["gain_8_over_1"], result["bits_per_byte"]
    assert gain["bits_per_byte"] == pytest.approx(bits["1"] - bits["8"], abs=1e-12)
    assert gain["low"] <= gain["bits_per_byte"] <= gain["high"]
    assert result["wall_s"] >= result["train_s"] > 0 and result["peak_rss_mb"] > 100
    assert json.loads((run / "eval.json").read_text())["bits_per_byte"] == bits
    assert len(done.out.splitlines()) == 1
    assert result["shipped"] is None
    for line in ("1/4", "2/4", "3/4", "4/4", "bigram", "8 loops", "next:   alcoda generate"):
        assert line in done.err
    html = (run / "report.html").read_text()
    assert "quickstart" in html and "bigram" in html.lower()
    samples = json.loads((run / "samples.json").read_text())
    assert [sample["loops"] for sample in samples] == [1, 8] * 3
    how = {key: samples[1][key] for key in ("loops", "temperature", "seed")}
    assert lm.generate(samples[1]["prompt"], max_tokens=64, **how) == samples[1]["text"]

    data = prepare(lm.recipe.data, lm.tokenizer)
    train, valid = (
        stream.read(0, stream.n_tokens) for part in ("train", "valid") for stream in data.split(part).values()
    )
    sizes = [len(lm.tokenizer.decode_bytes([token])) for token in valid[1:]]
    nats = Bigram.fit(train, 300).nats(valid[:-1], valid[1:])
    by_hand = sum(n for n, size in zip(nats, sizes, strict=True) if size) / sum(sizes) / 0.6931471805599453
    assert result["bigram_bits_per_byte"] == pytest.approx(by_hand)

    before = weights(run), (run / "eval.json").stat().st_mtime_ns, (run / "samples.json").stat().st_mtime_ns
    again = quickstart(run_cli, corpus, run)
    after = weights(run), (run / "eval.json").stat().st_mtime_ns, (run / "samples.json").stat().st_mtime_ns
    assert after == before
    timing = {"wall_s", "peak_rss_mb"}
    assert {k: v for k, v in again.json.items() if k not in timing} == {
        k: v for k, v in result.items() if k not in timing
    }

    (run / "mine.txt").write_text("is not of the run")
    refused = quickstart(run_cli, corpus, run, "--fresh")
    assert refused.code == 2 and "it holds mine.txt" in refused.err and weights(run) == before[0]
    (run / "mine.txt").unlink()
    wrong = quickstart(run_cli, corpus, run, "--fresh", "--set", "data.corpus=text:nothere")
    assert wrong.code == 2 and "nothere" in wrong.err and weights(run) == before[0]
    fresh = quickstart(run_cli, corpus, run, "--fresh")
    assert fresh.code == 0 and weights(run) > before[0] and [p.name for p in tmp_path.iterdir()] == ["quick"]
    assert fresh.json["bits_per_byte"] == bits


def test_another_config_deletes_nothing(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    run = tmp_path / "quick"
    quickstart(run_cli, corpus, run)
    with untouched(run):
        other = quickstart(run_cli, corpus, run, "--set", "train.steps=9")
        assert other.code == 2 and other.out == ""
        assert "train.steps: 6 in the run, 9 now" in other.err


def test_fresh_deletes_runs_only(tmp_path: Path, corpus: Path, run_cli: Cli) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    before = snapshot(tmp_path)
    refused = quickstart(run_cli, corpus, mine, "--fresh")
    assert refused.code == 2 and "is not a run" in refused.err and snapshot(tmp_path) == before
    assert quickstart(run_cli, corpus, tmp_path / "new", "--fresh").code == 0  # nothing to delete


def test_stopped_and_gone_on(tmp_path: Path, corpus: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = tmp_path / "quick", Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == 3:
            signal.raise_signal(signal.SIGINT)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        stopped = quickstart(run_cli, corpus, run)
    assert stopped.code == 0 and stopped.json["status"] == "stopped" and stopped.json["tokens"] == 4 * 2 * 32
    assert "the same command goes on from there" in stopped.err and not (run / "eval.json").exists()
    # Measured in between: that is not taken for the result of the whole.
    run_cli.ok("report", run, "--out", tmp_path / "half.html")
    assert json.loads((run / "eval.json").read_text())["train_step"] == 4
    done = quickstart(run_cli, corpus, run)
    assert done.code == 0 and done.json["status"] == "finished" and done.json["tokens"] == 6 * 2 * 32
    assert json.loads((run / "eval.json").read_text())["train_step"] == 6
    assert done.json["bigram_bits_per_byte"] > 0


def test_the_recipe_of_quickstart() -> None:
    recipe = load_recipe(Path(alcoda.__file__).with_name("quickstart.yaml")).resolved()
    assert recipe.name == "quickstart" and {1, 8} <= set(recipe.eval.loops)
    assert recipe.data.corpus == "pystdlib"


def test_it_opens_with_the_model_of_the_package(
    tmp_path: Path, corpus: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the model is the run of a quickstart, packed with its tiers and some of its text."""
    quick = tmp_path / "quick"
    assert quickstart(run_cli, corpus, quick, "--set", "data.splits.valid=0.2").code == 0
    alcoda.calibrate(quick, data="train", held_out="train", max_tokens=2000)
    alcoda.pack(quick, tmp_path / "shipped" / SHOWN, keep={"valid": 2000})
    monkeypatch.setattr(run_module, "SHIPPED", tmp_path / "shipped")
    done = quickstart(run_cli, corpus, tmp_path / "again")
    assert done.code == 0, done.err
    found = done.json["shipped"]
    assert found["name"] == SHOWN and found["exit"] == TIER and found["tokens_per_s"] > 0
    assert 1 <= found["mean_loops"] <= alcoda.load(SHOWN).n_loops
    assert 1 <= found["sufficient_loops"] <= alcoda.load(SHOWN).n_loops
    assert PROMPT in done.err and "state rule, mean" in done.err and "all tokens at" in done.err
    assert done.err.index(PROMPT) < done.err.index("1/4")
