"""The CPU cores this process may use, how ranks share them, and its memory. Imports no PyTorch."""

from __future__ import annotations

import math
import os
import shutil
import sys
from pathlib import Path

import psutil

# Loader processes of a rank, at most, unless the user names a number. 8 make some 3,000 to 4,300
# samples/s at 640 px (docs/research/performance.md), which a small model on a fast GPU may exceed.
# A GPU rank uses one of its cores, so more processes cost nothing but memory where they are not
# needed.
MOST_WORKERS = {"cpu": 8, "cuda": 16}
MOSTLY_FREE = 0.3  # a core that is busy for at most this share counts as free


def usable_cpu_count(
    cgroup_folder: Path = Path("/sys/fs/cgroup"), membership_file: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the number of cores of this process: its affinity, limited by the container's CPU
    quota (at least 1).
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cgroup_quotas(cgroup_folder, membership_file)]
    return max(1, min([cores, *quotas]))


def _cgroup_quotas(cgroup_folder: Path, membership_file: Path) -> list[float]:
    """Return the CPU quotas, in cores, of our cgroup and its parents: `cpu.max` (v2) or `cpu.cfs_*`
    (v1).
    """
    quotas = []
    for folder in _cgroup_folders(cgroup_folder, membership_file):
        words = read_words(folder / "cpu.max")
        if not words:
            words = read_words(folder / "cpu.cfs_quota_us") + read_words(
                folder / "cpu.cfs_period_us"
            )
        if (
            len(words) == 2
            and words[0].isdigit()
            and words[1].isdigit()
            and int(words[0])
            and int(words[1])
        ):
            # "max" and -1 mean no quota.
            quotas.append(int(words[0]) / int(words[1]))
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
    local_world_size: int,
    requested_workers: int | None = None,
    device_type: str = "cpu",
    cores: int | None = None,
) -> tuple[int, int]:
    """Return (compute threads, loader workers) for each of this node's ranks.

    `requested_workers` is an upper limit; None: MOST_WORKERS. Ranks x (threads + workers) does not
    exceed the usable cores, except with more ranks than cores. A GPU rank gets at least one thread
    and, unless 0 are requested, one worker.
    """
    share = (cores or usable_cpu_count()) // max(1, local_world_size)
    most = MOST_WORKERS[device_type] if requested_workers is None else requested_workers
    # Training on a CPU needs most cores for the model: one loader worker for every four cores.
    workers = min(most, share // 4 if device_type == "cpu" else max(1, share - 1))
    return max(1, share - workers), workers


def threads_beside_others(threads: int, free: float) -> int:
    """Return the number of compute threads, at most `threads`, that suits `free` cores, those that
    other programs leave idle.

    At each step of a computation all threads wait for the slowest. A thread that shares its core
    makes all threads several times slower; fewer threads with a core each are faster.
    """
    return min(threads, max(1, math.floor(free + MOSTLY_FREE)))


def free_cores(wait_s: float = 0.5) -> float:
    """Wait, and return how many of this process's cores are idle meanwhile; all of them if the
    system does not say.
    """
    mine = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    try:
        # A core that waits for a disk is idle.
        busy = psutil.cpu_percent(wait_s, percpu=True)
    except OSError:
        return float(len(mine))
    # If a core is switched off, the numbers are not those of the cores.
    if max(mine) >= len(busy):
        return float(len(mine))
    return sum(1 - busy[core] / 100 for core in mine)


def peak_process_bytes() -> int:
    """Return the peak memory of this process so far."""
    for line in read_words(Path("/proc/self/status"), separator="\n"):
        # ru_maxrss would begin at the memory of the process that started this one
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB.
    return peak if sys.platform == "darwin" else peak * 1024


def shared_memory_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the free bytes of the shared memory that loader workers use, or None if the system has
    none.
    """
    return shutil.disk_usage(folder).free if folder.is_dir() else None
