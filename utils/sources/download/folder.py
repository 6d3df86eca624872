"""A source in a local folder with the publisher's layout: the label file and one zip per circuit."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

from utils.common.bounded_zip import BoundedZip
from utils.common.errors import UserError
from utils.common.files import new_file
from utils.sources.download.progress import Progress
from utils.sources.download.source import CHUNK_BYTES, RemoteFile, md5_base64


class FolderSource:
    """Reads from a folder. Opens archives there, without copying them."""

    is_local = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if not self._folder.is_dir():
            raise UserError(f"--base-url {folder}: no such folder; name an https address or a folder with the zips")

    def shown(self, name: str = "") -> str:
        """Return the path of a file in the folder."""
        return str(self._folder / name)

    def describe(self, name: str) -> RemoteFile | None:
        """Return a file's size, and an ETag made of its size and modification time."""
        file = self._folder / name
        if not file.is_file():
            return None
        facts = file.stat()
        return RemoteFile(name, facts.st_size, f'"{facts.st_size:x}-{facts.st_mtime_ns:x}"', "", accepts_ranges=True)

    def fetch(self, remote: RemoteFile, target: Path, progress: Progress) -> RemoteFile:
        """Copy a file and compare the MD5 sums. Raises UserError when they differ."""
        origin = self._folder / remote.name
        if target.exists() and target.samefile(origin):
            progress.move_to(progress.position + remote.size_bytes)
            return remote
        part = target.with_name(target.name + ".part")
        with origin.open("rb") as source, new_file(part) as sink:
            while chunk := source.read(CHUNK_BYTES):
                sink.write(chunk)
                progress.advance(len(chunk))
        if md5_base64(part) != md5_base64(origin):
            part.unlink()
            raise UserError(f"{origin}: the copy differs from the original; check the disk and run the command again")
        os.replace(part, target)
        return remote

    def open_zip(self, remote: RemoteFile) -> zipfile.ZipFile:
        """Open an archive in the folder."""
        return BoundedZip(self._folder / remote.name)

    def circuit_names(self, candidates: tuple[str, ...]) -> list[str]:
        """Return the circuits whose zip is in the folder, in natural order; ignores `candidates`."""
        found = [re.fullmatch(r"Circuit(\d+)([a-z]?)\.zip", file.name) for file in self._folder.glob("Circuit*.zip")]
        keys = sorted((int(match[1]), match[2]) for match in found if match)
        return [f"{number}{letter}" for number, letter in keys]
