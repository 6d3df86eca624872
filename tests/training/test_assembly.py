"""The parts of a training as its options choose them."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.common.errors import UserError
from utils.data.dataset_yaml import DatasetSpec
from utils.training import assembly, plan
from utils.training.config import TrainConfig


def test_the_trainer_plans_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.shared_memory_free_bytes", lambda: 120_000_000)
    config = TrainConfig(batch_size=4, img_size=640, prefetch=2, multi_scale=False)
    assert plan.plan_workers(config, 8, 1).workers == 5
    larger = TrainConfig(batch_size=4, img_size=640, prefetch=2, multi_scale=True)
    assert plan.plan_workers(larger, 8, 1).workers == 2  # sides up to 1.5 times


def test_a_packed_cache_that_was_asked_for_is_not_left_out_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assembly, "read_photos", lambda *_: [])
    monkeypatch.setattr(assembly, "open_images", lambda *_, **__: None)  # no room
    spec = DatasetSpec(tmp_path / "data.yaml", tmp_path, ("pole",), {})
    assert assembly.open_dataset(TrainConfig(), spec, "train", False, print).packed is None
    with pytest.raises(UserError, match=r"--cache packed: .*\.cache has no room for it"):
        assembly.open_dataset(TrainConfig(cache="packed"), spec, "train", False, print)
