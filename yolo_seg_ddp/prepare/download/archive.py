"""Extracts photographs from an untrusted zip, local or on a server.

Writes only regular members with an image suffix, by file name without folders, into one folder.
Each photograph is written atomically. Photographs that an earlier run extracted, with the right
CRC-32, are kept.
"""

import hashlib
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import requests
from remotezip import RangeNotSupported, RemoteZipError
from urllib3.exceptions import HTTPError

from yolo_seg_ddp.data.dataset_yaml import is_photograph
from yolo_seg_ddp.prepare.download.source import Progress, RetryPolicy
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import new_file
from yolo_seg_ddp.utils.zips import (
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_RATIO,
    TooManyMembers,
    is_bomb,
)

T = TypeVar("T")
FAILURES = (
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    RemoteZipError,
    HTTPError,
    requests.RequestException,
)


@dataclass(frozen=True)
class Listing:
    """An archive's photographs. `num_ignored` counts other files; `repeated` lists photographs with
    the name of an earlier one, compared without case; they are skipped.
    """

    photographs: tuple[zipfile.ZipInfo, ...]
    num_ignored: int
    repeated: tuple[str, ...]


class PhotoArchive:
    """An archive that is opened again after a failure, up to `retry.max_attempts` times; `retry`
    None: no retries.

    `shown` is the archive's name in messages.
    """

    def __init__(
        self, open_zip: Callable[[], zipfile.ZipFile], shown: str, retry: RetryPolicy | None = None
    ) -> None:
        self._open_zip = open_zip
        self._shown = shown
        self._retry = retry
        self._zip: zipfile.ZipFile | None = None

    def listing(self) -> Listing:
        """Read the directory. Raises UserError when the archive is unreadable or unsafe."""
        return self._try("its directory", lambda archive: list_photographs(archive, self._shown))

    def extract(self, member: zipfile.ZipInfo, folder: Path, progress: Progress) -> bool:
        """Write one photograph; return False if it was already there.

        Raises UserError when it cannot be read.
        """
        start = progress.position
        target = folder / photograph_name(member)
        is_there = (
            not target.is_symlink()
            and target.is_file()
            and target.stat().st_size == member.file_size
        )
        if is_there and zlib.crc32(target.read_bytes()) == member.CRC:  # at most MAX_MEMBER_BYTES
            return False
        part = target.with_name(f".{target.name}.part")

        def write(archive: zipfile.ZipFile) -> None:
            progress.move_to(start)
            try:
                with archive.open(member) as source, new_file(part) as sink:
                    # zipfile reads at most the checked size, and checks the CRC-32
                    progress.copy(source, sink)
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)

        self._try(repr(member.filename), write)
        return True

    def close(self) -> None:
        """Close the archive; the next use opens it again."""
        if self._zip is not None:
            self._zip.close()
            self._zip = None

    def _try(self, what: str, action: Callable[[zipfile.ZipFile], T]) -> T:
        num_failures = 0
        while True:
            try:
                if self._zip is None:
                    self._zip = self._open_zip()
                return action(self._zip)
            except RangeNotSupported:
                raise UserError(
                    f"{self._shown}: the server does not answer range requests; run without "
                    "--max-images"
                ) from None
            except NotImplementedError:
                raise UserError(
                    f"{self._shown}: {what} is compressed in a way Python cannot read; unpack it "
                    "with another program"
                ) from None
            except TooManyMembers as error:
                raise UserError(
                    f"{self._shown}: {error}; nothing was extracted from this archive"
                ) from None
            except FAILURES as error:
                self.close()
                num_failures += 1
                # The error's message may contain the URL with its secret query: print only its
                # type.
                why = f"({type(error).__name__})"
                if self._retry is None:
                    text = (
                        f"{self._shown}: {what} is damaged {why}; delete this zip and download it "
                        "again"
                    )
                    raise UserError(text) from None
                if num_failures >= self._retry.max_attempts:
                    text = (
                        f"{self._shown}: {what} cannot be read {why}; run the same command again "
                        "to continue"
                    )
                    raise UserError(text) from None
                self._retry.wait(num_failures)


def list_photographs(archive: zipfile.ZipFile, shown: str) -> Listing:
    """Separate an archive's photographs from its other members.

    Raises UserError, before anything is written, for too many members, a path that leaves the
    folder, a link or device, an encrypted member, and a zip bomb.
    """
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise UserError(
            f"{shown}: {len(members):,} members, more than the {MAX_MEMBERS:,} allowed; not "
            "extracted"
        )
    photographs: dict[str, zipfile.ZipInfo] = {}
    repeated = []
    num_ignored = 0
    for member in members:
        _refuse_unsafe(member, shown)
        name = photograph_name(member)
        if member.is_dir():
            continue
        if not is_photograph(name):
            num_ignored += 1
        elif name.lower() in photographs:
            repeated.append(name)
        else:
            photographs[name.lower()] = member
    return Listing(tuple(photographs.values()), num_ignored, tuple(repeated))


def choose_photographs(
    photographs: Iterable[zipfile.ZipInfo], max_images: int | None
) -> list[zipfile.ZipInfo]:
    """Return `max_images` photographs, or all if it is None, in the archive's order.

    Chooses by the hash of the name, because neighbours show the same pole. A larger number only
    adds photographs.
    """
    members = sorted(photographs, key=lambda member: member.header_offset)
    if max_images is None:
        return members
    drawn = sorted(
        members, key=lambda member: hashlib.sha256(photograph_name(member).encode()).digest()
    )
    return sorted(drawn[:max_images], key=lambda member: member.header_offset)


def photograph_name(member: zipfile.ZipInfo) -> str:
    """Return a member's file name without folders; some Windows programs separate them by
    backslashes.
    """
    return member.filename.replace("\\", "/").rpartition("/")[2]


def _refuse_unsafe(member: zipfile.ZipInfo, shown: str) -> None:
    path = member.filename.replace("\\", "/")
    kind = stat.S_IFMT(member.external_attr >> 16)  # 0 when the archive was not made on Unix
    if path.startswith("/") or re.match("[A-Za-z]:", path) or ".." in path.split("/"):
        problem = "leaves the folder"
    elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        problem = "is a link or a device"
    elif member.flag_bits & 0x1:
        problem = "is encrypted"
    elif not (is_photograph(path) and is_bomb(member)):
        return
    elif member.file_size > MAX_MEMBER_BYTES:
        problem = (
            f"is {member.file_size / 1e6:,.0f} MB large, more than {MAX_MEMBER_BYTES / 1e6:,.0f} MB"
        )
    else:
        problem = f"unpacks to more than {MAX_RATIO} times its size"
    raise UserError(
        f"{shown}: {member.filename!r} {problem}; nothing was extracted from this archive"
    )
