"""The common parts of the download's sources, and the source in a local folder with the publisher's layout.

A source holds the label file and one zip per circuit. The other source, `web.HttpSource`, has the same methods.
"""

import base64
import hashlib
import os
import random
import re
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from utils.common.bounded_zip import BoundedZip
from utils.common.errors import UserError
from utils.common.files import new_file
from utils.sources.download.progress import Progress


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


class FolderSource:
    """Reads from a folder. Opens archives there, without copying them."""

    is_local = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if not self._folder.is_dir():
            raise UserError(f"--base-url {folder}: no such folder; name an https address or a folder with the zips")

    def shown(self, name: str = "") -> str:
        """Return a file's address for messages: without user, password and query."""
        return str(self._folder / name)

    def describe(self, name: str) -> RemoteFile | None:
        """Return a file's size, and an ETag made of its size and modification time; None if it is not there."""
        file = self._folder / name
        if not file.is_file():
            return None
        facts = file.stat()
        return RemoteFile(name, facts.st_size, f'"{facts.st_size:x}-{facts.st_mtime_ns:x}"', "", accepts_ranges=True)

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
            raise UserError(f"{origin}: the copy differs from the original; check the disk and run the command again")
        os.replace(part, target)
        return remote

    def open_zip(self, remote: RemoteFile) -> zipfile.ZipFile:
        """Open an archive at its source, without downloading all of it."""
        return BoundedZip(self._folder / remote.name)

    def circuit_names(self, candidates: tuple[str, ...]) -> list[str]:
        """Return the source's circuits, such as `13b`, in natural order. Only a server needs the `candidates`."""
        found = [re.fullmatch(r"Circuit(\d+)([a-z]?)\.zip", file.name) for file in self._folder.glob("Circuit*.zip")]
        keys = sorted((int(match[1]), match[2]) for match in found if match)
        return [f"{number}{letter}" for number, letter in keys]


def md5_base64(file: Path) -> str:
    """Return a file's MD5 in the format of the Content-MD5 header (RFC 1864)."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode("ascii")
