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

import numpy as np

from utils.common.cores import usable_cpu_count
from utils.common.errors import DataErrors, UserError
from utils.common.files import local_rank_first, write_text_atomic
from utils.common.threads import ordered_map
from utils.data.images import ImageError, fit_long_side, read_image

ALGORITHM = "area-v1"  # change it when the stored pixels change: it invalidates old caches
MIN_FREE_FRACTION = 1.2


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


def open_or_build(
    files: Sequence[Path], long_side_px: int, folder: Path, name: str, announce: Callable[[str], None] = print
) -> CacheIndex | None:
    """Return the packed cache of `files` at `long_side_px`; build it if needed. None if the disk has no room.

    The first process on a machine builds it while the others wait. A changed file, size or algorithm gives another
    fingerprint and another cache. Photographs are never enlarged.
    """
    key = _fingerprint(files, long_side_px)
    pixel_file = folder / f"{name}-{long_side_px}-{key}.u8"
    index_file = pixel_file.with_suffix(".json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        announce(f"packed cache off: {folder} cannot be written")
        return None
    with local_rank_first(folder / f"{name}.lock"):
        index = _load_index(pixel_file, index_file, len(files))
        if index is not None:
            return index
        needed = len(files) * long_side_px * long_side_px * 3 * 3 // 4  # a 4:3 photograph
        free = shutil.disk_usage(folder).free
        if free < needed * MIN_FREE_FRACTION:
            announce(
                f"packed cache off: {folder} has {free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} are needed"
            )
            return None
        announce(
            f"packing {len(files)} {name} photographs at {long_side_px} px into {pixel_file} "
            f"(about {needed / 2**30:.2f} GiB, {free / 2**30:.0f} GiB free)"
        )
        for old in folder.glob(f"{name}-{long_side_px}-*"):
            old.unlink()
        return _build(files, long_side_px, pixel_file, index_file, announce)


def _build(
    files: Sequence[Path], long_side_px: int, pixel_file: Path, index_file: Path, announce: Callable[[str], None]
) -> CacheIndex:
    temporary = pixel_file.with_suffix(f".tmp-{os.getpid()}")
    sizes, offsets, problems = [], [0], []
    every = max(len(files) // 5, 500)
    try:
        images = ordered_map(lambda file: _load(file, long_side_px), files, usable_cpu_count())
        with temporary.open("wb") as output:
            for done, image in enumerate(images, start=1):
                if isinstance(image, str):
                    problems.append(image)
                    continue
                output.write(image.tobytes())
                sizes.append(image.shape[:2])
                offsets.append(offsets[-1] + image.nbytes)
                if done % every == 0:
                    announce(f"  packed {done}/{len(files)}")
            if problems:
                raise DataErrors(f"{len(problems)} of {len(files)} photographs cannot be used: {problems[0]}", problems)
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, pixel_file)
    finally:
        temporary.unlink(missing_ok=True)
    write_text_atomic(index_file, json.dumps({"offsets": offsets, "sizes": sizes}))
    return CacheIndex(pixel_file, np.array(offsets, np.int64), np.array(sizes, np.int32))


def load_photo(file: Path, long_side_px: int) -> np.ndarray:
    """Read one photograph as RGB uint8 (H, W, 3) with its long side at most `long_side_px`, anti-aliased."""
    return fit_long_side(read_image(file, long_side_px), long_side_px)


def unreadable_message(file: Path, error: ImageError) -> str:
    """Return a one-line message about a photograph that cannot be read."""
    reason = str(error).removeprefix(f"{file}: ")
    return f"{file}: unreadable photograph ({reason}); remove it or run python parse_labels.py again"


def _load(file: Path, long_side_px: int) -> np.ndarray | str:
    """Return a photograph, or the message why it cannot be read."""
    try:
        return load_photo(file, long_side_px)
    except ImageError as error:
        return unreadable_message(file, error)


def _load_index(pixel_file: Path, index_file: Path, num_photographs: int) -> CacheIndex | None:
    try:
        content = json.loads(index_file.read_text(encoding="utf-8"))
        index = CacheIndex(pixel_file, np.array(content["offsets"], np.int64), np.array(content["sizes"], np.int32))
        is_whole = pixel_file.stat().st_size == index.offsets[-1] and _is_consistent(index, num_photographs)
        return index if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None  # missing or damaged: build it again


def _is_consistent(index: CacheIndex, num_photographs: int) -> bool:
    """Return whether offsets and sizes match; the folder may come from an untrusted data set."""
    if index.offsets.shape != (num_photographs + 1,) or index.sizes.shape != (num_photographs, 2):
        return False
    num_bytes = index.sizes.astype(np.int64).prod(axis=1) * 3
    return bool(index.offsets[0] == 0 and (index.sizes > 0).all() and (np.diff(index.offsets) == num_bytes).all())


def _fingerprint(files: Sequence[Path], long_side_px: int) -> str:
    digest = hashlib.sha256(f"{ALGORITHM} {long_side_px}".encode())
    for file in files:
        try:
            facts = file.stat()
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}") from error
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
