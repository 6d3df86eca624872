"""How many cores and how much shared memory this process may use."""

from __future__ import annotations

import os
import subprocess
import sys
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
def test_container_quota_limits_cores(tmp_path: Path, files: dict[str, str], membership: str, expected: int) -> None:
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


def test_unless_told_a_gpu_rank_does_not_stop_at_8_workers_while_it_has_more_cores() -> None:
    assert cores.choose_threads_and_workers(1, None, "cuda", cores=16) == (1, 15)
    assert cores.choose_threads_and_workers(8, None, "cuda", cores=64) == (1, 7)
    assert cores.choose_threads_and_workers(2, 8, "cuda", cores=32) == (8, 8)
    assert cores.choose_threads_and_workers(1, None, "cuda", cores=64) == (48, 16)
    assert cores.choose_threads_and_workers(1, None, "cpu", cores=64) == (56, 8)


BEFORE = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 100 0 50 1000 10 0 0 0 0 0
cpu1 100 0 50 1000 10 0 0 0 0 0
cpu2 100 0 50 1000 10 0 0 0 0 0
intr 12345
"""
AFTER = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 102 0 50 1036 12 0 0 0 2 0
cpu1 140 0 60 1000 10 0 0 0 0 0
cpu2 100 10 50 1010 10 0 5 15 0 0
intr 12345
"""


@pytest.mark.parametrize(("mine", "expected"), [({0}, 0.95), ({1}, 0.0), ({2}, 0.25), ({0, 1, 2}, 1.2), ({0, 7}, 2.0)])
def test_free_cores_are_those_that_idle(
    mine: set[int], expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine)
    file = tmp_path / "stat"
    file.write_text(BEFORE)
    monkeypatch.setattr(cores.time, "sleep", lambda seconds: file.write_text(AFTER))
    assert cores.free_cores(stat_file=file) == pytest.approx(expected)
    assert cores.free_cores(stat_file=tmp_path / "missing") == len(mine)


def test_a_busy_program_on_one_of_our_cores_is_noticed() -> None:
    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert cores.free_cores(0.2) < len(os.sched_getaffinity(0)) - 0.9
        finally:
            other.kill()


@pytest.mark.parametrize(
    ("threads", "free", "expected"),
    [
        (1, 0.0, 1),
        (2, 2.0, 2),
        (2, 1.75, 2),
        (2, 1.6, 1),
        (2, 1.0, 1),
        (2, 0.1, 1),
        (8, 6.5, 6),
        (8, 6.8, 7),
        (4, 64, 4),
    ],
)
def test_threads_leave_the_cores_of_other_programs(threads: int, free: float, expected: int) -> None:
    assert cores.threads_beside_others(threads, free) == expected


def test_free_shared_memory_is_reported_in_bytes(tmp_path: Path) -> None:
    free = cores.shared_memory_free_bytes(tmp_path)
    assert free is not None
    assert free > 0
    assert cores.shared_memory_free_bytes(tmp_path / "missing") is None
