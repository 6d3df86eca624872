"""What a training run counts: its place in the epochs, one epoch's running means, and how both are told to the user."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from utils.distributed import all_reduce_sum, communication_device, gather_arrays
from utils.logs import format_bytes, format_duration


@dataclass
class Progress:
    """Everything the loop counts; with the weights and the optimizer it is all that a resumed run needs."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches of the current epoch already used by every rank
    global_step: int = 0  # optimizer steps taken
    best_value: float | None = None
    best_epoch: int = -1
    stopped_early: bool = False
    left_out: list[list[int]] = field(default_factory=list)  # [epoch, batch] whose steps were undone: never used again
    trained: dict[str, Any] | None = None  # the record of the current epoch while only its validation is left to do
    history: dict[str, list[float]] = field(default_factory=dict)

    def regroup(self, before: int, now: int) -> None:
        """Count batches of a run that took `before` of them per optimizer step as batches of one that takes `now`."""
        self.batch = self.batch // before * now
        groups = sorted({(epoch, batch // before) for epoch, batch in self.left_out})
        self.left_out = [[epoch, group * now + number] for epoch, group in groups for number in range(now)]


@dataclass(frozen=True)
class Lap:
    """Batches of one rank between two looks at the clock."""

    num_batches: int
    elapsed_s: float
    data_wait_s: float

    @property
    def step_ms(self) -> float:
        """Mean time of a batch."""
        return 1000 * self.elapsed_s / max(self.num_batches, 1)

    @property
    def data_wait_share(self) -> float:
        """Share of the time that was spent waiting for batches."""
        return self.data_wait_s / max(self.elapsed_s, 1e-9)


class EpochMeter:
    """Sums of one epoch on this rank: values stay on the device until somebody asks for the mean."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.num_samples = 0
        self.num_batches = 0
        self.data_wait_s = 0.0
        self.start_s = time.perf_counter()
        self._told = (0, 0.0, 0.0)

    def lap(self) -> Lap:
        """Return what came since the last call, or since the epoch began."""
        before = self._told
        self._told = (self.num_batches, self.elapsed_s, self.data_wait_s)
        return Lap(self._told[0] - before[0], self._told[1] - before[1], self._told[2] - before[2])

    def add(self, values: dict[str, torch.Tensor], num_samples: int) -> None:
        """Add one batch's mean values, weighted by its number of samples."""
        for name, value in values.items():
            weighted = value.detach().double() * num_samples
            self.sums[name] = self.sums[name] + weighted if name in self.sums else weighted
        self.num_samples += num_samples
        self.num_batches += 1

    def means(self) -> dict[str, float]:
        """Return the means over all ranks. Every rank must reach this."""
        names = sorted(self.sums)
        sums = torch.stack([self.sums[name] for name in names]).tolist() if names else []
        local: dict[str, np.ndarray] = {
            "names": np.frombuffer(json.dumps(names).encode(), np.uint8),
            "sums": np.array([*sums, self.num_samples], np.float64),
        }
        total: dict[str, float] = {}
        num_samples = 0.0
        for part in gather_arrays(local):  # a rank whose share is empty has no names to offer
            *values, count = part["sums"].tolist()
            num_samples += count
            for name, value in zip(json.loads(part["names"].tobytes()), values, strict=True):
                total[name] = total.get(name, 0.0) + value
        return {name: value / num_samples for name, value in total.items()}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the epoch began on this rank."""
        return time.perf_counter() - self.start_s

    def speed(self, num_batches: int, world_size: int) -> dict[str, float]:
        """Return the epoch's time and throughput over all ranks. Every rank must reach this.

        `batches_per_s` counts every rank's batches, as the guide's sample output does.
        """
        seconds = self.elapsed_s
        local = torch.tensor([self.num_samples, self.data_wait_s], dtype=torch.float64, device=communication_device())
        num_samples, data_wait_s = all_reduce_sum(local).tolist()
        return {
            "epoch_time_s": seconds,
            "images_per_s": num_samples / seconds,
            "batches_per_s": num_batches * world_size / seconds,
            "data_wait_share": data_wait_s / world_size / seconds,
        }


def batch_line(
    position: int, batches: tuple[int, int], loss: float, meter: EpochMeter, images_per_s: float, memory_bytes: int
) -> str:
    """Return the console line of one batch; `batches` are those of the epoch and those still to come in the run."""
    per_batch_s = meter.elapsed_s / max(meter.num_batches, 1)
    return (
        f"  Batch [{position}/{batches[0]}] - Loss: {loss:.4f} | {images_per_s:.1f} images/s, "
        f"data wait {meter.data_wait_s / meter.elapsed_s:.0%}, {format_bytes(memory_bytes)}, "
        f"{format_duration(batches[1] * per_batch_s)} left"
    )


def epoch_lines(record: dict[str, Any], best_metric: str | None) -> list[str]:
    """Return the console lines that close an epoch; `best_metric` is named when this epoch is the best by it."""
    shown = [
        name for name in ("val_loss", "box_map50", "box_map50_95", "mask_map50", "mask_map50_95") if name in record
    ]
    return [
        f"  Average Loss: {record['train_loss']:.4f}",
        f"  Time: {record['epoch_time_s']:.1f}s",
        f"  Throughput: {record['batches_per_s']:.1f} batches/sec ({record['images_per_s']:.1f} images/s, "
        f"data wait {record['data_wait_share']:.0%})",
        *([f"  Validation: {', '.join(f'{name} {record[name]:.4f}' for name in shown)}"] if shown else []),
        f"  ✓ Saved checkpoint (loss: {record['train_loss']:.4f})"
        + (f", best {best_metric} so far" if best_metric else ""),
    ]
