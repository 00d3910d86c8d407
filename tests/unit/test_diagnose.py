"""Diagnostics by loop: known values, what a part describes, and that looking changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_run import make_run
from pages import draw_nothing
from torch import Tensor, nn

from alcoda.config import validate
from alcoda.data.prepare import Data, prepare
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.report.inside import by_loop_figure, by_step_figure
from alcoda.report.page import write_report
from alcoda.report.read import read_run
from alcoda.training import checkpoint
from alcoda.training import validate as validating
from alcoda.training.diagnose import MOST_TOKENS, diagnose, summary
from alcoda.training.loop import train
from alcoda.training.recipe import Recipe
from alcoda.training.track import scalars

SIZES = {"vocab_size": 257, "seq_len": 16, "d_model": 8, "n_heads": 2, "n_core": 1, "n_loops": 3}
GRT = {**SIZES, "inject": {"kind": "concat", "noise": 0.3}, "update": {"kind": "gate", "noise": 0.3, "bias": 0.5}}


@pytest.fixture(autouse=True, scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALCODA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"line {i * i} of it\n" for i in range(300)))
    return path


@pytest.fixture(scope="module")
def data(text: Path) -> Data:
    return prepare(recipe(text).data)


def recipe(text: Path, model: Any = GRT, **train: Any) -> Recipe:
    return validate(
        Recipe,
        {
            "model": model,
            "data": {"corpus": f"text:{text}", "tokenizer": "byte"},
            "train": {"steps": 6, "batch_size": 2, "dtype": "float32", "device": "cpu", "log_every": 1, **train},
            "eval": {"every": 2, "tokens": 60},
        },
    )


def model(**changes: Any) -> RecurrentLM:
    return RecurrentLM(ModelConfig.model_validate({**GRT, **changes})).init(0)


def look(made: RecurrentLM, data: Data) -> list[dict[str, Any]]:
    return diagnose(made, next(iter(data.split("valid").values())), 7, torch.float32)


def test_known_values(data: Data) -> None:
    """The state, its change and the gate, against a loop that is written out here."""
    made = model()
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.append((args[0], out, torch.sigmoid(part.logit(nn.functional.silu(part.hidden(_read(part, args)))))))

    made.eval()
    stream = next(iter(data.split("valid").values()))
    tokens = torch.from_numpy(stream.read(0, min(MOST_TOKENS, stream.n_tokens) // 16 * 16).astype(np.int64))
    with torch.no_grad(), made.update.register_forward_hook(keep):
        made(tokens.view(-1, 16))
    found = look(made, data)
    assert [record["loop"] for record in found] == [1, 2, 3] and len(seen) == 3
    for record, (old, new, gate) in zip(found, seen, strict=True):
        change = (new - old).norm(dim=-1) / old.norm(dim=-1)
        for name, values in (
            ("state_norm", new.pow(2).mean(-1).sqrt()),
            ("state_change", change),
            ("update.gate", gate),
        ):
            expected = values.double().numpy().ravel()
            assert record[f"{name}.mean"] == pytest.approx(expected.mean(), rel=1e-6)
            for q in (10, 50, 90):
                assert record[f"{name}.q{q}"] == pytest.approx(np.percentile(expected, q), rel=1e-5)
        about = {"type": "diagnostics", "train_step": 7, "loop": record["loop"], "loops": 3}
        assert record.items() >= about.items() and len(record) == 4 + 3 * 4
    # Noise is off, so the bias of 0.5 is where the gates of a fresh model lie.
    assert found[0]["update.gate.mean"] == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.01)


def _read(part: Any, args: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.state_norm(args[0]), part.anchor_norm(args[-1])], -1)


class Talks(nn.Module):
    """Stands for the module of a plugin: describes itself, and draws where it should not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *args: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3)
        return args[0] + args[1]

    def describe(self, args: tuple[Any, ...], out: Tensor) -> dict[str, Tensor]:
        assert torch.equal(out, args[0] + args[1]) and not self.training
        return {"share": torch.tensor(0.25 * self.calls), "mix": torch.arange(11.0).view(1, 11) + self.calls}


def test_what_a_part_describes(data: Data) -> None:
    made = model()
    made.inject = Talks()
    for record in look(made, data):
        loop = record["loop"]
        assert record["inject.share"] == 0.25 * loop
        assert [record[f"inject.mix.{q}"] for q in ("mean", "q10", "q50", "q90")] == [
            5 + loop,
            1 + loop,
            5 + loop,
            9 + loop,
        ]
        assert "inject.share.mean" not in record and "inject.mix" not in record
    assert not made.inject._forward_hooks and not made.update._forward_hooks, "hooks are gone"


def test_a_part_that_cannot_describe_itself_ends_nothing(
    data: Data, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = model().train()
    monkeypatch.setattr(type(made.update), "describe", lambda *_: 1 / 0)
    records = look(made, data)
    assert all("state_norm.mean" in record for record in records)
    assert not any(name.startswith("update.") for record in records for name in record)
    assert capsys.readouterr().err.count("no diagnostics of update.describe: ZeroDivisionError: division by zero") == 1
    assert not made.update._forward_hooks and made.training and torch.is_grad_enabled()


def test_numbers_that_are_none_are_left_out(data: Data) -> None:
    first, second, _ = look(model(state_init="zeros"), data)
    assert "state_change.mean" not in first and "state_change.mean" in second  # h = 0 has no relative change
    assert summary("a", torch.tensor([1.0, math.nan, 3.0]))["a.mean"] == 2.0
    assert summary("a", torch.tensor([math.inf])) == summary("a", torch.tensor(math.nan)) == {}
    assert summary("a", torch.tensor(2.0)) == {"a": 2.0}


def test_a_dense_model_has_no_loop(data: Data) -> None:
    assert look(RecurrentLM(ModelConfig(**{**SIZES, "n_core": 0, "n_loops": 1})).init(0), data) == []


def test_a_short_text(text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("abcdefgh " * 30)
    stream = next(iter(prepare(recipe(short).data).split("valid").values()))
    assert stream.n_tokens < 16
    assert len(diagnose(model(), stream, 1, torch.float32)) == 3


def test_looking_changes_nothing(data: Data) -> None:
    made = model().train()
    made.inject = Talks()
    torch.manual_seed(5)
    before, rng = {k: v.clone() for k, v in made.state_dict().items()}, torch.get_rng_state()
    look(made, data)
    assert torch.equal(torch.get_rng_state(), rng), "Talks drew, and the state was put back"
    assert made.training and all(part.training for part in made.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())
    assert all(p.grad is None for p in made.parameters())
    # The control: without the guard it would have moved.
    made.inject(torch.ones(1), torch.ones(1))
    assert not torch.equal(torch.get_rng_state(), rng)


def test_noise_is_off(data: Data) -> None:
    made = model(state_init="noise").train()
    assert look(made, data) == look(made, data)


def test_a_run_is_the_same_with_and_without(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recipe(text), tmp_path / "with")
    with monkeypatch.context() as patch:
        patch.setattr(validating, "diagnose", lambda *_: [])
        train(recipe(text), tmp_path / "without")
    paths = [checkpoint.listed(tmp_path / run / "checkpoints")[-1] for run in ("with", "without")]
    raw = [(path / "model.safetensors").read_bytes() for path in paths]
    assert raw[0] == raw[1]
    assert torch.equal(*(checkpoint.load_train_state(path)["rng"] for path in paths))
    both, without = (_metrics(tmp_path / run) for run in ("with", "without"))
    assert [line for line in both if line["type"] != "diagnostics"] == without
    inside = [line for line in both if line["type"] == "diagnostics"]
    assert [(line["train_step"], line["loop"]) for line in inside] == [(s, n) for s in (2, 4, 6) for n in (1, 2, 3)]


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "elapsed_s")} for line in lines]


def test_a_dashboard_gets_the_means_at_a_few_loops() -> None:
    def names(loop: int) -> dict[str, float]:
        record = {"type": "diagnostics", "train_step": 3, "loop": loop, "loops": 6, "inject.share": 0.5}
        return scalars(
            record | {"state_norm.mean": 2.0, "state_norm.q10": 1.0, "state_norm.q50": 1.5, "state_norm.q90": 3}
        )

    assert names(4) == {"diagnostics/loop_4/inject.share": 0.5, "diagnostics/loop_4/state_norm": 2.0}
    assert [loop for loop in range(1, 7) if names(loop)] == [1, 2, 4, 6]
    assert scalars({"type": "train", "train_step": 3, "loops": 6}) == {"train/loops": 6}


def lines(steps: tuple[int, ...], n_loops: int, better: float = 0.0) -> str:
    records = [
        {
            "type": "diagnostics",
            "train_step": step,
            "loop": loop,
            "loops": n_loops,
            **{
                f"state_norm.{q}": 1.0 + loop + d - better
                for q, d in (("mean", 0), ("q10", -1), ("q50", 0), ("q90", 1))
            },
            "route.<share>": loop / n_loops,
        }
        for step in steps
        for loop in range(1, n_loops + 1)
    ]
    return "".join(json.dumps(record) + "\n" for record in records)


def fake(folder: Path, *arguments: Any, **changed: Any) -> Path:
    run = make_run(folder, steps=20, **changed)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines(*arguments))
    return run


def test_the_report_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake(tmp_path / "run", (10, 20), 9)
    read = read_run(run)
    assert len(read.inside) == 2 * 9 * 2
    point = next(p for p in read.inside if (p.train_step, p.loop, p.name) == (20, 3, "state_norm"))
    assert (point.mean, point.q10, point.q90) == (4.0, 3.0, 5.0)
    share = next(p for p in read.inside if p.name == "route.<share>")
    assert (share.q10, share.q90) == (None, None)
    by_loop, by_step = by_loop_figure([read], "state_norm") or "", by_step_figure([read], "state_norm") or ""
    assert "from 2 at loop 1 to 10 at loop 9" in by_loop
    assert all(f">loop {loop}</text>" in by_step for loop in (1, 2, 4, 8, 9)) and ">loop 3</text>" not in by_step
    draw_nothing(monkeypatch)
    page = write_report([run], tmp_path / "out.html").read_text()
    assert '<a href="#loops">Loops</a>' in page and '<section id="loops"' in page
    assert page.count("<figure>") == 8 + 4 and "State size by loop" in page and "route.<share>" not in page


def test_two_runs_are_compared_at_their_last_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [fake(tmp_path / "a", (10, 20), 4), fake(tmp_path / "b", (10, 20), 2, 0.5, name="other", seed=1)]
    reads = [read_run(run) for run in runs]
    by_step = by_step_figure(reads, "state_norm") or ""
    assert "elastic-10m, loop 4: 5 at the end" in by_step and "other, loop 2: 2.50 at the end" in by_step
    draw_nothing(monkeypatch)
    page = write_report([*runs, make_run(tmp_path / "none", steps=20)], tmp_path / "out.html").read_text()
    assert "Inside the loop" in page


def test_one_validation_has_no_curve(tmp_path: Path) -> None:
    read = read_run(fake(tmp_path / "run", (20,), 3))
    assert by_step_figure([read], "state_norm") is None and by_loop_figure([read], "state_norm")


def test_a_run_without_them_has_no_such_section(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", steps=20)], tmp_path / "out.html").read_text()
    assert "Inside the loop" not in page and "#loops" not in page
