"""Files of tensors: torch.save, atomic and flushed to the disk, and torch.load of files that are
not trusted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from yolo_seg_ddp.utils.errors import UserError, one_line
from yolo_seg_ddp.utils.files import open_regular


def atomic_torch_save(content: Any, path: Path) -> None:
    """Write a .pt file; after a kill at any moment it holds the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_tensors(content, temporary)
        os.replace(temporary, path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(
    path: Path, what: str, missing: str = "no such file", *, flag: str = "", device: Any = "cpu"
) -> Any:
    """Load a .pt file of tensors and plain values.

    Raises UserError: `missing`, or that the file is not `what`.
    """
    try:
        open_regular(path).close()
        saved = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{flag}{path}: {missing}") from error
    except Exception as error:  # a foreign file can raise anything
        raise UserError(f"{flag}{path}: not {what} ({one_line(error)})") from error
    if not isinstance(saved, dict):
        raise UserError(f"{flag}{path}: not {what}")
    return saved


class _Disk:
    """A file that keeps its OSError: torch.save replaces it by a
    RuntimeError without the reason.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_tensors(content: Any, path: Path) -> None:
    """Write a .pt file and flush it to the disk.

    Raises OSError, with its reason, when the disk refuses.
    """
    with path.open("wb") as file:
        disk = _Disk(file)
        try:
            torch.save(content, disk)  # type: ignore[arg-type] # it needs only write and flush
        except RuntimeError as error:
            if disk.error is not None:
                raise disk.error from error
            raise
        flush_file(file)


def flush_file(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
