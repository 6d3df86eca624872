"""How many CPU cores this process may use, and how ranks share them. Imports no PyTorch."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path


def usable_cpu_count(
    cgroup_folder: Path = Path("/sys/fs/cgroup"), membership_file: Path = Path("/proc/self/cgroup")
) -> int:
    """Count the cores this process may really use: its affinity, cut by the container's CPU quota (at least 1)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cgroup_quotas(cgroup_folder, membership_file)]
    return max(1, min([cores, *quotas]))


def _cgroup_quotas(cgroup_folder: Path, membership_file: Path) -> list[float]:
    """Read every CPU quota on the way up from our own group: cgroup v2's `cpu.max`, v1's `cpu.cfs_*`."""
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
    try:
        return file.read_text(encoding="utf-8").split(separator)
    except (OSError, UnicodeDecodeError):
        return []


def choose_threads_and_workers(
    local_world_size: int, requested_workers: int = 8, device_type: str = "cpu", cores: int | None = None
) -> tuple[int, int]:
    """Share the usable cores: return (compute threads, loader workers) for each of this node's ranks.

    `requested_workers` is a ceiling. Ranks x (threads + workers) stays within the cores; the exceptions are more ranks
    than cores, and a GPU rank, which always keeps one thread and, unless 0 are asked for, one worker.
    """
    share = (cores or usable_cpu_count()) // max(1, local_world_size)
    if device_type == "cpu":
        # On a CPU the arithmetic takes most of the time: a loader process earns its core from the fourth core on.
        workers = min(requested_workers, share // 4)
    else:
        workers = min(requested_workers, max(1, share - 1))
    return max(1, share - workers), workers


def shared_memory_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Return what is free where loader workers hand over batches, or None where there is no such place."""
    return shutil.disk_usage(folder).free if folder.is_dir() else None
