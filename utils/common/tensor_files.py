"""Files of tensors, written completely and flushed to the disk, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import torch


def atomic_torch_save(content: Any, path: Path) -> None:
    """Write a .pt file so that a kill leaves either the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_tensors(content, temporary)
        os.replace(temporary, path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


class _Disk:
    """A file that remembers why it could not be written: torch.save turns that into an error of its own."""

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
    """Write a file of tensors to the disk itself. Raises OSError when that fails, whatever PyTorch makes of it."""
    with path.open("wb") as file:
        disk = _Disk(file)
        try:
            torch.save(content, disk)  # type: ignore[arg-type] # all it needs are write and flush
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
