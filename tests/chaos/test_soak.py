"""A long training: the resources that it holds must not grow."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.jobs import Job
from tests.chaos.trainings import await_training, read_json, small

WARM_UP = 0.2  # share of the time after which the reference is taken
MAX_GROWTH = 0.05


@pytest.mark.chaos(1, 1)
@pytest.mark.timeout(0)
def test_r25_nothing_grows_in_a_long_training(request: Any, tmp_path: Path, record_property: Any) -> None:
    config = request.config
    minutes = 0.5 if config.getoption("quick") else config.getoption("minutes")
    history = []
    with Job(small(tmp_path, epochs=1_000_000, num_workers=1, step_s=0.005), tmp_path / "log") as job:
        await_training(job, 0)
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s and job.popen.poll() is None:
            time.sleep(minutes / 2)
            history.append(holdings(job))
        job.process.send_signal(signal.SIGTERM)
        job.wait(60)
    record_property("epochs", read_json(tmp_path / "run" / "status.json").get("epoch", 0))
    warm = history[int(WARM_UP * len(history))]
    last = history[-max(len(history) // 10, 1) :]
    for name, before in warm.items():
        # The minimum of the last measurements: saving a checkpoint holds a few more for a moment.
        after = min(entry[name] for entry in last)
        record_property(f"{name} before", before)
        record_property(f"{name} after", after)
        assert after <= before * (1 + MAX_GROWTH), name


def holdings(job: Job) -> dict[str, float]:
    """Return what all ranks and loader processes hold together."""
    held = dict.fromkeys(("memory MiB", "files", "threads"), 0.0)
    for process in job.family():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if process != job.process:
                held["memory MiB"] += process.memory_info().rss / 2**20
                held["files"] += process.num_fds()
                held["threads"] += process.num_threads()
    return {**held, "shared segments": sum(1 for _ in Path("/dev/shm").iterdir())}
