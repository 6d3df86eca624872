"""The interface of a download source, and what the sources share."""

from __future__ import annotations

import base64
import hashlib
import random
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from utils.sources.download.progress import Progress

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts and retries for a server. The count of failures starts again when bytes arrive."""

    max_attempts: int = 6
    backoff_s: float = 1.0  # doubled after each failure
    max_backoff_s: float = 60.0
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 60.0

    def wait(self, num_failures: int) -> None:
        """Sleep before the next attempt, for a partly random time, so that many clients do not retry at once."""
        longest_s = min(self.max_backoff_s, self.backoff_s * 2 ** (num_failures - 1))
        time.sleep(longest_s * random.uniform(0.5, 1.0))


@dataclass(frozen=True)
class RemoteFile:
    """A source's description of a file. `md5` is base64 as in the Content-MD5 header, or empty if unknown."""

    name: str
    size_bytes: int
    etag: str
    md5: str
    accepts_ranges: bool

    @property
    def has_strong_etag(self) -> bool:
        """Whether the ETag identifies the bytes. Only then can a broken transfer continue (RFC 9110, 13.1.1)."""
        return self.etag.startswith('"')

    def is_same_content(self, size_bytes: int, etag: str, md5: str) -> bool:
        """Return whether a file described earlier, possibly from another address, has the same bytes."""
        same_md5 = bool(self.md5) and self.md5 == md5
        same_etag = self.has_strong_etag and self.etag == etag
        return self.size_bytes == size_bytes and (same_md5 or same_etag)


class Source(Protocol):
    """A place that holds the label file and the archives."""

    is_local: bool

    def shown(self, name: str = "") -> str:
        """Return a file's address for messages: without user, password and query."""

    def describe(self, name: str) -> RemoteFile | None:
        """Return a file's size, ETag and MD5; None if the source does not have it."""

    def fetch(self, remote: RemoteFile, target: Path, progress: Progress) -> RemoteFile:
        """Download a whole file to `target`, verified and atomically; return its latest description."""

    def open_zip(self, remote: RemoteFile) -> zipfile.ZipFile:
        """Open an archive at its source, without downloading all of it."""

    def circuit_names(self, candidates: tuple[str, ...]) -> list[str]:
        """Return the source's circuits, such as `13b`. A server can only be asked about `candidates`."""


def md5_base64(file: Path) -> str:
    """Return a file's MD5 in the format of the Content-MD5 header (RFC 1864)."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode("ascii")
