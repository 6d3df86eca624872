"""A small classifier, its data and its engine, for the tests of the training loop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from utils import distributed
from utils.engine import EngineOptions, Epoch, Task, TrainingEngine

CPU = torch.device("cpu")


def points(count: int, seed: int = 0) -> TensorDataset:
    """Return points of two classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    return TensorDataset(torch.randn(count, 4, generator=generator) + 2 * labels[:, None] - 1, labels)


def classifier(norm: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Linear(8, 2)]
    return nn.Sequential(*layers)


def loader_of(data: TensorDataset, batch_size: int, shuffle: bool = True) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=distributed.world_size(), rank=distributed.rank(), shuffle=shuffle
    )
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def engine_of(model: nn.Module, folder: Path, **options: Any) -> TrainingEngine:
    return TrainingEngine(model, CPU, EngineOptions(precision="off", tensorboard=False), run=folder, **options)


def plain(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in state.items()}


class ScriptedTask(Task):
    """Reports the given values instead of evaluating; with `written` it notes (file, epoch) instead of saving."""

    def __init__(self, name: str, values: Iterable[float], written: list[tuple[str, int]] | None = None) -> None:
        super().__init__()
        self.name = name
        self.values = iter(values)
        self.written = written

    def evaluate(self, model: nn.Module, loader: Any, epoch: Epoch) -> dict[str, Any]:
        return {self.name: next(self.values)}

    def save(self, path: Path, model: nn.Module, info: dict[str, Any]) -> None:
        if self.written is None:
            super().save(path, model, info)
        else:
            self.written.append((path.name, info["epoch"]))
