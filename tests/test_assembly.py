"""The parts of a training as its options choose them."""

from __future__ import annotations

import pytest

from utils import assembly
from utils.train_config import TrainConfig


def test_the_trainer_plans_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.shared_memory_free_bytes", lambda: 120_000_000)
    config = TrainConfig(batch_size=4, img_size=640, prefetch=2, multi_scale=False)
    assert assembly.plan_workers(config, 8, 1).workers == 5
    larger = TrainConfig(batch_size=4, img_size=640, prefetch=2, multi_scale=True)
    assert assembly.plan_workers(larger, 8, 1).workers == 2  # sides up to 1.5 times
