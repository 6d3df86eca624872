"""What every place to download from can do, and the small pieces the places share."""

from __future__ import annotations

import base64
import hashlib
import random
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from utils.data.download.progress import Progress

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait for a server and how often to ask again. Attempts start afresh whenever bytes arrive."""

    max_attempts: int = 6
    backoff_s: float = 1.0  # doubled after each failure
    max_backoff_s: float = 60.0
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 60.0

    def wait(self, num_failures: int) -> None:
        """Sleep before the next attempt. The random half keeps many clients from asking at the same moment."""
        longest_s = min(self.max_backoff_s, self.backoff_s * 2 ** (num_failures - 1))
        time.sleep(longest_s * random.uniform(0.5, 1.0))


@dataclass(frozen=True)
class RemoteFile:
    """One file as its source describes it. `md5` is base64, as in the Content-MD5 header, or empty when unknown."""

    name: str
    size_bytes: int
    etag: str
    md5: str
    accepts_ranges: bool

    @property
    def has_strong_etag(self) -> bool:
        """Whether the ETag identifies the bytes. Only then can a broken transfer be continued (RFC 9110, 13.1.1)."""
        return self.etag.startswith('"')

    def is_same_content(self, size_bytes: int, etag: str, md5: str) -> bool:
        """Tell whether a file noted earlier, maybe from another address, holds the same bytes."""
        same_md5 = bool(self.md5) and self.md5 == md5
        same_etag = self.has_strong_etag and self.etag == etag
        return self.size_bytes == size_bytes and (same_md5 or same_etag)


class Source(Protocol):
    """A place that holds the label file and the archives."""

    is_local: bool

    def shown(self, name: str = "") -> str:
        """Return the address of a file for people to read: no user, no password, no query."""

    def describe(self, name: str) -> RemoteFile | None:
        """Ask for a file's size, ETag and MD5; None when the source does not have it."""

    def fetch(self, remote: RemoteFile, target: Path, progress: Progress) -> RemoteFile:
        """Bring a whole file to `target`, verified and in one step; return it as it was when the transfer ended."""

    def open_zip(self, remote: RemoteFile) -> zipfile.ZipFile:
        """Open an archive where it lies, without fetching all of it."""

    def circuit_names(self, candidates: tuple[str, ...]) -> list[str]:
        """Return which circuits, such as `13b`, the source has. A server can only be asked about `candidates`."""


def md5_base64(file: Path) -> str:
    """Return a file's MD5 as the Content-MD5 header spells it (RFC 1864)."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode("ascii")
