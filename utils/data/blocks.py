"""The block store: a split's photographs at their own size, from which a window is read without decoding the rest.

    .cache/<split>-blocks-<fingerprint>.jpegs  one record per photograph
    .cache/<split>-blocks-<fingerprint>.json   offsets and sizes of the records

A record holds the photograph at 1, 1/2, 1/4, ... of its size, down to a long side of at most 512 pixels. Each level is the
average of two by two pixels of the one before, and is cut into JPEG blocks of 256 pixels a side. The record begins with the
lengths of all blocks (uint32), level by level, row by row; the blocks follow in this order. docs/performance.md has the
measurements behind size, quality and chroma.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from utils.common.cores import usable_cpu_count
from utils.common.errors import UserError
from utils.common.threads import ordered_map
from utils.data.cache import CacheIndex, CacheKind, Record, open_or_build_kind, unreadable_message
from utils.data.images import ImageError, encode_jpeg, is_jpeg, read_image

ALGORITHM = "blocks-1"  # change it when the stored bytes change
BLOCK_PX = 256
QUALITY = 92
SMALLEST_LEVEL_PX = 512  # long side
# A window is drawn from the coarsest level that need not be enlarged by more. Levels are then shrunk to 0.63 at least, where
# linear interpolation still keeps wires whole (at 0.5 it breaks thin ones).
MAX_ENLARGEMENT = 1.25
ESTIMATE_FROM = 8  # photographs that are encoded to estimate the size of the file

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the photograph


def level_shapes(height: int, width: int) -> list[tuple[int, int]]:
    """Return (height, width) of each level; odd sides are rounded up."""
    shapes = [(height, width)]
    while max(shapes[-1]) > SMALLEST_LEVEL_PX:
        shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
    return shapes


class BlockStore:
    """Random access to windows of photographs. Each process opens the file at its first read."""

    def __init__(self, index: CacheIndex) -> None:
        self.index = index
        self._descriptor: tuple[int, int] | None = None  # (process, file descriptor)

    def shape(self, position: int) -> tuple[int, int]:
        """Return (height, width) of photograph `position`."""
        height, width = self.index.sizes[position].tolist()
        return height, width

    def level_for(self, position: int, scale: float) -> int:
        """Return the level from which a photograph is drawn at `scale`, in drawn pixels per pixel of the photograph."""
        last = len(level_shapes(*self.shape(position))) - 1
        return min(last, max(0, int(np.floor(np.log2(MAX_ENLARGEMENT / scale)))))

    def read(self, position: int, box: Box, level: int, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels of `box` at a level as RGB uint8 (H, W, channels), and their place.

        A fourth channel has no meaning; OpenCV warps four channels faster than three. The box is rounded outwards to whole pixels of the level. The place is a (2, 3) map from pixel corners of the
        result to the photograph. Raises UserError if the file is damaged.
        """
        height, width = self.shape(position)
        shapes = level_shapes(height, width)
        rows, columns = shapes[level]
        step_x, step_y = width / columns, height / rows
        left, top = max(0, int(box[0] / step_x)), max(0, int(box[1] / step_y))
        right, bottom = min(columns, int(np.ceil(box[2] / step_x))), min(rows, int(np.ceil(box[3] / step_y)))
        pixels = np.empty((bottom - top, right - left, channels), np.uint8)
        starts = self._block_starts(position, shapes)[_first_block(shapes, level) :]
        per_row = _blocks(columns)
        for block_row in range(top // BLOCK_PX, _blocks(bottom)):
            first = block_row * per_row + left // BLOCK_PX
            last = block_row * per_row + _blocks(right)
            places = starts[first : last + 1].tolist()
            data = memoryview(self._pread(places[-1] - places[0], places[0]))
            for number, (start, end) in enumerate(itertools.pairwise(places)):
                y, x = block_row * BLOCK_PX, (left // BLOCK_PX + number) * BLOCK_PX
                shape = min(BLOCK_PX, rows - y), min(BLOCK_PX, columns - x)
                block = self._decode(data[start - places[0] : end - places[0]], (*shape, channels))
                inside = block[max(top - y, 0) : bottom - y, max(left - x, 0) : right - x]
                y, x = max(y - top, 0), max(x - left, 0)
                pixels[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
        return pixels, np.array([[step_x, 0, left * step_x], [0, step_y, top * step_y]])

    def _block_starts(self, position: int, shapes: list[tuple[int, int]]) -> np.ndarray:
        """Return where each block of a photograph begins in the file, and where the last one ends: int64."""
        begin, end = self.index.offsets[position : position + 2].tolist()
        num_blocks = _first_block(shapes, len(shapes))
        lengths = np.frombuffer(self._pread(4 * num_blocks, begin), np.uint32)
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) + begin + 4 * num_blocks
        if starts[-1] != end:
            raise self._damaged()
        return starts

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        if self._descriptor is None or self._descriptor[0] != os.getpid():
            self._descriptor = (os.getpid(), os.open(self.index.pixel_file, os.O_RDONLY))
        data = os.pread(self._descriptor[1], num_bytes, offset)
        if len(data) != num_bytes:
            raise self._damaged()
        return data

    def _decode(self, data: memoryview, shape: tuple[int, int, int]) -> np.ndarray:
        try:
            block: np.ndarray = simplejpeg.decode_jpeg(data, colorspace="RGB" if shape[2] == 3 else "RGBX")
        except ValueError as error:
            raise self._damaged() from error
        if block.shape != shape:
            raise self._damaged()
        return block

    def _damaged(self) -> UserError:
        return UserError(f"{self.index.pixel_file}: damaged; delete the file to build it again")

    def __getstate__(self) -> dict[str, object]:
        return {"index": self.index, "_descriptor": None}


def open_blocks(files: Sequence[Path], folder: Path, split: str, announce: Callable[[str], None]) -> BlockStore:
    """Open or build the block store of a split. Raises UserError if the disk has no room for it."""
    kind = CacheKind(
        what="at their own size, in blocks,",
        name="blocks",
        suffix=".jpegs",
        algorithm=f"{ALGORITHM} {BLOCK_PX} {QUALITY}",
        make=_encode,
        estimate=_estimate,
        is_consistent=lambda index: True,  # each read checks its record
    )
    found = open_or_build_kind(kind, files, folder, split, announce)
    if isinstance(found, str):
        raise UserError(f"--windows needs a copy of the photographs in blocks: {found}")
    return BlockStore(found)


def _blocks(side_px: int) -> int:
    return -(-side_px // BLOCK_PX)


def _first_block(shapes: list[tuple[int, int]], level: int) -> int:
    """Return the number of a level's first block in the record."""
    return sum(_blocks(height) * _blocks(width) for height, width in shapes[:level])


def _encode(file: Path) -> Record | str:
    """Return a photograph's record and its (height, width), or the message why it cannot be read."""
    try:
        image = read_image(file)
    except ImageError as error:
        return unreadable_message(file, error)
    height, width = image.shape[:2]
    data = file.read_bytes()
    # Half the chroma loses nothing that the photograph had, and decodes faster. The averaged levels have all of it.
    has_half_chroma = is_jpeg(data) and simplejpeg.decode_jpeg_header(data)[3] == "420"
    blocks = []
    for level, (rows, columns) in enumerate(level_shapes(height, width)):
        if level:
            image = cv2.resize(image, (columns, rows), interpolation=cv2.INTER_AREA)
        chroma = "420" if has_half_chroma and not level else "444"
        blocks += [
            encode_jpeg(image[y : y + BLOCK_PX, x : x + BLOCK_PX], QUALITY, chroma)
            for y in range(0, rows, BLOCK_PX)
            for x in range(0, columns, BLOCK_PX)
        ]
    lengths = np.array([len(block) for block in blocks], np.uint32)
    return b"".join([lengths.tobytes(), *blocks]), (height, width)


def _estimate(files: Sequence[Path]) -> int:
    """Return the expected size of the whole file, from a few photographs."""
    some = files[:: max(1, -(-len(files) // ESTIMATE_FROM))]
    records = ordered_map(_encode, some, usable_cpu_count())
    sizes = [len(record[0]) for record in records if not isinstance(record, str)]
    return round(sum(sizes) / len(sizes) * len(files)) if sizes else 0
