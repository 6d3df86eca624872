"""A run's output: console lines, metrics.jsonl, results.csv and TensorBoard.

Every rank has a RunLog; only rank 0's prints and writes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from utils.common.files import warn_on_write_error, write_bytes_atomic

if TYPE_CHECKING:
    import numpy as np

METRICS_FILE = "metrics.jsonl"
RESULTS_FILE = "results.csv"
TENSORBOARD_FOLDER = "tensorboard"
_BANNER_WIDTH = 66


class RunLog:
    """Writes a run's records into `run_dir`, created with the first record. Appends to the records of a resumed run.

    metrics.jsonl: one JSON object a line, written at once; NaN and infinity become null.
    results.csv: a table of the epochs. tensorboard/: event files, unless `tensorboard` is False or it is not installed.
    """

    def __init__(self, run_dir: Path, is_main: bool, tensorboard: bool = True) -> None:
        self.run_dir = Path(run_dir)
        self.is_main = is_main
        self._wants_tensorboard = tensorboard and is_main
        self._metrics: TextIO | None = None
        self._rows: list[dict[str, Any]] | None = None
        self._writer: Any = None
        self._first_new_step: int | None = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def print(self, *lines: str) -> None:
        """Print lines on rank 0 and flush. Write errors are ignored."""
        if self.is_main:
            # Closed terminal (EIO), pipe without a reader (EPIPE), full disk under a log file (ENOSPC).
            with contextlib.suppress(OSError):
                print(*lines, sep="\n", flush=True)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl. Converts NumPy and PyTorch numbers, which waits for the GPU."""
        if not self.is_main:
            return
        line = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"
        with warn_on_write_error(str(self.run_dir / METRICS_FILE)):
            if self._metrics is None:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                _drop_partial_line(self.run_dir / METRICS_FILE)
                self._metrics = (self.run_dir / METRICS_FILE).open("a", encoding="utf-8")
            self._metrics.write(line)
            self._metrics.flush()  # if the disk is full, the line stays in the buffer for the next flush

    def csv(self, row: Mapping[str, Any]) -> None:
        """Write one epoch to results.csv, replacing an older row of the same `epoch`. New names become new columns."""
        if not self.is_main:
            return
        plain = _plain(row)
        epoch = str(plain.get("epoch", ""))
        with warn_on_write_error(str(self.run_dir / RESULTS_FILE)):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            rows = self._read_rows()
            rows[:] = [old for old in rows if not epoch or str(old.get("epoch", "")) != epoch]
            rows.append(plain)
            self._write_rows()

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Write the numbers in `values` to TensorBoard as `prefix/name`; skip everything else."""
        with warn_on_write_error(str(self.run_dir / TENSORBOARD_FOLDER)):
            writer = self._open_writer()
            if writer is None:
                return
            for name, value in _plain(values).items():
                if isinstance(value, int | float):
                    writer.add_scalar(f"{prefix}/{name}", value, step)

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Write a picture, RGB uint8 (height, width, 3), to TensorBoard."""
        writer = self._open_writer()
        if writer is not None:
            writer.add_image(tag, image, step, dataformats="HWC")

    def truncate_after(self, step: int, epochs: float = math.inf) -> None:
        """Remove records after `step`, from which a run resumes, so that no step and no epoch appears twice.

        Removes the lines of metrics.jsonl and results.csv with a larger `global_step`; TensorBoard hides such events.
        Also removes epochs after the first `epochs`: a run that resumes before a validation has the last one's step already.
        """
        if not self.is_main:
            return
        self.close()
        self._first_new_step = step + 1
        file = self.run_dir / METRICS_FILE
        if file.is_file():
            lines = file.read_bytes().splitlines(keepends=True)
            kept = b"".join(line for line in lines if _is_kept(line, step, epochs))
            write_bytes_atomic(file, kept)
        rows = self._read_rows()
        if rows:
            rows[:] = [row for row in rows if _is_before(row, step, epochs)]
            self._write_rows()

    def close(self) -> None:
        """Close the files. A later record opens them again."""
        for stream, name in ((self._metrics, METRICS_FILE), (self._writer, TENSORBOARD_FOLDER)):
            if stream is not None:
                with warn_on_write_error(str(self.run_dir / name)):
                    stream.close()
        self._metrics = self._writer = self._rows = None

    def _read_rows(self) -> list[dict[str, Any]]:
        if self._rows is None:
            file = self.run_dir / RESULTS_FILE
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            self._rows = [dict(row) for row in csv.DictReader(io.StringIO(text, newline=""), restval="")]
        return self._rows

    def _write_rows(self) -> None:
        rows = self._read_rows()
        buffer = io.StringIO()
        columns = list(dict.fromkeys(name for row in rows for name in row if name is not None))
        writer = csv.DictWriter(buffer, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_bytes_atomic(self.run_dir / RESULTS_FILE, buffer.getvalue().encode())

    def _open_writer(self) -> Any:
        """Return TensorBoard's writer, or None without TensorBoard."""
        if self._writer is None and self._wants_tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._wants_tensorboard = False
                self.print(f"TensorBoard is not installed; the numbers are in {self.run_dir / METRICS_FILE}")
                return None
            folder = str(self.run_dir / TENSORBOARD_FOLDER)
            self._writer = SummaryWriter(folder, purge_step=self._first_new_step, flush_secs=30)
        return self._writer


def print_banner(world_size: int, rank: int) -> None:
    """Print the heading of a training run, on rank 0."""
    if rank == 0:
        line = "=" * _BANNER_WIDTH
        heading = [line, "Distributed YOLOv8 Training", line, f"World Size: {world_size}", f"Rank: {rank}", line]
        print(*heading, sep="\n", flush=True)


def _plain(value: Any) -> Any:
    """Convert a record to JSON types; NaN and infinity become None."""
    if hasattr(value, "tolist"):  # NumPy's and PyTorch's numbers and arrays
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, Path) else value


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of one line, or None if the line is incomplete."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _is_kept(line: bytes, step: int, epochs: float) -> bool:
    record = parse_record(line)
    if record is None:
        return False
    return _is_before(record, step, epochs if record.get("kind") == "epoch" else math.inf)


def _is_before(record: Mapping[str, Any], step: int, epochs: float) -> bool:
    return _count_of(record.get("global_step")) <= step and _count_of(record.get("epoch")) <= epochs


def _count_of(value: Any) -> float:
    """Return a record's step or epoch; minus infinity without one, so that the record is always kept."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return -math.inf


def _drop_partial_line(file: Path) -> None:
    """Remove an incomplete last line, left by a killed run. A complete record without its line end is kept."""
    if not file.is_file():
        return
    data = file.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        ending = data[len(complete) :]
        write_bytes_atomic(file, data + b"\n" if parse_record(ending) is not None else complete)
