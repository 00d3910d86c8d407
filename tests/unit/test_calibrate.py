"""Thresholds, probes and tiers on tables whose answer is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alcoda.config import validate
from alcoda.depth import watch
from alcoda.depth.record import ProbeWeights, fingerprint
from alcoda.depth.rules import NEVER, ArgmaxStable, Kl, Probe, StateChange
from alcoda.depth.tiers import Tiers
from alcoda.depth.watch import ArgmaxTest, ExitTest, FixedTest, KlTest
from alcoda.errors import RunError, UsageError
from alcoda.measure import calibrate as calibration
from alcoda.measure.bootstrap import mean_interval, ratio_interval
from alcoda.measure.calibrate import calibrate, sufficient
from alcoda.measure.frontier import frontier
from alcoda.measure.ladder import expected_depths, ladder
from alcoda.measure.replays import Passage, Read
from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger, readout_flops
from alcoda.model.lm import RecurrentLM
from alcoda.training.load import LoadedRun
from alcoda.training.run import RunFolder

R, N = 4, 1000
CONFIG: dict[str, Any] = {"vocab_size": 3, "seq_len": 16, "d_model": 4, "n_heads": 1, "n_loops": R}


# -- calibration on a table -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Tabled(Passage):
    """A text whose losses and scores are given, so that what is right can be computed."""

    nats_RN: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((R, 0)))
    tables: dict[type[ExitTest], np.ndarray] = dataclasses.field(default_factory=dict)

    def uniform(self, loops: Any, tell: Any = None) -> np.ndarray:
        return self.nats_RN[[n - 1 for n in loops]]

    def read(self, test: ExitTest, scores: bool = False, tell: Any = None) -> Read:
        if isinstance(test, FixedTest):
            depths_N = np.full(N, test.loops)
            return Read(self.nats_RN[test.loops - 1], depths_N, None)
        scores_NR = self.tables[type(test)]
        if isinstance(test, ArgmaxTest):
            scores_NR = (test.loops or np.inf) - scores_NR
        leaves_NR = scores_NR < np.array(test.bounds.thresholds, dtype=np.float32)
        leaves_NR[:, -1] = True
        depths_N = leaves_NR.argmax(1) + 1
        return Read(self.nats_RN[depths_N - 1, np.arange(N)], depths_N, scores_NR)


def tabled(nats_RN: np.ndarray, **tables: np.ndarray) -> Tabled:
    run: Any = SimpleNamespace(train_step=7)
    units: Any = np.repeat(np.arange(20), N // 20)
    found = Tabled(run, None, np.ones(N, dtype=np.int64), units, 8, nats_RN=nats_RN)  # pyrefly: ignore
    found.tables.update({getattr(watch, name): table for name, table in tables.items()})
    return found


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    model = RecurrentLM(validate(ModelConfig, CONFIG)).init(0).eval()
    recipe: Any = SimpleNamespace(model=model.config)
    tokenizer: Any = SimpleNamespace(sha256="words")
    return LoadedRun(RunFolder(tmp_path), recipe, model, tokenizer, torch.float32, 7, torch.float32)


def given(monkeypatch: pytest.MonkeyPatch, text: Tabled) -> None:
    monkeypatch.setattr(calibration.Passage, "open", lambda *_, **__: text)


def converging(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens that are done after 1 to 4 loops: loss, state change (falls 50-fold then), KL (the same a loop later)."""
    rng = np.random.default_rng(seed)
    done_N = rng.integers(1, R + 1, N)
    loop_R = np.arange(1, R + 1)[:, None]
    nats_RN = 2 + 0.5 * np.maximum(0, done_N - loop_R)
    state_NR = np.where(loop_R < done_N, 1.0, 0.02).T * rng.uniform(0.5, 1.5, (N, R))
    return nats_RN, state_NR.astype(np.float32), done_N


def test_the_threshold_is_the_loosest_that_keeps(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    nats_RN, state_NR, done_N = converging()
    text = tabled(nats_RN, StateTest=state_NR)
    given(monkeypatch, text)
    found = calibrate(run, "state", tolerances={"fast": 0.02, "balanced": 0.005, "exact": 0.0})
    assert [tier.name for tier in found.tiers] == ["fast", "balanced", "exact"]
    for tier in found.tiers[:2]:
        assert isinstance(tier.rule, StateChange) and isinstance(tier.rule.threshold, float)
        assert tier.rule.threshold > 0.029, "all that are done leave"
        assert 0 <= tier.calib.excess <= tier.tolerance
        # By hand: the loss of the next looser rung is too high.
        rungs = ladder(StateChange(), state_NR)
        looser = rungs[rungs.index(tier.rule) + 1]
        depths_N = expected_depths(looser, state_NR)
        assert nats_RN[depths_N - 1, np.arange(N)].sum() / nats_RN[-1].sum() - 1 > tier.tolerance
        mean = expected_depths(tier.rule, state_NR).mean()
        assert tier.calib.mean_loops == pytest.approx(mean) and mean < done_N.mean()
        assert tier.calib.mean_loops_low < mean < tier.calib.mean_loops_high
        assert tier.calib.excess_low < tier.calib.excess < tier.calib.excess_high
    assert found.tiers[0].calib.mean_loops < found.tiers[1].calib.mean_loops
    exact = found.tiers[2]
    assert exact.rule == NEVER and exact.calib.mean_loops == R and exact.calib.excess == 0
    # Some token is done only after the last loop, so no smaller depth for all loses nothing.
    assert exact.uniform_loops == R and found.tiers[0].uniform_loops == sufficient(nats_RN, 0.02)
    assert found.model == fingerprint(run.model) and found.tokenizer == "words" and found.n_loops == R
    flops_R = StateChange().executed_flops(run.model.config, R)
    counts_R = np.bincount(expected_depths(found.tiers[0].rule, state_NR), minlength=R + 1)[1:]
    assert found.tiers[0].calib.flops_per_token == pytest.approx((counts_R @ flops_R) / N)
    assert validate(Tiers, json.loads(found.model_dump_json())) == found


def test_a_rule_that_knows_more_is_imitated(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    nats_RN, state_NR, done_N = converging()
    kl_NR = state_NR.copy()
    kl_NR[:, 0] = np.inf
    # State change on another scale at each loop: one number for all loops cannot tell who is done.
    scaled_NR = (state_NR * np.array([1.0, 100.0, 0.01, 1.0])).astype(np.float32)
    text = tabled(nats_RN, StateTest=scaled_NR, KlTest=kl_NR)
    given(monkeypatch, text)
    (alone,) = calibrate(run, "state", tolerances={"balanced": 0.005}).tiers
    (taught,) = calibrate(run, "state", "kl", {"balanced": 0.005}).tiers
    assert alone.coverage is None and taught.coverage is not None
    assert taught.coverage.before + taught.coverage.same + taught.coverage.after == pytest.approx(1)
    assert taught.coverage.same > 0.97
    assert isinstance(taught.rule, StateChange) and isinstance(taught.rule.threshold, tuple)
    assert taught.rule.threshold[0] == 0, "KL lets none leave in the first loop"
    assert taught.calib.excess <= 0.005
    assert taught.calib.mean_loops == pytest.approx(np.maximum(done_N, 2).mean(), abs=0.1)
    assert taught.calib.mean_loops < alone.calib.mean_loops - 0.2


def test_a_model_that_is_done_after_one_loop(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tabled(np.full((R, N), 2.0), StateTest=np.zeros((N, R), dtype=np.float32))
    given(monkeypatch, text)
    (tier,) = calibrate(run, "state", tolerances={"balanced": 0.005}).tiers
    assert tier.calib.mean_loops == 1 and tier.calib.excess == 0 and tier.uniform_loops == 1


def test_counted_loops(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    nats_RN, _, done_N = converging()
    stable_NR = np.maximum(0, np.arange(1, R + 1) - done_N[:, None]).astype(np.float32)
    given(monkeypatch, tabled(nats_RN, ArgmaxTest=stable_NR))
    (tier,) = calibrate(run, "argmax_stable", tolerances={"balanced": 0.005}).tiers
    assert tier.rule == ArgmaxStable(loops=1) and tier.calib.excess == 0


def test_a_tolerance_that_only_never_leaving_keeps(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    nats_RN = np.array([8.0, 4.0, 3.0, 2.0])[:, None] * np.ones(N)
    given(monkeypatch, tabled(nats_RN, StateTest=np.ones((N, R), dtype=np.float32)))
    with pytest.raises(UsageError, match=r"tier balanced: exit 'state' lets no token leave.*300\.000% above it: give"):
        calibrate(run, "state", tolerances={"balanced": 0.005})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"rule": "fixed:2"}, "exit 'fixed' has no threshold to choose"),
        ({"rule": "stat"}, "unknown exit 'stat'; did you mean 'state'"),
        ({"rule": "gate"}, "no exit gate to ask"),
        ({"rule": "probe"}, "alcoda probe .* fits one"),
        ({"to": "state"}, "name another rule with a threshold, as kl"),
        ({"to": "argmax_stable"}, "name another rule with a threshold"),
        ({"rule": "argmax_stable", "to": "kl"}, "no threshold a loop to fit; leave --to out"),
        ({"tolerances": {}}, "no tier is named"),
        ({"tolerances": {"fast": 1.5}}, "tolerance fast=1.5: a share of the loss"),
        ({"tolerances": {"fast": float("nan")}}, "tolerance fast=nan"),
        ({"tolerances": {"fast": -0.1}}, "from 0 .no token leaves. to below 1"),
        ({"tolerances": {"kl": 0.1}}, "'kl' is the name of a rule"),
        ({"tolerances": {"Too Fast": 0.1}}, "name: string should match pattern"),
        ({"loops": 0}, "loops"),
    ],
)
def test_bad_calibrations(run: LoadedRun, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], says: str) -> None:
    nats_RN, state_NR, _ = converging()
    given(monkeypatch, tabled(nats_RN, StateTest=state_NR, KlTest=state_NR))
    with pytest.raises(UsageError, match=says):
        calibrate(run, **how)


# -- the record -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiers(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> Tiers:
    nats_RN, state_NR, _ = converging()
    given(monkeypatch, tabled(nats_RN, StateTest=state_NR))
    found = calibrate(run, "state", tolerances={"balanced": 0.005, "exact": 0.0})
    found.save(run.run.exits_json)
    return found


def test_tiers_are_bound_to_weights_and_tokenizer(run: LoadedRun, tiers: Tiers) -> None:
    assert Tiers.load(run.run.exits_json) == tiers
    chosen = run.exit("balanced")
    assert chosen.rule == tiers.tiers[0].rule and chosen.tier == "balanced" and chosen.test.n_loops == R
    assert run.exit("exact", R).rule == NEVER
    for how, says in (
        ({"choice": "balance"}, "unknown exit 'balance'; did you mean 'balanced'"),
        ({"choice": "balanced", "loops": 3}, "calibrated at 4 loops; leave loops out, or run alcoda calibrate"),
        ({"choice": "balanced", "threshold": 0.1}, "has thresholds of its own"),
    ):
        with pytest.raises(UsageError, match=says):
            run.exit(**how)  # pyrefly: ignore
    other: Any = SimpleNamespace(sha256="others")
    with pytest.raises(UsageError, match=r"with a tokenizer other than this model's .*alcoda calibrate"):
        dataclasses.replace(run, tokenizer=other).exit("balanced")
    with torch.no_grad():
        next(run.model.parameters()).mul_(1.01)
    with pytest.raises(UsageError, match=r"with weights other than this model's .train step 7.*alcoda calibrate"):
        run.exit("balanced")
    run.run.exits_json.unlink()
    with pytest.raises(UsageError, match=r"calibrated tier\? .* has none: alcoda calibrate .* makes them"):
        run.exit("balanced")


@pytest.mark.parametrize(
    ("changed", "says"),
    [("{", "cannot be read"), ('{"version": 2}', "damaged or of another version"), ("[]", "damaged or of another")],
)
def test_a_damaged_record_is_named(run: LoadedRun, tiers: Tiers, changed: str, says: str) -> None:
    run.run.exits_json.write_text(changed)
    with pytest.raises(RunError, match=says):
        run.exit("balanced")


def test_a_tier_knows_its_probe(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ProbeWeights(torch.zeros(4), torch.zeros(R), "argmax_changes", fingerprint(run.model))
    weights.save(run.run.probe)
    nats_RN, state_NR, _ = converging()
    given(monkeypatch, tabled(nats_RN, ProbeTest=state_NR))
    found = calibrate(run, "probe", tolerances={"balanced": 0.005})
    found.save(run.run.exits_json)
    assert isinstance(found.tiers[0].rule, Probe) and found.tiers[0].probe is not None
    assert run.exit("balanced").rule == found.tiers[0].rule
    dataclasses.replace(weights, bias_R=torch.ones(R)).save(run.run.probe)
    with pytest.raises(UsageError, match="not the probe that tier 'balanced' was calibrated with"):
        run.exit("balanced")


# -- cost -------------------------------------------------------------------------------------------------------------


def test_executed_flops_pay_for_the_rule() -> None:
    config = validate(ModelConfig, CONFIG)
    plain = [ledger(config, n).forward_flops_per_token for n in range(1, R + 1)]
    assert list(NEVER.executed_flops(config, R)) == plain
    assert list(StateChange().executed_flops(config, R)) == [plain[i] + 16 * min(i + 1, R - 1) for i in range(R)]
    looks = readout_flops(config)
    assert list(Kl().executed_flops(config, R)) == [plain[i] + i * looks for i in range(R)]


def test_frontier_of_a_table(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    nats_RN, state_NR, done_N = converging()
    text = tabled(nats_RN, StateTest=state_NR, SecondOrderTest=state_NR)
    text = dataclasses.replace(text, run=run, text=SimpleNamespace(unit="blocks", notes=lambda *_: []))  # pyrefly: ignore
    text.tables.update({KlTest: state_NR, ArgmaxTest: np.zeros((N, R), dtype=np.float32)})
    monkeypatch.setattr("alcoda.measure.frontier.Passage.open", lambda *_, **__: text)
    found = frontier(run, points=12, tolerance=0.01)
    assert [curve.rule for curve in found.curves] == ["kl", "kl", "state", "state", "second_order", "argmax_stable"]
    assert [curve.is_upper_bound for curve in found.curves] == [False, True, False, True, False, False]
    assert set(found.left_out) == {"gate", "probe"} and "alcoda probe" in found.left_out["probe"]
    assert found.sufficient_loops == R and len(found.uniform) == R
    state = found.curves[2]
    # A table knows no keys, so that readout-only is the same.
    assert state.points == found.curves[3].points and (state.coda_keys, found.curves[0].coda_keys) == (
        "at_exit",
        "per_loop",
    )
    assert state.best is not None
    best = state.points[state.best]
    assert best.mean_loops <= done_N.mean() + 0.2 and best.excess <= 0.01
    # By hand: at that mean, between two depths for all, in bits of one byte a token.
    below = int(best.mean_loops)
    share = best.mean_loops - below
    uniform = (1 - share) * nats_RN[below - 1].mean() + share * nats_RN[below].mean()
    assert best.at_equal_loops.bits_per_byte == pytest.approx(uniform / np.log(2) - best.bits_per_byte)
    assert best.at_equal_loops.low > 0.1 and best.at_equal_loops.low < best.at_equal_loops.high
    assert best.over_sufficient.bits_per_byte == pytest.approx(nats_RN[-1].mean() / np.log(2) - best.bits_per_byte)
    kl = found.curves[0].points[0]
    assert kl.rule_flops_per_token > 0.5 * readout_flops(run.model.config) > 20 * best.rule_flops_per_token / R
    assert json.loads(json.dumps(found.to_json()))["curves"][2]["points"][0]["rule"]["kind"] == "state"
    for how, says in (
        ({"rules": ["gate"]}, "no exit gate"),
        ({"rules": ["fixed"]}, "no threshold to choose"),
        ({"rules": ["kll"]}, "did you mean 'kl'"),
        ({"points": 0}, "at least 1 point"),
        ({"tolerance": 1.0}, "tolerance=1"),
    ):
        with pytest.raises(UsageError, match=says):
            frontier(run, **how)  # pyrefly: ignore


@pytest.mark.parametrize("fields", [{"n_core": 0, "n_loops": 1}, {"sharing": "untied"}])
def test_models_without_a_loop_to_leave(run: LoadedRun, fields: dict[str, Any]) -> None:
    model = RecurrentLM(validate(ModelConfig, CONFIG | fields))
    recipe: Any = SimpleNamespace(model=model.config)
    other = dataclasses.replace(run, model=model, recipe=recipe)
    for call in (frontier, calibrate):
        with pytest.raises(UsageError, match=r"dense|weights of their own"):
            call(other)


def test_mean_interval_is_in_the_units_it_is_given() -> None:
    sums_N, counts_N = np.arange(1.0, 41.0), np.full(40, 2.0)
    loops, bits = mean_interval(sums_N, counts_N), ratio_interval(sums_N, counts_N)
    assert loops.value == pytest.approx(10.25) and loops.low < 10.25 < loops.high
    assert [x / np.log(2) for x in loops] == pytest.approx(list(bits))
