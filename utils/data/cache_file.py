"""The two files of a cache: the records, one per photograph, and the index that says where they are.

Both lie inside the data set, which may come from elsewhere: a link is never followed, and each file has checksums.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from utils.common.errors import UserError, print_warning, printable
from utils.common.files import regular_only, write_text_atomic

T = TypeVar("T")
Record = tuple[bytes, tuple[int, int]]  # a photograph's bytes in the file, and its (height, width)
UNREADABLE_INDEX = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, RecursionError)


@dataclass(frozen=True)
class CacheIndex:
    """Positions in the pixel file: `offsets` int64 (N + 1,) in bytes, `sizes` int32 (N, 2) as (height, width).

    They count the usable photographs only, whose files are `files`. `unusable` holds the others by their position among
    all photographs, with a message each. `make` makes a photograph's record.
    """

    pixel_file: Path
    offsets: np.ndarray
    sizes: np.ndarray
    unusable: dict[int, str] = field(default_factory=dict)
    files: Sequence[Path] = ()
    make: Callable[[Path], Record | str] | None = None

    def usable(self, items: Sequence[T]) -> list[T]:
        """Return those of all photographs' `items` that belong to a usable photograph."""
        return [item for position, item in enumerate(items) if position not in self.unusable]


class DamagedRecord(UserError):
    """A record's bytes are not those that were written."""

    def __init__(self, pixel_file: Path, why: str = "") -> None:
        super().__init__(f"{pixel_file}: damaged{why}; delete the file to build it again")


class RecordFile:
    """Reads the records of a cache, and mends them. Each process opens the file at its first read."""

    def __init__(self, index: CacheIndex) -> None:
        self.index = index
        self._descriptor: tuple[int, int] | None = None  # (process, file descriptor)

    def shape(self, position: int) -> tuple[int, int]:
        """Return (height, width) of photograph `position` from the index."""
        height, width = self.index.sizes[position].tolist()
        return height, width

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        try:
            if self._descriptor is None or self._descriptor[0] != os.getpid():
                self._descriptor = (os.getpid(), regular_only(str(self.index.pixel_file), os.O_RDONLY))
            data = os.pread(self._descriptor[1], num_bytes, offset)
        except OSError as error:
            raise UserError(
                f"{self.index.pixel_file}: {error.strerror}; the next start builds the file if it is gone"
            ) from error
        if len(data) != num_bytes:
            raise DamagedRecord(self.index.pixel_file)
        return data

    def _mending(self, position: int, read: Callable[[], T]) -> T:
        """Return what `read` returns. If it finds the photograph's record damaged, mend the record and read again."""
        try:
            return read()
        except DamagedRecord:
            self._mend(position)
            return read()

    def _mend(self, position: int) -> None:
        """Make a record again from its photograph and write it in its place.

        All processes that find the damage write the same bytes, so they need no lock.
        """
        index = self.index
        begin, end = index.offsets[position : position + 2].tolist()
        file = index.files[position]
        assert index.make is not None  # `open_or_build_kind` sets it
        made = index.make(file)
        if isinstance(made, str) or (len(made[0]), made[1]) != (end - begin, self.shape(position)):
            raise DamagedRecord(index.pixel_file, f", and {printable(file.name)} no longer gives the same bytes")
        try:
            with open(index.pixel_file, "r+b", opener=regular_only) as output:
                output.seek(begin)
                output.write(made[0])
        except OSError as error:
            raise DamagedRecord(index.pixel_file, f", and cannot be mended: {error.strerror}") from error
        print_warning(f"{index.pixel_file}: the bytes of {printable(file.name)} were damaged and have been made again")

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_descriptor": None}


def save_index(
    output: BinaryIO, index_file: Path, offsets: list[int], sizes: list[list[int]], unusable: dict[int, str]
) -> None:
    """Flush the records to the disk, then write the index of those that are there."""
    output.flush()
    os.fsync(output.fileno())
    write_text_atomic(index_file, index_text({"offsets": offsets, "sizes": sizes, "unusable": unusable}))


def index_text(content: dict[str, Any]) -> str:
    """Return an index file's text: the content and its checksum."""
    return json.dumps({**content, "checksum": zlib.crc32(json.dumps(content).encode())})


def read_index(pixel_file: Path) -> CacheIndex:
    """Read the index beside a pixel file. Raises one of UNREADABLE_INDEX."""
    with open(pixel_file.with_suffix(".json"), encoding="utf-8", opener=regular_only) as stream:
        text = stream.read()
    content = json.loads(text)
    del content["checksum"]
    if index_text(content) != text:
        raise ValueError("wrong checksum")
    unusable = {int(position): printable(str(line), 5000) for position, line in content["unusable"].items()}
    sizes = np.array(content["sizes"], np.int32).reshape(-1, 2)
    return CacheIndex(pixel_file, np.array(content["offsets"], np.int64), sizes, unusable)


def has_shape(index: CacheIndex, num_photographs: int) -> bool:
    """Return whether offsets and sizes match; the folder may come from an untrusted data set."""
    num_usable = num_photographs - len(index.unusable)
    if index.offsets.shape != (num_usable + 1,) or index.sizes.shape != (num_usable, 2):
        return False
    if not all(0 <= position < num_photographs for position in index.unusable):
        return False
    return bool(index.offsets[0] == 0 and (index.sizes > 0).all() and (np.diff(index.offsets) > 0).all())
