"""The learning rate and weight decay that a training starts with."""

from __future__ import annotations

import pytest

from utils.common.config import parse_config
from utils.training.config import TrainConfig
from utils.training.plan import plan_optimizer


def config_of(*arguments: str) -> TrainConfig:
    return parse_config(TrainConfig, "", list(arguments))


def test_the_optimizer_brings_its_own_rate_unless_one_is_given() -> None:
    for epochs in ("10", "1000"):
        plan = plan_optimizer(config_of("--epochs", epochs), 1, 1000, 8)
        assert (plan.name, plan.lr) == ("musgd", 0.01)
    adamw = plan_optimizer(config_of("--optimizer", "adamw"), 1, 1000, 8)
    assert adamw.name == "adamw"
    assert adamw.lr == pytest.approx(0.002 * 5 / 12, abs=1e-6)
    assert plan_optimizer(config_of("--optimizer", "adamw", "--lr", "0.02"), 1, 1000, 8).lr == 0.02


def test_rate_and_decay_follow_the_effective_batch() -> None:
    plan = plan_optimizer(config_of("--lr", "0.01", "--accumulate", "2", "--lr-scale", "linear"), 4, 1000, 8)
    assert plan.global_batch_size == 16 * 4 * 2
    assert plan.lr == pytest.approx(0.01 * 128 / 64)
    assert plan.weight_decay == pytest.approx(5e-4 * 128 / 64)
    assert "16 images x 4 processes x 2 batches per step = 128" in plan.arithmetic[0]
