"""How many cores and how much shared memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.common import cores


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", 16),
        ({"cpu.max": "max 100000"}, "0::/\n", 16),
        ({"cpu.max": "250000 100000"}, "0::/\n", 3),
        ({"cpu.max": "1000 100000"}, "0::/\n", 1),
        ({"cpu.max": "6400000 100000"}, "0::/\n", 16),
        ({"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, "0::/job/step\n", 4),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, "3:memory:/x\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/\n", 16),
        ({"cpu/box/cpu.cfs_quota_us": "500000", "cpu/box/cpu.cfs_period_us": "100000"}, "1:cpu:/box\n", 5),
        ({"cpu.max": "nonsense"}, "garbage", 16),
    ],
)
def test_container_quota_limits_the_cores(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int
) -> None:
    membership_file = tmp_path / "membership"
    membership_file.write_text(membership)
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    assert cores.usable_cpu_count(tmp_path / "cgroup", membership_file) == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("requested", [0, 1, 8])
def test_threads_and_workers_never_oversubscribe_the_cores(device_type: str, requested: int) -> None:
    for num_cores in range(1, 65):
        for ranks in range(1, 9):
            threads, workers = cores.choose_threads_and_workers(ranks, requested, device_type, num_cores)
            assert threads >= 1
            assert 0 <= workers <= requested
            if num_cores // ranks >= 2:
                assert ranks * (threads + workers) <= num_cores
            elif device_type == "cpu":
                assert (threads, workers) == (1, 0)
            else:
                assert workers == min(1, requested)


def test_gpu_ranks_load_with_all_but_one_of_their_cores() -> None:
    assert cores.choose_threads_and_workers(4, 8, "cuda", cores=16) == (1, 3)
    assert cores.choose_threads_and_workers(2, 8, "cuda", cores=32) == (8, 8)


def test_free_shared_memory_is_reported_in_bytes(tmp_path: Path) -> None:
    free = cores.shared_memory_free_bytes(tmp_path)
    assert free is not None
    assert free > 0
    assert cores.shared_memory_free_bytes(tmp_path / "missing") is None
