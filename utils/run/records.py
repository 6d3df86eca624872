"""Reads what a run has written so far, beside the process that still writes: nothing here changes or locks a file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from utils.run.log import METRICS_FILE, parse_record
from utils.run.status import RUNNING, STATUS_FILE

CONFIG_FILE = "config.yaml"
MOST_BATCHES = 4000  # batch records kept for the curves
SILENT_S = 300.0  # longer than any wait of a healthy run that has shown no longer one
LONGEST_PAUSE_S = 1800.0  # a longer one was the time between two processes of the run
Record = dict[str, Any]


def read_config(folder: Path) -> Record:
    """Return the resolved options of the run in `folder`, or an empty dictionary."""
    try:
        content = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def read_status(folder: Path) -> Record:
    """Return a run's status.json, or an empty dictionary."""
    try:
        content = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_epochs(folder: Path) -> list[Record]:
    """Return the epoch records of a run's metrics.jsonl, oldest first. Raises OSError where there is no such file."""
    with (folder / METRICS_FILE).open("rb") as lines:
        # A line without its end is what a killed run left; the log drops it before it writes on.
        records = [parse_record(line) for line in lines if line.endswith(b"\n")]
    return [record for record in records if record is not None and record.get("kind") == "epoch"]


class RecordTail:
    """Reads a growing metrics.jsonl, each time only what is new. A file that was replaced or cut is read anew."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[bool, list[Record]]:
        """Return whether to forget what was read before, and the complete new records."""
        try:
            with self.file.open("rb") as stream:
                facts = os.fstat(stream.fileno())
                identity = facts.st_dev, facts.st_ino
                is_new = identity != self._identity or facts.st_size < self._offset
                if is_new:
                    self._identity, self._offset = identity, 0
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            is_new, self._identity, self._offset = self._identity is not None, None, 0
            return is_new, []
        complete = data[: data.rfind(b"\n") + 1]  # the rest is being written just now, or was left by a killed run
        self._offset += len(complete)
        records = (parse_record(line) for line in complete.splitlines())
        return is_new, [record for record in records if record is not None]


@dataclass
class RunState:
    """A run as its files tell it at one moment."""

    folder: Path
    config: Record = field(default_factory=dict)
    status: Record = field(default_factory=dict)
    epochs: list[Record] = field(default_factory=list)
    batches: deque[Record] = field(default_factory=lambda: deque(maxlen=MOST_BATCHES))
    last_sign_s: float | None = None  # Unix time of the last thing written

    @property
    def state(self) -> str:
        """As status.json says: running, finished, stopped or failed; empty without one."""
        return str(self.status.get("state", ""))

    def silent_s(self, now_s: float) -> float:
        """Return for how long nothing was written."""
        return max(now_s - self.last_sign_s, 0.0) if self.last_sign_s is not None else 0.0

    def trouble(self, now_s: float) -> str | None:
        """Return why a run that says it is running looks dead, or None."""
        if self.state != RUNNING:
            return None
        pid, host = self.status.get("pid"), self.status.get("host")
        if host == socket.gethostname() and isinstance(pid, int) and not _is_alive(pid, self.status.get("updated")):
            return f"process {pid} is gone; the same training command continues the run"
        if self.silent_s(now_s) > max(SILENT_S, 3 * self._longest_pause_s()):
            return (
                f"nothing written for {self.silent_s(now_s) / 60:.0f} minutes; is process {pid} on {host} still there?"
            )
        return None

    def _longest_pause_s(self) -> float:
        times = [record["time_s"] for record in self.batches if isinstance(record.get("time_s"), int | float)]
        pauses = (after - before for before, after in itertools.pairwise(times))
        return min(max(pauses, default=0.0), LONGEST_PAUSE_S)


class RunReader:
    """Follows one run's folder; `read` returns its present state."""

    def __init__(self, folder: Path) -> None:
        self._state = RunState(folder)
        self._tail = RecordTail(folder / METRICS_FILE)

    def read(self) -> RunState:
        """Read what is new. Raises FileNotFoundError when the folder is gone or holds no run."""
        state = self._state
        folder = state.folder
        is_new, records = self._tail.read()
        if is_new:
            state.epochs.clear()
            state.batches.clear()
        for record in records:
            if record.get("kind") in ("epoch", "batch"):
                (state.epochs if record["kind"] == "epoch" else state.batches).append(record)
        state.config, state.status = read_config(folder), read_status(folder)
        signs = [_modified_s(folder / name) for name in (METRICS_FILE, STATUS_FILE)]
        if not state.config and not any(signs):
            raise FileNotFoundError(folder)
        state.last_sign_s = max((sign for sign in signs if sign is not None), default=None)
        return state


def _modified_s(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def _is_alive(pid: int, seen_at: Any) -> bool:
    """Whether this machine's process `pid` runs and is the one that wrote at `seen_at` (ISO 8601), not a later one."""
    try:
        with contextlib.suppress(PermissionError):  # another user's, and alive
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        began_s = time.time() - up_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
        # Z: ended, but nobody has asked for its exit code. 2 s: `updated` is cut to whole seconds.
        return fields[0] != "Z" and began_s <= datetime.fromisoformat(str(seen_at)).timestamp() + 2
    except (OSError, ValueError, IndexError):
        return True  # a system without /proc
