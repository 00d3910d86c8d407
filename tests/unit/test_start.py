"""``init_from`` and ``trainable``: what is copied, what is named, what learns, and that a resumed run is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alcoda.config import validate
from alcoda.data.prepare import prepare
from alcoda.depth.sample import LoopPlan
from alcoda.errors import RunError, UsageError
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint
from alcoda.training.loop import Trainer, train
from alcoda.training.recipe import Recipe, load_recipe
from alcoda.training.run import RunFolder
from alcoda.training.trainable import mark

MODEL = {"vocab_size": 257, "seq_len": 8, "d_model": 8, "n_heads": 2, "n_core": 1, "n_loops": 2, "inject": "concat"}


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
    path.write_text("".join(f"line {i * i} of it\n" for i in range(80)))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A finished run with the gate; nobody writes to it."""
    run = tmp_path_factory.mktemp("source") / "run"
    train(recipe(text, model={"update": "gate"}), run)
    return run


@pytest.fixture
def no_gate(tmp_path: Path, text: Path) -> Path:
    train(recipe(text), tmp_path / "no_gate")
    return tmp_path / "no_gate"


def recipe(text: Path, model: Any = (), **changes: Any) -> Recipe:
    data = {
        "model": MODEL | dict(model),
        "depth": {"kind": "uniform", "min": 1},
        "data": {"corpus": f"text:{text}", "tokenizer": changes.pop("tokenizer", "byte")},
        "train": {
            "steps": 6,
            "batch_size": 2,
            "dtype": "float32",
            "device": "cpu",
            "checkpoint_every": 3,
            "log_every": 1,
            "schedule": {"warmup_steps": 0},
            **changes.pop("train", {}),
        },
        "eval": {"every": 3, "tokens": 40},
        **changes,
    }
    return validate(Recipe, data)


def weights(run: Path, which: int = -1) -> dict[str, Tensor]:
    return checkpoint.read_weights(checkpoint.listed(run / "checkpoints")[which])


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def begun(run: Path, made: Recipe, monkeypatch: pytest.MonkeyPatch, at: int = 0) -> dict[str, Tensor]:
    """The weights of a new run after ``at`` steps, where it crashes."""
    found: dict[str, Tensor] = {}
    real = Trainer._step

    def step(self: Trainer, *arguments: Any) -> Any:
        if self.train_step == at:
            found.update({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
            raise RuntimeError("crash")
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        with pytest.raises(RuntimeError, match="crash"):
            train(made, run)
    return found


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_new_run_starts_from_the_weights(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe(text, model={"update": "gate"}, init_from={"run": str(source), "checkpoint": "step_00000003"})
    started = begun(tmp_path / "run", made, monkeypatch)
    assert_equal(started, weights(source, 0))
    assert not all(torch.equal(started[name], tensor) for name, tensor in weights(source, -1).items())
    said = record(tmp_path / "run")["init_from"]
    digest = checkpoint.check(source / "checkpoints/step_00000003")["files"]["model.safetensors"]["sha256"]
    assert said == {
        "run": str(source),
        "checkpoint": "step_00000003",
        "train_step": 3,
        "sha256": digest,
        "fresh": [],
        "left": [],
    }
    assert "init_from" not in capsys.readouterr().err


def test_best_is_the_default_and_a_path_the_short_form(source: Path, text: Path) -> None:
    made = recipe(text, init_from=str(source))
    assert made.init_from is not None and made.init_from.checkpoint == "best"
    assert validate(Recipe, made.model_dump(mode="json")) == made
    assert recipe(text).init_from is None
    with pytest.raises(UsageError, match=r"init_from: unknown key 'chekpoint'; did you mean 'checkpoint'"):
        recipe(text, init_from={"run": "a", "chekpoint": "b"})


def test_the_draws_of_training_are_those_of_a_fresh_run(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying takes nothing from the random states: the same start, copied or trained to, goes on the same."""
    fresh = recipe(text, model={"update": "gate"}, train={"steps": 3})
    train(fresh, tmp_path / "fresh")
    start_of_it = begun(tmp_path / "x", fresh, monkeypatch)
    zero = tmp_path / "zero"
    shutil.copytree(source, zero)
    model = checkpoint.build(fresh.model, torch.device("cpu"))
    model.load_state_dict(start_of_it)
    for path in checkpoint.listed(zero / "checkpoints"):
        manifest, state = checkpoint.check(path), checkpoint.load_train_state(path)
        about = {name: manifest[name] for name in ("tokens", "tokenizer_sha256", "best")}
        checkpoint.save(zero / "checkpoints", manifest["train_step"], model, state, about)
    copied = recipe(text, model={"update": "gate"}, train={"steps": 3}, init_from=str(zero))
    train(copied, tmp_path / "copied")
    assert_equal(weights(tmp_path / "copied"), weights(tmp_path / "fresh"))


def test_a_part_that_only_the_new_model_has_starts_fresh(
    no_gate: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gated = recipe(text, model={"update": "gate"}, init_from=str(no_gate))
    started = begun(tmp_path / "run", gated, monkeypatch)
    fresh = begun(tmp_path / "fresh", recipe(text, model={"update": "gate"}), monkeypatch)
    old = weights(no_gate)
    for name, tensor in started.items():
        assert torch.equal(tensor, fresh[name] if name.startswith("update.") else old[name]), name
    assert record(tmp_path / "run")["init_from"]["fresh"] == ["update"]
    assert "): update start fresh, the run has none" in capsys.readouterr().err


def test_what_only_the_old_model_has_is_named(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inject = {"kind": "concat", "bias": True}
    started = begun(tmp_path / "run", recipe(text, model={"inject": inject}, init_from=str(source)), monkeypatch)
    assert not any(name.startswith("update.") for name in started)
    said = record(tmp_path / "run")["init_from"]
    # The injection is in both: there the tensor is named.
    assert said["left"] == ["update"] and said["fresh"] == [name for name in started if name not in weights(source)]
    assert len(said["fresh"]) == 1 and said["fresh"][0].startswith("inject.")
    err = capsys.readouterr().err
    assert "update are left out, the new model has none" in err and f"{said['fresh'][0]} start fresh" in err


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"d_model": 16}, r"embed\.weight is \(257, 8\) there and \(257, 16\) here; .*and \d+ more"),
        ({"vocab_size": 300}, r"embed\.weight is \(257, 8\) there and \(300, 8\) here\. Give the model the sizes"),
    ],
)
def test_another_shape_is_refused(source: Path, text: Path, tmp_path: Path, model: Any, says: str) -> None:
    with pytest.raises(UsageError, match=rf"init_from {source} \(step_0000000\d\): {says}"):
        train(recipe(text, model={"update": "gate", **model}, init_from=str(source)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused_and_the_way_out_works(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bpe = {"kind": "bpe", "vocab_size": 257}
    with pytest.raises(UsageError, match="its tokenizer is another one") as caught:
        train(recipe(text, tokenizer=bpe, init_from=str(source)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    given = f"{{kind: file, path: {source / 'tokenizer.json'}}}"
    assert str(caught.value).endswith(f"Set data.tokenizer to {given}")
    file = {"kind": "file", "path": str(source / "tokenizer.json")}
    begun(tmp_path / "run", recipe(text, model={"update": "gate"}, tokenizer=file, init_from=str(source)), monkeypatch)


def test_no_such_run_or_a_damaged_one(source: Path, text: Path, tmp_path: Path) -> None:
    for init_from, says in (
        (str(tmp_path / "gone"), "there is no run at"),
        ({"run": str(source), "checkpoint": "step_00000009"}, "has no checkpoint 'step_00000009': give best, last"),
    ):
        with pytest.raises(UsageError, match=says):
            train(recipe(text, init_from=init_from), tmp_path / "run")
    spoilt = tmp_path / "spoilt"
    shutil.copytree(source, spoilt)
    for path in checkpoint.listed(spoilt / "checkpoints"):
        file = path / "model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read"):
        train(recipe(text, model={"update": "gate"}, init_from=str(spoilt)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


OPTIMIZERS = {"adamw": {"kind": "adamw", "lr": 0.01}, "muon": {"kind": "muon", "lr": 0.02, "weight_decay": 0.5}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("named", [("update", "inject"), ("embed",), ("core",), ("final_norm",)])
def test_only_the_named_parts_learn(
    named: tuple[str, ...], optimizer: str, source: Path, text: Path, tmp_path: Path
) -> None:
    made = recipe(
        text,
        model={"update": "gate"},
        init_from=str(source),
        trainable=named,
        train={"optimizer": OPTIMIZERS[optimizer]},
    )
    run = tmp_path / "run"
    train(made, run)
    before = checkpoint.read_weights(source / "checkpoints" / record(run)["init_from"]["checkpoint"])
    learnt = {name for name, tensor in weights(run).items() if not torch.equal(tensor, before[name])}
    assert learnt == {name for name in before if name.split(".")[0] in named}
    state = checkpoint.load_train_state(checkpoint.listed(run / "checkpoints")[-1])
    assert sum(len(o["state"]) for o in state["optimizers"]) == len(learnt)
    assert load_recipe(run / "recipe.yaml").trainable == named


def test_all_parts_learn_where_none_is_named(source: Path, text: Path, tmp_path: Path) -> None:
    """The control of the test above."""
    train(recipe(text, model={"update": "gate"}, init_from=str(source)), tmp_path / "run")
    before = weights(source)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "run").items())


def test_the_step_of_a_part_is_that_of_full_training(text: Path, tmp_path: Path) -> None:
    """Freezing the rest takes the gradients of the rest away and changes none of the part's (fp64, no clipping)."""
    after = []
    for trainable in (None, ("update",)):
        made = recipe(text, model={"update": "gate"}, train={"clip": None}, trainable=trainable).resolved()
        trainer = Trainer(made, RunFolder(tmp_path), prepare(made.data), torch.device("cpu"), torch.float32)
        trainer.model.double()
        batch, _ = next(trainer.batches)
        trainer._step(batch, LoopPlan(0, 2))
        after.append(dict(trainer.model.state_dict()))
    for name, whole in after[0].items():
        difference = (whole - after[1][name]).abs().max().item()
        assert difference < 1e-12 if name.startswith("update.") else difference > 1e-6, (name, difference)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (["updat"], r"trainable: this model has no part 'updat'; did you mean 'update'\? Allowed: carry, coda, core"),
        (["head"], r"trainable=\['head'\] leaves nothing to train"),  # tied: the read-out is the embedding
        (["core.blocks"], r"this model has no part 'core\.blocks'"),
        (["update"], r"trainable=\['update'\] leaves nothing to train.* with parameters are embed, prelude, inject"),
        (["position", "state_init"], r"leaves nothing to train"),
        ([], r"trainable=\[\] leaves nothing to train"),
    ],
)
def test_names_that_cannot_be(named: list[str], says: str, text: Path) -> None:
    with pytest.raises(UsageError, match=says):
        recipe(text, trainable=named)
    with pytest.raises(UsageError, match=r"trainable"):
        recipe(text, trainable="update")


SHARED, EACH = {"kind": "prev_token"}, {"kind": "prev_token", "share": "per_layer", "beta": 0.1}
RESIDUAL, WITHOUT_GATES = {"kind": "prev_token", "kv": False}, {"kind": "prev_token", "gates": False}


@pytest.mark.parametrize("keys", ["per_loop", "anchor"])
@pytest.mark.parametrize("memory", [SHARED, EACH, RESIDUAL, WITHOUT_GATES, {"kind": "gated"}], ids=str)
def test_a_memory_is_one_part_wherever_it_lies(memory: Any, keys: str, text: Path) -> None:
    with_memory = recipe(text, model={"memory": memory, "keys": keys}, trainable=["memory"])
    with torch.device("meta"):
        model, bare = (RecurrentLM(made.model) for made in (with_memory, recipe(text, model={"keys": keys})))
    theirs = {name for name, _ in model.named_parameters()} - {name for name, _ in bare.named_parameters()}
    mark(model, ["memory"])
    assert {name for name, p in model.named_parameters() if p.requires_grad} == theirs
    assert any(name.startswith(("core.", "keys.")) for name in theirs)
    mark(model, ["core"])  # the core's share is the core's too
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith("core.")
    }


def test_a_memory_learns_beside_a_frozen_model(no_gate: Path, text: Path, tmp_path: Path) -> None:
    """A memory starts fresh in every block of another run's model; where it does not learn, it is what is missing."""
    model = {"memory": EACH}
    train(recipe(text, model=model, init_from=str(no_gate), trainable=["memory"]), tmp_path / "run")
    assert record(tmp_path / "run")["init_from"]["fresh"] == ["memory"]
    before, after = weights(no_gate), weights(tmp_path / "run")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(after["core.stack.layers.0.memory.alpha"], torch.ones(1))
    train(recipe(text, init_from=str(tmp_path / "run")), tmp_path / "back")
    assert record(tmp_path / "back")["init_from"]["left"] == ["memory"]
    with pytest.raises(UsageError, match=r"has no memory, and trainable leaves it frozen"):
        train(recipe(text, model=model, init_from=str(no_gate), trainable=["inject"]), tmp_path / "other")
    with pytest.raises(UsageError, match=r"trainable=\['memory'\] leaves nothing to train"):
        recipe(text, trainable=["memory"])


def test_an_untied_head_is_a_part(text: Path) -> None:
    assert recipe(text, model={"head": "untied"}, trainable=["head"]).trainable == ("head",)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stopped_and_resumed_is_uninterrupted(
    optimizer: str, source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    made = recipe(
        text,
        model={"update": "gate"},
        init_from=str(copy),
        trainable=["update", "inject"],
        train={"optimizer": OPTIMIZERS[optimizer]},
    )
    train(made, tmp_path / "straight")
    begun(tmp_path / "run", made, monkeypatch, at=4)
    shutil.rmtree(copy)  # from its first checkpoint on a run needs nothing of where it came from
    train(made, tmp_path / "run", resume=True)
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "straight"))
    for ours, theirs in zip(*(_optimizers(tmp_path / run) for run in ("run", "straight")), strict=True):
        assert ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
        for index, state in ours["state"].items():
            assert_equal(state, theirs["state"][index])
    ours, theirs = (_metrics(tmp_path / run) for run in ("run", "straight"))
    assert ours == theirs and any(line["type"] == "diagnostics" for line in ours)
    assert record(tmp_path / "run")["init_from"] == record(tmp_path / "straight")["init_from"]


def _optimizers(run: Path) -> list[dict[str, Any]]:
    return checkpoint.load_train_state(checkpoint.listed(run / "checkpoints")[-1])["optimizers"]


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "elapsed_s")} for line in lines]


def test_resumed_before_its_first_checkpoint_it_starts_from_the_same_weights(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    made = recipe(text, model={"update": "gate"}, init_from={"run": str(copy), "checkpoint": "last"})
    begun(tmp_path / "run", made, monkeypatch, at=2)
    assert not RunFolder(tmp_path / "run").checkpoints.exists()
    gone = checkpoint.listed(copy / "checkpoints")[-1]
    shutil.move(gone, tmp_path / gone.name)
    with pytest.raises(UsageError, match=rf"its weights are others than when .* was begun.*\({gone.name}\)"):
        train(made, tmp_path / "run", resume=True)
    shutil.move(tmp_path / gone.name, gone)
    train(made, tmp_path / "run", resume=True)
    train(made, tmp_path / "straight")
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "straight"))


def test_a_resumed_run_keeps_what_learns(source: Path, text: Path, tmp_path: Path) -> None:
    train(recipe(text, trainable=["inject"]), tmp_path / "run")
    with pytest.raises(UsageError, match=r"trainable: \['inject'\] in the run, \['core'\] now"):
        train(recipe(text, trainable=["core"]), tmp_path / "run", resume=True)
