"""Reads a run's files, also while the run writes them, and finds the rank that the others wait for.

Changes and locks nothing.
"""

import itertools
import math
import os
import socket
import statistics
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psutil

from yolo_seg_ddp.run.status import RUNNING, STATUS_FILE
from yolo_seg_ddp.utils.contents import BAD_CONTENT, mapping, parse_json, read_back, read_mapping
from yolo_seg_ddp.utils.files import open_regular, read_bytes

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
MEAN_MAP = "mean_map50_95"  # the mean of mask and box mAP50-95, reported if it chooses best.pt
# The choices of --best-metric, and the reported values that they stand for.
BEST_METRICS = {
    "val_loss": "val_loss",
    "mean_map": MEAN_MAP,
    "mask_map": "mask_map50_95",
    "box_map": "box_map50_95",
}
MAX_METRICS_BYTES = 2_000_000_000
MAX_BATCHES = 4000  # batch records kept for the curves
# a run that writes nothing for longer, and for three times its longest pause, looks dead
MAX_SILENCE_S = 300.0
MAX_PAUSE_S = 1800.0  # a longer pause between records was the time between two processes of the run
Record = dict[str, Any]


def read_config(folder: Path) -> Record:
    """Return the resolved options of the run in `folder`; empty without the file.

    Raises UserError if it is damaged.
    """
    try:
        return read_back(
            folder / CONFIG_FILE,
            mapping,
            "restore it, or remove it and a new run begins",
            is_yaml=True,
        )
    except (FileNotFoundError, NotADirectoryError):
        return {}


def read_status(folder: Path) -> Record:
    """Return a run's status.json, or an empty dictionary."""
    return read_mapping(folder / STATUS_FILE)


def number_of(value: Any) -> float:
    """Return a record's value as a number; NaN for what is none, such as null, which stands for
    infinity and NaN.
    """
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of one line, or None if the line is incomplete, or of a form that its
    readers do not expect.
    """
    try:
        record = mapping(parse_json(line))
        num_ranks = {len(values[:]) for values in (record.get("ranks") or {}).values()}
        seconds = sum(record.get(name) or 0 for name in ("time_s", "total_epoch_time_s"))
        is_sound = len(num_ranks) <= 1 and math.isfinite(seconds)
    except BAD_CONTENT:
        return None
    return (
        record
        if is_sound and (record.get("kind") != "epoch" or type(record.get("epoch")) is int)
        else None
    )


def read_epochs(folder: Path) -> list[Record]:
    """Return the epoch records of a run's metrics.jsonl, oldest first.

    Raises OSError without the file.
    """
    lines = read_bytes(folder / METRICS_FILE, MAX_METRICS_BYTES).splitlines(keepends=True)
    # A killed run can leave an incomplete last line; RunLog removes it when the run resumes.
    records = [parse_record(line) for line in lines if line.endswith(b"\n")]
    return [record for record in records if record is not None and record.get("kind") == "epoch"]


def best_epoch(epochs: Sequence[Record], config: Record) -> Record | None:
    """Return the record of the epoch that is kept as best.pt by the run's options; None if none has
    its value.
    """
    key = BEST_METRICS.get(str(config.get("best_metric", "val_loss")), "val_loss")
    known = [record for record in epochs if math.isfinite(number_of(record.get(key)))]
    choose = min if key == "val_loss" else max
    return choose(known, key=lambda record: number_of(record[key])) if known else None


class RecordTail:
    """Reads the new records of a growing metrics.jsonl.

    Reads a replaced or shortened file from its start.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[bool, list[Record]]:
        """Return whether the file was read from its start, which makes earlier records invalid, and
        the new records.
        """
        try:
            with open_regular(self.file) as stream:
                status = os.fstat(stream.fileno())
                identity = status.st_dev, status.st_ino
                is_new = identity != self._identity or status.st_size < self._offset
                if is_new:
                    self._identity = identity
                    self._offset = 0
                stream.seek(self._offset)
                data = stream.read(MAX_METRICS_BYTES)
        except FileNotFoundError:
            is_new = self._identity is not None
            self._identity = None
            self._offset = 0
            return is_new, []
        # the rest is still being written, or was left by a killed run
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = (parse_record(line) for line in complete.splitlines())
        return is_new, [record for record in records if record is not None]


@dataclass
class RunState:
    """The content of a run's files when they were last read."""

    folder: Path
    config: Record = field(default_factory=dict)
    status: Record = field(default_factory=dict)
    epochs: list[Record] = field(default_factory=list)
    batches: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_BATCHES))
    last_write_s: float | None = None  # Unix time

    def __post_init__(self) -> None:
        self._tail = RecordTail(self.folder / METRICS_FILE)

    def read(self) -> Self:
        """Read new records and return the current state.

        Raises FileNotFoundError when `folder` holds no run.
        """
        is_new, records = self._tail.read()
        if is_new:
            self.epochs.clear()
            self.batches.clear()
        for record in records:
            if record.get("kind") in ("epoch", "batch"):
                (self.epochs if record["kind"] == "epoch" else self.batches).append(record)
        self.config = read_config(self.folder)
        self.status = read_status(self.folder)
        writes = []
        for name in (METRICS_FILE, STATUS_FILE):
            with suppress(OSError):
                writes.append((self.folder / name).stat().st_mtime)
        if not self.config and not writes:
            raise FileNotFoundError(self.folder)
        self.last_write_s = max(writes, default=None)
        return self

    @property
    def state(self) -> str:
        """The state in status.json: running, finished, stopped or failed;
        empty without the file.
        """
        return str(self.status.get("state", ""))

    def silent_s(self, now_s: float) -> float:
        """Return the seconds since the last write."""
        return max(now_s - self.last_write_s, 0.0) if self.last_write_s is not None else 0.0

    def trouble(self, now_s: float) -> str | None:
        """Return why a run looks dead although its state is `running`, or None."""
        if self.state != RUNNING:
            return None
        pid, host = self.status.get("pid"), self.status.get("host")
        if (
            host == socket.gethostname()
            and isinstance(pid, int)
            and not _is_alive(pid, self.status.get("updated"))
        ):
            return f"process {pid} is gone; the same training command continues the run"
        times = [
            record["time_s"]
            for record in self.batches
            if isinstance(record.get("time_s"), int | float)
        ]
        pauses = (after - before for before, after in itertools.pairwise(times))
        silent_s = self.silent_s(now_s)
        longest_pause_s = min(max(pauses, default=0.0), MAX_PAUSE_S)
        if silent_s > max(MAX_SILENCE_S, 3 * longest_pause_s):
            return (
                f"nothing written for {silent_s / 60:.0f} minutes; is process {pid} on {host} "
                "still there?"
            )
        return None


def _is_alive(pid: int, seen_at: Any) -> bool:
    """Return whether process `pid` of this machine runs and had started by `seen_at` (ISO 8601)."""
    try:
        process = psutil.Process(pid)
        # A zombie has ended; its parent has not read its exit code yet. 2 s: `updated` is rounded
        # down to seconds.
        has_ended = process.status() == psutil.STATUS_ZOMBIE
        return (
            not has_ended
            and process.create_time() <= datetime.fromisoformat(str(seen_at)).timestamp() + 2
        )
    except psutil.NoSuchProcess:
        return False
    # A process of another user, or `seen_at` is no time.
    except (psutil.Error, ValueError):
        return True


SLOW_FACTOR = 1.2  # a slow rank takes longer than this factor of the others' median,
SLOW_SHARE = 0.05  # and the difference is more than this share of the step
SLOW_BATCHES = 3  # shorter laps are ignored
SLOW_LAPS = 2  # consecutive laps in which a rank must be slow


class SlowRank:
    """Reports a rank that was slow in SLOW_LAPS consecutive laps (a lap: the batches between two
    log lines).
    """

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._laps = 0

    def update(self, own_ms: Sequence[float], step_ms: float, num_batches: int) -> int | None:
        """Add a lap of `num_batches` with all ranks' own times; return the slow rank, or None."""
        if num_batches >= SLOW_BATCHES:
            slow_rank = _slow_rank(own_ms, step_ms)
            self._laps = (
                self._laps + 1
                if slow_rank is not None and slow_rank == self._suspect
                else int(slow_rank is not None)
            )
            self._suspect = slow_rank
        return self._suspect if self._laps >= SLOW_LAPS else None


def _slow_rank(own_ms: Sequence[float], step_ms: float) -> int | None:
    if len(own_ms) < 2 or not all(map(math.isfinite, own_ms)):
        return None
    slowest = max(range(len(own_ms)), key=lambda rank: own_ms[rank])
    others = others_ms(own_ms, slowest)
    excess = own_ms[slowest] - others
    return (
        slowest if excess > (SLOW_FACTOR - 1) * others and excess > SLOW_SHARE * step_ms else None
    )


def others_ms(own_ms: Sequence[float], slow_rank: int) -> float:
    """Return the median time of all ranks but `slow_rank`."""
    return statistics.median([*own_ms[:slow_rank], *own_ms[slow_rank + 1 :]])
