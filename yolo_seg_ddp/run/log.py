"""A run's output: console lines, metrics.jsonl, results.csv and TensorBoard.

Every rank has a RunLog; only rank 0's prints and writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import cv2
from tqdm import tqdm

from yolo_seg_ddp.run.records import (
    MAX_METRICS_BYTES,
    METRICS_FILE,
    number_of,
    parse_record,
    read_epochs,
)
from yolo_seg_ddp.utils.errors import print_warning
from yolo_seg_ddp.utils.files import (
    read_bytes,
    warn_on_write_error,
    write_bytes_atomic,
    write_text_atomic,
)
from yolo_seg_ddp.utils.text import csv_text

if TYPE_CHECKING:
    import numpy as np

RESULTS_FILE = "results.csv"
TENSORBOARD_FOLDER = "tensorboard"
_BANNER_WIDTH = 66


class RunLog:
    """Writes a run's records into `run_dir`, created with the first record. Appends to the records
    of a resumed run.

    metrics.jsonl: one JSON object a line, written at once; NaN and infinity become null.
    results.csv: a table of its epochs, each value with four digits. `columns` are its first
    columns: {our name: the name there}; `time` is the sum of the epochs' seconds.
    tensorboard/: event files, unless `tensorboard` is False or it is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        is_main: bool,
        tensorboard: bool = True,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.is_main = is_main
        self._wants_tensorboard = tensorboard and is_main
        self._metrics: TextIO | None = None
        self._columns = {"epoch": "epoch", "time": "time", **(columns or {})}
        # as in metrics.jsonl; of two with one number the later
        self._epochs: dict[int, dict[str, Any]] | None = None
        self._writers: dict[str, Any] = {}
        self._first_new_step: int | None = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def print(self, *lines: str) -> None:
        """Print lines on rank 0 and flush. Write errors are ignored."""
        if self.is_main:
            # Closed terminal (EIO), pipe without a reader (EPIPE), full disk under a log file
            # (ENOSPC).
            with contextlib.suppress(OSError):
                # A bar stays below the text.
                tqdm.write("\n".join(lines))
                sys.stdout.flush()

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl; one of `kind` epoch also to results.csv.

        Converts NumPy and PyTorch numbers, which waits for the GPU.
        """
        if not self.is_main:
            return
        plain = _plain(record)
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
        with warn_on_write_error(str(self.run_dir / METRICS_FILE)):
            if self._metrics is None:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                _drop_partial_line(self.run_dir / METRICS_FILE)
                self._metrics = (self.run_dir / METRICS_FILE).open("a", encoding="utf-8")
            self._metrics.write(line)
            # if the disk is full, the line stays in the buffer for the next flush
            self._metrics.flush()
        if plain.get("kind") == "epoch":
            with warn_on_write_error(str(self.run_dir / RESULTS_FILE)):
                self._write_results(plain)

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Write the numbers in `values` to TensorBoard as `prefix/name`; skip everything else.

        `train_loss` and `val_loss` are one chart, `prefix/loss`, with the lines `train` and `val`.
        """
        with warn_on_write_error(str(self.run_dir / TENSORBOARD_FOLDER)):
            for name, value in _plain(values).items():
                part, _, rest = name.partition("_")
                line, shown = (part, rest) if part in ("train", "val") else ("", name)
                if isinstance(value, int | float) and (writer := self._open_writer(line)):
                    writer.add_scalar(f"{prefix}/{shown}", value, step)

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Write a picture, RGB uint8 (height, width, 3), to TensorBoard: as JPEG, a tenth of
        `add_image`'s PNG.
        """
        if writer := self._open_writer():
            from tensorboard.compat.proto.summary_pb2 import Summary

            jpeg = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 75])[
                1
            ].tobytes()
            shown = Summary.Image(
                height=len(image), width=image.shape[1], colorspace=3, encoded_image_string=jpeg
            )
            writer.file_writer.add_summary(
                Summary(value=[Summary.Value(tag=tag, image=shown)]), step
            )

    def truncate_after(self, step: int, epochs: float = math.inf) -> None:
        """Remove records after `step`, from which a run resumes, so that no step and no epoch
        appears twice.

        Removes the lines of metrics.jsonl and results.csv with a larger `global_step`; TensorBoard
        hides such events. Also removes epochs after the first `epochs`: a run that resumes before a
        validation has the last one's step already.
        """
        if not self.is_main:
            return
        self.close()
        self._first_new_step = step + 1
        file = self.run_dir / METRICS_FILE
        if file.exists():
            lines = read_bytes(file, MAX_METRICS_BYTES).splitlines(keepends=True)
            if damaged := [
                line for line in lines if line.endswith(b"\n") and parse_record(line) is None
            ]:
                print_warning(
                    f"{file}: {len(damaged)} of {len(lines)} lines are no records and are removed"
                )
            kept = b"".join(line for line in lines if _is_kept(line, step, epochs))
            write_bytes_atomic(file, kept)
            if (self.run_dir / RESULTS_FILE).is_file():
                self._write_results()

    def close(self) -> None:
        """Close the files. A later record opens them again."""
        streams = [
            (self._metrics, METRICS_FILE),
            *((each, TENSORBOARD_FOLDER) for each in self._writers.values()),
        ]
        for stream, name in streams:
            if stream is not None:
                with warn_on_write_error(str(self.run_dir / name)):
                    stream.close()
        self._metrics = None
        self._epochs = None
        self._writers = {}

    def _write_results(self, record: dict[str, Any] | None = None) -> None:
        """Write results.csv anew from the epochs of metrics.jsonl; `record` is the newest."""
        if self._epochs is None:
            self._epochs = {each["epoch"]: each for each in read_epochs(self.run_dir)}
        if record:
            self._epochs[record["epoch"]] = record
        rows, time_s = [], 0.0
        for each in self._epochs.values():
            time_s += each.get("total_epoch_time_s") or 0.0
            values = {
                name: value
                for name, value in {**each, "time": time_s}.items()
                if isinstance(value, int | float)
            }
            rows.append(
                {
                    self._columns.get(name, name): _four_digits(value)
                    for name, value in values.items()
                }
            )
        names = list(dict.fromkeys(name for row in rows for name in row))
        first = [name for name in self._columns.values() if name in names]
        columns = list(dict.fromkeys([*first, *names]))
        text = csv_text(columns, ([row.get(name) for name in columns] for row in rows), "\n")
        write_text_atomic(self.run_dir / RESULTS_FILE, text)

    def _open_writer(self, line: str = "") -> Any:
        """Return TensorBoard's writer of a line in its charts, or None without TensorBoard."""
        if line not in self._writers and self._wants_tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._wants_tensorboard = False
                self.print(
                    "TensorBoard is not installed; the numbers are in "
                    f"{self.run_dir / METRICS_FILE}"
                )
                return None
            folder = str(self.run_dir / TENSORBOARD_FOLDER / line)
            self._writers[line] = SummaryWriter(
                folder, purge_step=self._first_new_step, flush_secs=30
            )
        return self._writers.get(line)


def print_banner(world_size: int, rank: int) -> None:
    """Print the heading of a training run, on rank 0."""
    if rank == 0:
        line = "=" * _BANNER_WIDTH
        heading = [
            line,
            "Distributed YOLOv8 Training",
            line,
            f"World Size: {world_size}",
            f"Rank: {rank}",
            line,
        ]
        print(*heading, sep="\n", flush=True)


def _plain(value: Any) -> Any:
    """Convert a record to JSON types; NaN and infinity become None."""
    # NumPy's and PyTorch's numbers and arrays have it.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, Path) else value


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _is_kept(line: bytes, step: int, epochs: float) -> bool:
    record = parse_record(line)
    if record is None:
        return False
    is_late = record.get("kind") == "epoch" and record["epoch"] > epochs
    # a record without a step is kept
    return not is_late and not number_of(record.get("global_step")) > step


def _drop_partial_line(file: Path) -> None:
    """Remove an incomplete last line, left by a killed run.

    A complete record without its line end is kept.
    """
    if not file.exists():
        return
    data = read_bytes(file, MAX_METRICS_BYTES)
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        ending = data[len(complete) :]
        write_bytes_atomic(file, data + b"\n" if parse_record(ending) is not None else complete)
