"""Measure how much faster two CPU processes train than one, with one thread each.

    python measure_speedup.py

Steps of one process alone and of both together, with and without SyncBatchNorm, take turns, so that other programs on
the machine slow all of them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from distributed_training_example import NUM_CLASSES, ResidualNetwork
from torch import nn
from training_engine import TrainingEngine, launch_distributed_training

from utils.common.errors import run_script
from utils.distributed import barrier

BATCH_SIZE = 16  # per process
ROUNDS, STEPS = 12, 10


def measure(rank: int, world_size: int, folder: str) -> None:
    """Time the steps of rank 0 alone and of all ranks, and print the speed-ups on rank 0."""
    engines = {
        "alone": prepared_engine(folder, distributed=False, sync_batchnorm=False),
        "with SyncBatchNorm": prepared_engine(folder, distributed=True, sync_batchnorm=True),
        "without SyncBatchNorm": prepared_engine(folder, distributed=True, sync_batchnorm=False),
    }
    batch = torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(NUM_CLASSES, (BATCH_SIZE,))
    times_s: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            barrier()
            for _ in range(STEPS if rank == 0 or name != "alone" else 0):
                start_s = time.perf_counter()
                engine.step.forward_backward(batch)
                engine.step.update()
                times_s[name].append(time.perf_counter() - start_s)
    if rank == 0:
        medians_s = {name: statistics.median(times) for name, times in times_s.items()}
        alone_s = medians_s.pop("alone")
        print(f"ResNet-20, 32 x 32, batch {BATCH_SIZE} per process: {1000 * alone_s:.0f} ms per step alone")
        for name, seconds in medians_s.items():
            speedup = world_size * alone_s / seconds
            print(f"{world_size} processes {name}: {1000 * seconds:.0f} ms, speed-up {speedup:.2f}")


def prepared_engine(folder: str, *, distributed: bool, sync_batchnorm: bool) -> TrainingEngine:
    torch.manual_seed(0)
    model = ResidualNetwork(NUM_CLASSES)
    options = {"use_amp": False, "quiet": True, "save_dir": folder, "sync_batchnorm": sync_batchnorm}
    engine = TrainingEngine(model, "cpu", distributed=distributed, **options)
    engine.begin(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), nn.CrossEntropyLoss())
    engine.model.train()
    return engine


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch_distributed_training(measure, 2, "gloo", folder=folder)


if __name__ == "__main__":
    run_script(main)
