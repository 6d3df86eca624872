"""The CPU cores this process may use, and how ranks share them. Imports no PyTorch."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path


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
    local_world_size: int, requested_workers: int = 8, device_type: str = "cpu", cores: int | None = None
) -> tuple[int, int]:
    """Return (compute threads, loader workers) for each of this node's ranks.

    `requested_workers` is an upper limit. Ranks x (threads + workers) does not exceed the usable cores, except
    with more ranks than cores. A GPU rank gets at least one thread and, unless 0 are requested, one worker.
    """
    share = (cores or usable_cpu_count()) // max(1, local_world_size)
    if device_type == "cpu":
        # Training on a CPU needs most cores for the model: one loader worker for every four cores.
        workers = min(requested_workers, share // 4)
    else:
        workers = min(requested_workers, max(1, share - 1))
    return max(1, share - workers), workers


def shared_memory_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the free bytes of the shared memory that loader workers use, or None if the system has none."""
    return shutil.disk_usage(folder).free if folder.is_dir() else None
