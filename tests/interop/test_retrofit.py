"""A dense model made recurrent: which layers go where, the same model at one loop, a run to train on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dense_folders as theirs
import pytest
import torch

import alcoda
from alcoda.config import validate
from alcoda.data.config import DataConfig
from alcoda.errors import RunError, UsageError
from alcoda.files import read_json, write_json
from alcoda.interop import retrofit as surgery
from alcoda.interop.source import open_source
from alcoda.measure.text import streams_of
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.retrofitting import Losses
from alcoda.training.recipe import Recipe, load_recipe

IDS_BT = torch.randint(theirs.V, (2, 19), generator=torch.Generator().manual_seed(4))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama2.c checkpoint of four layers with its vocabulary."""
    folder = tmp_path_factory.mktemp("source")
    theirs.llama2c(folder / "model.bin")
    theirs.tokenizer_bin(folder / "tok.bin", theirs.vocabulary(with_bytes=False))
    return folder / "model.bin"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(
        "<|endoftext|>\n".join(f"there and here the {'ring ' * (n % 7)}and another thing.\n" for n in range(400))
    )
    return f"text:{path}"


# -- which layers go where --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "core_from", "expected"),
    [
        ((4, 4, 4), None, (range(4), range(4, 8), range(8, 12), ())),
        ((4, 6, 4), None, (range(4), range(6, 12), range(12, 16), (4, 5))),
        ((2, 3, 1), 4, (range(2), range(4, 7), range(11, 12), (2, 3, 7, 8, 9, 10))),
        ((0, 5, 0), None, (range(0), range(7, 12), range(12, 12), (0, 1, 2, 3, 4, 5, 6))),
        ((0, 12, 0), 0, (range(0), range(12), range(12, 12), ())),
    ],
)
def test_split(sizes: tuple[int, int, int], core_from: int | None, expected: tuple[Any, ...]) -> None:
    found = surgery.split(16 if sizes == (4, 6, 4) else 12, *sizes, core_from)
    assert (found.prelude, found.core, found.coda, found.dropped) == expected


def test_the_split_as_a_table() -> None:
    rows = surgery.split(12, 2, 3, 1, 4).rows()
    assert rows == [["prelude", "0-1", "2"], ["core", "4-6", "3"], ["coda", "11", "1"], ["dropped", "2-3, 7-10", "6"]]
    assert surgery.split(3, 0, 3, 0).rows()[0] == ["prelude", "-", "0"]
    assert str(surgery.split(3, 1, 1, 1)) == "prelude 0; core 1; coda 2; dropped -"


@pytest.mark.parametrize(
    ("sizes", "core_from", "message"),
    [
        ((4, 6, 4), None, r"--prelude 4 --core 6 --coda 4 are 14 layers, and the source has 12: .* to be 12 or less"),
        ((4, 0, 4), None, r"--core 0: .* needs 1 layer or more \(1 to 4 with prelude 4 and coda 4\)"),
        ((0, -1, 12), None, r"--core -1: the core is what loops, and needs 1 layer or more$"),
        ((-1, 4, 4), None, r"--prelude -1: 0 layers or more"),
        ((4, 4, -2), None, r"--coda -2: 0 layers or more"),
        ((2, 4, 2), 1, r"--core-from 1: a core of 4 layers between prelude and coda begins at layer 2 to 6"),
        ((2, 4, 2), 7, r"--core-from 7: .* begins at layer 2 to 6"),
    ],
)
def test_layers_that_there_are_not(sizes: tuple[int, int, int], core_from: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        surgery.split(12, *sizes, core_from)


# -- the model --------------------------------------------------------------------------------------------------------


def dense(**fields: Any) -> tuple[ModelConfig, RecurrentLM]:
    sizes = {"vocab_size": theirs.V, "seq_len": 24, "d_model": 16, "n_heads": 2, "n_core": 0, "n_loops": 1}
    config = validate(ModelConfig, {**sizes, "n_prelude": 4, "n_coda": 2, "init_std": 0.3, **fields})
    return config, RecurrentLM(config).init(0).eval()


def retrofitted(config: ModelConfig, model: RecurrentLM, layers: surgery.Split) -> RecurrentLM:
    weights = surgery.retrofit_weights(config, model.state_dict(), layers)
    return surgery.build(surgery.recurrent(config, layers, 3), weights)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block": {"bias": True, "norm": "layernorm", "mlp": "gelu"}, "position": "learned", "head": "untied"},
        {
            "block": {
                "window": {"kind": "pattern", "tokens": 3},
                "value_embed": {"kind": "table", "gate": False},
                "sandwich": "after_add",
            }
        },
    ],
)
@pytest.mark.parametrize("sizes", [(1, 4, 1), (0, 6, 0), (2, 2, 2)])
def test_with_all_layers_kept_one_loop_is_the_source(fields: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    config, model = dense(**fields)
    made = retrofitted(config, model, surgery.split(6, *sizes))
    with torch.no_grad():
        assert torch.equal(made(IDS_BT, 1), model(IDS_BT, 1))
        assert not torch.allclose(made(IDS_BT, 2), model(IDS_BT, 1), atol=1e-2)  # control: it loops
    assert surgery.check_identity(made, model, True).difference == 0


def test_with_layers_dropped_one_loop_is_the_source_without_them() -> None:
    config, model = dense()
    layers = surgery.split(6, 1, 2, 1)
    kept = surgery.build(
        surgery.without(config, layers), surgery.dense_weights(config, model.state_dict(), layers.kept)
    )
    made = retrofitted(config, model, layers)
    with torch.no_grad():
        assert torch.equal(made(IDS_BT, 1), kept(IDS_BT, 1))
        assert not torch.allclose(made(IDS_BT, 1), model(IDS_BT, 1), atol=1e-2)
    assert "the source without the dropped layers" in str(surgery.check_identity(made, kept, False))


def test_two_loops_are_the_core_twice() -> None:
    """Written out with the source's own blocks: prelude, the core's layers twice over, coda."""
    config, model = dense()
    made = retrofitted(config, model, surgery.split(6, 2, 3, 1))
    twice, _ = dense(n_prelude=9, n_coda=0)
    order = [0, 1, 2, 3, 4, 2, 3, 4, 5]
    unrolled = surgery.dense_weights(config, model.state_dict(), list(range(6)))
    weights = {name: x for name, x in unrolled.items() if not name.startswith("prelude.")}
    for to, layer in enumerate(order):
        prefix = f"prelude.layers.{layer}."
        weights |= {f"prelude.layers.{to}.{n[len(prefix) :]}": x for n, x in unrolled.items() if n.startswith(prefix)}
    with torch.no_grad():
        torch.testing.assert_close(made(IDS_BT, 2), surgery.build(twice, weights)(IDS_BT, 1), rtol=0, atol=1e-5)


def test_the_identity_check_can_fail() -> None:
    config, model = dense()
    made = retrofitted(config, model, surgery.split(6, 1, 4, 1))
    with torch.no_grad():
        made.core.stack.layers[2].mlp.down.weight.data = made.core.stack.layers[2].mlp.down.weight + 1e-3
    with pytest.raises(RunError, match=r"the identity check failed: .* nothing was written"):
        surgery.check_identity(made, model, True)


def test_the_prelude_learns_through_the_injection_from_its_zero_half() -> None:
    config, model = dense()
    made = retrofitted(config, model, surgery.split(6, 1, 4, 1)).train()
    made(IDS_BT, 2).square().mean().backward()
    half = made.inject.proj.weight.grad[:, config.d_model :]
    assert half.abs().max() > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_prelude": 1, "n_core": 2, "n_coda": 1, "n_loops": 2}, r"the source is recurrent already \(n_core=2\)"),
        ({"memory": "prev_token"}, r"the source has a memory \('prev_token'\)"),
    ],
)
def test_sources_that_are_not_dense(fields: dict[str, Any], message: str) -> None:
    config, _ = dense(**fields)
    with pytest.raises(UsageError, match=message):
        surgery.check_dense(config)


def test_layers_of_several_kinds_cannot_be_dropped() -> None:
    config, model = dense(block={"value_embed": {"kind": "table", "every": 2, "gate": False}})
    with pytest.raises(UsageError, match=r"the layers of the source are not all of one kind .* Keep all of them"):
        retrofitted(config, model, surgery.split(6, 1, 2, 2))


# -- the run ----------------------------------------------------------------------------------------------------------


def test_a_run_and_a_recipe_that_heals_it(source: Path, corpus: str, tmp_path: Path) -> None:
    made = alcoda.retrofit(source, tmp_path / "retro", 1, 2, 1, 2, data=corpus, seq_len=32, steps=4, tokens=500)
    assert made.identity.difference == 0 and made.identity.is_source
    assert made.losses is not None and made.recipe is not None
    before = made.losses
    assert before.retrofit[1] == before.source and list(before.retrofit) == [1, 2]
    lm = alcoda.load(tmp_path / "retro")
    dense = alcoda.load(source)
    assert torch.equal(lm.logits(IDS_BT, loops=1), dense.logits(IDS_BT))
    assert lm.loaded.run.record()["retrofit"]["split"]["core"] == [1, 2]
    healing = load_recipe(made.recipe)
    assert healing.depth.resolve(2, 4).mean_loops < 2 and healing.model.seq_len == 32
    result = alcoda.train(healing, tmp_path / "healed")
    assert result.status == "finished"
    after = alcoda.healed(tmp_path / "healed")
    assert (after.source, after.retrofit) == (before.source, before.retrofit)
    assert after.healed[2].loss < before.retrofit[2].loss
    assert after.healed[2].loss == pytest.approx(
        alcoda.evaluate(alcoda.load(tmp_path / "healed", dtype="float32"), [2], max_tokens=500).by_depth[0].loss,
        abs=1e-6,
    )
    assert Losses.from_json(after.to_json()) == after


def test_it_says_how_many_tokens_were_scored(source: Path, corpus: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"data": corpus, "seq_len": 32, "steps": 2}
    for name, tokens in (("some", 500), ("cap", 20_000), ("all", None)):
        losses = alcoda.retrofit(source, tmp_path / name, 1, 2, 1, 2, tokens=tokens, **how).losses
        assert losses is not None and losses.max_tokens == tokens
        run = alcoda.load(tmp_path / name).loaded
        (stream,) = streams_of(run, "valid").values()
        ids = stream.read(0, min(tokens or stream.n_tokens, stream.n_tokens))
        # By hand: each but the first is predicted, and what stands for no text is not scored.
        assert losses.tokens == int((run.tokenizer.token_bytes_V[ids[1:]] > 0).sum()) < len(ids)
        assert losses.split_tokens == stream.n_tokens and 500 < stream.n_tokens < 20_000
        kept = read_json(tmp_path / name / "retrofit.json")["losses"]
        assert (kept["tokens"], kept["max_tokens"]) == (losses.tokens, tokens)
        told = f"has {stream.n_tokens:,} tokens, fewer than the 20,000 asked for"
        assert (told in (losses.note or "")) == (name == "cap")


def test_healed_of_losses_that_are_damaged(source: Path, corpus: str, tmp_path: Path) -> None:
    made = alcoda.retrofit(source, tmp_path / "retro", 1, 2, 1, 2, data=corpus, seq_len=32, steps=2, tokens=200)
    assert made.recipe is not None
    alcoda.train(load_recipe(made.recipe), tmp_path / "healed")
    write_json(tmp_path / "retro/retrofit.json", {"losses": {"data": corpus}})
    with pytest.raises(RunError, match=r"retrofit\.json is damaged, or of another version"):
        alcoda.healed(tmp_path / "healed")


def test_without_a_corpus_there_is_a_run_and_no_recipe(source: Path, tmp_path: Path) -> None:
    made = alcoda.retrofit(source, tmp_path / "retro", 1, 1, 1)
    assert (made.losses, made.recipe, made.split.dropped) == (None, None, (1,))
    assert alcoda.load(tmp_path / "retro").n_loops == 4
    alcoda.pack(tmp_path / "retro", tmp_path / "packed")
    assert "A dense model made recurrent, not trained here: model.bin." in (tmp_path / "packed/README.md").read_text()
    with pytest.raises(UsageError, match=r"was not trained from a retrofit whose losses were measured"):
        alcoda.healed(tmp_path / "retro")


def test_a_dense_run_of_ours_is_a_source(corpus: str, tmp_path: Path) -> None:
    fields = {"n_prelude": 3, "n_core": 0, "n_coda": 0, "n_loops": 1, "d_model": 16, "n_heads": 2, "seq_len": 16}
    recipe = {
        "model": {**fields, "vocab_size": 257, "position": "learned"},
        "data": {"corpus": corpus, "tokenizer": "byte"},
        "train": {"steps": 1, "batch_size": 2, "dtype": "float32"},
        "eval": {"tokens": 100},
    }
    alcoda.train(validate(Recipe, recipe), tmp_path / "dense")
    how: dict[str, Any] = {"data": corpus, "tokens": 200, "steps": 2}
    with pytest.raises(UsageError, match=r"--seq-len 8: positions of the source are learned, for rows of 16"):
        alcoda.retrofit(tmp_path / "dense", tmp_path / "retro", 1, 1, 1, 2, seq_len=8, **how)
    made = alcoda.retrofit(tmp_path / "dense", tmp_path / "retro", 1, 1, 1, 2, **how)
    assert made.losses is not None and made.losses.seq_len == 16 and made.recipe is not None
    found, retro = open_source(tmp_path / "dense"), alcoda.load(tmp_path / "retro")
    assert found.about["layout"] == "alcoda" and found.tokenizer.sha256 == retro.tokenizer.sha256
    assert alcoda.train(load_recipe(made.recipe), tmp_path / "healed").status == "finished"


def test_what_is_refused_leaves_nothing(source: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    theirs.llama2c(alone / "model.bin")
    for how, message in (
        ({"source": alone / "model.bin"}, r"has no tokenizer, and a run is trained on text"),
        ({"loops": 0}, r"--loops 0: at least 1"),
        ({"steps": 1}, r"--steps 1: at least 2"),
        ({"data": f"text:{tmp_path / 'no.txt'}"}, r"no.txt"),
        ({"data": "text"}, r"corpus 'text'"),
        ({"data": "pystdlib", "seq_len": 0}, r"model.seq_len"),
        ({"core": 4}, r"are 6 layers, and the source has 4"),
        ({"source": tmp_path / "nothing"}, r"nothing"),
    ):
        asked = {"source": source, "out": tmp_path / "out", "prelude": 1, "core": 2, "coda": 1, **how}
        with pytest.raises(UsageError, match=message):
            alcoda.retrofit(**asked)
        assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(UsageError, match=r"--out .* is there already and not empty"):
        alcoda.retrofit(source, tmp_path / "out", 1, 2, 1)


def test_a_recurrent_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"already \(n_core=1\): a dense model is needed"):
        alcoda.retrofit("mini", tmp_path / "out", 1, 2, 1)


def test_the_recipe_says_where_its_text_comes_from(source: Path, corpus: str, tmp_path: Path) -> None:
    made = alcoda.retrofit(source, tmp_path / "retro", 1, 2, 1, data=corpus, max_bytes=9_000, tokens=200, steps=2)
    assert made.recipe is not None
    data = load_recipe(made.recipe).data
    assert data == DataConfig.model_validate({**data.model_dump(), "corpus": corpus, "max_bytes": 9_000})
    text = made.recipe.read_text()
    assert text.startswith("# Heals retro: alcoda train") and "d_model: 32" in text and "soft_cap" not in text
