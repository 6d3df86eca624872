"""The CPU cores this process may use, how ranks share them, and its memory. Imports no PyTorch."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from pathlib import Path

IDLE = slice(3, 5)  # of a core's times in /proc/stat: idle, and idle while waiting for a disk
# Loader processes of a rank, at most, unless the user names a number. 8 make some 3,000 to 4,300 samples/s at 640 px
# (docs/research/performance.md), which a small model on a fast GPU may exceed. A GPU rank uses one of its cores, so more processes
# cost nothing but memory where they are not needed.
MOST_WORKERS = {"cpu": 8, "cuda": 16}
MOSTLY_FREE = 0.3  # a core that is busy for at most this share counts as free


def usable_cpu_count(
    cgroup_folder: Path = Path("/sys/fs/cgroup"), membership_file: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the number of cores of this process: its affinity, limited by the container's CPU quota (at least 1)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cgroup_quotas(cgroup_folder, membership_file)]
    return max(1, min([cores, *quotas]))


def _cgroup_quotas(cgroup_folder: Path, membership_file: Path) -> list[float]:
    """Return the CPU quotas, in cores, of our cgroup and its parents: `cpu.max` (v2) or `cpu.cfs_*` (v1)."""
    quotas = []
    for folder in _cgroup_folders(cgroup_folder, membership_file):
        words = read_words(folder / "cpu.max")
        if not words:
            words = read_words(folder / "cpu.cfs_quota_us") + read_words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[0]) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))  # "max" and -1 mean no quota
    return quotas


def _cgroup_folders(cgroup_folder: Path, membership_file: Path) -> list[Path]:
    folders = [cgroup_folder, cgroup_folder / "cpu", cgroup_folder / "cpu,cpuacct"]
    for line in read_words(membership_file, separator="\n"):
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = cgroup_folder / controllers if controllers else cgroup_folder
        parts = [part for part in group.split("/") if part and part != ".."]
        folders += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def read_words(file: Path, separator: str | None = None) -> list[str]:
    """Return the words of a text file, or an empty list when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").split(separator)
    except (OSError, UnicodeDecodeError):
        return []


def choose_threads_and_workers(
    local_world_size: int, requested_workers: int | None = None, device_type: str = "cpu", cores: int | None = None
) -> tuple[int, int]:
    """Return (compute threads, loader workers) for each of this node's ranks.

    `requested_workers` is an upper limit; None: MOST_WORKERS. Ranks x (threads + workers) does not exceed the usable cores, except
    with more ranks than cores. A GPU rank gets at least one thread and, unless 0 are requested, one worker.
    """
    share = (cores or usable_cpu_count()) // max(1, local_world_size)
    most = MOST_WORKERS[device_type] if requested_workers is None else requested_workers
    # Training on a CPU needs most cores for the model: one loader worker for every four cores.
    workers = min(most, share // 4 if device_type == "cpu" else max(1, share - 1))
    return max(1, share - workers), workers


def threads_beside_others(threads: int, free: float) -> int:
    """Return how many of `threads` compute threads to use beside other programs, for which `free` cores are left.

    At each step of a computation all threads wait for the slowest. One that shares its core makes all of them several
    times slower than fewer threads with a core each.
    """
    return min(threads, max(1, math.floor(free + MOSTLY_FREE)))


def free_cores(wait_s: float = 0.5, stat_file: Path = Path("/proc/stat")) -> float:
    """Return how many of this process's cores nobody uses while it waits; all of them where the system does not say."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    before = _core_times(stat_file)
    time.sleep(wait_s)
    after = _core_times(stat_file)
    free = 0.0
    for core in mine:
        if core not in before or core not in after:
            return float(len(mine))
        passed = [end - start for start, end in zip(before[core], after[core], strict=True)]
        free += sum(passed[IDLE]) / max(sum(passed), 1)
    return free


def _core_times(stat_file: Path) -> dict[int, list[int]]:
    """Return for each core how long it did what since the start, in the order of proc(5)."""
    times = {}
    for line in read_words(stat_file, separator="\n"):
        name, *values = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit():
            times[int(name[3:])] = [int(value) for value in values[:8]]  # the last two are part of the first two
    return times


def peak_process_bytes() -> int:
    """Return the peak memory of this process so far."""
    for line in read_words(Path("/proc/self/status"), separator="\n"):
        if line.startswith("VmHWM:"):  # ru_maxrss would begin at the memory of the process that started this one
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def shared_memory_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the free bytes of the shared memory that loader workers use, or None if the system has none."""
    return shutil.disk_usage(folder).free if folder.is_dir() else None
