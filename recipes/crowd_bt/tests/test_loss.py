"""The loss and the model, against values computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from crowd_bt import train
from crowd_bt.comparisons import Comparison, Comparisons
from crowd_bt.loss import Answers, crowd_loss, pair_losses
from crowd_bt.metrics import validation_values
from crowd_bt.model import PairModel
from crowd_bt.options import TrainConfig
from crowd_bt.task import PairComparison
from torch import nn

from recipes.crowd_bt.tests.small import small_model
from yolo_seg_ddp.engine import Task

NUM_ITEMS = 12
DRAW_LOG = -1.0
NU = torch.tensor(DRAW_LOG)
ROWS = [
    Comparison("a", "b", 1, "x", 1.0, "ann", 0.9),
    Comparison("b", "a", 1, "x", 1.0, "bob", 0.6),
]


def by_hand(difference: float, label: int, eta: float) -> float:
    """Return the loss for DRAW_LOG: of a draw and, with η, of the two decided answers by Davidson
    1970.
    """
    first, second, nu = math.exp(difference / 2), math.exp(-difference / 2), math.exp(DRAW_LOG)
    if label == 0:
        return -math.log(nu / (first + second + nu))
    towards, against = (first, second) if label > 0 else (second, first)
    return -math.log((eta * towards + (1 - eta) * against) / (first + second + nu))


@pytest.mark.parametrize("eta", [0.1, 0.5, 0.8, 1.0])
def test_a_pair_costs_what_the_formula_says(eta: float) -> None:
    cases = [(d, label) for d in (-30.0, -0.3, 0.0, 2.0) for label in (-1, 0, 1)]
    difference, label = (
        torch.tensor(values, dtype=torch.float64) for values in zip(*cases, strict=True)
    )
    expected = [by_hand(d, sign, eta) for d, sign in cases]
    assert pair_losses(difference, label, torch.tensor(eta), NU).tolist() == pytest.approx(
        expected, rel=1e-6
    )
    three = torch.tensor([-1.0, 0.0, 1.0])  # a pair's answers: their probabilities add up to 1
    assert float(
        torch.exp(-pair_losses(torch.tensor(0.7), three, torch.tensor(eta), NU)).sum()
    ) == pytest.approx(1)
    # 1 draw of 3, and half a draw
    rows = [Comparison("a", "b", draw - 1, "x") for draw in (0, 0, 1)]
    equal = pair_losses(
        torch.zeros(1),
        torch.zeros(1),
        NU,
        torch.tensor(train.first_draw_log(Comparisons(rows, rows, {}))),
    )
    assert torch.exp(-equal).item() == pytest.approx(1.5 / 4)


@pytest.mark.parametrize(("label", "slope"), [(-1.0, 1.0), (1.0, 0.0), (0.0, 0.5)])
def test_a_wrong_order_is_pulled_back_however_far_it_is(label: float, slope: float) -> None:
    # With 1e-8 inside the logarithm the gradient of a trusted answer was 0 at d = 40.
    for eta in (torch.tensor(1.0), torch.sigmoid(torch.tensor(40.0, requires_grad=True))):
        difference = torch.tensor([40.0, 400.0], requires_grad=True)
        pair_losses(difference, torch.full((2,), label), eta, NU).sum().backward()
        assert difference.grad is not None
        assert difference.grad.tolist() == pytest.approx([slope] * 2, abs=1e-6)


def test_the_loss_is_the_weighted_mean_and_validation_computes_the_same() -> None:
    scores = {"a": 1.0, "b": 0.2, "c": 0.15}
    rows = [
        Comparison("a", "b", 1, "x", 2.0),
        Comparison("b", "a", 1, "x", 1.0),
        Comparison("b", "c", 0, "x", 3.0),
    ]
    difference = torch.tensor([0.8, -0.8, 0.05])
    answers = Answers(
        *(torch.tensor(values) for values in ([1.0, 1.0, 0.0], [2.0, 1.0, 3.0], [0, 0, 0]))
    )
    loss, values = crowd_loss(difference, torch.tensor(0.7), NU, answers)
    expected = (2 * by_hand(0.8, 1, 0.7) + by_hand(-0.8, 1, 0.7) + 3 * by_hand(0.05, 0, 0.7)) / 6
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(values["accuracy"]) == pytest.approx(5 / 6)  # the draw counts as right below 0.1
    found = validation_values(rows, scores, 0.7, DRAW_LOG)
    assert found["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["val_accuracy"] == pytest.approx(5 / 6)


@pytest.mark.parametrize(("reliability", "direction"), [(0.9, -1), (0.5, 0), (0.1, 1)])
def test_who_guesses_moves_no_quality_and_who_lies_moves_it_the_other_way(
    reliability: float, direction: int
) -> None:
    # A measured reliability of 0.5 is that of guesses; it once counted as half trust.
    config, found = (
        TrainConfig(learnable_eta=False),
        [replace(ROWS[0], annotator_reliability=reliability)],
    )
    model = PairModel(nn.Identity(), *train.eta_of(config, Comparisons(found, found, {})))  # type: ignore[arg-type]
    difference, who = torch.zeros(1, requires_grad=True), torch.zeros(1, dtype=torch.int64)
    loss, _ = crowd_loss(
        difference, model.eta, torch.tensor(-100.0), Answers(torch.ones(1), torch.ones(1), who)
    )
    loss.backward()
    assert difference.grad is not None
    assert float(difference.grad) == pytest.approx(direction * 0.4, abs=1e-6)  # (1 - 2 η) / 2


def test_bradley_terry_trusts_every_answer() -> None:
    # Its log once said so while the loss was that of Crowd-BT with the annotators' own
    # reliabilities.
    comparisons, losses = Comparisons(ROWS, ROWS, {}), {}
    for loss in ("bradley-terry", "crowd-bt"):
        model = PairModel(nn.Identity(), *train.eta_of(TrainConfig(loss=loss), comparisons))  # type: ignore[arg-type]
        answers = Answers(torch.ones(2), torch.ones(2), torch.tensor([0, 1]))
        outputs = torch.tensor([0.7, -0.7]), model.eta, NU
        losses[loss] = PairComparison(comparisons, {}).loss(outputs, answers)[0].item()
    assert losses["bradley-terry"] == pytest.approx(
        (by_hand(0.7, 1, 1.0) + by_hand(-0.7, 1, 1.0)) / 2, rel=1e-6
    )
    prior = -9 * (math.log(0.9) + math.log(0.6)) / 2
    expected = (by_hand(0.7, 1, 0.9) + by_hand(-0.7, 1, 0.6)) / 2 + prior
    assert losses["crowd-bt"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rows", [ROWS, [Comparison("a", "b", 1, "x")]])
def test_eta_lr_is_the_step_of_the_reliabilities_and_of_nothing_else(
    rows: list[Comparison],
) -> None:
    config = TrainConfig(lr=1e-3, eta_lr=0.2)
    model = small_model(*train.eta_of(config, Comparisons(rows, rows, {})))
    optimizer = train.build_optimizer(model, config)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    sum(weight.sum() for weight in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()  # Adam's first step is the learning rate
    moved = {
        name: float((weight.detach() - before[name]).abs().max())
        for name, weight in model.named_parameters()
    }
    assert moved.pop("eta_logit") == pytest.approx(0.2, rel=1e-3)
    assert moved.pop("draw_log") == pytest.approx(train.ANNOTATORS_LR, rel=1e-3)
    assert max(moved.values()) == pytest.approx(1e-3, rel=1e-2)


def test_training_finds_who_guesses_and_who_lies_without_gold_pairs() -> None:
    generator, honest = (
        np.random.default_rng(0),
        {"ann": 0.95, "bob": 0.95, "eve": 0.05, "guy": 0.5},
    )
    rows = []
    for name, reliability in honest.items():
        for _ in range(150):
            # the second is the better one
            one, other = sorted(generator.choice(NUM_ITEMS, 2, replace=False))
            is_right = generator.random() < reliability
            rows.append(
                Comparison(str(one), str(other), -1 if is_right else 1, "x", annotator_id=name)
            )
    comparisons, config = Comparisons(rows, rows, {}), TrainConfig(lr=0.05, eta_lr=0.1)
    scorer = nn.Sequential(nn.Linear(NUM_ITEMS, 1, bias=False), nn.Flatten(0))
    model = PairModel(scorer, *train.eta_of(config, comparisons))  # type: ignore[arg-type]
    task, optimizer = PairComparison(comparisons, {}), train.build_optimizer(model, config)
    pairs = torch.eye(NUM_ITEMS)[torch.tensor([[int(row.img1), int(row.img2)] for row in rows])]
    names = list(comparisons.measured)
    who = torch.tensor([names.index(row.annotator) for row in rows])
    answers = Answers(torch.tensor([float(row.label) for row in rows]), torch.ones(len(rows)), who)
    for _ in range(150):
        optimizer.zero_grad()
        task.loss(model(pairs), answers)[0].backward()
        optimizer.step()
    assert task.eta_of(model) == pytest.approx(honest, abs=0.12)
    qualities = scorer(torch.eye(NUM_ITEMS)).tolist()
    assert qualities == sorted(qualities)


def test_the_best_epoch_is_no_tie_while_all_differences_count_as_draws() -> None:
    # The accuracy, which once chose best_model.pt, is 0 for both: the first epoch stayed the best
    # one.
    options = train.engine_options(TrainConfig())
    wrong, right = (
        validation_values(ROWS[:1], {"a": quality, "b": 0.0}, 0.8, -3.0)
        for quality in (-0.09, 0.09)
    )
    assert wrong["val_accuracy"] == right["val_accuracy"] == 0
    assert not Task().is_score(options.monitor)
    assert right[options.monitor] < wrong[options.monitor]


def test_the_crowds_reliability_begins_where_it_is_told() -> None:
    for first, expected in ((0.8, 0.8), (0.5, 0.501), (1.0, 0.999)):
        assert float(small_model(first).eta) == pytest.approx(expected, abs=1e-6)


def test_both_images_of_a_pair_pass_the_network_together() -> None:
    model = small_model(dropout=False)
    sizes: list[int] = []
    model.scorer.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    pairs = torch.from_numpy(
        np.random.default_rng(0).normal(size=(5, 2, 3, 32, 32)).astype(np.float32)
    )
    difference, eta, _ = model.eval()(pairs)
    assert sizes == [10]
    assert float(eta) == pytest.approx(0.8)
    first, second = model.scorer(pairs[:, 0]), model.scorer(pairs[:, 1])
    assert torch.allclose(difference, first - second, atol=1e-5)
    assert difference.abs().max() > 0
