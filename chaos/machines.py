"""Processes that a scenario owns, their descendants, and what a small training left in its folder."""

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
    """What had to come true did not."""


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
    """End a process of ours and all below it, as a power cut would; without `itself` only what it started."""
    victims = descendants(process.pid)
    if itself and process.poll() is None:
        process.kill()
    for victim in victims:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:  # gone with its parent
            continue
    if itself:
        process.wait()


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]) -> float:
    """Wait for something to come true and return the seconds it took. Raises ScenarioFailed after `timeout_s`.

    `what` is awaited; a function is asked for it only then, when logs have come to their end.
    """
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            raise ScenarioFailed(f"not within {timeout_s:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
    return time.monotonic() - start_s


def step_of(folder: Path) -> int:
    """Return the optimizer step that the run's status names, 0 before there is one."""
    try:
        return int(json.loads((folder / "status.json").read_text(encoding="utf-8")).get("step", 0))
    except OSError:
        return 0


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """Return the starts of a small training, first to last."""
    try:
        return [json.loads(line) for line in (folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []


def result_of(folder: Path) -> dict[str, Any]:
    """Return what a finished small training left. Raises ScenarioFailed when it did not finish."""
    file = folder / "result.json"
    if not file.is_file():
        raise ScenarioFailed(f"{folder} holds no result")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def require(condition: bool, what: str) -> None:
    """Raise ScenarioFailed with `what` unless the condition holds."""
    if not condition:
        raise ScenarioFailed(what)
