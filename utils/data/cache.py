"""The packed cache: a split's photographs, resized once, in one file that all processes of a machine share.

    .cache/<split>-<size>-<fingerprint>.u8    uint8 RGB pixels, one photograph after the other
    .cache/<split>-<size>-<fingerprint>.json  offsets and sizes, and the photographs that `--skip-bad` left out
    .cache/<split>-<size>-<fingerprint>.part  the pixels while they are written; then the .json tells what is finished

`os.pread` reads the pixels: the page cache holds one copy per machine, and a cold read is eight times as fast as
through a memory map.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from utils.common.cores import usable_cpu_count
from utils.common.errors import DataErrors, UserError, printable
from utils.common.files import local_rank_first, write_text_atomic
from utils.common.threads import ordered_map
from utils.data.images import ImageError, fit_long_side, read_image

ALGORITHM = "area-v1"  # change it when the stored pixels change: it invalidates old caches
MIN_FREE_FRACTION = 1.2
SAVES, MIN_BETWEEN_SAVES = 50, 64  # how often a build writes down what it has finished, and after how many photographs
Item = TypeVar("Item")
Record = tuple[bytes, tuple[int, int]]  # a photograph's bytes in the file, and its (height, width)
_UNREADABLE_INDEX = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError)


@dataclass(frozen=True)
class CacheIndex:
    """Positions in the pixel file: `offsets` int64 (N + 1,) in bytes, `sizes` int32 (N, 2) as (height, width).

    They count the usable photographs only. `unusable` holds the others by their position among all photographs, with a
    message each.
    """

    pixel_file: Path
    offsets: np.ndarray
    sizes: np.ndarray
    unusable: dict[int, str] = field(default_factory=dict)

    def usable(self, items: Sequence[Item]) -> list[Item]:
        """Return those of all photographs' `items` that belong to a usable photograph."""
        return [item for position, item in enumerate(items) if position not in self.unusable]


class PackedImages:
    """Random access to the packed photographs. Each process opens the file at its first read."""

    def __init__(self, index: CacheIndex) -> None:
        self.index = index
        self._descriptor: tuple[int, int] | None = None  # (process, file descriptor)

    def shape(self, position: int) -> tuple[int, int]:
        """Return (height, width) of photograph `position` from the index."""
        height, width = self.index.sizes[position].tolist()
        return height, width

    def read(self, position: int, rows: range | None = None) -> np.ndarray:
        """Return photograph `position`, or some consecutive rows of it, as RGB uint8 (rows, W, 3)."""
        if self._descriptor is None or self._descriptor[0] != os.getpid():
            self._descriptor = (os.getpid(), os.open(self.index.pixel_file, os.O_RDONLY))
        height, width = self.shape(position)
        rows = range(height) if rows is None else rows
        num_bytes = len(rows) * width * 3
        data = os.pread(self._descriptor[1], num_bytes, int(self.index.offsets[position]) + rows.start * width * 3)
        if len(data) != num_bytes:
            raise UserError(f"{self.index.pixel_file}: shorter than its index says; delete the file to build it again")
        return np.frombuffer(data, dtype=np.uint8).reshape(len(rows), width, 3)

    def __getstate__(self) -> dict[str, object]:
        return {"index": self.index, "_descriptor": None}


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
    is_consistent: Callable[[CacheIndex], bool]
    skips_bad: bool = False


def open_or_build(
    files: Sequence[Path],
    long_side_px: int,
    folder: Path,
    name: str,
    announce: Callable[[str], None] = print,
    *,
    skips_bad: bool = False,
) -> CacheIndex | None:
    """Return the packed cache of `files` at `long_side_px`; build it if needed. None if the disk has no room.

    Photographs are never enlarged.
    """
    kind = CacheKind(
        what=f"at {long_side_px} px",
        name=str(long_side_px),
        suffix=".u8",
        algorithm=f"{ALGORITHM} {long_side_px}",
        make=lambda file: _pack(file, long_side_px),
        estimate=lambda files: len(files) * long_side_px * long_side_px * 3 * 3 // 4,  # a 4:3 photograph
        is_consistent=_is_packed,
        skips_bad=skips_bad,
    )
    found = open_or_build_kind(kind, files, folder, name, announce)
    if isinstance(found, CacheIndex):
        return found
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
        is_consistent=lambda index: True,
        skips_bad=True,
    )
    found = open_or_build_kind(kind, files, folder, name, announce)
    if isinstance(found, str):
        raise UserError(f"--skip-bad writes down which photographs can be read: {found}")
    return found


def open_or_build_kind(
    kind: CacheKind, files: Sequence[Path], folder: Path, name: str, announce: Callable[[str], None]
) -> CacheIndex | str:
    """Return a cache file of `files`; build it if needed. Return why not if the disk has no room or is read-only.

    The first process on a machine builds it while the others wait. A changed file or algorithm gives another
    fingerprint and another cache. A build that was killed continues where it was.
    """
    key = _fingerprint(files, kind)
    pixel_file = folder / f"{name}-{kind.name}-{key}{kind.suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        return f"{folder} cannot be written"
    with local_rank_first(folder / f"{name}.lock"):
        index = _load_index(kind, pixel_file, files)
        if index is not None:
            if index.unusable and not kind.skips_bad:
                raise _refusal(list(index.unusable.values()), len(files))
            return index
        part = pixel_file.with_suffix(".part")
        for old in folder.glob(f"{name}-{kind.name}-*"):
            if old not in (part, pixel_file.with_suffix(".json")):
                old.unlink()
        needed, free = kind.estimate(files), shutil.disk_usage(folder).free
        done = part.stat().st_size if part.exists() else 0
        if free + done < needed * MIN_FREE_FRACTION:
            return f"{folder} has {free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} are needed"
        announce(
            f"packing {len(files)} {name} photographs {kind.what} into {pixel_file} "
            f"(about {needed / 2**30:.2f} GiB, {free / 2**30:.0f} GiB free)"
        )
        try:
            return _build(kind, files, pixel_file, announce)
        except OSError as error:  # other programs write to the disk too
            return f"{error.filename or pixel_file}: {error.strerror or error}"


def _build(kind: CacheKind, files: Sequence[Path], pixel_file: Path, announce: Callable[[str], None]) -> CacheIndex:
    part, index_file = pixel_file.with_suffix(".part"), pixel_file.with_suffix(".json")
    finished = _finished_part(kind, part)
    offsets, sizes, unusable = finished.offsets.tolist(), finished.sizes.tolist(), dict(finished.unusable)
    first = len(sizes) + len(unusable)
    every = max(len(files) // 5, 500)
    if first:
        announce(f"  continuing at {first}/{len(files)}")
    try:
        records = ordered_map(kind.make, files[first:], usable_cpu_count())
        with part.open("r+b" if first else "wb") as output:
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
                    _save(output, index_file, offsets, sizes, unusable)
            if unusable and (not kind.skips_bad or not sizes):
                raise _refusal(list(unusable.values()), len(files))
            _save(output, index_file, offsets, sizes, unusable)
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


def _save(
    output: BinaryIO, index_file: Path, offsets: list[int], sizes: list[list[int]], unusable: dict[int, str]
) -> None:
    """Flush the pixels to the disk, then write the index of those that are there."""
    output.flush()
    os.fsync(output.fileno())
    write_text_atomic(index_file, json.dumps({"offsets": offsets, "sizes": sizes, "unusable": unusable}))


def _finished_part(kind: CacheKind, part: Path) -> CacheIndex:
    """Return the index of what a killed build has finished; an empty one if there is nothing to continue."""
    nothing = CacheIndex(part, np.zeros(1, np.int64), np.zeros((0, 2), np.int32))
    try:
        index = _read_index(part, part.with_suffix(".json"))
        can_continue = (
            part.stat().st_size >= index.offsets[-1]
            and _has_shape(index, len(index.sizes) + len(index.unusable))
            and (kind.skips_bad or not index.unusable)
            and kind.is_consistent(index)
        )
    except _UNREADABLE_INDEX:
        return nothing
    return index if can_continue else nothing


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
    """Return a photograph's pixels and its (height, width), or the message why it cannot be read."""
    try:
        image = load_photo(file, long_side_px)
    except ImageError as error:
        return unreadable_message(file, error)
    return image.tobytes(), (image.shape[0], image.shape[1])


def _load_index(kind: CacheKind, pixel_file: Path, files: Sequence[Path]) -> CacheIndex | None:
    """Return a complete index. None if it is missing, damaged, or a photograph that was unusable can now be used."""
    try:
        index = _read_index(pixel_file, pixel_file.with_suffix(".json"))
        is_whole = pixel_file.stat().st_size == index.offsets[-1] and _has_shape(index, len(files))
        if not is_whole or not kind.is_consistent(index):
            return None
        return index if all(isinstance(kind.make(files[position]), str) for position in index.unusable) else None
    except _UNREADABLE_INDEX:
        return None  # missing or damaged: build it again


def _read_index(pixel_file: Path, index_file: Path) -> CacheIndex:
    content = json.loads(index_file.read_text(encoding="utf-8"))
    unusable = {int(position): printable(str(line), 5000) for position, line in content.get("unusable", {}).items()}
    sizes = np.array(content["sizes"], np.int32).reshape(-1, 2)
    return CacheIndex(pixel_file, np.array(content["offsets"], np.int64), sizes, unusable)


def _has_shape(index: CacheIndex, num_photographs: int) -> bool:
    """Return whether offsets and sizes match; the folder may come from an untrusted data set."""
    num_usable = num_photographs - len(index.unusable)
    if index.offsets.shape != (num_usable + 1,) or index.sizes.shape != (num_usable, 2):
        return False
    if not all(0 <= position < num_photographs for position in index.unusable):
        return False
    return bool(index.offsets[0] == 0 and (index.sizes > 0).all() and (np.diff(index.offsets) > 0).all())


def _is_packed(index: CacheIndex) -> bool:
    num_bytes = index.sizes.astype(np.int64).prod(axis=1) * 3
    return bool((np.diff(index.offsets) == num_bytes).all())


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
