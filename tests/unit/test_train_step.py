"""One training step: accumulation, recomputation and truncation against the plain computation, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from alcoda.config import validate
from alcoda.data.batches import NOT_SCORED, Batch
from alcoda.data.prepare import Data, prepare
from alcoda.depth.sample import LoopPlan
from alcoda.training.loop import Trainer
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder
from alcoda.training.score import score
from alcoda.training.stop import stop_on_signal

PLAN = LoopPlan(1, 2)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(tmp_path: Path, noise: float = 0.0, **train: Any) -> Trainer:
    (tmp_path / "lines.txt").write_text("".join(f"line {i * i} of it\n" for i in range(60)))
    recipe = validate(
        Recipe,
        {
            "model": {
                "vocab_size": 257,
                "seq_len": 8,
                "d_model": 8,
                "n_heads": 2,
                "n_core": 1,
                "inject": {"kind": "concat", "noise": noise},
                "update": {"kind": "gate", "noise": noise},
            },
            "data": {"corpus": f"text:{tmp_path}/lines.txt", "tokenizer": "byte"},
            "train": {"batch_size": 4, "optimizer": {"kind": "adamw", "lr": 0.01}, **train},
        },
    ).resolved()
    data: Data = prepare(recipe.data)
    made = Trainer(recipe, RunFolder(tmp_path / "run"), data, torch.device("cpu"), torch.float32)
    made.model.double()
    return made


def after_steps(made: Trainer, n_steps: int = 3) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    logged = []
    for _ in range(n_steps):
        batch, _ = next(made.batches)
        logged.append(made._step(batch, PLAN))
    return dict(made.model.state_dict()), logged


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(a[1], b[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path, micro_batches: int) -> None:
    whole = after_steps(trainer(tmp_path))
    parts = after_steps(trainer(tmp_path, micro_batches=micro_batches))
    assert_close(parts, whole, 1e-12)


def test_recomputing_changes_nothing_with_noise_on(tmp_path: Path) -> None:
    plain = after_steps(trainer(tmp_path, noise=0.1))
    again = after_steps(trainer(tmp_path, noise=0.1, recompute=True))
    assert_close(again, plain, 1e-12)
    other = after_steps(trainer(tmp_path, noise=0.1, seed=1))
    with pytest.raises(AssertionError):
        assert_close(other, plain, 1e-12)


def test_loss_and_gradient_norm_by_hand(tmp_path: Path) -> None:
    made = trainer(tmp_path, clip=0.5)
    batch, _ = next(made.batches)
    made.model.train()
    inputs, targets = torch.from_numpy(batch.inputs_BT), torch.from_numpy(batch.targets_BT)
    logits_BTV = made.model(inputs, PLAN.n_loops, n_free=PLAN.n_free)
    by_hand = F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten(), ignore_index=-100)
    gradients = torch.autograd.grad(by_hand, list(made.model.parameters()))
    norm_by_hand = torch.cat([g.flatten() for g in gradients]).norm()
    loss, norm = made._step(batch, PLAN)
    assert loss == pytest.approx(by_hand.item(), rel=1e-12) and norm == pytest.approx(norm_by_hand.item(), rel=1e-12)
    assert all(p.grad is None for p in made.model.parameters())


def test_a_short_row_is_scored_where_there_are_targets(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    batch, _ = next(made.batches)
    short = Batch(batch.inputs_BT, batch.targets_BT.copy(), batch.where)
    short.targets_BT[1:3, 5:] = NOT_SCORED
    made.model.train()
    targets = torch.from_numpy(short.targets_BT).flatten()
    logits = made.model(torch.from_numpy(short.inputs_BT), 3).flatten(0, 1)
    by_hand = F.cross_entropy(logits[targets >= 0], targets[targets >= 0])
    assert made._step(short, LoopPlan(0, 3))[0] == pytest.approx(by_hand.item(), rel=1e-12)


@pytest.mark.parametrize(("batch_size", "max_tokens"), [(1, None), (3, None), (64, None), (2, 30), (2, 9), (1, 5)])
def test_score_is_each_token_once(tmp_path: Path, batch_size: int, max_tokens: int | None) -> None:
    made = trainer(tmp_path)
    stream = made.data.split("valid")["lines"]
    tokens = stream.read(0, max_tokens or stream.n_tokens).astype(np.int64)
    sizes = made.token_bytes_V
    parts = list(score(made.model, stream, sizes, [1, 3], batch_size=batch_size, max_tokens=max_tokens))
    assert [part.start for part in parts] == list(np.cumsum([1, *(len(part.bytes_N) for part in parts[:-1])]))
    nats_LN = np.concatenate([part.nats_LN for part in parts], 1)
    bytes_N = np.concatenate([part.bytes_N for part in parts])
    assert nats_LN.shape == (2, len(tokens) - 1)
    np.testing.assert_array_equal(bytes_N, sizes[tokens[1:]])
    made.model.eval()
    for row, loops in enumerate((1, 3)):
        for start in range(0, len(tokens) - 1, 8):
            inputs = torch.from_numpy(tokens[start : start + 8][: len(tokens) - 1 - start])
            with torch.no_grad():
                log_p_TV = F.log_softmax(made.model(inputs[None], loops)[0].float(), -1)
            for t in range(len(inputs)):
                expected = -log_p_TV[t, tokens[start + t + 1]] if sizes[tokens[start + t + 1]] else 0.0
                assert nats_LN[row, start + t] == pytest.approx(float(expected), abs=1e-5)


def test_scoring_leaves_the_mode_and_the_random_state(tmp_path: Path) -> None:
    made = trainer(tmp_path, noise=0.1)
    made.model.train()
    before = torch.get_rng_state()
    list(score(made.model, made.data.split("valid")["lines"], made.token_bytes_V, [2]))
    assert made.model.training and torch.equal(torch.get_rng_state(), before)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    import threading

    seen: list[bool] = []

    def work() -> None:
        with stop_on_signal() as stop:
            seen.append(stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
