"""Known sizes and prices: the papers' parameter totals and FLOP ratios (papers.md 1.1 to 1.3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.cost import Ledger, TrainingDepth, ledger
from alcoda.training.recipe import load_recipe

PAPERS = Path(__file__).parents[2] / "recipes" / "papers"


def ledger_of(name: str, loops: int | None = None) -> Ledger:
    return load_recipe(PAPERS / f"{name}.yaml").ledger(loops)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("grt_medium_isoflop", 171_073_536),  # the released checkpoint's card
        ("grt_large_isoparam", 781_780_480),  # the released checkpoint's card
        ("grt_large_isoflop", 290_196_480),
        ("gpt2_small", 124_373_760),
        ("gpt2_medium", 354_599_936),
        ("gpt2_large", 773_582_080),
    ],
)
def test_parameters_of_the_papers_models(name: str, params: int) -> None:
    assert ledger_of(name).params == params


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2_small", 124.4),
        ("gpt2_medium", 354.6),
        ("gpt2_large", 773.6),
        ("grt_small_isoflop", 63.6),
        ("grt_medium_isoflop", 171.1),
        ("grt_large_isoflop", 290.2),
        ("grt_small_isoparam", 127.3),
        ("grt_medium_isoparam", 359.8),
        ("grt_large_isoparam", 781.8),
        ("elastic_135m", 134.6),
    ],
)
def test_rounded_parameters_of_the_papers_models(name: str, millions: float) -> None:
    assert round(ledger_of(name).params / 1e6, 1) == millions


def test_parameters_by_the_formula_of_the_released_checkpoints() -> None:
    """n_blocks (12 d^2 + 2 d) + 50304 d + 1024 d + d + 5 d^2 + 5 d (papers.md 1.1)."""
    for size, d, n_blocks in [("small", 768, 3), ("medium", 1024, 9), ("large", 1280, 11)]:
        expected = n_blocks * (12 * d * d + 2 * d) + 50304 * d + 1024 * d + d + 5 * d * d + 5 * d
        assert ledger_of(f"grt_{size}_isoflop").params == expected


def without_head(found: Ledger) -> int:
    return sum(term.forward_flops for term in found.terms if term.name != "head")


@pytest.mark.parametrize(("size", "ratio"), [("small", 1.284), ("medium", 1.060), ("large", 1.061)])
def test_isoflop_models_cost_more_than_their_dense_twins(size: str, ratio: float) -> None:
    grt, dense = ledger_of(f"grt_{size}_isoflop"), ledger_of(f"gpt2_{size}")
    assert round(without_head(grt) / without_head(dense), 3) == ratio


def test_with_the_head_the_small_ratio_is_1_207() -> None:
    grt, dense = ledger_of("grt_small_isoflop"), ledger_of("gpt2_small")
    assert round(grt.forward_flops_per_token / dense.forward_flops_per_token, 3) == 1.207


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_flops_by_the_papers_formula(size: str) -> None:
    """(n_pre + n_rec R + n_coda) (24 d^2 + 4 S d) + R 10 d^2 (papers.md 1.3)."""
    model = load_recipe(PAPERS / f"grt_{size}_isoflop.yaml").model
    d, r = model.d_model, model.n_loops
    n_blocks = model.n_prelude + model.n_core * r + model.n_coda
    expected = n_blocks * (24 * d * d + 4 * model.seq_len * d) + r * 10 * d * d
    assert without_head(ledger(model)) == expected


@pytest.mark.parametrize(("size", "loops"), [("small", 10), ("medium", 4), ("large", 6)])
def test_uniform_training_costs_the_mean_of_one_to_r_loops(size: str, loops: int) -> None:
    found = ledger_of(f"grt_{size}_isoflop")
    assert found.training_loops == pytest.approx((loops + 1) / 2, rel=1e-12)
    assert found.training_grad_loops == found.training_loops
    low, high = ledger_of(f"grt_{size}_isoflop", 1), ledger_of(f"grt_{size}_isoflop", loops)
    mean = 3 * (low.forward_flops_per_token + high.forward_flops_per_token) / 2
    assert found.training_flops_per_token == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(("size", "ratio"), [("small", 0.78), ("medium", 0.73), ("large", 0.69)])
def test_training_costs_less_than_the_dense_twin(size: str, ratio: float) -> None:
    """papers.md 1.2, in the paper's count, which leaves the head out."""
    grt, dense = ledger_of(f"grt_{size}_isoflop"), ledger_of(f"gpt2_{size}")

    def training(found: Ledger) -> float:
        return sum(term.training_flops for term in found.terms if term.name != "head")

    # Medium is 0.7247, which papers.md gives as 0.73.
    assert training(grt) / training(dense) == pytest.approx(ratio, abs=0.006)


def test_key_bytes_of_gpt2_small() -> None:
    # 12 layers, keys and values, 768 numbers of 2 bytes; a loop has slots of its own.
    assert ledger_of("gpt2_small").kv_bytes_per_token == 12 * 2 * 768 * 2
    assert ledger_of("grt_small_isoflop").kv_bytes_per_token == (1 + 10 + 1) * 2 * 768 * 2


def test_effective_parameters_count_every_loop() -> None:
    one, four = ledger_of("grt_medium_isoflop", 1), ledger_of("grt_medium_isoflop", 4)
    looped = 5 * (12 * 1024**2 + 2 * 1024) + 5 * 1024**2 + 5 * 1024
    assert one.effective_params == one.params == four.params
    assert four.effective_params == four.params + 3 * looped


def test_passes_of_free_and_recomputed_loops() -> None:
    model = ModelConfig(n_loops=8)

    def core(depth: TrainingDepth) -> float:
        return sum(t.training_flops for t in ledger(model, 8, depth).terms if t.name.startswith("core."))

    one = core(TrainingDepth(1, 0))
    assert core(TrainingDepth(8, 8)) == 24 * one
    assert core(TrainingDepth(8, 3)) == (8 + 2 * 3) * one
    assert core(TrainingDepth(8, 3, recompute=True)) == (8 + 3 * 3) * one


def test_a_depth_that_the_model_cannot_run_is_refused() -> None:
    with pytest.raises(UsageError, match="loops=0: at least 1 loop is needed"):
        ledger(ModelConfig(), 0)
    with pytest.raises(UsageError, match="loops=2: this model is dense"):
        ledger_of("gpt2_small", 2)
