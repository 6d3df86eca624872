"""The packed cache: a split's photographs, resized once, in one file that all processes of a machine share.

    .cache/<split>-<size>-<fingerprint>.u8    uint8 RGB pixels, one photograph after the other
    .cache/<split>-<size>-<fingerprint>.json  offsets and sizes, written last: without it the .u8 is ignored

`os.pread` reads the pixels: the page cache holds one copy per machine, and a cold read is eight times as fast as
through a memory map.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from utils.common.cores import usable_cpu_count
from utils.common.errors import DataErrors, UserError
from utils.common.files import local_rank_first, write_text_atomic
from utils.common.threads import ordered_map
from utils.data.images import ImageError, fit_long_side, read_image

ALGORITHM = "area-v1"  # change it when the stored pixels change: it invalidates old caches
MIN_FREE_FRACTION = 1.2
SAVES, MIN_BETWEEN_SAVES = 50, 64  # how often a build writes down what it has finished, and after how many photographs
Record = tuple[bytes, tuple[int, int]]  # a photograph's bytes in the file, and its (height, width)
_UNREADABLE_INDEX = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError)


@dataclass(frozen=True)
class CacheIndex:
    """Positions in the pixel file: `offsets` int64 (N + 1,) in bytes, `sizes` int32 (N, 2) as (height, width)."""

    pixel_file: Path
    offsets: np.ndarray
    sizes: np.ndarray


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
    """

    what: str
    name: str
    suffix: str
    algorithm: str
    make: Callable[[Path], Record | str]
    estimate: Callable[[Sequence[Path]], int]
    is_consistent: Callable[[CacheIndex], bool]


def open_or_build(
    files: Sequence[Path], long_side_px: int, folder: Path, name: str, announce: Callable[[str], None] = print
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
    )
    found = open_or_build_kind(kind, files, folder, name, announce)
    if isinstance(found, CacheIndex):
        return found
    announce(f"packed cache off: {found}")
    return None


def open_or_build_kind(
    kind: CacheKind, files: Sequence[Path], folder: Path, name: str, announce: Callable[[str], None]
) -> CacheIndex | str:
    """Return a cache file of `files`; build it if needed. Return why not if the disk has no room or is read-only.

    The first process on a machine builds it while the others wait. A changed file or algorithm gives another
    fingerprint and another cache. A build that was killed continues where it was.
    """
    key = _fingerprint(files, kind.algorithm)
    pixel_file = folder / f"{name}-{kind.name}-{key}{kind.suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        return f"{folder} cannot be written"
    with local_rank_first(folder / f"{name}.lock"):
        index = _load_index(kind, pixel_file, len(files))
        if index is not None:
            return index
        keep = (_part_of(pixel_file), _part_of(pixel_file).with_suffix(".json"))
        for old in folder.glob(f"{name}-{kind.name}-*"):
            if old not in keep:
                old.unlink()
        needed, free = kind.estimate(files), shutil.disk_usage(folder).free
        done = keep[0].stat().st_size if keep[0].exists() else 0
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
    part = _part_of(pixel_file)
    part_index = part.with_suffix(".json")
    offsets, sizes = _finished_part(kind, part)
    first, problems = len(sizes), []
    every = max(len(files) // 5, 500)
    if first:
        announce(f"  continuing at {first}/{len(files)}")
    try:
        records = ordered_map(kind.make, files[first:], usable_cpu_count())
        with part.open("r+b" if first else "wb") as output:
            output.truncate(output.seek(offsets[-1]))
            for done, record in enumerate(records, start=first + 1):
                if isinstance(record, str):
                    problems.append(record)
                    continue
                output.write(record[0])
                sizes.append(record[1])
                offsets.append(offsets[-1] + len(record[0]))
                if done % every == 0:
                    announce(f"  packed {done}/{len(files)}")
                if done % max(len(files) // SAVES, MIN_BETWEEN_SAVES) == 0 and not problems:
                    _save(output, part_index, offsets, sizes)
            if problems:
                raise DataErrors(f"{len(problems)} of {len(files)} photographs cannot be used: {problems[0]}", problems)
            _save(output, part_index, offsets, sizes)
        os.replace(part, pixel_file)
        os.replace(part_index, pixel_file.with_suffix(".json"))
    except (OSError, DataErrors):  # what a kill or Ctrl-C leaves is for the next start
        part.unlink(missing_ok=True)
        part_index.unlink(missing_ok=True)
        raise
    return CacheIndex(pixel_file, np.array(offsets, np.int64), np.array(sizes, np.int32))


def _part_of(pixel_file: Path) -> Path:
    return pixel_file.with_suffix(".part")


def _save(output: BinaryIO, index_file: Path, offsets: list[int], sizes: list[tuple[int, int]]) -> None:
    """Flush the pixels to the disk, then write the index of those that are there."""
    output.flush()
    os.fsync(output.fileno())
    write_text_atomic(index_file, json.dumps({"offsets": offsets, "sizes": sizes}))


def _finished_part(kind: CacheKind, part: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the offsets and sizes of what a killed build has finished; [0] and nothing if there is none."""
    try:
        index = _read_index(part, part.with_suffix(".json"))
        if (
            part.stat().st_size >= index.offsets[-1]
            and _has_shape(index, len(index.sizes))
            and kind.is_consistent(index)
        ):
            return index.offsets.tolist(), [(height, width) for height, width in index.sizes.tolist()]
    except _UNREADABLE_INDEX:
        pass  # begin anew
    return [0], []


def load_photo(file: Path, long_side_px: int) -> np.ndarray:
    """Read one photograph as RGB uint8 (H, W, 3) with its long side at most `long_side_px`, anti-aliased."""
    return fit_long_side(read_image(file, long_side_px), long_side_px)


def unreadable_message(file: Path, error: ImageError) -> str:
    """Return a one-line message about a photograph that cannot be read."""
    reason = str(error).removeprefix(f"{file}: ")
    return f"{file}: unreadable photograph ({reason}); remove it or run python parse_labels.py again"


def _pack(file: Path, long_side_px: int) -> Record | str:
    """Return a photograph's pixels and its (height, width), or the message why it cannot be read."""
    try:
        image = load_photo(file, long_side_px)
    except ImageError as error:
        return unreadable_message(file, error)
    return image.tobytes(), (image.shape[0], image.shape[1])


def _load_index(kind: CacheKind, pixel_file: Path, num_photographs: int) -> CacheIndex | None:
    try:
        index = _read_index(pixel_file, pixel_file.with_suffix(".json"))
        is_whole = pixel_file.stat().st_size == index.offsets[-1] and _has_shape(index, num_photographs)
        return index if is_whole and kind.is_consistent(index) else None
    except _UNREADABLE_INDEX:
        return None  # missing or damaged: build it again


def _read_index(pixel_file: Path, index_file: Path) -> CacheIndex:
    content = json.loads(index_file.read_text(encoding="utf-8"))
    return CacheIndex(pixel_file, np.array(content["offsets"], np.int64), np.array(content["sizes"], np.int32))


def _has_shape(index: CacheIndex, num_photographs: int) -> bool:
    """Return whether offsets and sizes match; the folder may come from an untrusted data set."""
    if index.offsets.shape != (num_photographs + 1,) or index.sizes.shape != (num_photographs, 2):
        return False
    return bool(index.offsets[0] == 0 and (index.sizes > 0).all() and (np.diff(index.offsets) > 0).all())


def _is_packed(index: CacheIndex) -> bool:
    num_bytes = index.sizes.astype(np.int64).prod(axis=1) * 3
    return bool((np.diff(index.offsets) == num_bytes).all())


def _fingerprint(files: Sequence[Path], algorithm: str) -> str:
    digest = hashlib.sha256(algorithm.encode())
    for file in files:
        try:
            facts = file.stat()
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}") from error
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
