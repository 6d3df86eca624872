"""Batches: random augmentation and dropout equal after a resume, equal numbers on all ranks, each validation sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.engine.small import CPU, Record, engine_of, loader_of, plain, points
from tests.support.ranks import run_ranks
from utils import distributed
from utils.common.errors import UserError
from utils.engine import EngineOptions, TrainingEngine
from utils.engine.loading import batches_from, each_sample_once

pytestmark = pytest.mark.usefixtures("one_thread")


class Noisy(Dataset[Any]):
    """Points with noise from PyTorch's and NumPy's generators, as random augmentation draws it."""

    def __init__(self) -> None:
        self.points = points(24)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.points[index]
        return inputs + 0.1 * torch.randn(4) + np.float32(0.1 * np.random.randn()), label


def train_with_noise(
    folder: Path, num_workers: int, *, seed: int | None = 0, resume: bool = False, stop_at: int = 0
) -> Record:
    """Train two epochs of six batches with noise and dropout; return the weights and the optimizer steps taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    torch.seed()  # what was drawn before must not matter
    trainer = TrainingEngine(
        model, CPU, EngineOptions(epochs=2, precision="off", tensorboard=False, seed=seed, quiet=True), run=folder
    )
    num_batches = 0

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal num_batches
        num_batches += outputs.requires_grad
        if num_batches == stop_at:
            trainer.stop_flag.set("test")
        return nn.functional.cross_entropy(outputs, labels)

    data = Noisy()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    trainer.train(
        DataLoader(data, 4, sampler=sampler, num_workers=num_workers),
        loader_of(points(8), 4),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        criterion,
        resume=resume,
    )
    return {"weights": plain(model.state_dict()), "step": trainer.progress.global_step}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_noise_and_dropout_are_the_same_after_a_resume_within_an_epoch(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.engine.stopping.STOP_CHECK_STEPS", 2)
    whole = train_with_noise(tmp_path / "whole", num_workers)
    stopped = train_with_noise(tmp_path / "halves", num_workers, stop_at=8)
    continued = train_with_noise(tmp_path / "halves", num_workers, resume=True)
    assert (stopped["step"], whole["step"], continued["step"]) == (8, 12, 12)
    for name, value in whole["weights"].items():
        np.testing.assert_array_equal(continued["weights"][name], value, err_msg=name)
    other = train_with_noise(tmp_path / "other", num_workers, seed=1)
    assert any((other["weights"][name] != value).any() for name, value in whole["weights"].items())


def test_each_epoch_draws_other_noise() -> None:
    loader = DataLoader(Noisy(), 4)
    first, second, again = ([inputs for inputs, _ in batches_from(loader, epoch, 0, seed=0)] for epoch in (0, 1, 0))
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def validate(folder: Path) -> Record:
    """Validate the same model on 7 samples, which two ranks cannot share equally; then on 1, which one rank has alone."""
    torch.manual_seed(0)
    trainer = engine_of(nn.Linear(4, 2), folder)
    trainer.begin(torch.optim.SGD(trainer.state.model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    return {str(number): trainer.validate(loader_of(points(number), 3))["val_loss"] for number in (7, 1)}


def train_unevenly(folder: Path) -> str:
    model = nn.Linear(4, 2)
    data = DataLoader(points(8 if distributed.rank() else 12), 4)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine_of(model, folder, epochs=1).train(data, data, optimizer, nn.CrossEntropyLoss())
    except UserError as error:
        return str(error)
    return "nothing"


def on_two_ranks(folder: Path) -> tuple[Record, str]:
    return validate(folder), train_unevenly(folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Record, str]]:
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("ranks"), timeout_s=20)


def test_samples_that_the_sampler_repeats_count_twice_in_validation(
    two_ranks: list[tuple[Record, str]], tmp_path: Path
) -> None:
    alone = validate(tmp_path)
    for found, _ in two_ranks:
        assert found == pytest.approx(alone, rel=1e-6)


def test_ranks_with_unequal_numbers_of_batches_hang(two_ranks: list[tuple[Record, str]]) -> None:
    for rank, (_, message) in enumerate(two_ranks):
        assert f"between 2 and 3 batches, {3 - rank} on rank {rank}" in message


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_sampler_trains_with_equal_shares_after_a_validation(drop_last: bool) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(points(7), num_replicas=2, rank=1, drop_last=drop_last)
    loader = DataLoader(points(7), 2, sampler=sampler)
    before, batches = list(sampler), len(loader)
    with each_sample_once(loader):
        within = list(sampler)
    assert within == before[:3]
    assert list(sampler) == before
    assert len(before) == (3 if drop_last else 4)
    assert len(loader) == batches == 2
