"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it appears complete or not at all, whoever else writes it at the same time."""
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name[-80:]}.part")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text so that it appears complete or not at all."""
    write_bytes_atomic(path, text.encode("utf-8"))


@contextmanager
def going_on_without(what: str) -> Iterator[None]:
    """Let the work go on when the disk refuses what is written in this block; say so on stderr."""
    try:
        yield
    except OSError as error:
        print(f"WARNING: {what} was not written: {error.strerror or error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def local_rank_first(lock_file: Path) -> Iterator[None]:
    """Let one process per machine do a job first (the others find it done), without needing a process group."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(lock_file)):
        yield
