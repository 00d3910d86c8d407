"""`alcoda retrofit`, `alcoda train` of the recipe that it writes, `alcoda healed`; and `alcoda import` of one file."""

from __future__ import annotations

from pathlib import Path

import dense_folders as theirs
import pytest
from helpers import Cli


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    theirs.llama2c(folder / "model.bin")
    theirs.tokenizer_bin(folder / "tok.bin", theirs.vocabulary(with_bytes=False))
    return folder / "model.bin"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    rows = (f"there and here the {'ring ' * (n % 7)}and {n % 10 * 'an '}other thing.\n" for n in range(400))
    path.write_text("<|endoftext|>\n".join(rows))
    return f"text:{path}"


def test_from_a_dense_file_to_a_healed_model(run_cli: Cli, source: Path, words: str, tmp_path: Path) -> None:
    out, healed = tmp_path / "retro", tmp_path / "healed"
    sizes = ("--prelude", 1, "--core", 2, "--coda", 1, "--loops", 2, "--seq-len", 32, "--steps", 4, "--tokens", 500)
    done = run_cli.ok("retrofit", source, *sizes, "--data", words, "--out", out)
    for text in ("│ core    │ 1-2 ", "identity check: at 1 loop its logits are those of the source", "retrofit, 2"):
        assert text in done.out
    assert f"next: alcoda train {out / 'heal.yaml'} --out {out}-healed" in done.err
    assert done.json["identity"]["difference"] == 0
    assert done.json["losses"]["retrofit"]["1"] == done.json["losses"]["source"]
    scored = done.json["losses"]["tokens"]
    assert scored < 500 and f"valid split ({scored} tokens scored)" in done.out and "fewer than" not in done.err
    run_cli.ok("train", out / "heal.yaml", "--out", healed)
    after = run_cli.ok("healed", healed)
    assert "healed, 2" in after.out and after.json["retrofit"] == done.json["losses"]["retrofit"]
    assert list(after.json["healed"]) == ["1", "2"]
    assert after.json["tokens"] == scored and f"({scored} tokens scored)" in after.out
    assert run_cli.ok("eval", healed, "--loops", "1,2,3", "--json").json["bits_per_byte"].keys() == {"1", "2", "3"}
    assert run_cli.ok("eval", out, "--json").json["bits_per_byte"].keys() == {"1", "2"}
    refused = run_cli.refused(
        "healed", out, says=("was not trained from a retrofit", "alcoda retrofit SRC --data CORPUS")
    )
    assert "heal.yaml" in refused


def test_a_split_of_fewer_tokens_than_were_asked_for(run_cli: Cli, source: Path, words: str, tmp_path: Path) -> None:
    sizes = ("--prelude", 1, "--core", 2, "--coda", 1, "--loops", 1, "--seq-len", 32, "--steps", 2)
    done = run_cli.ok("retrofit", source, *sizes, "--data", words, "--out", tmp_path / "retro")
    losses = done.json["losses"]
    assert losses["max_tokens"] == 20_000 and losses["tokens"] < losses["split_tokens"] < 20_000
    said = " ".join(done.err.split())
    assert f"has {losses['split_tokens']:,} tokens, fewer than the 20,000 asked for (--tokens)" in said


def test_layers_that_there_are_not(run_cli: Cli, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_cli.refused(
        "retrofit",
        source,
        "--prelude",
        4,
        "--core",
        6,
        "--coda",
        4,
        "--out",
        out,
        says=("14 layers", "has 4", "4 or less"),
    )
    run_cli.refused("retrofit", source, "--prelude", 1, "--core", 0, "--coda", 1, "--out", out, says=("1 to 2",))
    run_cli.refused("retrofit", tmp_path, "--prelude", 1, "--core", 1, "--coda", 1, "--out", out, says=("recipe.yaml",))
    assert not out.exists()


def test_another_architecture(run_cli: Cli, tmp_path: Path) -> None:
    folder = theirs.write(tmp_path / "gpt2", "llama", None)
    (folder / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    run_cli.refused(
        "retrofit",
        folder,
        *("--prelude", 1, "--core", 2, "--coda", 1, "--out", tmp_path / "out"),
        says=("model_type 'gpt2'", "Known: ", "llama or mistral or qwen2 or qwen3"),
    )


def test_one_file_is_imported_and_generates(run_cli: Cli, source: Path, tmp_path: Path) -> None:
    done = run_cli.ok("import", source, "--out", tmp_path / "run", "--json")
    assert done.json["layout"] == "llama2.c" and done.json["has_tokenizer"]
    ask = ("--prompt", "the ", "--max-tokens", 5, "--json")
    from_run, from_file = (run_cli.ok("generate", path, *ask).json["text"] for path in (tmp_path / "run", source))
    assert from_run == from_file != ""
    run_cli.refused("import", source, "--out", tmp_path / "two", "--eot", "x", says=("says itself that it is '<s>'",))
