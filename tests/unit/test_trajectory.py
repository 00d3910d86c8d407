"""Trajectories on models whose convergence is known, and against slower ways to find the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from alcoda.config import validate
from alcoda.depth.replay import replay
from alcoda.depth.rules import SecondOrder, StateChange
from alcoda.depth.trajectory import NUMBERS, first_crossing, memories, settled_depth, stable_loop, trace
from alcoda.errors import UsageError
from alcoda.measure.trajectories import ByLoop, Sweep
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import read_rows

R = 5
SMALL: dict[str, Any] = {
    "vocab_size": 7,
    "seq_len": 16,
    "d_model": 8,
    "n_heads": 2,
    "n_prelude": 1,
    "n_core": 1,
    "n_coda": 1,
    "n_loops": R,
    "inject": "add",
    "init_std": 0.4,
}
IDS = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 0, 3, 3, 1, 2]])
NAN = float("nan")


def lm(**fields: Any) -> RecurrentLM:
    return RecurrentLM(validate(ModelConfig, SMALL | fields)).double().init(0).eval()


def freeze_after(model: RecurrentLM, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From loop k + 1 on the state stays."""
    run = model.loop
    monkeypatch.setattr(
        model, "loop", lambda begun, state, loop, *a: run(begun, state, loop, *a) if loop < k else state
    )


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_state_that_stays_after_loop_k_has_depth_k_plus_1(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm(n_coda=0)  # a coda has keys of its own at each loop, of equal states
    freeze_after(model, k, monkeypatch)
    found = trace(model, IDS, R, IDS.roll(-1, 1))
    depth, censored = settled_depth(found["kl_previous"], 1e-12)
    assert (depth == k + 1).all() and not censored.any()
    assert (found["state_change"][..., k:] == 0).all() and (found["kl_final"][..., k - 1 :] == 0).all()
    assert (stable_loop(found["argmax"]) <= k).all()
    # A control: while the state moves, nothing is settled.
    assert (found["state_change"][..., :k] > 1e-6).all()


def test_frozen_with_a_coda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    freeze_after(model, 2, monkeypatch)
    depth, _ = settled_depth(trace(model, IDS, R, record=["kl_previous"])["kl_previous"], 1e-12)
    assert (depth == 3).all()


def test_a_model_that_never_stops_is_censored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    monkeypatch.setattr(
        model, "loop", lambda begun, state, loop, *a: state._replace(h_BTD=state.h_BTD.roll(loop + 1, -1) * 1.5)
    )
    depth, censored = settled_depth(trace(model, IDS, R, record=["kl_previous"])["kl_previous"], 1e-12)
    assert (depth == R).all() and censored.all()


def test_depths_of_tables() -> None:
    kl = torch.tensor(
        [
            [NAN, 0.1, 0.1, 0.1],  # never
            [NAN, 0.0, 0.1, 0.0],  # crosses at 2, settles at 4
            [NAN, 0.0, 0.0, 0.0],
            [NAN, 0.1, 0.0, 0.1],  # crosses at 3, and is censored
        ]
    )
    depth, censored = settled_depth(kl, 0.05)
    assert depth.tolist() == [4, 4, 2, 4] and censored.tolist() == [True, False, False, True]
    crossing, none = first_crossing(kl, 0.05)
    assert crossing.tolist() == [4, 2, 2, 3] and none.tolist() == [True, False, False, False]
    assert settled_depth(kl, 0.1)[0].tolist() == [4, 4, 2, 4]  # at eps is not below it
    argmax = torch.tensor([[1, 1, 1], [2, 1, 1], [1, 2, 1], [3, 2, 1]])
    assert stable_loop(argmax).tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "fields",
    [{}, {"update": "gate"}, {"keys": "anchor"}, {"route": "token_choice"}, {"sharing": "untied"}, {"n_coda": 0}],
)
def test_numbers_are_those_of_the_model_at_each_depth(fields: dict[str, Any]) -> None:
    model = lm(**fields)
    targets = IDS.roll(-1, 1)
    found = trace(model, IDS, R, targets, (*NUMBERS, "logits"))
    with torch.no_grad():
        ys = list(model.readouts(IDS, range(1, R + 1)))
        log_p = [model.logits(y.y_BTD).log_softmax(-1) for y in ys]
        states = [y.state.h_BTD for y in ys]
    for i in range(R):
        torch.testing.assert_close(found["logits"][..., i, :].log_softmax(-1), log_p[i], rtol=0, atol=1e-12)
        assert torch.equal(found["argmax"][..., i], log_p[i].argmax(-1))
        loss = F.nll_loss(log_p[i].flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        torch.testing.assert_close(found["loss"][..., i], loss, rtol=0, atol=1e-12)
        entropy = torch.distributions.Categorical(logits=log_p[i]).entropy()
        torch.testing.assert_close(found["entropy"][..., i], entropy, rtol=0, atol=1e-12)
        to_final = F.kl_div(log_p[i], log_p[-1], reduction="none", log_target=True).sum(-1)
        torch.testing.assert_close(found["kl_final"][..., i], to_final, rtol=0, atol=1e-12)
        if i:
            kl = F.kl_div(log_p[i - 1], log_p[i], reduction="none", log_target=True).sum(-1)
            torch.testing.assert_close(found["kl_previous"][..., i], kl, rtol=0, atol=1e-12)
            change = (states[i] - states[i - 1]).norm(dim=-1) / states[i].norm(dim=-1)
            torch.testing.assert_close(found["state_change"][..., i], change, rtol=0, atol=1e-12)
    assert found["kl_previous"][..., 0].isnan().all()


def test_numbers_are_the_exit_rules_scores() -> None:
    model = lm()
    found = trace(model, IDS, R, record=["state_change", "second_order"])
    scores = replay(model, IDS, StateChange(), R, scores=True).scores_BTR
    assert scores is not None
    torch.testing.assert_close(found["state_change"], scores, rtol=0, atol=1e-12)
    scores = replay(model, IDS, SecondOrder(hits=1), R, scores=True).scores_BTR
    assert scores is not None
    torch.testing.assert_close(found["second_order"][..., 1:], scores[..., 1:], rtol=0, atol=1e-12)


def test_a_memory_is_read_token_by_token() -> None:
    model = lm(memory="prev_token")
    found = trace(model, IDS, 3, IDS, ["logits", "state"])
    with torch.no_grad():
        (y,) = read_rows(model, IDS, [3])
        expected = model.logits(y)
        once = next(model.readouts(IDS, [3], memory_BTD=memories(model, IDS, 3)))
        blind = next(model.readouts(IDS, [3]))
    torch.testing.assert_close(found["logits"][..., -1, :], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found["state"][..., -1, :], once.state.h_BTD, rtol=0, atol=1e-10)
    assert (blind.state.h_BTD - once.state.h_BTD).abs().max() > 1e-3  # without memories it is another model
    assert memories(lm(), IDS, 3) is None


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(UsageError, match="dense"):
        trace(lm(n_core=0, n_loops=1, inject="none"), IDS, 1)
    with pytest.raises(UsageError, match=r"did you mean 'kl_final'"):
        trace(lm(), IDS, R, record=["kl_finale"])
    with pytest.raises(UsageError, match="targets"):
        trace(lm(), IDS, R, record=["loss"])
    with pytest.raises(ValueError, match="5"):
        trace(lm(sharing="untied"), IDS, R + 1, record=["argmax"])


def test_by_loop_means_and_quantiles() -> None:
    by_loop, rng = ByLoop(2), torch.Generator().manual_seed(0)
    kl = torch.rand(5000, 2, generator=rng, dtype=torch.float64) * 1e-3
    kl[:, 0] = NAN
    read = {name: torch.ones(5000, 2, dtype=torch.float64).numpy() for name in NUMBERS}
    read |= {"kl_previous": kl.numpy(), "argmax": torch.zeros(5000, 2, dtype=torch.long).numpy()}
    for part in (slice(0, 1000), slice(1000, 5000)):
        by_loop.add({name: x[part] for name, x in read.items()}, torch.zeros(5000, dtype=torch.long).numpy()[part])
    first, second = by_loop.to_json()
    assert "kl_previous" not in first and first["accuracy"] == 1 and first["loss"] == 1
    assert second["kl_previous"]["mean"] == pytest.approx(float(kl[:, 1].mean()), rel=1e-12)
    for name, share in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9)):
        assert second["kl_previous"][name] == pytest.approx(float(kl[:, 1].quantile(share)), rel=0.06)


def test_sweep_counts_each_eps() -> None:
    sweep = Sweep(3, (0.5, 0.05))
    sweep.add(torch.tensor([[NAN, 0.1, 0.01], [NAN, 0.1, 0.1]]))
    assert sweep.to_json() == [
        {"eps": 0.5, "mean": 2.0, "median": 2, "censored": 0.0},
        {"eps": 0.05, "mean": 3.0, "median": 3, "censored": 0.5},
    ]
