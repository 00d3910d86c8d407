"""The benchmark of a large import, on a model of one narrow layer."""

from __future__ import annotations

import json
from pathlib import Path

import import_large
import pytest


@pytest.mark.slow
def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 300}
    import_large.main(["--layers", "1", "--tokens", "3", "--folder", str(tmp_path)], toy)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["load_run"]["tokens"] == 3 and found["load_run"]["tokens_per_s"] > 0
    assert {"import", "load_folder", "load_run"} < found.keys()
    assert found["load_run_to_decode_alone"]["peak_over_weights_decoding"] > 0
    assert not list(tmp_path.iterdir())


def test_it_has_the_shape_of_ouro() -> None:
    from alcoda.interop.ouro import Ouro
    from alcoda.training.recipe import load_recipe

    theirs = Ouro().model(import_large.config(24, import_large.SHAPE))
    recipe = load_recipe("papers/ouro_1.4b").model
    for name in ("d_model", "n_heads", "d_ff", "n_core", "n_loops", "vocab_size", "seq_len"):
        assert theirs[name] == getattr(recipe, name), name
