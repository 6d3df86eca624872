"""A small problem for the recipe's worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training_engine
from distributed_training_example import Pictures, ResidualNetwork
from torch import nn

from tests.support.recipes import assert_equal, assert_equal_moments, dying

NUM_STEPS = 20  # 4 epochs of 5 steps


def pictures(number: int, *, augment: bool = False, seed: int = 0) -> Pictures:
    """Return random pictures (8, 8, 3), brighter from class to class."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, number)
    drawn = generator.integers(0, 120, (number, 8, 8, 3)) + 60 * labels[:, None, None, None]
    return Pictures(drawn.astype(np.uint8), labels, augment=augment, flip=augment)


def small_network() -> nn.Module:
    """Return a network with one BatchNorm: ranks wait for each other at each, which is slow on a
    busy machine.
    """
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 10),
    )


def residual_network() -> nn.Module:
    return ResidualNetwork(10, width=4, blocks=1)


def train_small(
    folder: Path,
    rank: int = 0,
    world_size: int = 1,
    *,
    batch_size: int = 4,
    augment: bool = False,
    kill_at: int = 0,
    resume: bool = False,
    model_fn: Callable[[], nn.Module] = small_network,
    **engine_kwargs: Any,
) -> dict[str, list[float]]:
    """Train 4 epochs of 5 steps on 40 pictures by 2 ranks (or by 1 with the double batch); kill
    rank 1 at a batch.
    """
    place = {"save_dir": folder.parent, "experiment_name": folder.name, "tensorboard": False}
    with dying(nn.CrossEntropyLoss, "forward", kill_at if rank else 0):
        return training_engine.distributed_train_worker(
            rank,
            world_size,
            model_fn=model_fn,
            train_dataset=pictures(40, augment=augment),
            val_dataset=pictures(21, seed=1),
            batch_size=batch_size,
            optimizer_fn=lambda weights: torch.optim.SGD(
                weights, lr=0.05, momentum=0.9, weight_decay=1e-4
            ),
            criterion_fn=nn.CrossEntropyLoss,
            scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
            engine_kwargs={"use_amp": False, **place, **engine_kwargs},
            train_kwargs={"num_epochs": 4, "resume": resume},
        )


def checkpoint(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "last.pt", weights_only=True)
    return found


def assert_same_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Check that two checkpoints hold the same bits: weights, averages, momenta, and validation
    values of all epochs.
    """
    for part in ("model_state_dict", "ema_state_dict"):
        assert_equal(first[part] or {}, second[part] or {})
    assert_equal_moments(
        first["optimizer_state_dict"], second["optimizer_state_dict"], "momentum_buffer"
    )
    # train_ values of an epoch that was resumed cover the rest of it.
    assert second["history"]["train_loss"][-1] == first["history"]["train_loss"][-1]
    assert second["scheduler_state_dict"] == first["scheduler_state_dict"]
    assert second["global_step"] == first["global_step"] == NUM_STEPS
    for name in ("val_loss", "val_accuracy", "lr"):
        assert second["history"][name] == first["history"][name], name
