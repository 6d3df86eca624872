"""profile_gpu.py: the sweep over batch sizes and the best of them, and the GPU's readings."""

from types import SimpleNamespace

import pytest
import torch

from yolo_seg_ddp.measure import profiling
from yolo_seg_ddp.measure.profiling import (
    BatchProfile,
    best_profile,
    profile_table,
    profile_until_full,
    verdict_lines,
)
from yolo_seg_ddp.measure.step_timer import PHASES
from yolo_seg_ddp.utils import nvml


def profile(
    batch_size: int, images_per_s: float, reserved_bytes: int | None = None
) -> BatchProfile:
    step_ms = batch_size / images_per_s * 1000
    shares = dict(zip(PHASES, (0.0, 0.3, 0.1, 0.5, 0.1), strict=True))
    phase_ms = {phase: share * step_ms for phase, share in shares.items()}
    return BatchProfile(batch_size, phase_ms, batch_size * 2**20, reserved_bytes)


def test_the_sweep_ascends_and_stops_where_memory_ends() -> None:
    tried, announced = list[int](), list[int]()

    def measure(batch_size: int) -> BatchProfile:
        tried.append(batch_size)
        if batch_size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return profile(batch_size, 10.0 * batch_size)

    profiles, ended = profile_until_full(
        (32, 8, 4, 16, 8), measure, lambda done: announced.append(done.batch_size)
    )
    assert tried == [4, 8, 16]
    assert announced == [found.batch_size for found in profiles] == [4, 8]
    assert (
        verdict_lines(profiles, ended, 2**40)[1]
        == "Largest that fits: 8 (batch 16 ran out of memory)"
    )


@pytest.mark.parametrize(
    "words",
    ["GET was unable to find an engine to execute this computation", "illegal memory access"],
)
def test_libraries_that_lack_memory_end_the_sweep_and_nothing_else_does(words: str) -> None:
    def measure(batch_size: int) -> BatchProfile:
        if batch_size > 4:
            raise RuntimeError(f"cuDNN error: {words}")
        return profile(batch_size, 10.0)

    if words == "illegal memory access":
        with pytest.raises(RuntimeError, match=words):
            profile_until_full((4, 8), measure, lambda _: None)
        return
    profiles, ended = profile_until_full((4, 8), measure, lambda _: None)
    assert (len(profiles), ended) == (1, "batch 8 ran out of memory")


def test_a_batch_beyond_the_machines_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        profiling.psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * 2**20)
    )
    profiles, ended = profile_until_full(
        (4, 8, 32), lambda size: profile(size, 10.0), lambda _: None
    )
    # 8 takes 4 MiB more than 4, 32 would take 24 more than 8
    assert [one.batch_size for one in profiles] == [4, 8]
    assert ended == "batch 32 was not tried: up to 24.0 MiB more than batch 8, 10.0 MiB available"
    sizes, reserved_bytes = (4, 8, 32), 1  # on a GPU the process survives, so all are tried
    assert (
        profile_until_full(sizes, lambda size: profile(size, 10.0, reserved_bytes), lambda _: None)[
            1
        ]
        is None
    )


FASTER_IF_LARGER = {4: (60.0, 40), 8: (97.0, 80), 16: (120.0, 95)}  # images/s and bytes


@pytest.mark.parametrize(
    ("speeds", "capacity_bytes", "best"),
    [
        (FASTER_IF_LARGER, 2**40, 16),
        (FASTER_IF_LARGER, 100, 8),  # 16 leaves less than a tenth
        (FASTER_IF_LARGER, 42, 4),  # none leaves a tenth: the smallest
        # the smallest near the fastest
        ({4: (60.0, 1), 8: (97.5, 1), 16: (100.0, 1), 32: (98.0, 1)}, 2**40, 8),
        ({4: (60.0, 1)}, 2**40, 4),
    ],
)
def test_the_best_batch_is_the_smallest_near_the_fastest_that_leaves_headroom(
    speeds: dict[int, tuple[float, int]], capacity_bytes: int, best: int
) -> None:
    profiles = [profile(size, speed, reserved) for size, (speed, reserved) in speeds.items()]
    assert best_profile(profiles, capacity_bytes).batch_size == best
    line = verdict_lines(profiles, None, capacity_bytes)[0]
    assert line.startswith(f"Best: --batch-size {best} ({speeds[best][0]:.1f} images/s")
    assert ("none leaves 10% of the memory free" in line) == (capacity_bytes == 42)


def test_the_table_shows_reserved_memory_only_where_there_is_any() -> None:
    assert "peak RSS" in profile_table([profile(4, 60.0)])
    table = profile_table([profile(4, 60.0, reserved_bytes=3 * 2**30)])
    assert "3.0 GiB" in table
    assert "peak RSS" not in table


def test_a_gpus_readings_are_taken_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = {"gpu_util": 0.9, "gpu_power_w": 400.0, "gpu_temperature_c": 60.0}
    monkeypatch.setattr(
        nvml, "Gpu", lambda index: SimpleNamespace(index=index, read=lambda: dict(reading))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    watch = nvml.GpuWatch(1, print, 0.1)
    monkeypatch.setattr(
        profiling,
        "GpuWatch",
        lambda index, *_, **__: watch if index == watch.device_index else None,
    )
    with profiling._readings(torch.device("cuda", 1)) as readings:
        while not watch._count:  # the thread's first reading
            pass
    assert readings == reading
