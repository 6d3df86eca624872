"""The common parts of the download's sources, and the source in a local folder with the publisher's
layout.

A source holds the label file and one zip per circuit. The other source, `web.HttpSource`, has the
same methods.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import new_file
from yolo_seg_ddp.utils.text import is_terminal
from yolo_seg_ddp.utils.zips import BoundedZip


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts and retries for a server. The count of failures starts again when bytes arrive."""

    max_attempts: int = 6
    backoff_s: float = 1.0  # doubled after each failure
    max_backoff_s: float = 60.0
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 60.0

    def wait(self, num_failures: int) -> None:
        """Sleep before the next attempt, for a partly random time, so that many clients do not
        retry at once.
        """
        longest_s = min(self.max_backoff_s, self.backoff_s * 2 ** (num_failures - 1))
        time.sleep(longest_s * random.uniform(0.5, 1.0))


@dataclass(frozen=True)
class RemoteFile:
    """A source's description of a file.

    `md5` is base64 as in the Content-MD5 header, or empty if unknown.
    """

    name: str
    size_bytes: int
    etag: str
    md5: str
    accepts_ranges: bool

    @property
    def has_strong_etag(self) -> bool:
        """Whether the ETag identifies the bytes.

        Only then can a broken transfer continue (RFC 9110, 13.1.1).
        """
        return self.etag.startswith('"')

    def is_same_content(self, size_bytes: int, etag: str, md5: str) -> bool:
        """Return whether a file described earlier, possibly from another address, has the same
        bytes.
        """
        same_md5 = bool(self.md5) and self.md5 == md5
        same_etag = self.has_strong_etag and self.etag == etag
        return self.size_bytes == size_bytes and (same_md5 or same_etag)


class FolderSource:
    """Reads from a folder. Opens archives there, without copying them."""

    is_local = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if not self._folder.is_dir():
            raise UserError(
                f"--base-url {folder}: no such folder; name an https address or a folder with the "
                "zips"
            )

    def shown(self, name: str = "") -> str:
        """Return a file's address for messages: without user, password and query."""
        return str(self._folder / name)

    def describe(self, name: str) -> RemoteFile | None:
        """Return a file's size, and an ETag made of its size and modification time; None if it is
        not there.
        """
        file = self._folder / name
        if not file.is_file():
            return None
        status = file.stat()
        return RemoteFile(
            name,
            status.st_size,
            f'"{status.st_size:x}-{status.st_mtime_ns:x}"',
            "",
            accepts_ranges=True,
        )

    def fetch(self, remote: RemoteFile, target: Path, progress: Progress) -> RemoteFile:
        """Copy a whole file to `target`, verified and atomically; return its latest description."""
        origin = self._folder / remote.name
        if target.exists() and target.samefile(origin):
            progress.move_to(progress.position + remote.size_bytes)
            return remote
        part = target.with_name(target.name + ".part")
        with origin.open("rb") as source, new_file(part) as sink:
            progress.copy(source, sink)
        if md5_base64(part) != md5_base64(origin):
            part.unlink()
            raise UserError(
                f"{origin}: the copy differs from the original; check the disk and run the "
                "command again"
            )
        os.replace(part, target)
        return remote

    def open_zip(self, remote: RemoteFile) -> zipfile.ZipFile:
        """Open an archive at its source, without downloading all of it."""
        return BoundedZip(self._folder / remote.name)

    def circuit_names(self, candidates: tuple[str, ...]) -> list[str]:
        """Return the source's circuits, such as `13b`, in natural order.

        Only a server needs the `candidates`.
        """
        matches = [
            re.fullmatch(r"Circuit(\d+)([a-z]?)\.zip", file.name)
            for file in self._folder.glob("Circuit*.zip")
        ]
        keys = sorted((int(match[1]), match[2]) for match in matches if match)
        return [f"{number}{letter}" for number, letter in keys]


def md5_base64(file: Path) -> str:
    """Return a file's MD5 in the format of the Content-MD5 header (RFC 1864)."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode("ascii")


CHUNK_BYTES = 1 << 16
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A progress bar on a terminal, otherwise a line about every ten seconds; on stderr.

    `position` counts all bytes on disk, including those of an earlier run; `received_bytes` only
    those of this run.
    """

    def __init__(self, total_bytes: int) -> None:
        self.position = 0
        self.received_bytes = 0
        self._total_bytes = total_bytes
        self._started = self._last_line = time.monotonic()
        is_off = not (is_terminal(sys.stderr) and total_bytes)
        self._bar: Any = tqdm(
            total=total_bytes,
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            disable=is_off,
        )

    def copy(self, source: IO[bytes], sink: IO[bytes]) -> None:
        """Copy a stream and count its bytes."""
        while chunk := source.read(CHUNK_BYTES):
            sink.write(chunk)
            self.advance(len(chunk))

    def advance(self, num_bytes: int) -> None:
        """Count received bytes."""
        self.position += num_bytes
        self.received_bytes += num_bytes
        now = time.monotonic()
        self._bar.update(num_bytes)
        if self._bar.disable and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print_line()

    def move_to(self, position: int) -> None:
        """Set the position without counting bytes: forwards over existing bytes, back when bytes
        are received again.
        """
        self._bar.initial, self._bar.n = position - self.received_bytes, position
        self._bar.refresh()
        self.position = position

    def note(self, line: str) -> None:
        """Print a line without disturbing the progress bar."""
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.close()

    def summary(self) -> str:
        """Return the size and speed of this run, such as `42.9 MB in 1.2 s (35.7 MB/s)`."""
        seconds = max(time.monotonic() - self._started, 1e-3)
        megabytes = self.received_bytes / 1e6
        return f"{megabytes:.1f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s)"

    def _print_line(self) -> None:
        rate = self.received_bytes / max(time.monotonic() - self._started, 1e-3)
        left_min = max(self._total_bytes - self.position, 0) / max(rate, 1.0) / 60
        self.note(
            f"  {self.position / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB "
            f"({100 * self.position / max(self._total_bytes, 1):.0f} %), {rate / 1e6:.1f} MB/s, "
            f"{left_min:.0f} min left"
        )
