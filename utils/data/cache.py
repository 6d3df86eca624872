"""What the packed cache and the block store share: two files in the data set, how they are built, checked and mended.

    .cache/<split>-<kind>-<list>-<facts>.<suffix>  the records, one photograph after the other
    .cache/<split>-<kind>-<list>-<facts>.json      their offsets and sizes, and the photographs that `--skip-bad` left out
    .cache/<split>-<kind>-<list>-<facts>.part      the records while they are written; the .json tells what is finished

<list> is a hash of the photographs' paths, <facts> of their sizes and times. A new cache replaces those of the same list.
`os.pread` reads the records: the page cache holds one copy per machine, and a cold read is eight times as fast as through
a memory map. The data set may come from elsewhere: a link is never followed, and each file has checksums.

The packed cache (`.u8`) has the photographs of a split resized once: uint8 RGB pixels and a checksum for each.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from utils.common.cores import usable_cpu_count
from utils.common.errors import DataErrors, UserError, print_warning, printable
from utils.common.files import (
    in_the_way,
    is_own_file,
    local_rank_first,
    new_file,
    parse_json,
    regular_only,
    write_text_atomic,
)
from utils.common.threads import ordered_map
from utils.data.images import ImageError, fit_long_side, read_image

T = TypeVar("T")
Record = tuple[bytes, tuple[int, int]]  # a photograph's bytes in the file, and its (height, width)
UNREADABLE_INDEX = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, RecursionError)
MIN_FREE_FRACTION = 1.2
SAVES, MIN_BETWEEN_SAVES = 50, 64  # how often a build writes down what it has finished, and after how many photographs


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


@dataclass(frozen=True)
class CacheKind:
    """What differs between the kinds of cache files.

    `name` is a part of the file's name and `suffix` its end; `algorithm` enters the fingerprint. `make` returns a
    photograph's bytes and its (height, width), or why it cannot be used. `estimate` returns the size of the whole file.
    With `skips_bad` unusable photographs are left out; otherwise they raise DataErrors.
    """

    what: str
    name: str
    suffix: str
    algorithm: str
    make: Callable[[Path], Record | str]
    estimate: Callable[[Sequence[Path]], int]
    is_consistent: Callable[[CacheIndex], bool] = lambda index: True
    skips_bad: bool = False


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
        """Return what `read` returns. If it finds a damaged record, make it again from its photograph, and read again.

        All processes that find the damage write the same bytes, so they need no lock.
        """
        with contextlib.suppress(DamagedRecord):
            return read()
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
        return read()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_descriptor": None}


def open_or_build_kind(
    kind: CacheKind, files: Sequence[Path], folder: Path, name: str, announce: Callable[[str], None]
) -> CacheIndex | str:
    """Return a cache file of `files`; build it if needed. Return why not if it cannot be written.

    The first process on a machine builds it while the others wait. A changed file or algorithm gives another
    fingerprint and another cache. A build that was killed continues where it was.
    """
    # Relative paths, because the data set may be moved with its cache.
    paths = b"\0".join(os.fsencode(os.path.relpath(file, folder.parent)) for file in files)
    list_key = hashlib.sha256(paths).hexdigest()[:8]
    pixel_file = folder / f"{name}-{kind.name}-{list_key}-{_fingerprint(files, kind)}{kind.suffix}"
    lock_file = folder / f"{name}.lock"
    if folder.is_symlink():
        return f"{folder} is a link, which is followed only with --trust-links"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return f"{folder} cannot be written"
    try:
        if problem := in_the_way(lock_file, *map(pixel_file.with_suffix, (kind.suffix, ".json", ".part"))):
            return problem
        with local_rank_first(lock_file):
            found = _load_index(kind, pixel_file, files) or _build_if_room(kind, files, pixel_file, name, announce)
    except OSError as error:  # also a full disk: other programs write to it too
        return f"{error.filename or pixel_file}: {error.strerror or error}"
    if isinstance(found, str):
        return found
    if found.unusable and not kind.skips_bad:
        raise _refusal(list(found.unusable.values()), len(files))
    return replace(found, files=found.usable(files), make=kind.make)


def _load_index(kind: CacheKind, pixel_file: Path, files: Sequence[Path]) -> CacheIndex | None:
    """Return a complete index. None if it is missing, damaged, or a photograph that was unusable can now be used."""
    index = _trusted_index(kind, pixel_file, len(files))
    if index is None or pixel_file.stat().st_size != index.offsets[-1]:
        return None
    return index if all(isinstance(kind.make(files[position]), str) for position in index.unusable) else None


def _trusted_index(kind: CacheKind, pixel_file: Path, num_photographs: int | None = None) -> CacheIndex | None:
    """Return the index of a pixel file if the file holds what it says; None if one is missing or damaged."""
    try:
        with open(pixel_file.with_suffix(".json"), encoding="utf-8", opener=regular_only) as stream:
            text = stream.read()
        content = parse_json(text)
        del content["checksum"]
        if index_text(content) != text:
            return None
        unusable = {int(position): printable(str(line), 5000) for position, line in content["unusable"].items()}
        sizes = np.array(content["sizes"], np.int32).reshape(-1, 2)
        index = CacheIndex(pixel_file, np.array(content["offsets"], np.int64), sizes, unusable)
        known = len(index.sizes) + len(index.unusable) if num_photographs is None else num_photographs
        is_right = has_shape(index, known) and pixel_file.stat().st_size >= index.offsets[-1]
        return index if is_right and kind.is_consistent(index) else None
    except UNREADABLE_INDEX:
        return None


def _build_if_room(
    kind: CacheKind, files: Sequence[Path], pixel_file: Path, name: str, announce: Callable[[str], None]
) -> CacheIndex | str:
    """Remove the caches that this one replaces and build it. Return why not if the disk has no room.

    It replaces those of the same list of photographs as they were before, and those that an older version made. Says
    what caches of other lists remain.
    """
    start, list_key, _ = pixel_file.stem.rsplit("-", 2)
    of_another_list = re.compile(rf"{re.escape(start)}-(?!{list_key})[0-9a-f]{{8}}-[0-9a-f]{{16}}\.\w+")
    other_bytes = 0
    for old in pixel_file.parent.glob(f"{start}-*"):
        if of_another_list.fullmatch(old.name):
            other_bytes += old.lstat().st_size
        elif old not in (pixel_file.with_suffix(".part"), pixel_file.with_suffix(".json")) and not old.is_dir():
            old.unlink()
    if other_bytes:
        announce(
            f"{pixel_file.parent} also holds {start}-* of other lists of photographs, {other_bytes / 2**30:.2f} GiB; "
            "delete what you no longer need"
        )
    folder, part = pixel_file.parent, pixel_file.with_suffix(".part")
    needed, free = kind.estimate(files), shutil.disk_usage(folder).free
    done = part.stat().st_size if part.exists() else 0
    if free + done < needed * MIN_FREE_FRACTION:
        return f"{folder} has {free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} are needed"
    announce(
        f"packing {len(files)} {name} photographs {kind.what} into {pixel_file} "
        f"(about {needed / 2**30:.2f} GiB, {free / 2**30:.0f} GiB free)"
    )
    return _build(kind, files, pixel_file, announce)


def _build(kind: CacheKind, files: Sequence[Path], pixel_file: Path, announce: Callable[[str], None]) -> CacheIndex:
    part, index_file = pixel_file.with_suffix(".part"), pixel_file.with_suffix(".json")
    finished = _trusted_index(kind, part)  # what a killed build has finished
    # A copy of the data set made of hard links has the same file.
    if finished is None or not is_own_file(part) or (finished.unusable and not kind.skips_bad):
        finished = CacheIndex(part, np.zeros(1, np.int64), np.zeros((0, 2), np.int32))
    offsets, sizes, unusable = finished.offsets.tolist(), finished.sizes.tolist(), dict(finished.unusable)
    first = len(sizes) + len(unusable)
    every = max(len(files) // 5, 500)
    if first:
        announce(f"  continuing at {first}/{len(files)}")
    try:
        records = ordered_map(kind.make, files[first:], usable_cpu_count())
        with open(part, "r+b", opener=regular_only) if first else new_file(part) as output:
            output.truncate(output.seek(offsets[-1]))
            for done, record in enumerate(records, start=first + 1):
                if isinstance(record, str):
                    unusable[done - 1] = record
                else:
                    output.write(record[0])
                    sizes.append(record[1])
                    offsets.append(offsets[-1] + len(record[0]))
                if done % every == 0:
                    announce(f"  packed {done}/{len(files)}")
                if done % max(len(files) // SAVES, MIN_BETWEEN_SAVES) == 0 and (kind.skips_bad or not unusable):
                    save_index(output, index_file, offsets, sizes, unusable)
            if unusable and (not kind.skips_bad or not sizes):
                raise _refusal(list(unusable.values()), len(files))
            save_index(output, index_file, offsets, sizes, unusable)
        os.replace(part, pixel_file)
    except (OSError, DataErrors):  # what a kill or Ctrl-C leaves is for the next start
        part.unlink(missing_ok=True)
        index_file.unlink(missing_ok=True)
        raise
    return CacheIndex(pixel_file, np.array(offsets, np.int64), np.array(sizes, np.int32), unusable)


def _refusal(problems: list[str], num_photographs: int) -> DataErrors:
    advice = "" if len(problems) == num_photographs else "; the trainer's --skip-bad goes on without them"
    message = f"{len(problems)} of {num_photographs} photographs cannot be used: {problems[0]}{advice}"
    return DataErrors(message, problems)


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


def has_shape(index: CacheIndex, num_photographs: int) -> bool:
    """Return whether offsets and sizes match; the folder may come from an untrusted data set."""
    num_usable = num_photographs - len(index.unusable)
    if index.offsets.shape != (num_usable + 1,) or index.sizes.shape != (num_usable, 2):
        return False
    if not all(0 <= position < num_photographs for position in index.unusable):
        return False
    return bool(index.offsets[0] == 0 and (index.sizes > 0).all() and (np.diff(index.offsets) > 0).all())


def _fingerprint(files: Sequence[Path], kind: CacheKind) -> str:
    digest = hashlib.sha256(kind.algorithm.encode())
    for file in files:
        try:
            facts = file.stat()
        except OSError as error:
            if kind.skips_bad:  # `make` says why it cannot be used
                digest.update(os.fsencode(file.name) + b"\0absent\n")
                continue
            raise UserError(f"{file}: {error.strerror}") from error
        digest.update(os.fsencode(file.name) + f"\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


ALGORITHM = "area-v2"  # change it when the stored pixels change: it invalidates old caches
CHECKSUM_BYTES = 4


class PackedImages(RecordFile):
    """Random access to the packed photographs. A record is its pixels and their CRC-32 (uint32).

    Each process checks a photograph at its first read.
    """

    def __init__(self, index: CacheIndex) -> None:
        super().__init__(index)
        self._is_checked = np.zeros(len(index.sizes), bool)

    def read(self, position: int, rows: range | None = None) -> np.ndarray:
        """Return photograph `position`, or some consecutive rows of it, as RGB uint8 (rows, W, 3).

        Mends a damaged photograph. Raises UserError if that fails.
        """
        if not self._is_checked[position]:
            self._mending(position, lambda: self._check(position))
            self._is_checked[position] = True
        height, width = self.shape(position)
        rows = range(height) if rows is None else rows
        data = self._pread(len(rows) * width * 3, int(self.index.offsets[position]) + rows.start * width * 3)
        return np.frombuffer(data, dtype=np.uint8).reshape(len(rows), width, 3)

    def _check(self, position: int) -> None:
        begin, end = self.index.offsets[position : position + 2].tolist()
        record = memoryview(self._pread(end - begin, begin))
        if zlib.crc32(record[:-CHECKSUM_BYTES]) != int.from_bytes(record[-CHECKSUM_BYTES:], "little"):
            raise DamagedRecord(self.index.pixel_file)


def open_images(
    files: Sequence[Path],
    size_px: int,
    folder: Path,
    split: str,
    announce: Callable[[str], None],
    *,
    skips_bad: bool = False,
) -> PackedImages | None:
    """Open the packed cache of a split at a long side of `size_px`; build it if needed. None if the disk has no room.

    Photographs are never enlarged. With `skips_bad` the index says which photographs the cache holds.
    """
    kind = CacheKind(
        what=f"at {size_px} px",
        name=str(size_px),
        suffix=".u8",
        algorithm=f"{ALGORITHM} {size_px}",
        make=functools.partial(_pack, long_side_px=size_px),
        estimate=lambda files: len(files) * size_px * size_px * 3 * 3 // 4,  # a 4:3 photograph
        is_consistent=_is_packed,
        skips_bad=skips_bad,
    )
    found = open_or_build_kind(kind, files, folder, split, announce)
    if isinstance(found, CacheIndex):
        return PackedImages(found)
    announce(f"packed cache off: {found}")
    return None


def open_or_build_check(files: Sequence[Path], folder: Path, name: str, announce: Callable[[str], None]) -> CacheIndex:
    """Decode all photographs once to find the unusable ones. Raises UserError if the result cannot be written.

    The result is a cache of one byte per photograph.
    """
    kind = CacheKind(
        what="as a list of the readable ones",
        name="readable",
        suffix=".ok",
        algorithm="readable-1",
        make=_check,
        estimate=len,
        skips_bad=True,
    )
    found = open_or_build_kind(kind, files, folder, name, announce)
    if isinstance(found, str):
        raise UserError(f"--skip-bad writes down which photographs can be read: {found}")
    return found


def load_photo(file: Path, long_side_px: int) -> np.ndarray:
    """Read one photograph as RGB uint8 (H, W, 3) with its long side at most `long_side_px`, anti-aliased."""
    return fit_long_side(read_image(file, long_side_px), long_side_px)


def unreadable_message(file: Path, error: ImageError) -> str:
    """Return a one-line message about a photograph that cannot be read."""
    reason = str(error).removeprefix(f"{file}: ")
    return (
        f"{printable(str(file), 4096)}: unreadable photograph ({reason}); remove it or run python parse_labels.py again"
    )


def _check(file: Path) -> Record | str:
    try:
        image = read_image(file)
    except ImageError as error:
        return unreadable_message(file, error)
    return b"\0", (image.shape[0], image.shape[1])


def _pack(file: Path, long_side_px: int) -> Record | str:
    """Return a photograph's pixels with their checksum and its (height, width), or the message why it cannot be read."""
    try:
        image = load_photo(file, long_side_px)
    except ImageError as error:
        return unreadable_message(file, error)
    pixels = image.tobytes()
    return pixels + zlib.crc32(pixels).to_bytes(CHECKSUM_BYTES, "little"), (image.shape[0], image.shape[1])


def _is_packed(index: CacheIndex) -> bool:
    num_bytes = index.sizes.astype(np.int64).prod(axis=1) * 3
    return bool((np.diff(index.offsets) == num_bytes + CHECKSUM_BYTES).all())
