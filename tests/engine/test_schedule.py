"""Learning rate and momentum as pure functions of the step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from utils.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps

SPEC = ScheduleSpec(lr=0.1, total_steps=100, warmup_steps=10, final_lr_fraction=0.05, warmup_bias_lr=0.3)


def optimizer_of(kind: type[torch.optim.SGD | torch.optim.AdamW]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "weight"},
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "bias"},
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "head", "lr_multiplier": 10.0},
    ]
    return kind(groups, lr=1.0)


def test_the_peak_comes_with_the_last_step_of_the_warm_up() -> None:
    assert SPEC.lr_at(9) == pytest.approx(SPEC.cosine_at(9))
    assert max(range(100), key=SPEC.lr_at) == 9
    assert SPEC.lr_at(10) == SPEC.cosine_at(10)
    assert SPEC.lr_at(0) == pytest.approx(0.1 * SPEC.lr_at(9), rel=0.03)


def test_the_end_is_the_final_fraction_and_stays_there() -> None:
    assert SPEC.lr_at(100) == pytest.approx(0.1 * 0.05)
    assert SPEC.lr_at(99) == pytest.approx(SPEC.lr_at(100), rel=0.01)
    assert SPEC.lr_at(5000) == SPEC.lr_at(100)
    assert ScheduleSpec(lr=0.1, total_steps=100).lr_at(100) == pytest.approx(0.001)


def test_half_way_is_half_the_cosine() -> None:
    assert SPEC.cosine_at(0) == pytest.approx(0.1)
    assert SPEC.cosine_at(50) == pytest.approx(0.1 * (0.05 + 0.95 / 2))
    assert SPEC.cosine_at(25) == pytest.approx(0.1 * (0.05 + 0.95 * (1 + math.sqrt(0.5)) / 2))


def test_the_warm_up_climbs_and_the_cosine_falls() -> None:
    rates = [SPEC.lr_at(step) for step in range(101)]
    assert all(later > earlier for earlier, later in pairwise(rates[:10]))
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))


def test_biases_begin_high_and_meet_the_others_after_the_warm_up() -> None:
    biases = [SPEC.lr_at(step, is_bias=True) for step in range(12)]
    assert biases[0] == pytest.approx(0.3 + (SPEC.cosine_at(0) - 0.3) / 10)
    assert all(later < earlier for earlier, later in pairwise(biases[:10]))
    assert biases[9:] == pytest.approx([SPEC.lr_at(step) for step in (9, 10, 11)])


def test_momentum_warms_up_to_its_value() -> None:
    values = [SPEC.momentum_at(step) for step in range(12)]
    assert values[0] == pytest.approx(0.8 + 0.137 / 10)
    assert values[9:] == pytest.approx([0.937] * 3)
    assert values == sorted(values)


def test_without_a_warm_up_the_first_step_is_the_peak() -> None:
    spec = ScheduleSpec(lr=0.2, total_steps=10)
    assert spec.lr_at(0) == pytest.approx(0.2)
    assert spec.momentum_at(0) == 0.937


def test_the_optimizer_gets_what_the_step_says_whatever_came_before() -> None:
    jumped, walked = optimizer_of(torch.optim.SGD), optimizer_of(torch.optim.SGD)
    for step in range(38):
        StepSchedule(walked, SPEC).step_update(step)
    StepSchedule(jumped, SPEC).step_update(80)
    StepSchedule(jumped, SPEC).step_update(37)
    assert [group["lr"] for group in jumped.param_groups] == [group["lr"] for group in walked.param_groups]
    assert [group["lr"] for group in jumped.param_groups] == [SPEC.lr_at(37), SPEC.lr_at(37), 10 * SPEC.lr_at(37)]


def test_groups_named_bias_follow_the_bias_warm_up_and_multipliers_count() -> None:
    optimizer = optimizer_of(torch.optim.SGD)
    StepSchedule(optimizer, SPEC).step_update(3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [SPEC.lr_at(3), SPEC.lr_at(3, is_bias=True), 10 * SPEC.lr_at(3)]
    )
    assert {group["momentum"] for group in optimizer.param_groups} == {SPEC.momentum_at(3)}


def test_adam_takes_the_momentum_as_its_first_beta() -> None:
    optimizer = optimizer_of(torch.optim.AdamW)
    StepSchedule(optimizer, SPEC).step_update(0)
    assert {group["betas"] for group in optimizer.param_groups} == {(SPEC.momentum_at(0), 0.999)}


@pytest.mark.parametrize(
    ("warmup_epochs", "steps_per_epoch", "num_epochs", "expected"),
    [(3, 100, 100, 300), (3, 100, 10, 100), (0.5, 100, 100, 50), (0, 100, 100, 0), (3, 1, 2, 1)],
)
def test_the_warm_up_never_takes_more_than_a_tenth(
    warmup_epochs: float, steps_per_epoch: int, num_epochs: int, expected: int
) -> None:
    assert warmup_steps(warmup_epochs, steps_per_epoch, num_epochs) == expected
