"""Measure speed and memory of training at several batch sizes on one device, choose the best one,
and report both.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, record_function

from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.engine import TrainingEngine
from yolo_seg_ddp.measure.step_timer import (
    PHASES,
    Repeated,
    middle_half,
    run_training_steps,
    time_training_steps,
)
from yolo_seg_ddp.measure.synthetic import synthetic_batch, training_colours
from yolo_seg_ddp.utils.devices import peak_memory_bytes
from yolo_seg_ddp.utils.errors import is_out_of_memory, print_warning
from yolo_seg_ddp.utils.nvml import GpuWatch
from yolo_seg_ddp.utils.text import format_bytes, format_table
from yolo_seg_ddp.yolo.loss import SegmentationLoss

BEST_WITHIN = 0.03  # a smaller batch this close to the fastest one is the better choice
HEADROOM = 0.10  # of the device's memory: communication and photographs with many objects need it
OBJECTS_PER_IMAGE = 20
_RANGE = "phase: "  # the names of the phases in a trace begin with it
READINGS = {
    "gpu_util": ("GPU busy", "{:.0%}"),
    "gpu_power_w": ("power W", "{:.0f}"),
    "gpu_temperature_c": ("temp. C", "{:.0f}"),
}


@dataclass(frozen=True)
class BatchProfile:
    """Speed and memory of training with one batch size.

    `phase_ms`: ms per step of each phase, the mean over the middle half of the steps (see
    `middle_half`). `allocated_bytes`: peak of all tensors on a GPU; on a CPU the process's peak RSS
    so far. `reserved_bytes`: GPU memory held by PyTorch; None on a CPU.
    `readings`: means of NVML's readings of a GPU over the timed steps.
    """

    batch_size: int
    phase_ms: dict[str, float]
    allocated_bytes: int
    reserved_bytes: int | None
    readings: dict[str, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Duration of a step."""
        return sum(self.phase_ms.values())

    @property
    def images_per_s(self) -> float:
        """Images trained per second."""
        return self.batch_size / self.step_ms * 1000


def profile_batch(
    engine: TrainingEngine, batch_size: int, size_px: int, warmup_steps: int, steps: int
) -> BatchProfile:
    """Train on a synthetic batch and return its profile.

    Raises torch.OutOfMemoryError when a GPU cannot hold it.
    """
    device = engine.device
    batch = batch_for(engine, batch_size, size_px)
    time_training_steps(engine, batch, warmup_steps, 1)
    if device.type == "cuda":
        # reserved for a smaller batch, or while cuDNN searched for the fastest kernel
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with _readings(device) as readings:
        phases_ms = time_training_steps(engine, batch, 1, steps)
    reserved_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    phase_ms = dict(zip(PHASES, middle_half(phases_ms).tolist(), strict=True))
    return BatchProfile(batch_size, phase_ms, peak_memory_bytes(device), reserved_bytes, readings)


def batch_for(engine: TrainingEngine, batch_size: int, size_px: int) -> Batch:
    """Return a synthetic batch for an engine of `build_training`, with its classes and as its
    device varies colours.
    """
    criterion = engine.task.criterion
    assert isinstance(criterion, SegmentationLoss)
    colours = training_colours(engine.device)
    return synthetic_batch(
        batch_size,
        size_px,
        criterion.num_classes,
        objects_per_image=OBJECTS_PER_IMAGE,
        colours=colours,
    )


@contextmanager
def _readings(device: torch.device) -> Iterator[dict[str, float]]:
    """Yield what is filled at the end: the means of NVML's readings of a GPU.

    It stays empty on a CPU.
    """
    readings: dict[str, float] = {}
    if device.type != "cuda":
        yield readings
        return
    with GpuWatch(device.index or 0, print_warning, period_s=0.1) as watch:
        yield readings
        torch.cuda.synchronize(device)
        readings |= watch.means()


def profile_until_full(
    batch_sizes: Iterable[int],
    measure: Callable[[int], BatchProfile],
    on_profile: Callable[[BatchProfile], None],
) -> tuple[list[BatchProfile], str | None]:
    """Measure batch sizes in ascending order until memory runs out; return the profiles and why the
    sweep ended early.
    """
    profiles: list[BatchProfile] = []
    for batch_size in sorted(set(batch_sizes)):
        reason = lack_of_memory(profiles[-1], batch_size) if profiles else None
        try:
            if not reason:
                profiles.append(measure(batch_size))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = "ran out of memory"
        if reason:
            # Only here the exception no longer holds the tensors of the failed step.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return profiles, f"batch {batch_size} {reason}"
        on_profile(profiles[-1])
    return profiles, None


def lack_of_memory(last: BatchProfile, batch_size: int) -> str | None:
    """Return why a batch would exhaust the memory of a machine that trains on its CPU, else None.

    The system would kill the process there. The memory is assumed to grow in proportion to the
    batch.
    """
    more_bytes = last.allocated_bytes * (batch_size / last.batch_size - 1)
    available_bytes = psutil.virtual_memory().available
    if last.reserved_bytes is not None or more_bytes < available_bytes * (1 - HEADROOM):
        return None
    return (
        f"was not tried: up to {format_bytes(more_bytes)} more than batch {last.batch_size}, "
        f"{format_bytes(available_bytes)} available"
    )


def memory_of(device: torch.device) -> int:
    """Return the bytes of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return int(psutil.virtual_memory().total)


def best_profile(profiles: Sequence[BatchProfile], capacity_bytes: int) -> BatchProfile:
    """Return the smallest batch within 3 % of the highest images/s, among those that leave
    headroom.

    If none leaves headroom, return the smallest batch of all.
    """
    roomy = [profile for profile in profiles if leaves_headroom(profile, capacity_bytes)]
    if not roomy:
        return min(profiles, key=lambda profile: profile.batch_size)
    enough = (1 - BEST_WITHIN) * max(profile.images_per_s for profile in roomy)
    return min(
        (profile for profile in roomy if profile.images_per_s >= enough),
        key=lambda profile: profile.batch_size,
    )


def leaves_headroom(profile: BatchProfile, capacity_bytes: int) -> bool:
    """Return whether at least 10 % of the device's memory stays free."""
    return (profile.reserved_bytes or profile.allocated_bytes) <= (1 - HEADROOM) * capacity_bytes


def verdict_lines(
    profiles: Sequence[BatchProfile], ended: str | None, capacity_bytes: int
) -> list[str]:
    """Return two lines: the best batch size, and the largest that fits."""
    best = best_profile(profiles, capacity_bytes)
    room = f"with at least {HEADROOM:.0%} of the memory free"
    if not leaves_headroom(best, capacity_bytes):
        room = f"none leaves {HEADROOM:.0%} of the memory free: try a smaller one"
    return [
        f"Best: --batch-size {best.batch_size} ({best.images_per_s:.1f} images/s; "
        f"the smallest batch within {BEST_WITHIN:.0%} of the fastest, {room})",
        f"Largest that fits: {profiles[-1].batch_size} "
        f"({ended or 'none of those tried ran out of memory'})",
    ]


def profile_table(profiles: Sequence[BatchProfile]) -> str:
    """Return speed, times (ms per step), memory and readings as a table, one row per batch size."""
    memory = ("tensors", "reserved") if profiles[0].reserved_bytes is not None else ("peak RSS",)
    readings = {name: look for name, look in READINGS.items() if name in profiles[0].readings}
    rows = []
    for profile in profiles:
        cells = [
            f"{value:.1f}"
            for value in (profile.images_per_s, profile.step_ms, *profile.phase_ms.values())
        ]
        cells += [
            format_bytes(size or 0)
            for size in (profile.allocated_bytes, profile.reserved_bytes)[: len(memory)]
        ]
        cells += [
            form.format(profile.readings.get(name, float("nan")))
            for name, (_, form) in readings.items()
        ]
        rows.append([profile.batch_size, *cells])
    titles = [
        "batch",
        "images/s",
        "ms/step",
        *PHASES,
        *memory,
        *(title for title, _ in readings.values()),
    ]
    return format_table(titles, rows, right_from=1)


# --- operators ------------------------------------------------------------------------------------


def profile_operators(
    engine: TrainingEngine, batch: Batch, steps: int, trace: Path | None = None
) -> str:
    """Train `steps` steps under torch.profiler; return its table of the operators and kernels with
    the most own time.

    The file `trace` is for chrome://tracing or ui.perfetto.dev and shows the phases of each step as
    ranges.
    """
    # Otherwise the profiler's library writes its stages to stderr, even at the level 5 that
    # Ultralytics sets.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if engine.device.type == "cuda" else []),
    ]
    ranges = ExitStack()

    def begin(phase: str) -> None:
        ranges.close()
        ranges.enter_context(record_function(_RANGE + phase))

    # Warm-up: the first step does extra work.
    run_training_steps(engine, Repeated(batch, 2))
    with torch.profiler.profile(activities=activities) as profiler:
        run_training_steps(engine, Repeated(batch, steps), begin)
        ranges.close()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    self_time = "self_device_time_total" if engine.device.type == "cuda" else "self_cpu_time_total"
    events = EventList(
        event for event in profiler.key_averages() if not event.key.startswith(_RANGE)
    )
    return events.table(sort_by=self_time, row_limit=20)
