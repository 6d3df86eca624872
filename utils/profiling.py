"""Speed and memory of training at several batch sizes on one device, and what follows from them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from utils.logs import format_bytes, format_table
from utils.runtime import peak_memory_bytes
from utils.step_timer import PHASES, Training, time_training_steps
from utils.synthetic import synthetic_batch

BEST_WITHIN = 0.03  # a smaller batch this close to the fastest one is the better choice


@dataclass(frozen=True)
class BatchProfile:
    """One batch size: mean milliseconds per step, phase by phase, and the most memory it took.

    `allocated_bytes` is what tensors took on a GPU, and the process's peak so far (RSS) on a CPU, where
    `reserved_bytes`, what PyTorch holds of the GPU, is None.
    """

    batch_size: int
    steps: int
    phase_ms: dict[str, float]
    step_ms_std: float
    allocated_bytes: int
    reserved_bytes: int | None

    @property
    def step_ms(self) -> float:
        """Mean duration of a step."""
        return sum(self.phase_ms.values())

    @property
    def images_per_s(self) -> float:
        """Images trained per second."""
        return self.batch_size / self.step_ms * 1000


Measure = Callable[[int], BatchProfile]


def profile_batch(
    training: Training, batch_size: int, size_px: int, objects_per_image: int, warmup_steps: int, steps: int
) -> BatchProfile:
    """Train on a synthetic batch and return its profile. Raises torch.OutOfMemoryError when a GPU cannot hold it."""
    device = training.engine.device
    batch = synthetic_batch(batch_size, size_px, training.criterion.num_classes, objects_per_image=objects_per_image)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what a smaller batch reserved is not this one's
        torch.cuda.reset_peak_memory_stats(device)
    phases_ms = time_training_steps(training, batch, warmup_steps, steps)
    return BatchProfile(
        batch_size=batch_size,
        steps=len(phases_ms),
        phase_ms=dict(zip(PHASES, phases_ms.mean(0).tolist(), strict=True)),
        step_ms_std=float(phases_ms.sum(1).std()),
        allocated_bytes=peak_memory_bytes(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
    )


def profile_until_full(
    batch_sizes: Iterable[int], measure: Measure, on_profile: Callable[[BatchProfile], None]
) -> tuple[list[BatchProfile], int | None]:
    """Measure ascending batch sizes until memory runs out; return the profiles and the size that no longer fitted."""
    profiles: list[BatchProfile] = []
    for batch_size in sorted(set(batch_sizes)):
        try:
            profiles.append(measure(batch_size))
        except torch.OutOfMemoryError:
            too_large = batch_size
        else:
            on_profile(profiles[-1])
            continue
        gc.collect()  # here the exception, and with it every tensor of the failed step, is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return profiles, too_large
    return profiles, None


def best_profile(profiles: Sequence[BatchProfile]) -> BatchProfile:
    """Return the smallest batch whose images/s lie within 3 % of the fastest one's."""
    enough = (1 - BEST_WITHIN) * max(profile.images_per_s for profile in profiles)
    return min(
        (profile for profile in profiles if profile.images_per_s >= enough), key=lambda profile: profile.batch_size
    )


def verdict_lines(profiles: Sequence[BatchProfile], too_large: int | None) -> list[str]:
    """Say which batch is the best, and which the largest that fits."""
    best = best_profile(profiles)
    largest = max(profile.batch_size for profile in profiles)
    fits = f"batch {too_large} ran out of memory" if too_large else "none of those tried ran out of memory"
    return [
        f"Best: --batch-size {best.batch_size} ({best.images_per_s:.1f} images/s; "
        f"the smallest batch within {BEST_WITHIN:.0%} of the fastest)",
        f"Largest that fits: {largest} ({fits})",
    ]


def profile_table(profiles: Sequence[BatchProfile]) -> str:
    """Lay the profiles out as a table; times are ms per step."""
    memory = ("tensors", "reserved") if profiles[0].reserved_bytes is not None else ("peak RSS",)
    header = ["batch", *(title.rjust(9) for title in ("images/s", "ms/step", "std", *PHASES, *memory))]
    rows = []
    for profile in profiles:
        sizes = [profile.allocated_bytes, profile.reserved_bytes][: len(memory)]
        values = [profile.images_per_s, profile.step_ms, profile.step_ms_std, *profile.phase_ms.values()]
        cells = [*(f"{value:.1f}" for value in values), *(format_bytes(size or 0) for size in sizes)]
        rows.append([profile.batch_size, *(cell.rjust(9) for cell in cells)])
    return format_table(header, rows)


def to_record(profiles: Sequence[BatchProfile], too_large: int | None) -> dict[str, Any]:
    """Return profiles and verdict as plain values for JSON."""
    return {
        "best_batch_size": best_profile(profiles).batch_size,
        "largest_batch_size": max(profile.batch_size for profile in profiles),
        "out_of_memory_at": too_large,
        "profiles": [
            {**asdict(profile), "step_ms": profile.step_ms, "images_per_s": profile.images_per_s}
            for profile in profiles
        ],
    }
