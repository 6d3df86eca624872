"""The loss and the model, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from crowd_bt.loss import Answers, crowd_loss, fixed_eta, pair_losses
from crowd_bt.metrics import validation_values

from tests.recipes.crowd_bt.small import small_model


def by_hand(difference: float, label: int, eta: float) -> float:
    if label == 0:
        return 0.5 * abs(difference)
    sigma = 1 / (1 + math.exp(-difference * label))
    return -math.log(eta * sigma + (1 - eta) / 2 + 1e-8)


@pytest.mark.parametrize("eta", [0.5, 0.8, 1.0])
def test_a_pair_costs_what_the_formula_says(eta: float) -> None:
    cases = [(d, label) for d in (-30.0, -0.3, 0.0, 2.0) for label in (-1, 0, 1)]
    difference, label = (torch.tensor(values, dtype=torch.float64) for values in zip(*cases, strict=True))
    expected = [by_hand(d, sign, eta) for d, sign in cases]
    assert pair_losses(difference, label, torch.tensor(eta)).tolist() == pytest.approx(expected, rel=1e-6)


def test_the_loss_is_the_weighted_mean_and_validation_computes_the_same() -> None:
    from crowd_bt.comparisons import Comparison

    scores = {"a": 1.0, "b": 0.2, "c": 0.15}
    rows = [Comparison("a", "b", 1, "x", 2.0), Comparison("b", "a", 1, "x", 1.0), Comparison("b", "c", 0, "x", 3.0)]
    difference = torch.tensor([0.8, -0.8, 0.05])
    answers = Answers(*(torch.tensor(values) for values in ([1.0, 1.0, 0.0], [2.0, 1.0, 3.0], [1.0, 1.0, 1.0])))
    loss, values = crowd_loss(difference, torch.tensor(0.7), answers)
    expected = (2 * by_hand(0.8, 1, 0.7) + by_hand(-0.8, 1, 0.7) + 3 * by_hand(0.05, 0, 0.7)) / 6
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(values["accuracy"]) == pytest.approx(5 / 6)  # the draw counts as right below 0.1
    found = validation_values(rows, scores, 0.7)
    assert found["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["val_accuracy"] == pytest.approx(5 / 6)


def test_annotations_of_their_own_reliability_are_clamped() -> None:
    difference, label = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
    answers = Answers(label, torch.ones(2), torch.tensor([0.3, 0.9]))
    assert fixed_eta(answers.reliability).tolist() == pytest.approx([0.5, 0.9])
    expected = (by_hand(1, -1, 0.5) + by_hand(1, 1, 0.9)) / 2
    assert float(crowd_loss(difference, None, answers)[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("first", "expected"), [(0.8, 0.8), (0.5, 0.501), (1.0, 0.999)])
def test_the_crowds_reliability_begins_where_it_is_told(first: float, expected: float) -> None:
    assert float(small_model(first).eta or 0) == pytest.approx(expected, abs=1e-6)


def test_both_images_of_a_pair_pass_the_network_together() -> None:
    model = small_model(dropout=False)
    sizes: list[int] = []
    model.scorer.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    pairs = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 2, 3, 32, 32)).astype(np.float32))
    difference, eta = model.eval()(pairs)
    assert sizes == [10]
    assert eta is not None
    first, second = model.scorer(pairs[:, 0]), model.scorer(pairs[:, 1])
    assert torch.allclose(difference, first - second, atol=1e-5)
    assert difference.abs().max() > 0
