"""The block store: a split's photographs at their own size, from which a window is read without
decoding the rest.

    .cache/<split>-blocks-*.jpegs  one record per photograph

`cache.py` has the names and what it shares with the packed cache. A record holds the photograph at
1, 1/2, 1/4, ... of its size, down to a long side of at most 512 pixels. Each level is the average
of two by two pixels of the one before, and is cut into JPEG blocks of 256 pixels a side. The record
begins with the lengths of all blocks (uint32), level by level, row by row, and their CRC-32
(uint32); the blocks follow in this order. Each read checks the blocks that it decodes.
docs/research/performance.md has the measurements behind size, quality and chroma.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from yolo_seg_ddp.data.cache import (
    CacheKind,
    CachePlace,
    Record,
    RecordFile,
    open_or_build_kind,
)
from yolo_seg_ddp.data.images import (
    MAX_IMAGE_PIXELS,
    ImageError,
    encode_jpeg,
    is_jpeg,
    read_image,
    unreadable_message,
)
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.threads import ordered_map

ALGORITHM = "blocks-2"  # change it when the stored bytes change
BLOCK_PX = 256
QUALITY = 92
SMALLEST_LEVEL_PX = 512  # long side
TABLE_BYTES = 8  # of each block's length and checksum
# A window is drawn from the coarsest level that need not be enlarged by more. Levels are then
# shrunk to 0.63 at least, where linear interpolation still keeps wires whole (at 0.5 it breaks thin
# ones).
MAX_ENLARGEMENT = 1.25
ESTIMATE_FROM = 8  # photographs that are encoded to estimate the size of the file

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the photograph


def level_shapes(height: int, width: int) -> list[tuple[int, int]]:
    """Return (height, width) of each level; odd sides are rounded up."""
    shapes = [(height, width)]
    while max(shapes[-1]) > SMALLEST_LEVEL_PX:
        shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
    return shapes


class BlockStore(RecordFile):
    """Random access to rectangles of photographs."""

    def level_for(self, position: int, scale: float) -> int:
        """Return the level from which a photograph is drawn at `scale`, in drawn pixels per pixel
        of the photograph.
        """
        last = len(level_shapes(*self.shape(position))) - 1
        return min(last, max(0, int(np.floor(np.log2(MAX_ENLARGEMENT / scale)))))

    def read(
        self, position: int, box: Box, level: int, channels: int = 3
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels of `box` at a level as RGB uint8 (H, W, channels), and their place.

        A fourth channel has no meaning; OpenCV warps four channels faster than three. The box is
        rounded outwards to whole pixels of the level. The place is a (2, 3) map from pixel corners
        of the result to the photograph. Mends a damaged record. Raises UserError if that fails.
        """
        return self._mending(position, lambda: self._read(position, box, level, channels))

    def _read(
        self, position: int, box: Box, level: int, channels: int
    ) -> tuple[np.ndarray, np.ndarray]:
        height, width = self.shape(position)
        shapes = level_shapes(height, width)
        rows, columns = shapes[level]
        step_x, step_y = width / columns, height / rows
        left, top = max(0, int(box[0] / step_x)), max(0, int(box[1] / step_y))
        right, bottom = (
            min(columns, int(np.ceil(box[2] / step_x))),
            min(rows, int(np.ceil(box[3] / step_y))),
        )
        pixels = np.empty((bottom - top, right - left, channels), np.uint8)
        starts, checksums = self._blocks_of(position, shapes)
        per_row, of_level = _blocks(columns), _first_block(shapes, level)
        for block_row in range(top // BLOCK_PX, _blocks(bottom)):
            first = of_level + block_row * per_row + left // BLOCK_PX
            last = of_level + block_row * per_row + _blocks(right)
            places = starts[first : last + 1].tolist()
            data = memoryview(self._pread(position, places[-1] - places[0], places[0]))
            for number, checksum in enumerate(checksums[first:last].tolist()):
                y, x = block_row * BLOCK_PX, (left // BLOCK_PX + number) * BLOCK_PX
                shape = min(BLOCK_PX, rows - y), min(BLOCK_PX, columns - x)
                start, end = places[number] - places[0], places[number + 1] - places[0]
                block = self._decode(position, data[start:end], checksum, (*shape, channels))
                inside = block[max(top - y, 0) : bottom - y, max(left - x, 0) : right - x]
                y, x = max(y - top, 0), max(x - left, 0)
                pixels[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
        return pixels, np.array([[step_x, 0, left * step_x], [0, step_y, top * step_y]])

    def _blocks_of(
        self, position: int, shapes: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where each of a photograph's M blocks begins in the record, and where the last one
        ends: int64 (M + 1,); and their checksums: uint32 (M,).
        """
        num_blocks = _first_block(shapes, len(shapes))
        table_bytes = TABLE_BYTES * num_blocks
        lengths, checksums = np.frombuffer(self._pread(position, table_bytes), np.uint32).reshape(
            2, num_blocks
        )
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) + table_bytes
        if starts[-1] != self._place(position)[2]:
            raise self._damaged(position)
        return starts, checksums

    def _decode(
        self, position: int, data: memoryview, checksum: int, shape: tuple[int, int, int]
    ) -> np.ndarray:
        if zlib.crc32(data) != checksum:
            raise self._damaged(position)
        try:
            block: np.ndarray = simplejpeg.decode_jpeg(
                data, colorspace="RGB" if shape[2] == 3 else "RGBX"
            )
        except ValueError as error:  # a store that came with the data set
            raise self._damaged(position) from error
        if block.shape != shape:
            raise self._damaged(position)
        return block


def open_blocks(files: Sequence[Path], place: CachePlace) -> BlockStore:
    """Open or build the block store of a split. Raises UserError if the disk has no room for it."""
    kind = CacheKind(
        what="at their own size, in blocks,",
        name="blocks",
        suffix=".jpegs",
        algorithm=f"{ALGORITHM} {BLOCK_PX} {QUALITY}",
        make=_encode,
        estimate=_estimate,
        is_consistent=_is_plausible,
    )
    opened = open_or_build_kind(kind, files, place)
    if isinstance(opened, str):
        raise UserError(f"--windows needs a copy of the photographs in blocks: {opened}")
    return BlockStore(opened)


def _is_plausible(sizes: np.ndarray, lengths: np.ndarray) -> bool:
    """Return whether photographs of these sizes can have such records.

    Each read checks its record itself.
    """
    num_pixels = sizes.astype(np.int64).prod(axis=1)
    least = TABLE_BYTES * (num_pixels // BLOCK_PX**2)  # bytes of the table alone
    return bool((num_pixels <= MAX_IMAGE_PIXELS).all() and (lengths > least).all())


def _blocks(side_px: int) -> int:
    return -(-side_px // BLOCK_PX)


def _first_block(shapes: list[tuple[int, int]], level: int) -> int:
    """Return the number of a level's first block in the record."""
    return sum(_blocks(height) * _blocks(width) for height, width in shapes[:level])


def _encode(file: Path) -> Record | str:
    """Return a photograph's record and its (height, width), or the message why
    it cannot be read.
    """
    try:
        image = read_image(file)
    except ImageError as error:
        return unreadable_message(file, error)
    height, width = image.shape[:2]
    data = file.read_bytes()
    # Half the chroma loses nothing that the photograph had, and decodes faster. The averaged levels
    # have all of it.
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
    table = np.array(
        [[len(block) for block in blocks], [zlib.crc32(block) for block in blocks]], np.uint32
    )
    return b"".join([table.tobytes(), *blocks]), (height, width)


def _estimate(files: Sequence[Path]) -> int:
    """Return the expected size of the whole file, from a few photographs."""
    some = files[:: max(1, -(-len(files) // ESTIMATE_FROM))]
    records = ordered_map(_encode, some, usable_cpu_count())
    sizes = [len(record[0]) for record in records if not isinstance(record, str)]
    return round(sum(sizes) / len(sizes) * len(files)) if sizes else 0
