"""An imported model fine-tuned through an adapter of its core, and exported with the adapter in its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign import OURO, ouro_weights, write_folder
from helpers import Cli

import alcoda

IDS = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"there and here the {'ring ' * (n % 7)}and {n % 10 * 'an '}other." for n in range(400)))
    return f"text:{path}"


def test_fine_tuned_and_merged_on_export(run_cli: Cli, words: str, tmp_path: Path) -> None:
    base, tuned, out = tmp_path / "base", tmp_path / "tuned", tmp_path / "out"
    run_cli.ok("import", write_folder(tmp_path / "theirs", OURO, ouro_weights(), tokenizer=True), "--out", base)
    settings = {
        "model.sharing": "{kind: adapter, rank: 2}",
        "trainable": "[lora]",
        "depth": "uniform",
        "data.tokenizer.path": base / "tokenizer.json",
        "data.corpus": words,
        "train.batch_size": 2,
        "train.steps": 3,
        "train.optimizer.lr": 0.05,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = run_cli.ok("train", base / "recipe.yaml", "--init", base, *sets, "--out", tuned)
    assert "lora start fresh" in done.err and "parameters learn (lora)" in done.err
    before, after = alcoda.load(base), alcoda.load(tuned)
    ours, theirs = before.model.state_dict(), after.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()), "the weights stay"
    assert any(tensor.abs().max() > 0 for name, tensor in theirs.items() if name.endswith(".up"))
    run_cli.ok("export", tuned, out)
    merged = alcoda.load(out)
    assert merged.recipe.model == before.recipe.model and merged.model.state_dict().keys() == ours.keys()
    # The control: what was learned shows.
    assert (merged.logits(IDS) - before.logits(IDS)).abs().max() > 1e-2
    # The export is a model like any other: imported, it has no adapter and all works on it.
    run_cli.ok("import", out, "--out", tmp_path / "again")
    how = {"exit": "state:0.5", "max_tokens": 6}
    assert alcoda.load(tmp_path / "again").generate("the", **how) == after.generate("the", **how)
    # A packed run keeps the adapter beside the weights, to the bit, and can be trained on from.
    run_cli.ok("pack", tuned, "--out", tmp_path / "packed", "--dtype", "float32")
    packed = alcoda.load(tmp_path / "packed")
    assert packed.recipe.model.sharing.kind == "adapter" and torch.equal(packed.logits(IDS), after.logits(IDS))
    run_cli.ok("train", base / "recipe.yaml", "--init", tmp_path / "packed", *sets, "--out", tmp_path / "on")
    on = alcoda.load(tmp_path / "on").model.state_dict()
    assert all(torch.equal(tensor, on[name]) for name, tensor in ours.items())
    assert any(not torch.equal(tensor, on[name]) for name, tensor in theirs.items())
    with torch.no_grad():
        for loops in (1, 4, 6):  # in fp64, so that only the merged weights are rounded
            told, exact = (one.model.double()(IDS, loops) for one in (merged, after))
            torch.testing.assert_close(told, exact, rtol=0, atol=1e-5)
