"""The sweep over batch sizes, and the best of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.measure.made_up import profile
from utils.measure.profiling import (
    BatchProfile,
    TooLarge,
    best_profile,
    forecast_on_cpu,
    profile_until_full,
)
from utils.measure.profiling_report import missing_lines, profile_table, verdict_lines


def test_the_sweep_ascends_and_stops_where_memory_ends() -> None:
    tried: list[int] = []
    announced: list[int] = []

    def measure(batch_size: int) -> BatchProfile:
        tried.append(batch_size)
        if batch_size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return profile(batch_size, 10.0 * batch_size)

    profiles, too_large = profile_until_full((32, 8, 4, 16, 8), measure, lambda done: announced.append(done.batch_size))
    assert tried == [4, 8, 16]
    assert announced == [found.batch_size for found in profiles] == [4, 8]
    assert too_large == TooLarge(16, "ran out of memory")
    assert verdict_lines(profiles, too_large)[1] == "Largest that fits: 8 (batch 16 ran out of memory)"


@pytest.mark.parametrize(
    ("words", "ends_the_sweep"),
    [("GET was unable to find an engine to execute this computation", True), ("illegal memory access", False)],
)
def test_libraries_that_lack_memory_end_the_sweep_and_nothing_else_does(words: str, ends_the_sweep: bool) -> None:
    def measure(batch_size: int) -> BatchProfile:
        if batch_size > 4:
            raise RuntimeError(f"cuDNN error: {words}")
        return profile(batch_size, 10.0)

    if not ends_the_sweep:
        with pytest.raises(RuntimeError, match="illegal"):
            profile_until_full((4, 8), measure, lambda _: None)
        return
    profiles, too_large = profile_until_full((4, 8), measure, lambda _: None)
    assert len(profiles) == 1
    assert too_large == TooLarge(8, "ran out of memory")


def test_a_batch_beyond_the_machines_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def measure(batch_size: int) -> BatchProfile:
        tried.append(batch_size)
        return replace(profile(batch_size, 10.0), allocated_bytes=batch_size * 2**30, memory_bytes={"process": 2**30})

    monkeypatch.setattr("utils.measure.profiling.available_memory_bytes", lambda: 10 * 2**30)
    profiles, too_large = profile_until_full((4, 8, 32), measure, lambda _: None, forecast_on_cpu)
    assert tried == [4, 8]  # 8 takes 3 GiB more than 4, 32 would take 21 more than 8
    assert too_large is not None
    assert verdict_lines(profiles, too_large)[1] == (
        "Largest that fits: 8 (batch 32 was not tried: about 21.0 GiB more than batch 8, 10.0 GiB available)"
    )


@pytest.mark.parametrize(
    ("speeds", "capacity_bytes", "best"),
    [
        ({4: (60.0, 40), 8: (97.0, 80), 16: (120.0, 95)}, None, 16),
        ({4: (60.0, 40), 8: (97.0, 80), 16: (120.0, 95)}, 100, 8),  # 16 leaves less than a tenth
        ({4: (60.0, 40), 8: (97.0, 80), 16: (120.0, 95)}, 42, 4),  # none leaves a tenth: the smallest
        ({4: (60.0, 1), 8: (97.5, 1), 16: (100.0, 1), 32: (98.0, 1)}, None, 8),  # the smallest near the fastest
        ({4: (60.0, 1)}, None, 4),
    ],
)
def test_the_best_batch_is_the_smallest_near_the_fastest_that_leaves_headroom(
    speeds: dict[int, tuple[float, int]], capacity_bytes: int | None, best: int
) -> None:
    profiles = [profile(size, speed, reserved) for size, (speed, reserved) in speeds.items()]
    assert best_profile(profiles, capacity_bytes).batch_size == best
    line = verdict_lines(profiles, None, capacity_bytes)[0]
    assert line.startswith(f"Best: --batch-size {best} ({speeds[best][0]:.1f} images/s")
    assert ("none leaves 10% of the memory free" in line) == (capacity_bytes == 42)


def test_what_no_tensor_holds_is_said_beyond_a_tenth_of_the_peak() -> None:
    whole = replace(profile(1, 10.0), allocated_bytes=100, memory_bytes={"weights": 30, "activations": 65})
    assert missing_lines([whole]) == []
    lines = missing_lines([replace(whole, allocated_bytes=200, reserved_bytes=300)])
    assert lines == [
        "Missing: 105 B at batch 1 (52% of the peak) in no tensor: workspaces of kernels and gaps between blocks"
    ]


def test_the_table_shows_reserved_memory_only_where_there_is_any() -> None:
    assert "peak RSS" in profile_table([profile(4, 60.0)])
    table = profile_table([profile(4, 60.0, reserved_bytes=3 * 2**30)])
    assert "3.0 GiB" in table
    assert "peak RSS" not in table
