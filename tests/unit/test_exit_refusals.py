"""Exit rules: what they refuse, what is no rule, and files of traces and probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exit_models import IDS, R, lm
from safetensors.torch import save_file

from alcoda.config import validate
from alcoda.depth.record import ProbeWeights, Trace, fingerprint
from alcoda.depth.replay import replay
from alcoda.depth.rules import (
    NEVER,
    ArgmaxStable,
    ExitRule,
    Fixed,
    Gate,
    Kl,
    Probe,
    StateChange,
    TraceRule,
    read_rule,
)
from alcoda.engine.decode import decode
from alcoda.errors import RunError, UsageError
from alcoda.model.prefill import ZeroPrefill

# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "fields", "says"),
    [
        (Gate(), {"exit_gate": "none"}, "has no exit gate to ask. Train with model.exit_gate linear"),
        (StateChange(threshold=(0.1, 0.2)), {}, "threshold has 2 numbers and 4 loops run"),
        (StateChange(min_loops=5), {}, "min_loops=5: only 4 loops run"),
        (Fixed(loops=5), {}, "exit.loops=5: only 4 loops run"),
        (NEVER, {"sharing": "untied"}, "with sharing 'untied', loops have weights of their own"),
        (NEVER, {"sharing": "lora"}, "with sharing 'lora'"),
        (NEVER, {"route": "expert_choice"}, "with route 'expert_choice'"),
        (TraceRule(), {}, "exit trace without depths"),
        (Probe(), {}, "exit probe without weights"),
        (Probe(weights="nowhere"), {}, "nowhere: no such file; a probe is needed there"),
        (TraceRule(depths="nowhere"), {}, "nowhere: no such file; a trace of depths is needed there"),
    ],
)
def test_rules_say_what_they_cannot(rule: ExitRule, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        replay(lm(**fields), IDS, rule)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stat:0.1", "unknown exit 'stat'; did you mean 'state'?"),
        ("state:-1", "threshold"),
        ("state:nan", "threshold"),
        ("state:soon", "threshold"),
        ("fixed:0", "loops"),
        ("fixed:2.5", "loops"),
        ("argmax_stable:x", "loops"),
        ("trace:3", "depths"),
        ("", "unknown exit ''"),
    ],
)
def test_text_that_is_no_rule(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        read_rule(text)
    assert says in str(error.value)


def test_text_that_is_a_rule() -> None:
    assert read_rule("state:1e-3") == StateChange(threshold=1e-3) and read_rule("kl") == Kl()
    assert read_rule("fixed:3") == Fixed(loops=3) and read_rule("argmax_stable:2") == ArgmaxStable(loops=2)
    assert read_rule("trace:a/b") == TraceRule(depths="a/b") and read_rule("state", 0.5) == StateChange(threshold=0.5)
    assert read_rule("gate", [0.5, 0.1]) == Gate(threshold=(0.5, 0.1))
    with pytest.raises(UsageError, match="unknown key 'threshold'"):
        read_rule("fixed", 0.5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_loops": 3, "max_loops": 2}, "min_loops=3 is above max_loops=2"),
        ({"horizon": 2}, "horizon"),
        ({"horizon": True}, "horizon"),
        ({"threshold": True}, "threshold"),
        ({"threshold": [0.1, -0.1]}, "threshold"),
        ({"min_loops": 0}, "min_loops"),
    ],
)
def test_fields_that_make_no_sense(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(StateChange, fields)
    assert says in str(error.value)


def test_arguments_that_do_not_fit() -> None:
    model = lm()
    with pytest.raises(UsageError, match="coda_keys 'at_exit': this exit rule looks at logits after every loop"):
        replay(model, IDS, Kl(), coda_keys="at_exit")
    with pytest.raises(UsageError, match="coda_keys='later': at_exit or per_loop"):
        replay(model, IDS, NEVER, coda_keys="later")  # pyrefly: ignore
    with pytest.raises(UsageError, match="readout_only with recompute_keys"):
        replay(model, IDS, NEVER, readout_only=True, recompute_keys=True)
    with pytest.raises(UsageError, match="built for another model, or for 4 loops"):
        replay(model, IDS, NEVER.build(model, R), 3)
    with pytest.raises(UsageError, match="built for another model"):
        replay(lm(), IDS, NEVER.build(model, R))
    with pytest.raises(UsageError, match="loops=0"):
        replay(model, IDS, NEVER, 0)
    told = lm(memory="prev_token")
    with pytest.raises(UsageError, match="readout_only of tokens that are read one after the other"):
        replay(told, IDS, NEVER, readout_only=True)
    with pytest.raises(UsageError, match="prefill 'zero' with an exit rule"):
        decode(told, [1, 2], loops=R, max_tokens=2, rule=NEVER, prefill=ZeroPrefill())


def test_a_trace_of_other_work_is_refused() -> None:
    model = lm()
    deep = TraceRule().build
    with pytest.raises(UsageError, match="depths up to 5, and 4 loops run; run 5"):
        deep(model, R, Trace(torch.full((1, 5), 5), 8, "at_exit"))
    with pytest.raises(UsageError, match=r"holds 1 x 3 depths \(rows x tokens\), and 1 x 5 are run"):
        replay(model, IDS, deep(model, R, Trace(torch.ones(1, 3, dtype=torch.long), R, "at_exit")))
    with pytest.raises(UsageError, match="is no Trace"):
        deep(model, R, torch.ones(1, 5))


def test_a_probe_of_another_model_is_refused() -> None:
    model, bias = lm(), torch.zeros(R)
    other = fingerprint(lm(init_std=0.1))
    with pytest.raises(UsageError, match="fitted to other weights than this model's"):
        Probe().build(model, R, ProbeWeights(torch.zeros(2), bias, "argmax_changes", other))
    with pytest.raises(UsageError, match=r"shape \(3,\) with 4 biases; this model needs \(2,\)"):
        Probe().build(model, R, ProbeWeights(torch.zeros(3), bias, "argmax_changes", fingerprint(model)))
    with pytest.raises(UsageError, match="a bias for each of 4 loops"):
        Probe().build(model, R, ProbeWeights(torch.zeros(2), bias[:3], "loss_falls", fingerprint(model), 0.1))


# -- files ------------------------------------------------------------------------------------------------------------


def test_traces_and_probes_survive_a_file(tmp_path: Path) -> None:
    model = lm()
    found = replay(model, IDS, StateChange(threshold=0.5))
    found.trace().save(tmp_path / "depths")
    again = replay(model, IDS, TraceRule(depths=str(tmp_path / "depths")))
    assert torch.equal(again.depths_BT, found.depths_BT) and torch.equal(again.y_BTD, found.y_BTD)
    probe = ProbeWeights(torch.randn(2), torch.randn(R), "loss_falls", fingerprint(model), 0.25)
    probe.save(tmp_path / "probe")
    read = ProbeWeights.load(tmp_path / "probe")
    assert torch.equal(read.weight_D, probe.weight_D) and torch.equal(read.bias_R, probe.bias_R)
    assert (read.label, read.model, read.delta) == ("loss_falls", probe.model, 0.25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["depths", "probe"]


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(RunError, match="cannot be read as a trace of depths"):
        Trace.load(tmp_path / "text")
    save_file({"depths": torch.ones(1, 2)}, tmp_path / "bare")
    with pytest.raises(UsageError, match="is not a trace of depths: it has no n_loops, coda_keys"):
        Trace.load(tmp_path / "bare")
    about = {"n_loops": "4", "coda_keys": "at_exit"}
    save_file({"depths": torch.ones(1, 2)}, tmp_path / "floats", about)
    with pytest.raises(UsageError, match="whole numbers"):
        Trace.load(tmp_path / "floats")
    save_file({"depths": torch.ones(1, 2, dtype=torch.long)}, tmp_path / "n", about | {"n_loops": "four"})
    with pytest.raises(UsageError, match="is no trace of depths"):
        Trace.load(tmp_path / "n")
    save_file({"depths": torch.full((1, 2), -3)}, tmp_path / "negative", about)
    with pytest.raises(UsageError, match="they must be 0 to its n_loops=4"):
        Trace.load(tmp_path / "negative")
    tensors = {"weight": torch.ones(2), "bias": torch.ones(4)}
    save_file(tensors, tmp_path / "probe", {"label": "right", "model": "", "delta": "0"})
    with pytest.raises(UsageError, match="is no probe: a label"):
        ProbeWeights.load(tmp_path / "probe")
