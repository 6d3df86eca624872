"""A long training: the resources that it holds must not grow."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from chaos.jobs import Job, Process
from chaos.kills import await_training
from chaos.scenario import Result, Setting
from chaos.trainers import small, status

WARM_UP = 0.2  # share of the time after which the reference is taken
MAX_GROWTH = 0.05


@dataclass(frozen=True)
class Holdings:
    """Resources of all ranks and loader processes together."""

    memory_mib: float
    files: int
    threads: int
    shared_segments: int


def soak(setting: Setting) -> Result:
    """R25: many short epochs with loader processes, each with validation and a checkpoint."""
    result = Result()
    minutes = 0.5 if setting.quick else setting.minutes
    folder = setting.folder
    history: list[Holdings] = []
    with Job(small(folder, epochs=1_000_000, num_workers=1, step_s=0.005), folder / "log") as job:
        await_training(job, 0)
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s and job.popen.poll() is None:
            time.sleep(minutes / 2)
            history.append(_holdings(job))
        job.process.send(signal.SIGTERM)
        job.wait(60)
    warm = history[int(WARM_UP * len(history))]
    last = history[-max(len(history) // 10, 1) :]
    grown = min(entry.memory_mib for entry in last) / warm.memory_mib - 1
    result.trial("memory", f"grew by {grown:.1%}" if grown > MAX_GROWTH else "")
    for name in ("files", "threads", "shared_segments"):
        # The minimum of the last measurements: saving a checkpoint holds a few more for a moment.
        before, after = getattr(warm, name), min(getattr(entry, name) for entry in last)
        result.trial(name, f"{before} became {after}" if after > before * (1 + MAX_GROWTH) else "")
    result.figures = {
        "minutes": minutes,
        "epochs": int(status(folder / "run").get("epoch", 0)),
        "memory": f"{warm.memory_mib:.0f} to {last[-1].memory_mib:.0f} MiB",
        "files": f"{warm.files} to {last[-1].files}",
        "threads": f"{warm.threads} to {last[-1].threads}",
    }
    return result


def _holdings(job: Job) -> Holdings:
    members = [process for process in job.family() if process.pid != job.popen.pid]
    memory_kib = threads = files = 0
    for process in members:
        memory_kib += _status_number(process, "VmRSS")
        threads += _status_number(process, "Threads")
        files += _count(Path(f"/proc/{process.pid}/fd"))
    return Holdings(memory_kib / 1024, files, threads, _count(Path("/dev/shm")))


def _status_number(process: Process, name: str) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _count(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0
