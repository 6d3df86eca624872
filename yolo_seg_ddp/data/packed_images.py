"""The packed cache (`.u8`): the photographs of a split resized once, uint8 RGB pixels and a
checksum for each; and the list of the photographs that can be read.

`cache.py` has the names and what both share with the block store.
"""

import functools
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from yolo_seg_ddp.data.cache import (
    CacheIndex,
    CacheKind,
    CachePlace,
    Record,
    RecordFile,
    open_or_build_kind,
)
from yolo_seg_ddp.data.images import ImageError, load_photo, read_image, unreadable_message
from yolo_seg_ddp.utils.errors import UserError

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
        data = self._pread(position, len(rows) * width * 3, rows.start * width * 3)
        return np.frombuffer(data, dtype=np.uint8).reshape(len(rows), width, 3)

    def _check(self, position: int) -> None:
        record = memoryview(self._pread(position, self._place(position)[2]))
        if zlib.crc32(record[:-CHECKSUM_BYTES]) != int.from_bytes(
            record[-CHECKSUM_BYTES:], "little"
        ):
            raise self._damaged(position)


def open_images(files: Sequence[Path], size_px: int, place: CachePlace) -> PackedImages | str:
    """Open the packed cache of a split at a long side of `size_px`; pack what is missing. Return
    why not if that fails.

    Photographs are never enlarged. If bad ones are skipped, the index says which photographs the
    cache holds.
    """
    make = functools.partial(_pack, long_side_px=size_px)
    kind = CacheKind(
        what=f"at {size_px} px",
        name=str(size_px),
        suffix=".u8",
        algorithm=f"{ALGORITHM} {size_px}",
        make=make,
        estimate=lambda files: len(files) * size_px * size_px * 3 * 3 // 4,  # a 4:3 photograph
        is_consistent=_is_packed,
    )
    opened = open_or_build_kind(kind, files, place)
    if isinstance(opened, CacheIndex):
        return PackedImages(opened)
    before_s = time.thread_time()
    make(files[0])
    cost_ms = 1000 * (time.thread_time() - before_s)
    return (
        f"{opened}; without it a photograph is decoded each time it is shown, in {cost_ms:.0f} ms "
        "of a core"
    )


def open_or_build_check(files: Sequence[Path], place: CachePlace) -> CacheIndex:
    """Decode all photographs once to find the unusable ones. Raises UserError if the result cannot
    be written.

    The result is a cache of one byte per photograph.
    """
    kind = CacheKind(
        what="as a list of the readable ones",
        name="readable",
        suffix=".ok",
        algorithm="readable-1",
        make=_check,
        estimate=len,
    )
    opened = open_or_build_kind(kind, files, place)
    if isinstance(opened, str):
        raise UserError(f"--skip-bad writes down which photographs can be read: {opened}")
    return opened


def _check(file: Path) -> Record | str:
    try:
        image = read_image(file)
    except ImageError as error:
        return unreadable_message(file, error)
    return b"\0", (image.shape[0], image.shape[1])


def _pack(file: Path, long_side_px: int) -> Record | str:
    """Return a photograph's pixels with their checksum and its (height, width), or the message why
    it cannot be read.
    """
    try:
        image = load_photo(file, long_side_px)
    except ImageError as error:
        return unreadable_message(file, error)
    pixels = image.tobytes()
    return pixels + zlib.crc32(pixels).to_bytes(CHECKSUM_BYTES, "little"), (
        image.shape[0],
        image.shape[1],
    )


def _is_packed(sizes: np.ndarray, lengths: np.ndarray) -> bool:
    return bool((lengths == sizes.astype(np.int64).prod(axis=1) * 3 + CHECKSUM_BYTES).all())
