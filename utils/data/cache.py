"""The packed cache: a split's photographs, resized once, in one file that all processes of a machine share.

    .cache/<split>-<size>-<list>-<facts>.u8  uint8 RGB pixels and a checksum, one photograph after the other

`cache_file.py` has the names and what it shares with the block store.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from utils.common.errors import UserError, printable
from utils.data.cache_file import CacheIndex, CacheKind, DamagedRecord, Record, RecordFile, open_or_build_kind
from utils.data.images import ImageError, fit_long_side, read_image

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
