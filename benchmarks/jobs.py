"""Start commands of this project, end them with all their descendants, and compare what two
trainings saved.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER, python_path
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.options import words_of

# Variables of an outer launcher that a command must not inherit.
NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
)
POLL_S = 0.02
COMPARED = ("model", "ema", "ema_updates", "optimizer", "scheduler", "scaler", "progress")


class TooSlow(Exception):
    """An event did not happen in time. The message names it and ends with the job's last lines."""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    with suppress(psutil.Error):
        return bool(
            process.is_running()
            and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        )
    return False


class Job:
    """A running command. Leaving the `with` block kills it and all its descendants."""

    def __init__(self, command: Sequence[str | Path], log_file: Path, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        with log_file.open("ab") as log:
            self.popen = subprocess.Popen(
                [str(word) for word in command],
                cwd=PROJECT_FOLDER,
                env={
                    **inherited,
                    "PYTHONPATH": python_path(),
                    "OMP_NUM_THREADS": "1",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.process = psutil.Process(self.popen.pid)
        self._known = {self.process}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self, *, only_descendants: bool = False) -> None:
        """Send SIGKILL to the command and its descendants."""
        family = self.family()
        if not only_descendants:
            # First the launcher, which would replace its ranks.
            self.popen.kill()
        for process in family:
            # It may have just ended.
            with suppress(psutil.NoSuchProcess):
                if process != self.process:
                    process.kill()
        if not only_descendants:
            self.popen.wait(timeout=30)

    def family(self) -> list[psutil.Process]:
        """Return the command and its living descendants, including orphans that an earlier call
        found.
        """
        with suppress(psutil.NoSuchProcess):
            self._known.update(self.process.children(recursive=True))
        return [process for process in self._known if is_alive(process)]

    def ranks(self, attempt: int, world_size: int) -> list[psutil.Process]:
        """Return the living ranks of the launcher's start number `attempt` (from 0); empty unless
        all of them live.
        """
        living = []
        with suppress(psutil.NoSuchProcess):
            for process in filter(is_alive, self.process.children()):
                environment = process.environ()
                if "RANK" in environment and environment.get("TORCHELASTIC_RESTART_COUNT") == str(
                    attempt
                ):
                    living.append(process)
        return living if len(living) == world_size else []

    def output(self) -> str:
        """Return its stdout and stderr so far, as one text."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """Return the last line that it printed."""
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return the exit code. Raises TooSlow."""
        try:
            return self.popen.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TooSlow(f"still running after {timeout_s:.0f} s {self._last_lines()}") from error

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> float:
        """Wait for a condition and return the seconds.

        Raises TooSlow, also when the job ends first.
        """
        start_s = time.monotonic()
        while not condition():
            if self.popen.poll() is not None and not condition():
                raise TooSlow(
                    f"ended with {self.popen.returncode} before {what} {self._last_lines()}"
                )
            if time.monotonic() - start_s > timeout_s:
                raise TooSlow(f"no {what} within {timeout_s:.0f} s {self._last_lines()}")
            time.sleep(POLL_S)
        return time.monotonic() - start_s

    def _last_lines(self) -> str:
        return "(" + " / ".join(self.output().splitlines()[-4:])[-500:] + ")"


def run(
    command: Sequence[str | Path], log_file: Path, *, timeout_s: float = 900, **environment: str
) -> int:
    """Run a command and return its exit code. Leaves no process behind. Raises TooSlow."""
    with Job(command, log_file, **environment) as job:
        return job.wait(timeout_s)


def require(command: Sequence[str | Path], log_file: Path, **environment: str) -> None:
    """Run a command. Raises RuntimeError when it fails."""
    if code := run(command, log_file, timeout_s=900, **environment):
        raise RuntimeError(f"{' '.join(map(str, command))[:200]} ended with {code}; see {log_file}")


def draw_sample(folder: Path, num_photos: int, **choices: object) -> Path:
    """Make a small data set from the built-in sample; return its dataset.yaml."""
    raw, processed = folder / "raw", folder / "processed"
    log = folder / "sample.log"
    require([sys.executable, "download_data.py", "--sample", str(num_photos), "--output", raw], log)
    options = words_of({"input": raw, "output": processed, "long_side": 128, **choices})
    require([sys.executable, "parse_labels.py", *options], log)
    return processed / "dataset.yaml"


def difference(run_folder: Path, reference: Path) -> str:
    """Return a description of the difference between two runs' newest checkpoints; empty if they
    are bitwise equal.
    """
    try:
        checkpoints = [load_latest(folder / "checkpoint") for folder in (run_folder, reference)]
    except UserError as error:
        return str(error)
    if checkpoints[0] is None or checkpoints[1] is None:
        return "there is no checkpoint"
    first, second = (_compared(checkpoint[1]) for checkpoint in checkpoints if checkpoint)
    if first.keys() != second.keys():
        return f"the checkpoints hold different values: {sorted(first.keys() ^ second.keys())[:3]}"
    names = [name for name in first if first[name] != second[name]]
    return f"{len(names)} of {len(first)} values differ, the first is {names[0]}" if names else ""


def _compared(state: dict[str, Any]) -> dict[str, bytes]:
    values = {name: state[name] for name in COMPARED}
    # the epochs' times
    progress = {name: value for name, value in state["progress"].items() if name != "history"}
    return leaves({**values, "progress": progress})


def leaves(value: Any, name: str = "") -> dict[str, bytes]:
    """Return the values of nested dictionaries and lists as bits: a NaN equals itself, and -0
    differs from 0.
    """
    if isinstance(value, torch.Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {name: f"{value.dtype}{tuple(value.shape)}".encode() + bits}
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {name: repr(value).encode()}
    return {
        leaf: bits
        for key, part in items
        for leaf, bits in leaves(part, f"{name}.{key}".removeprefix(".")).items()
    }
