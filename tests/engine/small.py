"""A small classifier, its data and its engine, for the tests of the training loop."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from yolo_seg_ddp.engine import EngineOptions, Epoch, Task, TrainingEngine
from yolo_seg_ddp.engine.schedule import ScheduleSpec, StepSchedule
from yolo_seg_ddp.utils import distributed

CPU = torch.device("cpu")
Record = dict[str, Any]


def points(count: int, seed: int = 0) -> TensorDataset:
    """Return points of two classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    return TensorDataset(
        torch.randn(count, 4, generator=generator) + 2 * labels[:, None] - 1, labels
    )


def classifier(norm: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [
        nn.Linear(4, 8),
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Linear(8, 2),
    ]
    return nn.Sequential(*layers)


def loader_of(data: TensorDataset, batch_size: int, shuffle: bool = True) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=distributed.world_size(), rank=distributed.rank(), shuffle=shuffle
    )
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def engine_of(
    model: nn.Module,
    folder: Path,
    *,
    task: Task | None = None,
    manifest: Record | None = None,
    **options: Any,
) -> TrainingEngine:
    options = {
        "precision": "off",
        "tensorboard": False,
        "ema": "ema_decay" in options,
        "patience": 0,
        **options,
    }
    return TrainingEngine(
        model, CPU, EngineOptions(**options), task=task, run=folder, manifest=manifest
    )


def fit(
    model: nn.Module,
    folder: Path,
    train: Any,
    val: Any,
    criterion: Any = nn.functional.cross_entropy,
    scheduler: Any = None,
    *,
    lr: float = 0.1,
    resume: bool = False,
    **options: Any,
) -> TrainingEngine:
    """Train by plain SGD; return the engine."""
    engine = engine_of(model, folder, **options)
    engine.train(
        train, val, torch.optim.SGD(model.parameters(), lr=lr), criterion, scheduler, resume=resume
    )
    return engine


class CountedLoss:
    """The cross-entropy, which counts the training's batches and calls `action` at number `at`."""

    def __init__(self, at: int | None, action: Callable[[], object]) -> None:
        self.at, self.action, self.num_batches = at, action, 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.num_batches += outputs.requires_grad
        if self.num_batches == self.at:
            self.action()
        return nn.functional.cross_entropy(outputs, labels)


def plain(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in state.items()}


class ScriptedTask(Task):
    """Reports the given values instead of evaluating; with `written` it notes (file, epoch) instead
    of saving.
    """

    def __init__(
        self, name: str, values: Iterable[float], written: list[tuple[str, int]] | None = None
    ) -> None:
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


def train_with_everything(
    folder: Path,
    num_epochs: int,
    *,
    resume: bool = False,
    stop_at: int | None = None,
    accumulation_steps: int = 1,
    num_points: int = 68,
) -> Record:
    """Train with momentum, schedule, BatchNorm, EMA and clipping; `stop_at` is the batch at which
    the last rank is told to stop. Return all that a resumed run has to bring back.
    """
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: Record = {
        "ema_decay": 0.9,
        "ema_ramp": 5,
        "clip_norm": 1.0,
        "accumulate": accumulation_steps,
    }
    trainer = engine_of(model, folder, epochs=num_epochs, **options)
    is_last_rank = distributed.rank() == distributed.world_size() - 1
    criterion = CountedLoss(
        stop_at if is_last_rank else None, partial(trainer.stop_flag.set, "test")
    )
    train_loader, val_loader = loader_of(points(num_points), 4), loader_of(points(20, seed=1), 4)
    scheduler = StepSchedule(optimizer, ScheduleSpec(0.1, total_steps=60, warmup_steps=5))
    history = trainer.train(
        train_loader, val_loader, optimizer, criterion, scheduler, resume=resume
    )
    assert trainer.state.ema is not None
    momenta = [
        entry["momentum_buffer"].numpy().copy()
        for entry in optimizer.state_dict()["state"].values()
    ]
    return {
        "weights": plain(model.state_dict()),
        "average": plain(trainer.state.ema.module.state_dict()),
        "momenta": {str(k): momentum for k, momentum in enumerate(momenta)},
        "updates": trainer.state.ema.updates,
        "val_loss": history.get("val_loss"),
        "lr": history.get("lr"),
        "place": (trainer.progress.epoch, trainer.progress.batch, trainer.progress.global_step),
        "num_batches": criterion.num_batches,
        "stopped": bool(trainer.stopped_by),
    }


def assert_bitwise_equal(first: Record, second: Record) -> None:
    for part in ("weights", "average", "momenta"):
        assert first[part].keys() == second[part].keys()
        for name, value in first[part].items():
            np.testing.assert_array_equal(
                second[part][name], value, err_msg=f"{part} {name}", strict=True
            )
    for part in ("updates", "val_loss", "lr", "place"):
        assert first[part] == second[part], part


def plain_steps(
    folder: Path, batch_size: int, accumulation_steps: int, num_samples: int
) -> dict[str, np.ndarray]:
    """Train without BatchNorm and in the data's own order; return the weights."""
    model, loader = (
        classifier(norm=False),
        loader_of(points(num_samples), batch_size, shuffle=False),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = engine_of(model, folder, accumulate=accumulation_steps, epochs=2)
    engine.train(loader, loader_of(points(8, seed=1), 4), optimizer, nn.CrossEntropyLoss())
    return plain(model.state_dict())
