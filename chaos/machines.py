"""Helpers of the scenarios on several machines: environments, process trees, and the results of small trainings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
TRAINER = PROJECT / "chaos" / "small_training.py"
LAUNCHERS_PREFIXES = ("SLURM", "PET_", "OMPI_", "TORCHELASTIC", "GLOO_", "NCCL_")
LAUNCHERS_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("DRY_RUN", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PROJECT", "RUN_FOLDER", "PROCESSES", "MAX_REQUEUES"),
)


class ScenarioFailed(AssertionError):
    """A condition of a scenario did not hold."""


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without any launcher's variables, ready for train_ddp.sh."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHERS_NAMES and not name.startswith(LAUNCHERS_PREFIXES)
    }
    ours = {
        "PYTHON": sys.executable,
        "TRAIN_SCRIPT": str(TRAINER),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "INIT_TIMEOUT": "120",
        "NCCL_TIMEOUT": "60",
    }
    return {**inherited, **ours, **extra}


def descendants(process_id: int) -> list[int]:
    """Return the ids of all processes below one, children before grandchildren."""
    found: list[int] = []
    waiting = [process_id]
    while waiting:
        parent = waiting.pop(0)
        for tasks in Path("/proc").glob(f"{parent}/task/*/children"):
            try:
                children = [int(word) for word in tasks.read_text().split()]
            except OSError:  # it ended meanwhile
                continue
            found += children
            waiting += children
    return found


def kill_tree(process: subprocess.Popen[bytes], *, itself: bool = True) -> None:
    """Kill a process and all its descendants; with `itself=False` only the descendants."""
    victims = descendants(process.pid)
    if itself and process.poll() is None:
        process.kill()
    for victim in victims:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:  # it ended with its parent
            continue
    if itself:
        process.wait()


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]) -> float:
    """Wait for a condition and return the seconds. Raises ScenarioFailed after `timeout_s`.

    `what` names the condition in the error; a function is called only then, so that it can quote the latest logs.
    """
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            raise ScenarioFailed(f"not within {timeout_s:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
    return time.monotonic() - start_s


def step_of(folder: Path) -> int:
    """Return the optimizer step in the run's status; 0 if there is none."""
    try:
        return int(json.loads((folder / "status.json").read_text(encoding="utf-8")).get("step", 0))
    except OSError:
        return 0


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `starts.jsonl` of a small training."""
    try:
        return [json.loads(line) for line in (folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []


def result_of(folder: Path) -> dict[str, Any]:
    """Return `result.json` of a small training. Raises ScenarioFailed when it did not finish."""
    file = folder / "result.json"
    if not file.is_file():
        raise ScenarioFailed(f"{folder} holds no result")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def require(condition: bool, what: str) -> None:
    """Raise ScenarioFailed with `what` unless the condition holds."""
    if not condition:
        raise ScenarioFailed(what)
