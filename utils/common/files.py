"""Atomic writes, write errors as warnings, and a lock for work that one process per machine does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from utils.common.errors import print_warning


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old or the whole new content, also while others write it."""
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name[-80:]}.part")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file of UTF-8 text atomically."""
    write_bytes_atomic(path, text.encode("utf-8"))


@contextmanager
def warn_on_write_error(what: str) -> Iterator[None]:
    """Print a warning instead of raising when this block raises OSError, for example on a full disk."""
    try:
        yield
    except OSError as error:
        print_warning(f"{what} was not written: {error.strerror or error}")


@contextmanager
def local_rank_first(lock_file: Path) -> Iterator[None]:
    """Run the block in one process of this machine at a time: the first does the work, the others find it done."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(lock_file)):
        yield
