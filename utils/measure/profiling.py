"""Measure speed and memory of training at several batch sizes on one device, choose the best one, and report both."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch

from utils.common.devices import peak_memory_bytes
from utils.common.errors import is_out_of_memory, print_warning
from utils.common.nvml import GpuWatch
from utils.common.text import format_bytes, format_table
from utils.data.dataset import Batch
from utils.data.synthetic import synthetic_batch, training_colours
from utils.engine import TrainingEngine
from utils.engine.step_timer import PHASES, middle_half, time_training_steps
from utils.measure.operators import Operator
from utils.yolo.loss import SegmentationLoss

BEST_WITHIN = 0.03  # a smaller batch this close to the fastest one is the better choice
HEADROOM = 0.10  # of the device's memory: communication and photographs with many objects need it
_SAMPLE_S = 0.1


@dataclass(frozen=True)
class Space:
    """A device's memory, and how much of it the process used before the model was built (CPU; 0 on a GPU)."""

    capacity_bytes: int | None
    process_bytes: int = 0


@dataclass(frozen=True)
class BatchProfile:
    """Speed and memory of training with one batch size.

    `phase_ms`: ms per step of each phase, the mean over the middle half of the steps (see `middle_half`).
    `allocated_bytes`: peak of all tensors on a GPU; on a CPU the process's peak RSS so far.
    `reserved_bytes`: GPU memory held by PyTorch; None on a CPU.
    `fixed_bytes`: what does not depend on the batch size: the process before the model was built (CPU), the weights, their
    average and the optimizer's state.
    `readings`: means over the timed steps of what the device or the operating system reports.
    """

    batch_size: int
    steps: int
    phase_ms: dict[str, float]
    step_ms_std: float
    allocated_bytes: int
    reserved_bytes: int | None
    fixed_bytes: int = 0
    readings: dict[str, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Duration of a step."""
        return sum(self.phase_ms.values())

    @property
    def images_per_s(self) -> float:
        """Images trained per second."""
        return self.batch_size / self.step_ms * 1000


@dataclass(frozen=True)
class TooLarge:
    """The batch size at which a sweep ended, and why."""

    batch_size: int
    reason: str


Measure = Callable[[int], BatchProfile]


def profile_batch(
    engine: TrainingEngine,
    batch_size: int,
    size_px: int,
    objects_per_image: int,
    warmup_steps: int,
    steps: int,
    space: Space,
) -> BatchProfile:
    """Train on a synthetic batch and return its profile. Raises torch.OutOfMemoryError when a GPU cannot hold it."""
    device = engine.device
    batch = batch_for(engine, batch_size, size_px, objects_per_image)
    time_training_steps(engine, batch, warmup_steps, 1)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # reserved for a smaller batch, or while cuDNN searched for the fastest kernel
        torch.cuda.reset_peak_memory_stats(device)
    with _utilisation(device) as readings:
        phases_ms = time_training_steps(engine, batch, 1, steps)
    allocated_bytes = peak_memory_bytes(device)
    reserved_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return BatchProfile(
        batch_size=batch_size,
        steps=len(phases_ms),
        phase_ms=dict(zip(PHASES, middle_half(phases_ms).tolist(), strict=True)),
        step_ms_std=float(phases_ms.sum(1).std()),
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        fixed_bytes=space.process_bytes + state_bytes(engine),
        readings=readings,
    )


def batch_for(engine: TrainingEngine, batch_size: int, size_px: int, objects_per_image: int) -> Batch:
    """Return a synthetic batch for an engine of `build_training`, with its classes and as its device varies colours."""
    criterion, colours = engine.task.criterion, training_colours(engine.device)
    assert isinstance(criterion, SegmentationLoss)
    classes = criterion.num_classes
    return synthetic_batch(batch_size, size_px, classes, objects_per_image=objects_per_image, colours=colours)


def state_bytes(engine: TrainingEngine) -> int:
    """Return the bytes of the weights, their moving average and the optimizer's state."""
    tensors = [value for module in engine.state.modules().values() for value in module.state_dict().values()]
    values = [value for state in engine.state.optimizer.state.values() for value in state.values()]
    tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _utilisation(device: torch.device) -> Iterator[dict[str, float]]:
    """Yield what is filled at the end: how busy the device was, by NVML's readings of a GPU or the process's CPU time."""
    readings: dict[str, float] = {}
    if device.type == "cuda":
        with GpuWatch(device.index or 0, print_warning, _SAMPLE_S) as watch:
            yield readings
            torch.cuda.synchronize(device)
            readings |= watch.means()
        return
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    yield readings
    elapsed_s = time.perf_counter() - start_s
    readings["cpu_util"] = (time.process_time() - start_cpu_s) / elapsed_s / torch.get_num_threads()


def profile_until_full(
    batch_sizes: Iterable[int],
    measure: Measure,
    on_profile: Callable[[BatchProfile], None],
    forecast: Callable[[Sequence[BatchProfile], int], str | None] = lambda profiles, batch_size: None,
) -> tuple[list[BatchProfile], TooLarge | None]:
    """Measure batch sizes in ascending order until memory runs out; return the profiles and the size that did not fit.

    `forecast` may return a reason not to try a batch size.
    """
    profiles: list[BatchProfile] = []
    for batch_size in sorted(set(batch_sizes)):
        reason = forecast(profiles, batch_size)
        try:
            if not reason:
                profiles.append(measure(batch_size))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = "ran out of memory"
        if reason:
            gc.collect()  # only here the exception no longer holds the tensors of the failed step
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return profiles, TooLarge(batch_size, reason)
        on_profile(profiles[-1])
    return profiles, None


def forecast_on_cpu(profiles: Sequence[BatchProfile], batch_size: int) -> str | None:
    """Return why a batch size would exhaust this machine's memory, else None.

    Without this the system would kill the process. From the second batch size on, the memory that each further image
    took so far is compared with the memory that the system reports as available.
    """
    available_bytes = available_memory_bytes()
    if not profiles or available_bytes is None:
        return None
    last = profiles[-1]
    per_image = (last.allocated_bytes - last.fixed_bytes) / last.batch_size
    more_bytes = per_image * (batch_size - last.batch_size)
    if more_bytes < available_bytes * (1 - HEADROOM):
        return None
    return f"was not tried: about {format_bytes(more_bytes)} more than batch {last.batch_size}, {format_bytes(available_bytes)} available"


def available_memory_bytes() -> int | None:
    """Return the bytes that Linux can give to new work without swapping; None on other systems."""
    return int(psutil.virtual_memory().available) if psutil.LINUX else None


def memory_of(device: torch.device) -> Space:
    """Return the device's memory. Call this before a model is built."""
    if device.type == "cuda":
        return Space(torch.cuda.get_device_properties(device).total_memory)
    return Space(int(psutil.virtual_memory().total), peak_memory_bytes(device))


def best_profile(profiles: Sequence[BatchProfile], capacity_bytes: int | None = None) -> BatchProfile:
    """Return the smallest batch within 3 % of the highest images/s, among those that leave headroom.

    If none leaves headroom, return the smallest batch of all.
    """
    roomy = [profile for profile in profiles if leaves_headroom(profile, capacity_bytes)]
    if not roomy:
        return min(profiles, key=lambda profile: profile.batch_size)
    enough = (1 - BEST_WITHIN) * max(profile.images_per_s for profile in roomy)
    return min((profile for profile in roomy if profile.images_per_s >= enough), key=lambda profile: profile.batch_size)


def leaves_headroom(profile: BatchProfile, capacity_bytes: int | None) -> bool:
    """Return whether at least 10 % of the device's memory stays free."""
    held_bytes = profile.allocated_bytes if profile.reserved_bytes is None else profile.reserved_bytes
    return capacity_bytes is None or held_bytes <= (1 - HEADROOM) * capacity_bytes


def verdict_lines(
    profiles: Sequence[BatchProfile], too_large: TooLarge | None, capacity_bytes: int | None = None
) -> list[str]:
    """Return two lines: the best batch size, and the largest that fits."""
    best = best_profile(profiles, capacity_bytes)
    largest = max(profile.batch_size for profile in profiles)
    fits = f"batch {too_large.batch_size} {too_large.reason}" if too_large else "none of those tried ran out of memory"
    room = f"with at least {HEADROOM:.0%} of the memory free"
    if not leaves_headroom(best, capacity_bytes):
        room = f"none leaves {HEADROOM:.0%} of the memory free: try a smaller one"
    return [
        f"Best: --batch-size {best.batch_size} ({best.images_per_s:.1f} images/s; "
        f"the smallest batch within {BEST_WITHIN:.0%} of the fastest, {room})",
        f"Largest that fits: {largest} ({fits})",
    ]


def profile_table(profiles: Sequence[BatchProfile]) -> str:
    """Return speed, times (ms per step), memory and readings as a table, one row per batch size."""
    memory = ("tensors", "reserved") if profiles[0].reserved_bytes is not None else ("peak RSS",)
    readings = {
        "cpu_util": ("CPU busy", "{:.0%}"),
        "gpu_util": ("GPU busy", "{:.0%}"),
        "gpu_power_w": ("power W", "{:.0f}"),
        "gpu_temperature_c": ("temp. C", "{:.0f}"),
    }
    shown = {name: look for name, look in readings.items() if any(name in profile.readings for profile in profiles)}
    titles = ("images/s", "ms/step", "std", *PHASES, *memory, *(title for title, _ in shown.values()))
    rows = []
    for profile in profiles:
        sizes = [profile.allocated_bytes, profile.reserved_bytes][: len(memory)]
        values = [profile.images_per_s, profile.step_ms, profile.step_ms_std, *profile.phase_ms.values()]
        cells = [*(f"{value:.1f}" for value in values), *(format_bytes(size or 0) for size in sizes)]
        cells += [
            form.format(profile.readings[name]) if name in profile.readings else "-"
            for name, (_, form) in shown.items()
        ]
        rows.append([profile.batch_size, *cells])
    return format_table(["batch", *titles], rows, right_from=1)


def to_record(
    profiles: Sequence[BatchProfile], too_large: TooLarge | None, capacity_bytes: int | None = None
) -> dict[str, Any]:
    """Return the profiles and the recommended batch size as plain values for JSON."""
    derived = ("step_ms", "images_per_s")  # properties, which asdict leaves out
    return {
        "best_batch_size": best_profile(profiles, capacity_bytes).batch_size,
        "largest_batch_size": max(profile.batch_size for profile in profiles),
        "out_of_memory_at": too_large.batch_size if too_large else None,
        "ended_because": too_large.reason if too_large else None,
        "capacity_bytes": capacity_bytes,
        "profiles": [{**asdict(one), **{name: getattr(one, name) for name in derived}} for one in profiles],
    }


def operator_table(operators: Sequence[Operator]) -> str:
    """Return the most expensive operators as a table."""
    rows = [[found.name, f"{found.calls:.0f}", f"{found.ms:.1f}", f"{found.share:.1%}"] for found in operators]
    return format_table(["operator", "calls/step", "own ms/step", "share".rjust(7)], rows, right_from=1)
