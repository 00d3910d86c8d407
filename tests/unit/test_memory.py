"""Memory: sizes, sources and recall at known values; what is refused; weights with and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from alcoda.cli import app, main
from alcoda.config import validate
from alcoda.errors import RunError, UsageError
from alcoda.laws.shrink import shrink
from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger
from alcoda.model.lm import RecurrentLM
from alcoda.model.memory import PrevToken
from alcoda.model.prefill import ExactPrefill, InterleavedPrefill, IteratedPrefill, Reader, Reading, prefills, read_rows
from alcoda.model.shape import Shape
from alcoda.training import checkpoint
from alcoda.training.loop import train
from alcoda.training.passes import Chunked, Interleaved, Refined
from alcoda.training.recipe import Recipe, load_recipe

PAPER: dict[str, Any] = {
    "vocab_size": 32768,
    "seq_len": 2048,
    "d_model": 1280,
    "n_heads": 10,
    "d_ff": 5120,
    "n_prelude": 20,
    "n_core": 0,
    "n_coda": 0,
    "n_loops": 1,
    "head": "untied",
    "block": {
        "norm": {"kind": "rmsnorm", "weight": False},
        "attention": {"kind": "mha", "qk_norm": "after_rope"},
        "mlp": "relu2",
        "value_embed": {"kind": "table", "every": 1},
    },
}
"""LRT at 20 layers (papers.md 4.1)."""


def params(**memory: Any) -> int:
    config = validate(ModelConfig, {**PAPER, "memory": memory or "none"})
    with torch.device("meta"):
        built = sum(p.numel() for p in RecurrentLM(config).parameters())
    assert ledger(config).params == built
    return built


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_what_the_memory_adds_at_the_size_of_the_paper() -> None:
    """papers.md 4.1: 1.316 B; shared 0.25 % for the maps and 0.06 % for the gates; layerwise 5.0 %."""
    bare = params()
    # Blocks of 12 d^2, embedding and head, a table of V d a layer with a gate of 32 channels for each head.
    assert bare == 20 * (12 * 1280**2 + 32768 * 1280 + 32 * 10) + 2 * 32768 * 1280
    assert round(bare / 1e9, 3) == 1.316
    shared = params(kind="prev_token", beta=0.1) - bare
    assert shared == 2 * 1280**2 + 20 * (2 * 10 * 1280 + 3)
    assert 0.0025 < shared / bare < 0.0035
    own = params(kind="prev_token", beta=0.1, share="per_layer") - bare
    assert own == 20 * (2 * 1280**2 + 2 * 10 * 1280 + 3)
    assert own / bare == pytest.approx(0.050, abs=0.001)
    assert params(kind="gated") - bare == 20 * 10 * 1280
    assert params(kind="prev_token", kv=False) - bare == 20 * 2


# -- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "n_loops", "source"),
    [
        ((20, 0, 0), 1, ("prelude", 11)),  # 12 of 20
        ((24, 0, 0), 1, ("prelude", 13)),  # 14 of 24
        ((1, 0, 0), 1, ("prelude", 0)),
        ((1, 2, 1), 8, ("core", 0)),  # 11 of 18: in the loop
        ((6, 1, 3), 1, ("prelude", 5)),  # 6 of 10
        ((2, 1, 7), 1, ("coda", 2)),  # 6 of 10
        ((0, 1, 0), 1, ("core", 0)),
        ((0, 0, 5), 1, ("coda", 2)),
    ],
)
def test_the_default_source_is_the_upper_middle(
    blocks: tuple[int, int, int], n_loops: int, source: tuple[str, int]
) -> None:
    assert PrevToken().source_of(*blocks, n_loops) == source
    sizes = dict(zip(("n_prelude", "n_core", "n_coda"), blocks, strict=True))
    assert validate(ModelConfig, {**sizes, "n_loops": n_loops, "memory": "prev_token"}).memory_source == source


def test_named_sources() -> None:
    for name, source in {
        "prelude.1": ("prelude", 1),
        "core": ("core", 0),
        "coda.0": ("coda", 0),
        "final": ("final", 0),
    }.items():
        assert PrevToken(source=name).source_of(2, 1, 1, 4) == source
    assert validate(ModelConfig, {"memory": "gated"}).memory_source is None


def test_a_source_is_what_its_name_says() -> None:
    """Of each layer, by hooks: the norm of what it puts out."""
    for source in ("prelude.0", "prelude.1", "core", "coda.0", "coda.1", "final"):
        data = {"vocab_size": 20, "d_model": 16, "n_heads": 2, "n_prelude": 2, "n_core": 1, "n_coda": 2, "n_loops": 3}
        model = RecurrentLM(validate(ModelConfig, {**data, "memory": {"kind": "prev_token", "source": source}})).init(0)
        stage, _, layer = source.partition(".")
        part: Any = {"core": model.core, "final": model.final_norm}.get(stage)
        if part is None:
            part = getattr(model, stage).layers[int(layer)]
        elif stage == "core":
            part = model.core.at(0)
        seen: list[Any] = []
        part.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        readout = next(model.readouts(torch.arange(5)[None], [3]))
        made = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
        assert readout.source_BTD is not None
        expected = made / (made.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert torch.allclose(readout.source_BTD, expected, atol=1e-6), source


# -- recall -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lag", "mean_of", "expected"),
    [
        (1, 1, [0, 1, 2, 4, 8]),
        (2, 1, [0, 0, 1, 2, 4]),
        (1, 2, [0, 0.5, 1.5, 3, 6]),
        (2, 3, [0, 0, 1 / 3, 1, 7 / 3]),
    ],
)
def test_recall(lag: int, mean_of: int, expected: list[float]) -> None:
    """Tokens become 1, 2, 4, 8, 16; those before the text are 0."""
    shape = Shape(4, 2, 2, 8, 16, 10, False)
    memory = PrevToken(lag=lag, mean_of=mean_of).build(shape, 4, ("final", 0))
    assert memory.n_carried == lag + mean_of - 1
    became = torch.tensor([0.0] * memory.n_carried + [1, 2, 4, 8, 16])[None, :, None].expand(1, -1, 4)
    found = memory.recall(became)
    assert found.shape == (1, 5, 4)
    assert torch.allclose(found[0, :, 0], torch.tensor(expected, dtype=torch.float32))


# -- what is refused --------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[str], str]] = {
    "no such source": (
        ["model.memory.source=prelude.9"],
        r"model: memory\.source 'prelude\.9'; did you mean 'prelude\.0'\? Allowed: coda\.0, core, final, prelude\.0",
    ),
    "no core": (
        ["model.memory.source=core", "model.n_core=0", "model.n_loops=1"],
        r"memory\.source 'core'.* Allowed: coda\.0, final, prelude\.0",
    ),
    "nowhere": (
        ["model.memory.residual=false", "model.memory.kv=false"],
        r"memory\.residual=false and memory\.kv=false: the memory enters nowhere; set one to true",
    ),
    "beta": (
        ["model.memory.residual=false", "model.memory.beta=0.1"],
        r"memory\.beta is a term of the residual injection: set residual to true, or beta to null",
    ),
    "gamma": (
        ["model.memory.residual=false", "model.memory.gamma=0.2"],
        r"memory\.gamma is a weight of the residual injection: set residual to true, or remove it",
    ),
    "no lag": (["model.memory.lag=0"], r"lag: input should be greater than or equal to 1 \(got 0\)"),
    "subsets": (
        ["passes.kind=interleaved", "passes.subsets=17"],
        r"passes\.subsets=17 is more than model\.seq_len=16: .*; set it to 16 or less \(LRT: 2\)",
    ),
    "no subsets": (["passes.kind=interleaved", "passes.subsets=0"], r"passes\.subsets: input should be greater than"),
    "chunk": (
        ["passes.kind=chunked", "passes.tokens=16"],
        r"passes\.tokens=16 with model\.seq_len=16: a row would be one chunk.*; set it to less than 16",
    ),
    "one pass": (
        ["passes=one"],
        r"model\.memory 'prev_token' learns nothing from passes 'one', .*: set passes to interleaved, refined, chunked "
        r"or sequential, or model\.memory to none",
    ),
    "no memory": (
        ["model.memory=none", "passes=interleaved"],
        r"passes 'interleaved' with model\.memory 'none': there is no memory to fill; set passes to one, or model\.mem",
    ),
    "weights": (
        ["passes.kind=refined", "passes.passes=3", "passes.weights=[0.1, 0.3, 0.6]"],
        r"passes: passes\.weights=\[0\.1, 0\.3, 0\.6\]: 4 numbers are needed, one for the first pass and one for each "
        r"of the 3",
    ),
    "no weight": (
        ["passes.kind=refined", "passes.passes=1", "passes.weights=[0, 0]"],
        r"only the first pass, .* would count \(if any\)",
    ),
    "no weight that teaches": (
        ["passes.kind=refined", "passes.passes=1", "passes.weights=[1, 0]"],
        r"weights=\[1\.0, 0\.0\]: only the first pass, .*; give one of them a weight above 0",
    ),
    "weights without a sum": (
        ["passes.kind=refined", "passes.passes=1", "passes.weights=[1e308, 1e308]"],
        r"2 numbers are needed, .*, with a finite sum",
    ),
    "more passes than tokens": (
        ["passes.kind=refined", "passes.passes=17"],
        r"passes\.passes=17 is more than model\.seq_len=16: .*; set it to 16 or less",
    ),
    "before every row": (
        ["model.memory.lag=16"],
        r"memory\.lag=16 with mean_of=1 reaches back 16 tokens, and the last of seq_len=16 has 15 before it",
    ),
    "a mean that is never whole": (
        ["model.memory.lag=2", "model.memory.mean_of=15"],
        r"lag=2 with mean_of=15 reaches back 16 tokens",
    ),
    "projections of none": (
        ["model.memory.kv=false", "model.memory.share=per_layer"],
        r"memory\.share='per_layer' is of the projections .*memory\.kv=false has none: leave it out, or set kv to true",
    ),
    "gates of none": (
        ["model.memory.kv=false", "model.memory.gates=false"],
        r"memory\.gates=false is of the projections .*, or set kv to true",
    ),
    "compile": (
        ["train.compile=true"],
        r"train\.compile with passes 'interleaved': .*; set train\.compile to false",
    ),
    "no such prefill": (["eval.prefill=exakt"], r"unknown prefill 'exakt'; did you mean 'exact'\?"),
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i * i} of it\n" for i in range(80)))
    return path


def data(text: Path, memory: Any = "none", **more: Any) -> dict[str, Any]:
    model = {"vocab_size": 257, "seq_len": 16, "d_model": 8, "n_heads": 2, "n_core": 1, "n_loops": 2, "inject": "add"}
    return {
        "model": {**model, "memory": memory},
        "data": {"corpus": f"text:{text}", "tokenizer": "byte"},
        "train": {"steps": 2, "batch_size": 2, "dtype": "float32", "device": "cpu", "schedule": {"warmup_steps": 0}},
        "eval": {"every": 2, "tokens": 40},
        **more,
    }


@pytest.fixture
def recipe(tmp_path: Path, text: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data(text, {"kind": "prev_token"})))
    return path


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused(recipe: Path, name: str) -> None:
    settings, message = BAD[name]
    with pytest.raises(UsageError, match=message):
        load_recipe(recipe, settings).resolved()


@pytest.mark.parametrize("name", ["no such source", "one pass"])
def test_the_command_line_says_so_and_exits_with_2(
    recipe: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for setting in BAD[name][0] for word in ("--set", setting)]
    monkeypatch.setattr("sys.argv", ["alcoda", "cost", str(recipe), *settings])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert "Traceback" not in said.err and "set" in said.err + "set"


def test_auto_passes_and_prefill_follow_the_memory(recipe: Path) -> None:
    made = load_recipe(recipe).resolved()
    assert made.passes == Interleaved(subsets=2) and made.eval.prefill == InterleavedPrefill(subsets=2)
    four = load_recipe(recipe, ["passes.kind=interleaved", "passes.subsets=4"]).resolved()
    assert four.eval.prefill == InterleavedPrefill(subsets=4)
    plain = load_recipe(recipe, ["model.memory=none"]).resolved()
    assert plain.passes.kind == "one" and plain.resolved() == plain
    assert load_recipe(recipe, ["model.memory=gated"]).resolved().passes.kind == "one"
    assert set(prefills()) >= {"exact", "zero", "interleaved", "iterated"}
    assert prefills()["iterated"] == IteratedPrefill(tolerance=0.01, max_passes=8)


def test_a_memory_may_reach_as_far_as_a_row(recipe: Path) -> None:
    load_recipe(recipe, ["model.memory.lag=2", "model.memory.mean_of=14"]).resolved()
    load_recipe(recipe, ["passes.kind=refined", "passes.passes=16"]).resolved()


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.timeout(60)
def test_more_strides_than_tokens_are_exact_and_no_more_work(recipe: Path, padded: bool) -> None:
    """A pass over no tokens is none: a huge S would not end otherwise."""
    model = RecurrentLM(load_recipe(recipe).model).init(0).double().eval()
    ids_BT = torch.arange(24).view(2, 12) * 7 % 257
    live_BT = torch.ones(2, 12, dtype=torch.bool)
    live_BT[1, :3] = not padded
    pos_BT = (live_BT.cumsum(1) - 1).clamp(min=0) if padded else None
    read = {}
    for prefill in (ExactPrefill(), InterleavedPrefill(subsets=10**9), InterleavedPrefill(subsets=2)):
        reader, parts = Reader(model, 2), []
        for chunk in (slice(0, 5), slice(5, 12)):
            tags = (pos_BT[:, chunk], live_BT[:, chunk]) if pos_BT is not None else ()
            parts.append(reader.read(ids_BT[:, chunk], prefill, *tags))
        read[prefill] = torch.cat(parts, 1)[live_BT]
    exact, most, two = read.values()
    assert torch.allclose(most, exact, rtol=0, atol=1e-12)
    assert not torch.allclose(two, exact, rtol=0, atol=1e-6)


@torch.no_grad()
def test_what_fills_a_row_up_is_not_waited_for(recipe: Path) -> None:
    """A row that is cut is read as it is alone, whatever stands behind its text."""
    model = RecurrentLM(load_recipe(recipe).model).init(0).double().eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.6)  # so that tokens stop at passes of their own
    filled_BT = torch.arange(16).view(1, 16) * 7 % 257
    reading = Reading(IteratedPrefill(tolerance=0.3, max_passes=16))
    (alone_BTD,) = read_rows(model, filled_BT[:, :6], [2], reading)
    (filled_BTD,) = read_rows(model, filled_BT, [2], reading, n_text=6)
    (waited_BTD,) = read_rows(model, filled_BT, [2], reading)
    assert torch.allclose(filled_BTD[:, :6], alone_BTD, rtol=0, atol=1e-12)
    assert not torch.allclose(waited_BTD[:, :6], alone_BTD, rtol=0, atol=1e-3)  # the control


# -- passes -----------------------------------------------------------------------------------------------------------


def test_passes_and_their_weights() -> None:
    assert [(list(p.tokens), p.weight) for p in Interleaved(subsets=2).of(5)] == [
        ([0, 1, 2, 3, 4], pytest.approx(1 / 3)),
        ([0, 2, 4], pytest.approx(1 / 3)),
        ([1, 3], pytest.approx(1 / 3)),
    ]
    assert [p.weight for p in Refined(passes=2, weights=(1, 3, 6)).of(4)] == pytest.approx([0.1, 0.3, 0.6])
    assert [(list(p.tokens), list(p.over)) for p in Chunked(tokens=2).of(5)] == [
        ([0, 1], [0, 1, 2, 3, 4]),
        ([2, 3], [0, 1, 2, 3, 4]),
        ([4], [0, 1, 2, 3, 4]),
    ]
    assert [p.cost() for p in (Interleaved(subsets=4), Refined(passes=3), Chunked())] == [2, 4, 1]


# -- weights with and without a memory --------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run without a memory."""
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    train(validate(Recipe, data(text)), tmp_path / "run")
    return tmp_path / "run"


def test_a_model_with_a_memory_starts_from_one_without(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = validate(Recipe, data(text, "prev_token", init_from={"run": str(trained)}))
    capsys.readouterr()
    assert train(made, tmp_path / "new").status == "finished"
    said = capsys.readouterr().err
    # One part, wherever in the model it lies.
    assert ": memory start fresh, the run has none" in said


def test_resuming_with_a_memory_is_refused(trained: Path, text: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.memory"):
        train(validate(Recipe, data(text, "prev_token")), trained, True)


def test_weights_without_a_memory_do_not_fit_and_are_named(trained: Path, text: Path) -> None:
    model = RecurrentLM(validate(Recipe, data(text, "prev_token")).model)
    path = checkpoint.listed(trained / "checkpoints")[-1]
    with pytest.raises(
        RunError, match=r"does not fit the run's recipe: missing memory\.k\.weight; missing memory\.v\.w"
    ):
        checkpoint.load_weights(path, model)


# -- laws -------------------------------------------------------------------------------------------------------------


def test_a_shrunk_model_remembers_a_layer_that_it_has() -> None:
    config = validate(ModelConfig, {**PAPER, "memory": {"kind": "prev_token", "source": "prelude.11"}})
    small, changes = shrink(config)
    assert small.memory_source == ("prelude", 1)
    assert "memory.source prelude.11 -> prelude.1" in changes


def test_laws_hold_of_a_recipe_with_other_passes(recipe: Path) -> None:
    """The law that reads a recipe's passes, which resumes its training, and one that reads none of them; every law of
    recipes with a memory is in tests/laws."""
    passes = ("--set", "passes.kind=refined", "--set", "passes.passes=1")
    done = CliRunner().invoke(app, ["laws", str(recipe), *passes, "--law", "resume", "--law", "refinement"])
    assert done.exit_code == 0, done.output
    assert done.output.count("holds") == 2 and "BROKEN" not in done.output
