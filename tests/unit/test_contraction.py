"""Path independence and the Jacobian of a loop, on loops whose matrix is known and against autograd's Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_trajectory import IDS, lm
from torch import Tensor

from alcoda.measure.contraction import N_PRODUCTS, contraction, path_independence
from alcoda.model.lm import RecurrentLM


def linear(model: RecurrentLM, matrix: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop is ``h = A h + e``."""
    monkeypatch.setattr(
        model, "loop", lambda begun, state, loop: state._replace(h_BTD=state.h_BTD @ matrix.T + begun.e_BTD)
    )


@pytest.mark.parametrize("largest", [0.9, 1.1])
def test_the_radius_of_a_known_loop(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    basis, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    values = torch.tensor([largest, 0.3, 0.2, 0.1, 0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
    linear(model, basis @ torch.diag(values) @ basis.T, monkeypatch)
    (found,) = contraction(model, IDS, [2], 5)
    assert found.radius["mean"] == pytest.approx(largest, rel=1e-9)
    assert found.radius["q10"] == pytest.approx(largest, rel=1e-9)
    assert found.expanding == (largest >= 1) and found.loop == 2 and found.n_tokens == len(IDS)
    # A random vector holds at most all of the largest direction.
    assert 0 < found.growth["mean"] <= largest**N_PRODUCTS


@pytest.mark.parametrize("fields", [{}, {"update": "gate"}, {"keys": "anchor"}, {"memory": "prev_token"}])
def test_it_is_the_block_of_the_whole_jacobian(fields: dict[str, Any]) -> None:
    model = lm(**fields)
    (found,) = contraction(model, IDS[:1], [1], 3)
    from alcoda.depth.trajectory import memories

    with torch.no_grad():
        begun, state = model.begin(IDS[:1], 3, memory_BTD=memories(model, IDS[:1], 3))
        state = model.loop(begun, state, 0)

    def step(h: Tensor) -> Tensor:
        return model.loop(begun, state._replace(h_BTD=h), 1).h_BTD

    jacobian = torch.autograd.functional.jacobian(step, state.h_BTD)[0, :, :, 0]  # [T, D, T, D]
    generator = torch.Generator().manual_seed(0)
    place = int(torch.randint(IDS.size(1), (1,), generator=generator))
    v = torch.randn(1, 8, dtype=torch.float64, generator=generator)[0]
    v, sizes = v / v.norm(), []
    for _ in range(N_PRODUCTS):
        v = jacobian[place, :, place] @ v
        sizes.append(float(v.norm()))
        v = v / v.norm()
    growth = torch.tensor(sizes, dtype=torch.float64).prod()
    assert found.growth["mean"] == pytest.approx(float(growth), rel=1e-8)


def test_paths_of_a_contracting_loop_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm(state_init="noise")
    linear(model, 0.5 * torch.eye(8, dtype=torch.float64), monkeypatch)
    found = path_independence(model, IDS, 12)
    assert "two draws" in found.how and [point.loop for point in found.by_loop] == list(range(13))
    first, last = found.by_loop[0], found.by_loop[-1]
    assert first.distance["mean"] > 0.5 and last.distance["mean"] < 1e-2
    assert last.kl < 1e-4 < first.kl and last.agree == 1
    # The distance itself halves a loop; what it is relative to goes to that of 2 e.
    ratio = found.by_loop[12].distance["q50"] / found.by_loop[11].distance["q50"]
    assert ratio == pytest.approx(0.5, rel=0.02)


def test_paths_of_a_loop_that_keeps_what_it_has_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    monkeypatch.setattr(model, "loop", lambda begun, state, loop: state)
    found = path_independence(model, IDS, 4)
    assert "starts from no noise" in found.how
    assert len({point.distance["mean"] for point in found.by_loop}) == 1 and found.by_loop[-1].distance["mean"] > 0.3


def test_the_model_is_as_before() -> None:
    model = lm(state_init="noise")
    before = torch.get_rng_state()
    first, second = (path_independence(model, IDS, 2) for _ in range(2))
    assert first == second and torch.equal(before, torch.get_rng_state())
    assert not any(part.training for part in model.modules())
