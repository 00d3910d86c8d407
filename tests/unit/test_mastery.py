"""Stages of a source: when one is mastered the next begins, and a resumed run knows which one it is at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alcoda.data.hops import answers
from alcoda.errors import UsageError
from alcoda.training import checkpoint, mastery
from alcoda.training.loop import Trainer, train
from alcoda.training.recipe import load_recipe

RECIPE = """
model: {vocab_size: 300, seq_len: 64, d_model: 16, n_heads: 2, d_ff: 32, n_prelude: 1, n_core: 1, n_coda: 1, n_loops: 2}
data:
  mix:
    - corpus: "hops:nodes=4,hops=1,docs=100"
      stages: ["hops:nodes=4,hops=2,docs=100", "hops:nodes=4,hops=3,docs=100"]
      mastery: 1.0
    - {corpus: "hops:nodes=5,hops=1,docs=100", name: other}
  tokenizer: {kind: bpe, vocab_size: 300}
train: {steps: 12, batch_size: 2, checkpoint_every: 4, log_every: 10, dtype: float32, schedule: {warmup_steps: 2}}
eval: {every: 2, tokens: 300}
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def recipe(tmp_path: Path, *settings: str) -> Any:
    (tmp_path / "r.yaml").write_text(RECIPE)
    return load_recipe(tmp_path / "r.yaml", settings)


def measured(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["type"] == "mastery"]


def knowing(trainer: Trainer, hops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model one that answers up to ``hops`` hops, and nothing else."""
    tokenizer, n_tokens = trainer.data.tokenizer, trainer.recipe.model.vocab_size

    def read_rows(model: Any, ids_BT: torch.Tensor, *rest: Any) -> Any:
        y_BTV = torch.zeros(*ids_BT.shape, n_tokens)
        for row, ids_T in enumerate(ids_BT):
            ends = torch.tensor(tokenizer.token_bytes_V)[ids_T].cumsum(0).tolist()
            for answer in answers(tokenizer.decode_bytes(ids_T.numpy())):
                at = ends.index(answer.stop)
                y_BTV[row, at - 1, ids_T[at]] = float(answer.hops <= hops)
        return iter([y_BTV])

    monkeypatch.setattr(mastery, "read_rows", read_rows)
    monkeypatch.setattr(type(trainer.model), "logits", lambda model, y: y)


def trainer_of(made: Any) -> Trainer:
    found: list[Trainer] = []
    run_to_end = Trainer.run_to_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run_to_end", lambda trainer: found.append(trainer))
        train(made, Path(made.description))
    assert Trainer.run_to_end is run_to_end
    return found[0]


@pytest.mark.parametrize("knows", [0, 1, 2, 3])
def test_a_stage_is_mastered_by_answers_of_its_most_hops(
    knows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(recipe(tmp_path, f"description={tmp_path}/run"))
    knowing(trainer, knows, monkeypatch)
    found = [mastery.climb(trainer) for _ in range(4)]
    at = min(knows, 2)  # stages 0, 1, 2 ask for 1, 2, 3 hops
    names = ["hops", "hops-2", "hops-3"]
    assert [record["source"] for (record,) in found] == [names[min(i, at)] for i in range(4)]
    assert [record["accuracy"] for (record,) in found] == [float(min(i, at) < knows) for i in range(4)]
    assert trainer.batches.stage(0) == at
    assert (trainer.batch_state or {"stages": [0]})["stages"] == [at]


def test_a_run_climbs_and_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mastery, "_right_and_asked", lambda *args: [1.0, 1.0])
    made = recipe(tmp_path)
    whole = train(made, tmp_path / "whole")
    assert {record["source"] for record in measured(whole.run)} == {"hops", "hops-2", "hops-3"}
    part = tmp_path / "part"
    step = Trainer._step

    def stops(trainer: Trainer, *args: Any) -> Any:
        if trainer.train_step == 9:
            raise KeyboardInterrupt
        return step(trainer, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_step", stops)
        train(made, part)
    train(made, part, resume=True)
    a, b = (checkpoint.listed(run / "checkpoints")[-1] for run in (whole.run, part))
    states = [torch.load(one / "train_state.pt", weights_only=False) for one in (a, b)]
    assert states[0]["batches"] == states[1]["batches"] and states[0]["batches"]["stages"] == [2]
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def test_what_cannot_be_mastered_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no questions")
    mix = [{"corpus": f"text:{tmp_path}/a.txt", "stages": ["hops"]}]
    with pytest.raises(UsageError, match=r"is a stage, and its text has no answers.*Forms that have: hops"):
        train(recipe(tmp_path, "data.mix=" + json.dumps(mix)), tmp_path / "run")
    with pytest.raises(UsageError, match=r"valid .* with a source that has stages.*leave valid out"):
        recipe(tmp_path, "data.valid=pystdlib")
    with pytest.raises(UsageError, match="mastery"):
        recipe(tmp_path, "data.mix=" + json.dumps([{"corpus": "hops", "mastery": 1.5}]))
    mix = [
        {"corpus": "hops:nodes=9,hops=8,skew=60,docs=100", "stages": ["hops:docs=100"]}
    ]  # of 8 hops nothing is asked
    with pytest.raises(UsageError, match=r"validation tokens ask nothing.*raise eval.tokens"):
        train(recipe(tmp_path, "data.mix=" + json.dumps(mix)), tmp_path / "run2")
