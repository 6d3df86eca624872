"""Folders in an object storage, such as s3://bucket/folder, and in all other systems that fsspec
knows.

Credentials are those that fsspec's packages find: AWS_ACCESS_KEY_ID, ~/.aws, the role of the
machine. An address never holds any, so that messages and the files of a run can show it.
"""

import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import fsspec

from yolo_seg_ddp.utils.errors import UsageError, UserError, one_line, print_warning, printable
from yolo_seg_ddp.utils.files import is_plain_file, make_plain_folder, new_file
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.text import without_secrets
from yolo_seg_ddp.utils.threads import ordered_map

BLOCK_BYTES = 16 << 20  # of one request; a broken transfer loses at most these
# so that a server that sends a byte now and then does not hold a command for ever
BLOCK_TIMEOUT_S = 600.0
FETCHES_AT_ONCE = 8
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before the second try and the later ones
MOST_TRANSFERS = 3  # of a file that arrives damaged
# each of fsspec's packages has its own name
TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


@dataclass(frozen=True)
class StoredFile:
    """A storage's description of a file.

    `etag` is empty if unknown; `time_s`: when it was written, in whole seconds.
    """

    size_bytes: int
    etag: str
    time_s: int

    @classmethod
    def of(cls, info: dict[str, Any]) -> Self:
        """Read fsspec's description."""
        written = next((info[name] for name in TIMES if info.get(name)), 0)
        time_s = written.timestamp() if isinstance(written, datetime) else written
        etag = info.get("ETag") or info.get("etag") or ""
        return cls(int(info["size"]), etag.strip('"'), int(time_s))

    def is_at(self, path: Path) -> bool:
        """Return whether a file of this machine has its size, and its time or else its MD5.

        Raises UserError for another one that is newer: somebody may have changed it here.
        """
        if not is_plain_file(path):
            return False
        status = path.stat()
        if status.st_size == self.size_bytes:
            if int(status.st_mtime) == self.time_s:
                return True
            with path.open("rb") as stream:
                if md5_hex(stream) == self.etag:
                    return True
        if status.st_mtime > self.time_s:
            raise UserError(
                f"{path}: differs from the stored file, and is newer; remove it to get the stored "
                "one"
            )
        return False


class Storage:
    """A folder at an address. Its methods can be called from several threads.

    A request that fails is repeated after each of `pauses_s`. Then UserError tells the reason and
    the fix in one line.
    """

    def __init__(self, address: str, flag: str, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        """Raises UsageError, which names `flag`, for an address that cannot be used."""
        self.shown = printable(without_secrets(address), 400).rstrip("/")
        if without_secrets(address) != address or re.match("https?:", address):
            raise UsageError(
                f"{flag} {self.shown}: expected s3://bucket/folder or the like, without user and "
                "password"
            )
        try:
            self.system, root = fsspec.core.url_to_fs(address, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            install = "; pip install -r requirements-s3.txt" if address.startswith("s3:") else ""
            raise UsageError(f"{flag} {self.shown}: {one_line(error)}{install}") from error
        self.system.auto_mkdir = True  # in a folder of this machine, such as file:///mnt/folder
        self.root = root.rstrip("/")
        self._pauses_s = pauses_s
        self._progress = Progress("", 0, is_shown=False)
        self._strange_digests: set[str] = set()
        self._has_md5 = True

    def files(self, folder: str = "") -> dict[str, StoredFile]:
        """Return all files below a folder by their names, without hidden ones and names that lead
        elsewhere.
        """
        self.system.invalidate_cache()
        infos = self.tried(folder, self.system.find, detail=True)
        named = {path[len(self.root) + 1 :]: info for path, info in sorted(infos.items())}
        # The first part of a name that is absolute is empty; that of one that leads out of the
        # folder is `..`.
        is_plain = re.compile(r"[^./\\][^/\\]*(/[^./\\][^/\\]*)*")
        return {
            name: StoredFile.of(info) for name, info in named.items() if is_plain.fullmatch(name)
        }

    def read(self, name: str, file: StoredFile) -> bytes:
        """Return a file's verified content."""
        content = io.BytesIO()
        self._receive(name, file, content)
        return content.getvalue()

    def fetch_all(self, files: Mapping[str, StoredFile], folder: Path) -> int:
        """Fetch the files that `folder` lacks, several at once; return how many.

        Raises UserError without room for them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        missing = {name: file for name, file in files.items() if not file.is_at(folder / name)}
        sizes = [file.size_bytes for file in missing.values()]
        if sum(sizes) > (free_bytes := shutil.disk_usage(folder).free):
            needed = (
                f"{sum(sizes) / 2**30:.1f} GiB are needed, {free_bytes / 2**30:.1f} GiB are free"
            )
            raise UserError(f"{folder}: {needed}; make room there, or use another --output")

        blocks = sum(-(-size // BLOCK_BYTES) for size in sizes)
        self._progress = Progress(f"parts of at most {BLOCK_BYTES >> 20} MiB", blocks)
        fetches = ordered_map(
            lambda name: self.fetch(name, files[name], folder / name), missing, FETCHES_AT_ONCE
        )
        return len([*fetches])

    def fetch(self, name: str, file: StoredFile, target: Path) -> None:
        """Copy a file to `target`, verified and atomically; continue an interrupted copy."""
        make_plain_folder(target.parent)
        # The version of the file is a part of the name: bytes of different versions never meet.
        version = hashlib.sha256(repr(file).encode()).hexdigest()[:12]
        part = target.with_name(f".{target.name[:100]}.{version}.part")
        if not is_plain_file(part):
            new_file(part).close()

        with part.open("a+b") as sink:
            self._receive(name, file, sink)
        os.utime(part, (file.time_s, file.time_s))
        os.replace(part, target)

    def tried(self, name: str, action: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return what an action of fsspec returns for a file or folder. Raises UserError."""
        place = printable(f"{self.shown}/{name}".rstrip("/"), 400)
        for pause_s in (*self._pauses_s, None):
            try:
                return action(f"{self.root}/{name}".rstrip("/"), *arguments, **named)
            except Exception as error:  # noqa: BLE001 # each package has its own
                kind = type(error).__name__
                reason = f"{place}: {without_secrets(one_line(error))} ({kind})"
                if isinstance(error, FileNotFoundError):
                    fix = "check the address"
                elif isinstance(error, PermissionError) or re.search("Credential|Auth|Token", kind):
                    fix = (
                        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what the package of "
                        "this storage reads"
                    )
                elif pause_s is not None:
                    print_warning(f"{reason}; asking again in {pause_s:g} s")
                    time.sleep(pause_s)
                    continue
                else:
                    fix = "check the network and AWS_ENDPOINT_URL"
                # The chain of the error may show keys.
                raise UserError(f"{reason}; {fix}") from None

    def _receive(self, name: str, file: StoredFile, sink: IO[bytes]) -> None:
        """Add what `sink` lacks of a file."""
        for _ in range(MOST_TRANSFERS):
            while (start := sink.seek(0, os.SEEK_END)) < file.size_bytes:
                end = min(start + BLOCK_BYTES, file.size_bytes)
                block = self.tried(name, self._block, start, end)
                for arrived in self._progress([block]):
                    sink.write(arrived)
            sink.seek(0)
            if self._is_whole(name, file, md5_hex(sink)):
                return
            sink.truncate(0)
        raise UserError(
            f"{self.shown}/{printable(name)}: it changes or arrives damaged; run the same command "
            "again"
        )

    def _block(self, path: str, start: int, end: int) -> bytes:
        block: bytes = self.system.cat_file(path, start=start, end=end, timeout=BLOCK_TIMEOUT_S)
        if len(block) != end - start:
            raise OSError(f"only {len(block)} of {end - start} bytes arrived")
        return block

    def _is_whole(self, name: str, file: StoredFile, digest: str) -> bool:
        """Return whether bytes with this MD5 are the file's.

        The ETag of a file that S3 encrypts with a key of KMS looks like an MD5 and is none. Two
        transfers of the same bytes show it. From then on the storage is asked whether the file is
        still the one that was listed.
        """
        if digest == file.etag:
            return True
        if self._has_md5 and re.fullmatch("[0-9a-f]{32}", file.etag):
            self._has_md5 = digest not in self._strange_digests
            self._strange_digests.add(digest)
            return not self._has_md5
        return StoredFile.of(self.tried(name, self.system.info)) == file


def md5_hex(stream: IO[bytes]) -> str:
    """Return the MD5 of a stream in hexadecimal digits."""
    return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]
