"""Text files, folders of any depth, writes that are atomic and follow no link, and a lock for one
process per machine.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import shlex
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from filelock import FileLock, Timeout

from yolo_seg_ddp.utils.errors import UserError, print_warning, printable

UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
MAX_READ_BYTES = 200_000_000


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises UserError for a pipe and a device,
    and OSError.

    To open a pipe would wait for its writer, and some devices never end.
    """
    # asked again below: another file may have taken its place
    kind = stat.S_IFMT(path.stat().st_mode)
    # To open a folder raises OSError.
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        # the caller's
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    raise UserError(
        f"{printable(str(path), 400)}: not a regular file but a pipe or a device; put the file in "
        "its place"
    )


def read_bytes(path: Path, most_bytes: int = MAX_READ_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises UserError as `open_regular`, and for a larger file; OSError.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UserError(
            f"{printable(str(path), 400)}: larger than {most_bytes // 10**6} MB; is it another "
            "file?"
        )
    return data


def read_text(path: Path, most_bytes: int = MAX_READ_BYTES) -> str:
    """Return the text of a UTF-8 file, with or without a byte-order mark; line breaks become `\\n`.

    Raises UserError that tells how to convert a file of another encoding, and as `read_bytes`;
    OSError.
    """
    try:
        text = (
            read_bytes(path, most_bytes)
            .decode("utf-8-sig")
            .replace("\r\n", "\n")
            .replace("\r", "\n")
        )
    except UnicodeDecodeError as error:
        raise UserError(other_encoding(path, error.object, error.start)) from error
    if looks_like_utf_16(text[:4].encode()):
        raise UserError(other_encoding(path, text[:4].encode(), 0))
    return text


def looks_like_utf_16(data: bytes) -> bool:
    """Return whether a file that begins with `data` is UTF-16: a byte-order mark, or a zero in the
    first two letters.
    """
    return data.startswith(UTF_16_MARKS) or (b"\0" in data[:4] and data[:4] != bytes(4))


def other_encoding(path: Path, data: bytes, position: int) -> str:
    """Return a one-line message about a file whose byte at `position` is not UTF-8: how to convert
    it.
    """
    is_utf_16 = looks_like_utf_16(data)
    encoding = "UTF-16" if is_utf_16 else f"byte 0x{data[position]:02x} is not UTF-8"
    line = data[:position].count(b"\n") + 1
    name = printable(str(path), 400)
    command = (
        f"iconv -f {'UTF-16' if is_utf_16 else 'LATIN1'} -t UTF-8 {shlex.quote(name)} > converted"
    )
    return (
        f"{name}:{line}: {encoding}; UTF-8 is expected: convert the file from its encoding, for "
        f"example {command}"
    )


def walk(
    folder: Path,
    enters: Callable[[Path], bool],
    on_error: Callable[[Path, str], None] | None = None,
) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
    """Yield `folder` and each folder below it, with its entries that are no folders, sorted by
    name, at any depth.

    `enters` is asked about each subfolder and each link to a folder. `on_error` receives a folder
    that cannot be listed and the reason; without it such a folder raises UserError. `os.walk` and
    `Path.rglob` fail below 1,000 folders.
    """
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        if place is not folder and not enters(place):
            continue
        try:
            with os.scandir(place) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if on_error is None:
                raise UserError(f"{printable(str(place), 400)}: {error.strerror}") from error
            on_error(place, str(error.strerror))
            continue
        is_folder = [_is_folder(entry) for entry in entries]
        yield (
            place,
            [
                entry
                for entry, is_subfolder in zip(entries, is_folder, strict=True)
                if not is_subfolder
            ],
        )
        waiting += [place / entry.name for entry in itertools.compress(entries, is_folder)][::-1]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    # A link to itself.
    except OSError:
        return False


def new_file(path: Path) -> BinaryIO:
    """Open a new file for writing.

    A file or link of this name is removed first: nothing is written through a link.
    """
    path.unlink(missing_ok=True)
    return io.BufferedWriter(_NamedFile(path, "x"))


def new_text_file(path: Path, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    """Open a new text file as `new_file` does."""
    return io.TextIOWrapper(new_file(path), encoding=encoding, newline=newline)


class _NamedFile(io.FileIO):
    """A file whose name is in the error when the disk is full; the system's error has none."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # the path it was opened with
            error.filename = os.fspath(self.name)  # type: ignore[type-var]
            raise


def regular_only(path: str, flags: int) -> int:
    """Open an existing regular file; the `opener` of `open`, for files in a folder whose author is
    not trusted.

    Raises OSError for a link, a folder, a pipe and a device. For writing, also for a file with a
    second name (hard link).
    """
    descriptor = os.open(path, (flags & ~os.O_CREAT) | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (
        status.st_nlink == 1 or flags & os.O_ACCMODE == os.O_RDONLY
    ):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EPERM, "not a regular file with one name", path)


def is_plain_file(path: Path) -> bool:
    """Return whether a path is a regular file with this name only: neither a symbolic nor a hard
    link.
    """
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return False


def make_plain_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises UserError if it is a link: what is written into it would lie elsewhere.
    """
    if folder.is_symlink():
        raise UserError(
            f"{printable(str(folder), 400)}: is a link, and nothing is written through links; "
            "remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)


def in_the_way(*files: Path) -> str:
    """Return a message if a link, a folder or a pipe has the name of a file to be written; else an
    empty string.
    """
    for file in files:
        with suppress(FileNotFoundError):
            mode = file.lstat().st_mode
            if not stat.S_ISREG(mode):
                kind = (
                    "a link"
                    if stat.S_ISLNK(mode)
                    else "a folder"
                    if stat.S_ISDIR(mode)
                    else "a pipe or a device"
                )
                return (
                    f"{printable(str(file), 400)}: {kind} is in the place of this file; remove it"
                )
    return ""


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old or the whole new content, also while others
    write it.
    """
    temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name[-40:]}.part")
    try:
        with new_file(temporary) as output:
            output.write(data)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
            error.filename2 = None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file of UTF-8 text atomically."""
    write_bytes_atomic(path, text.encode("utf-8"))


def output_folder(path: str, flag: str = "--output") -> Path:
    """Return a script's output folder; make nothing.

    Raises UserError, before the work, if no file can be written there.
    """
    try:
        place = Path(path).absolute()
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            return Path(path)
    except OSError as error:
        raise UserError(
            f"{flag} {path}: {error.strerror}; name a folder in which files can be written"
        ) from error


@contextmanager
def claimed_output(path: str, flag: str = "--output") -> Iterator[Path]:
    """Let no other process write into a script's output folder while the block runs; rank 0 holds
    the lock.

    The lock lies beside the folder, or in it where its parent cannot be written; the system
    releases it when the process ends. Raises UserError if another process holds it, or if no file
    can be written there.
    """
    folder = output_folder(path, flag)
    if os.environ.get("RANK", "0") != "0":
        yield folder
        return
    place = folder.absolute()
    made = [parent for parent in place.parents if not parent.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        is_beside = os.access(place.parent, os.W_OK)
        lock = FileLock(
            str(place.with_name(f".{place.name}.lock") if is_beside else place / ".lock"), timeout=0
        )
        lock.acquire()
    except Timeout as timeout:
        raise UserError(
            f"{flag} {path}: another process writes there; wait until it ends, or name another "
            "folder"
        ) from timeout
    except OSError as error:
        raise UserError(
            f"{flag} {path}: {error.strerror}; name a folder in which files can be written"
        ) from error
    try:
        yield folder
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        # A refused command made it; after another one it is not empty.
        with suppress(OSError):
            for parent in made:
                parent.rmdir()


@contextmanager
def warn_on_write_error(what: str) -> Iterator[None]:
    """Print a warning instead of raising when this block raises OSError, for example on a full
    disk.
    """
    try:
        yield
    except OSError as error:
        print_warning(f"{what} was not written: {error.strerror or error}")


@contextmanager
def local_rank_first(lock_file: Path) -> Iterator[None]:
    """Run the block in one process of this machine at a time.

    The first process does the work; the others find it done.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(lock_file)):
        yield
