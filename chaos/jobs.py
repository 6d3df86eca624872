"""Start a command, find its descendants, read its output from a file, and kill all of them in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from utils.common.environment import python_path

PROJECT = Path(__file__).resolve().parent.parent
# Variables of an outer launcher or shell that an attacked training must not inherit.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES")
POLL_S = 0.02
REFERENCE_TIMEOUT_S = 900.0  # for a command that is not attacked


class TooSlow(Exception):
    """Something did not happen in time. The message says what, and ends with the job's last lines."""


@dataclass(frozen=True)
class Process:
    """A process, identified by number and start time, because the system reuses numbers."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        """Return whether it still runs; a zombie does not."""
        facts = _facts(self.pid)
        return facts is not None and facts[0] not in "ZX" and facts[2] == self.started

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_alive():
            os.kill(self.pid, number)

    def environment(self) -> dict[str, str]:
        """Return the environment it was started with; empty when it has ended."""
        try:
            content = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            return {}
        return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


class Job:
    """A running command. Leaving the `with` block kills it and all its descendants."""

    def __init__(self, command: Sequence[str | Path], log_file: Path, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        with log_file.open("ab") as log:
            self.popen = subprocess.Popen(
                [str(word) for word in command],
                cwd=PROJECT,
                env={**inherited, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.process = _process(self.popen.pid)
        self._known: set[Process] = set()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = self.family()
        self.popen.kill()
        for process in family:
            process.send(signal.SIGKILL)
        self.popen.wait(timeout=30)

    def family(self) -> list[Process]:
        """Return the command and its living descendants, including orphans that an earlier call found."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (facts := _facts(int(entry.name))) is not None:
                parents.setdefault(facts[1], []).append(int(entry.name))
        waiting = [self.popen.pid]
        while waiting:
            pid = waiting.pop()
            waiting += parents.get(pid, [])
            self._known.add(_process(pid))
        return [process for process in self._known if process.is_alive()]

    def ranks(self) -> dict[int, Process]:
        """Return the living ranks by number: children of the launcher with RANK in their environment."""
        found = {}
        for process in self.family():
            facts = _facts(process.pid)
            if facts is not None and facts[1] == self.popen.pid and (rank := process.environment().get("RANK")):
                found[int(rank)] = process
        return found

    def output(self) -> str:
        """Return its stdout and stderr so far, as one text."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return the exit code. Raises TooSlow."""
        try:
            return self.popen.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TooSlow(f"still running after {timeout_s:.0f} s {self._last_lines()}") from error

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Wait for a condition and return the seconds. Raises TooSlow, also when the job ends first."""
        start_s = time.monotonic()
        while not condition():
            if self.popen.poll() is not None and not condition():
                raise TooSlow(f"ended with {self.popen.returncode} before {what} {self._last_lines()}")
            if time.monotonic() - start_s > timeout_s:
                raise TooSlow(f"no {what} within {timeout_s:.0f} s {self._last_lines()}")
            time.sleep(POLL_S)
        return time.monotonic() - start_s

    def _last_lines(self) -> str:
        return "(" + " / ".join(self.output().splitlines()[-4:])[-500:] + ")"


def run(command: Sequence[str | Path], log_file: Path, *, timeout_s: float = 300, **environment: str) -> int:
    """Run a command and return its exit code. Leaves no process behind. Raises TooSlow."""
    with Job(command, log_file, **environment) as job:
        return job.wait(timeout_s)


def require(command: Sequence[str | Path], log_file: Path, **environment: str) -> None:
    """Run a command. Raises RuntimeError when it fails."""
    code = run(command, log_file, timeout_s=REFERENCE_TIMEOUT_S, **environment)
    if code:
        raise RuntimeError(f"{' '.join(map(str, command))[:200]} ended with {code}; see {log_file}")


def _process(pid: int) -> Process:
    facts = _facts(pid)
    return Process(pid, facts[2] if facts else "gone")


def _facts(pid: int) -> tuple[str, int, str] | None:
    """Return (state, parent, start time) of a process from /proc, None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]
