"""The sweep over batch sizes, and the best of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.measure.made_up import profile
from utils.measure.profiling import (
    BatchProfile,
    TooLarge,
    available_memory_bytes,
    best_profile,
    forecast_on_cpu,
    profile_until_full,
)
from utils.measure.profiling_report import verdict_lines


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


def test_available_memory_is_read_where_linux_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       1000 kB\nMemAvailable:    512 kB\n")
    assert available_memory_bytes(file) == 512 * 1024
    assert available_memory_bytes(tmp_path / "nothing") is None


def test_the_best_batch_leaves_headroom() -> None:
    profiles = [profile(4, 60.0, 40), profile(8, 97.0, 80), profile(16, 120.0, 95)]
    assert best_profile(profiles).batch_size == 16
    assert best_profile(profiles, capacity_bytes=100).batch_size == 8
    tight = best_profile(profiles, capacity_bytes=42)
    assert tight.batch_size == 4
    assert "none leaves 10% of the memory free" in verdict_lines(profiles, None, 42)[0]


def test_the_best_batch_is_the_smallest_near_the_fastest() -> None:
    profiles = [profile(4, 60.0), profile(8, 97.5), profile(16, 100.0), profile(32, 98.0)]
    assert best_profile(profiles).batch_size == 8
    assert best_profile(profiles[:1]).batch_size == 4
    assert verdict_lines(profiles, None)[0].startswith("Best: --batch-size 8 (97.5 images/s")
