"""Fills a raw-data folder: the label file and one folder of photographs per circuit."""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from yolo_seg_ddp.prepare.download.archive import (
    Listing,
    PhotoArchive,
    choose_photographs,
    photograph_name,
)
from yolo_seg_ddp.prepare.download.source import Progress, RemoteFile, RetryPolicy, md5_base64
from yolo_seg_ddp.prepare.download.web import Source
from yolo_seg_ddp.prepare.parsing.label_csv import LABEL_CSV
from yolo_seg_ddp.utils.contents import read_back
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import in_the_way, make_plain_folder, write_text_atomic
from yolo_seg_ddp.utils.text import counted
from yolo_seg_ddp.utils.zips import BoundedZip

LEDGER_NAME = "download.json"
# of the only version known to us
LABELS_SHA256 = "a2b75c6d6aa08e2e7620ca007eb9b6b52546b4ee119f2105ec1ac689bedd3a52"


@dataclass(frozen=True)
class Report:
    """The result of a download. `missing` lists files that the source does not have."""

    num_photographs: int
    missing: tuple[str, ...]
    is_unchanged: bool
    summary: str


@dataclass(frozen=True)
class _CircuitTask:
    """The work for one circuit. Without a `listing` the whole zip is downloaded and extracted; with
    one, `members` are extracted from the zip at its source. `transfer_bytes` are downloaded, the
    others are needed on the disk.
    """

    remote: RemoteFile
    listing: Listing | None
    members: tuple[zipfile.ZipInfo, ...]
    transfer_bytes: int
    zip_on_disk_bytes: int
    photographs_on_disk_bytes: int


@dataclass(frozen=True)
class Entry:
    """One downloaded object: the label file or a circuit's zip.

    `url` has no user, password or query. `files` maps paths relative to the raw-data folder to
    sizes in bytes; it is empty until the object is complete. `max_images` is None if all
    photographs were requested.
    """

    url: str
    size_bytes: int
    etag: str
    md5: str
    max_images: int | None = None
    num_photographs: int = 0
    is_complete: bool = False
    files: dict[str, int] = field(default_factory=dict)

    def covers(self, max_images: int | None, folder: Path) -> bool:
        """Return whether it is complete, holds the photographs requested now, and all its files are
        in `folder`.
        """
        holds_all = self.max_images is None or (
            max_images is not None and max_images <= self.max_images
        )
        return (
            self.is_complete
            and holds_all
            and all(_has_size(folder / name, n) for name, n in self.files.items())
        )


def _entries(content: Any) -> dict[str, Entry]:
    return {name: Entry(**values) for name, values in content["objects"].items()}


class Ledger:
    """The entries of a raw-data folder by object name, so that a repeated run skips what is there.

    Raises UserError when the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / LEDGER_NAME
        self.entries: dict[str, Entry] = {}
        if self._file.exists():
            self.entries = read_back(self._file, _entries, "delete it and run again")

    def record(self, name: str, entry: Entry) -> None:
        """Set an object's entry and write the file atomically."""
        self.entries[name] = entry
        objects = {name: asdict(entry) for name, entry in sorted(self.entries.items())}
        write_text_atomic(self._file, json.dumps({"version": 1, "objects": objects}, indent=1))


def download(
    source: Source,
    output: Path,
    circuits: Sequence[str],
    *,
    max_images: int | None = None,
    keep_zips: bool = False,
    retry: RetryPolicy | None = None,
) -> Report:
    """Download the label file and the circuits into `output`, continuing an earlier run.

    Makes no request for objects that are complete in `download.json` and whose files still exist
    with their sizes. Files that the source does not have are listed in the report. Raises UserError
    when the download stops.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock_file = output / ".download.lock"
        if problem := in_the_way(lock_file, output / LEDGER_NAME):
            raise UserError(problem)
        with FileLock(lock_file, timeout=0):
            return _Download(source, output, max_images, keep_zips, retry or RetryPolicy()).run(
                circuits
            )
    except Timeout:
        raise UserError(
            f"{output}: another download is writing here; wait for it or use another --output"
        ) from None
    except OSError as error:
        where, why = error.filename or output, error.strerror or type(error).__name__
        raise UserError(f"{where}: {why}; run the same command again to continue") from error


class _Download:
    def __init__(
        self,
        source: Source,
        output: Path,
        max_images: int | None,
        keep_zips: bool,
        retry: RetryPolicy,
    ) -> None:
        self._source = source
        self._output = output
        self._max_images = max_images
        self._keep_zips = keep_zips
        self._retry = retry
        self._ledger = Ledger(output)
        self._missing: list[str] = []

    def run(self, circuits: Sequence[str]) -> Report:
        labels = self._plan_labels()
        labels_bytes = labels.size_bytes if labels else 0
        tasks = [
            task for circuit in circuits if (task := self._plan_circuit(f"Circuit{circuit}.zip"))
        ]
        zips_bytes = [task.zip_on_disk_bytes for task in tasks]
        self._check_disk(
            labels_bytes
            + sum(task.photographs_on_disk_bytes for task in tasks)
            # Without --keep-zips each is deleted before the next.
            + (sum(zips_bytes) if self._keep_zips else max(zips_bytes, default=0))
        )
        with closing(
            Progress(labels_bytes + sum(task.transfer_bytes for task in tasks))
        ) as progress:
            if labels:
                self._get_labels(labels, progress)
            for task in tasks:
                self._get_circuit(task, progress)
        entries = [self._ledger.entries.get(f"Circuit{circuit}.zip") for circuit in circuits]
        return Report(
            num_photographs=sum(entry.num_photographs for entry in entries if entry),
            missing=tuple(self._missing),
            is_unchanged=not (labels or tasks or self._missing),
            summary=progress.summary(),
        )

    def _plan_labels(self) -> RemoteFile | None:
        entry, target = self._ledger.entries.get(LABEL_CSV), self._output / LABEL_CSV
        if (
            entry
            and entry.url == self._source.shown(LABEL_CSV)
            and entry.covers(None, self._output)
        ):
            return None
        remote = self._describe(LABEL_CSV)
        if remote is None or not target.exists():
            return remote
        if target.stat().st_size != remote.size_bytes or (
            remote.md5 and md5_base64(target) != remote.md5
        ):
            raise UserError(
                f"{target}: differs from {self._source.shown(LABEL_CSV)}; delete it to download "
                "that file, or use "
                "another --output"
            )
        self._record(remote, {LABEL_CSV: remote.size_bytes})
        return None

    def _plan_circuit(self, name: str) -> _CircuitTask | None:
        entry, zip_file = self._ledger.entries.get(name), self._output / name
        is_complete = entry is not None and entry.covers(self._max_images, self._output)
        if entry and self._keep_zips:
            is_complete = is_complete and _has_size(zip_file, entry.size_bytes)
        if entry and is_complete and entry.url == self._source.shown(name):
            return None
        remote = self._describe(name)
        if remote is None or is_complete:  # complete: the same file at another address
            return None
        if self._max_images is not None or (self._source.is_local and not self._keep_zips):
            return self._plan_members(remote)
        is_same = entry is not None and remote.is_same_content(
            entry.size_bytes, entry.etag, entry.md5
        )
        # from an earlier run, or copied by the user
        has_zip = _has_size(zip_file, remote.size_bytes)
        has_zip = has_zip and (is_same or (bool(remote.md5) and md5_base64(zip_file) == remote.md5))
        files = _folder(zip_file).iterdir() if _folder(zip_file).is_dir() else ()
        folder_bytes = sum(file.stat().st_size for file in files if file.is_file())
        part = zip_file.with_name(zip_file.name + ".part")
        if (
            folder_bytes
            and remote.accepts_ranges
            and not (has_zip or self._keep_zips or part.exists())
        ):
            task = self._plan_members(remote)
            if task.transfer_bytes < remote.size_bytes / 2:
                return task  # most photographs exist: fetch only the missing ones
        arriving_bytes = 0 if has_zip else remote.size_bytes
        return _CircuitTask(
            remote=remote,
            listing=None,
            members=(),
            transfer_bytes=arriving_bytes,
            zip_on_disk_bytes=max(
                arriving_bytes - (part.stat().st_size if part.exists() else 0), 0
            ),
            # JPEG does not shrink in a zip
            photographs_on_disk_bytes=max(remote.size_bytes - folder_bytes, 0),
        )

    def _plan_members(self, remote: RemoteFile) -> _CircuitTask:
        with closing(self._archive_in_place(remote)) as archive:
            listing = archive.listing()
        members = tuple(choose_photographs(listing.photographs, self._max_images))
        wanted_bytes = _missing_bytes(members, _folder(self._output / remote.name))
        return _CircuitTask(remote, listing, members, wanted_bytes, 0, wanted_bytes)

    def _describe(self, name: str) -> RemoteFile | None:
        remote = self._source.describe(name)
        if remote is None:
            self._missing.append(name)
            return None
        entry = self._ledger.entries.get(name)
        if entry and entry.url != self._source.shown(name):
            if not remote.is_same_content(entry.size_bytes, entry.etag, entry.md5):
                raise UserError(
                    f"{self._output}: {name} came from {entry.url}, and "
                    f"{self._source.shown(name)} is another file; "
                    f"use another --output, or delete {self._output}"
                )
            self._ledger.record(name, replace(entry, url=self._source.shown(name)))
        return remote

    def _get_labels(self, remote: RemoteFile, progress: Progress) -> None:
        target = self._output / LABEL_CSV
        remote = self._source.fetch(remote, target, progress)
        content = target.read_bytes()
        header = content.partition(b"\n")[0]
        if b"Label" not in header or b"External ID" not in header:
            target.unlink()
            raise UserError(
                f"{self._source.shown(LABEL_CSV)}: not the label file, its first line lacks the "
                "columns `Label` and "
                "`External ID`; check --base-url"
            )
        self._record(remote, {LABEL_CSV: remote.size_bytes})
        digest = hashlib.sha256(content).hexdigest()
        if digest != LABELS_SHA256:
            progress.note(
                f"note: {LABEL_CSV} is another version than the known one (SHA-256 "
                f"{digest[:16]}…); this is no error"
            )

    def _get_circuit(self, task: _CircuitTask, progress: Progress) -> None:
        remote, zip_file = task.remote, self._output / task.remote.name
        if task.listing is not None:
            self._extract(
                remote, self._archive_in_place(remote), task.listing, task.members, progress
            )
            return
        if task.transfer_bytes:
            remote = self._source.fetch(remote, zip_file, progress)
            self._record(remote)
        with closing(PhotoArchive(lambda: BoundedZip(zip_file), str(zip_file))) as archive:
            listing = archive.listing()
        members = choose_photographs(listing.photographs, None)
        missing_bytes = _missing_bytes(members, _folder(zip_file))
        self._check_disk(missing_bytes)
        # not `progress`, which has already counted these bytes
        with closing(Progress(missing_bytes)) as unpacking:
            self._extract(remote, archive, listing, members, unpacking)
        if not self._keep_zips:
            zip_file.unlink()

    def _extract(
        self,
        remote: RemoteFile,
        archive: PhotoArchive,
        listing: Listing,
        members: Sequence[zipfile.ZipInfo],
        progress: Progress,
    ) -> None:
        folder = _folder(self._output / remote.name)
        make_plain_folder(folder)
        with closing(archive):
            num_new = sum(archive.extract(member, folder, progress) for member in members)
        files = {f"{folder.name}/{photograph_name(member)}": member.file_size for member in members}
        self._record(remote, files, len(members))
        line = f"{folder.name}: {counted(len(members), 'photograph')}, {num_new:,} of them new"
        if listing.num_ignored:
            line += f"; {listing.num_ignored:,} other files in the archive ignored"
        if listing.repeated:
            line += (
                f"; {len(listing.repeated):,} with a repeated name skipped, the first "
                f"{listing.repeated[0]!r}"
            )
        progress.note(line)

    def _archive_in_place(self, remote: RemoteFile) -> PhotoArchive:
        retry = None if self._source.is_local else self._retry
        return PhotoArchive(
            lambda: self._source.open_zip(remote), self._source.shown(remote.name), retry
        )

    def _record(
        self, remote: RemoteFile, files: dict[str, int] | None = None, num_photographs: int = 0
    ) -> None:
        """Write down an object. With `files` it is complete."""
        max_images = self._max_images if num_photographs else None
        content = (self._source.shown(remote.name), remote.size_bytes, remote.etag, remote.md5)
        entry = Entry(*content, max_images, num_photographs, files is not None, files or {})
        self._ledger.record(remote.name, entry)

    def _check_disk(self, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._output).free
        if needed_bytes > free_bytes:
            raise UserError(
                f"{self._output}: needs {needed_bytes / 2**30:.1f} GiB, only "
                f"{free_bytes / 2**30:.1f} GiB are free; "
                "use --max-images, fewer --circuits or another --output"
            )


def _folder(zip_file: Path) -> Path:
    return zip_file.with_suffix("")


def _missing_bytes(members: Sequence[zipfile.ZipInfo], folder: Path) -> int:
    """Return the total size of the photographs that do not exist in `folder` with their size."""
    return sum(
        member.file_size
        for member in members
        if not _has_size(folder / photograph_name(member), member.file_size)
    )


def _has_size(file: Path, size_bytes: int) -> bool:
    return file.is_file() and file.stat().st_size == size_bytes
