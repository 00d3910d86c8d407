"""The probe: labels, its fit, the area under the curve."""

from __future__ import annotations

import numpy as np
import torch

from alcoda.measure.probe import auc, labelled, logistic

# -- the probe --------------------------------------------------------------------------------------------------------


def test_labels() -> None:
    argmax_RN = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 2]])
    assert labelled(argmax_RN, torch.zeros(3, 3), "argmax_changes", 0.0).tolist() == [
        [False, True, False],
        [False, True, False],
    ]
    nats_RN = torch.tensor([[3.0, 1.0, 2.0], [2.95, 2.0, 1.0], [2.8, 0.95, 1.0]])
    assert labelled(argmax_RN, nats_RN, "loss_falls", 0.1).tolist() == [[True, False, True], [True, True, False]]
    assert labelled(argmax_RN, nats_RN, "loss_falls", 0.0).tolist() == [[True, True, True], [True, True, False]]


def test_area_under_the_curve() -> None:
    true = np.array([False, True, False, True])
    assert auc(np.array([0.1, 0.9, 0.2, 0.8]), true) == 1
    assert auc(np.array([0.1, 0.2, 0.3, 0.4]), true) == 0.75
    assert auc(np.array([0.5, 0.5, 0.5, 0.5]), true) == 0.5
    assert auc(np.array([0.1, 0.2]), np.array([True, True])) is None


def test_logistic_finds_what_made_the_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    x_NRD = torch.randn(20_000, 2, 3, generator=generator)
    weight_D, bias_R = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, -1.0])
    true_NR = torch.rand(20_000, 2, generator=generator) < torch.sigmoid(x_NRD @ weight_D + bias_R)
    found_D, found_R = logistic(x_NRD, true_NR)
    assert torch.allclose(found_D, weight_D, atol=0.06) and torch.allclose(found_R, bias_R, atol=0.06)
    again_D, _ = logistic(x_NRD, true_NR)
    assert torch.equal(found_D, again_D)


def test_a_separable_label_ends() -> None:
    x_NRD = torch.linspace(-1, 1, 100).view(-1, 1, 1)
    found_D, _ = logistic(x_NRD, x_NRD[..., 0] > 0)
    assert 5 < float(found_D) < 1000
