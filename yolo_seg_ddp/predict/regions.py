"""Masks of objects that take little memory in a large photograph: a bitmap cut to its box, or runs
of pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from yolo_seg_ddp.utils.compiled import compiled


@dataclass(frozen=True)
class Region:
    """A mask cut to its bounding box: bool (h, w), its upper left pixel at (left, top) of the
    photograph.
    """

    left: int
    top: int
    mask: np.ndarray

    def crop(self, left: int, top: int, right: int, bottom: int) -> np.ndarray:
        """Return the part of the mask inside a rectangle of the photograph: bool, a view, no larger
        than the rectangle.
        """
        return self.mask[
            max(top - self.top, 0) : max(bottom - self.top, 0),
            max(left - self.left, 0) : max(right - self.left, 0),
        ]

    @property
    def corners(self) -> Corners:
        """The rectangle that the mask was cut to."""
        height, width = self.mask.shape
        return self.left, self.top, self.left + width, self.top + height

    def add_to(self, canvas: np.ndarray) -> None:
        """Add the mask's pixels to those of a photograph, bool (H, W)."""
        left, top, right, bottom = self.corners
        canvas[top:bottom, left:right] |= self.mask

    def covers(self, pixels: np.ndarray) -> np.ndarray:
        """Return whether each of some pixels, int (K, 2) xy, is in the mask, which has a width and
        a height: bool (K,).
        """
        places = pixels - (self.left, self.top)
        inside = places.clip(0, np.array(self.mask.shape[::-1]) - 1)
        return self.mask[inside[:, 1], inside[:, 0]] & (inside == places).all(axis=1)

    def shared_pixels(self, other: Region) -> int:
        """Count the pixels in both masks."""
        shared = intersection(self.corners, other.corners)
        return (
            int(np.count_nonzero(self.crop(*shared) & other.crop(*shared)))
            if has_pixels(shared)
            else 0
        )


def canvas_of(regions: Iterable[Region], size: tuple[int, int]) -> np.ndarray:
    """Draw masks into a photograph of (width, height) pixels: bool (H, W)."""
    canvas = np.zeros(size[::-1], bool)
    for region in regions:
        region.add_to(canvas)
    return canvas


def fill_outline(outline: np.ndarray, photo_size: tuple[int, int]) -> Region:
    """Fill an outline (V, 2) in pixels: a pixel belongs to the mask if its centre lies inside
    (even-odd rule).

    OpenCV would also fill the pixels on the edge and so double the width of a wire that is one
    pixel wide. An outline without any centre inside becomes the pixels of its corners.
    """
    width, height = photo_size
    low = np.floor(outline.min(0)).astype(int).clip(0, (width - 1, height - 1))
    high = np.ceil(outline.max(0)).astype(int).clip(low + 1, (width, height))
    (left, top), (columns, rows) = low.tolist(), (high - low).tolist()
    # Where its edges cross the centres of the rows: the row from 0 and x, (K,).
    (x1, y1), (x2, y2) = outline.T, np.roll(outline, -1, axis=0).T
    centres = np.arange(top, top + rows) + 0.5
    first, last = np.searchsorted(centres, [np.minimum(y1, y2), np.maximum(y1, y2)])
    edge = np.repeat(np.arange(len(outline)), last - first)
    row = np.arange(len(edge)) - np.repeat((last - first).cumsum() - last, last - first)
    slope = (x2[edge] - x1[edge]) / (y2[edge] - y1[edge])
    x = x1[edge] + (centres[row] - y1[edge]) * slope
    column = np.ceil(x - 0.5 - left).astype(int).clip(0, columns)
    # whether an odd number of edges lies just before each pixel
    toggles = np.zeros((rows, columns + 1), np.uint8)
    np.bitwise_xor.at(toggles, (row, column), 1)
    mask = np.bitwise_xor.accumulate(toggles, axis=1)[:, :-1].view(bool)
    if not mask.any():
        corners = (np.floor(outline).astype(int) - low).clip(0, (columns - 1, rows - 1))
        mask[corners[:, 1], corners[:, 0]] = True
    return Region(left, top, mask)


def column_runs(region: Region, photo_size: tuple[int, int]) -> list[int]:
    """Count in turn the pixels outside and inside a mask, column by column of a photograph of
    (width, height) pixels.
    """
    width, height = photo_size
    mask = region.mask
    # A run begins or ends before a pixel of the mask, or at the end of the column.
    inner_row, inner_column = divmod(np.flatnonzero(mask[1:] != mask[:-1]), max(mask.shape[1], 1))
    first, last = (np.flatnonzero(mask[row]) for row in (slice(0, 1), slice(-1, None)))
    row = np.concatenate([inner_row + 1, np.zeros(len(first), int), np.full(len(last), len(mask))])
    column = np.concatenate([inner_column, first, last])
    changes, times = np.unique(
        (region.left + column) * height + region.top + row, return_counts=True
    )
    # A run that goes on in the next column is one run.
    changes = changes[times == 1]
    ends = (
        changes
        if len(changes) and changes[-1] == width * height
        else np.append(changes, width * height)
    )
    counts: list[int] = np.diff(ends, prepend=0).tolist()
    return counts


class LazyRegions(Sequence[Region]):
    """Masks that `draw` makes of their sources when they are asked for, because all at once may
    take gigabytes.
    """

    def __init__(self, sources: Sequence[Any], draw: Callable[[Any], Region]) -> None:
        self.sources = sources
        self.draw = draw

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, position: int) -> Region: ...
    @overload
    def __getitem__(self, position: slice) -> LazyRegions: ...
    def __getitem__(self, position: int | slice) -> Region | LazyRegions:
        """Draw a mask."""
        if isinstance(position, slice):
            return LazyRegions(self.sources[position], self.draw)
        return self.draw(self.sources[position])


ROW = 2**32  # larger than any column
# left, top, right, bottom in pixels of the photograph; right and bottom excluded
Corners = tuple[int, int, int, int]


@dataclass(frozen=True)
class Runs:
    """A mask in a photograph, stored as its rows' runs of pixels: a wire takes some kB, its bitmap
    up to 20 MB.

    corners: the bounding box of the pixels. edges: int64, ascending; the first pixel of each run
    and the one after its last, as row * ROW + column.
    """

    corners: Corners
    edges: np.ndarray

    @classmethod
    def of(cls, mask: np.ndarray, left: int = 0, top: int = 0) -> Runs:
        """Return a mask (H, W), its upper left pixel at (left, top), as runs."""
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        if not len(rows):
            return cls((left, top, left, top), np.zeros(0, np.int64))
        y, x = int(rows[0]), int(columns[0])
        return cls.of_cut(mask[y : int(rows[-1]) + 1, x : int(columns[-1]) + 1], left + x, top + y)

    @classmethod
    def of_cut(cls, mask: np.ndarray, left: int, top: int) -> Runs:
        """Return a mask as runs; it must have pixels in its first and last row and column."""
        height, width = mask.shape
        padded = np.zeros((height, width + 2), bool)
        padded[:, 1:-1] = mask
        flat = padded.ravel()
        row, column = np.divmod(np.flatnonzero(flat[1:] != flat[:-1]), width + 2)
        return cls((left, top, left + width, top + height), (row + top) * ROW + column + left)

    @property
    def is_empty(self) -> bool:
        """Whether there are no pixels."""
        return not len(self.edges)

    @cached_property
    def area(self) -> int:
        """The number of pixels."""
        return int((self.edges[1::2] - self.edges[::2]).sum())

    def moved(self, right: int, down: int) -> Runs:
        """Return the mask moved by some pixels."""
        left, top, *ends = self.corners
        return Runs(
            (left + right, top + down, ends[0] + right, ends[1] + down),
            self.edges + (down * ROW + right),
        )

    def region(self) -> Region:
        """Draw the mask in its bounding box."""
        return Region(*self.corners[:2], self.crop(self.corners))

    def crop(self, corners: Corners) -> np.ndarray:
        """Draw the mask in a rectangle of the photograph: bool (bottom - top, right - left)."""
        left, top, right, bottom = corners
        width, height = right - left, bottom - top
        first, last = np.searchsorted(self.edges, (top * ROW, bottom * ROW))
        rows = self.edges[first:last] // ROW - top
        columns = self.edges[first:last] % ROW
        edges = np.empty(len(rows) + 2, np.int64)
        # runs outside become empty
        edges[1:-1] = rows * width + np.minimum(np.maximum(columns, left), right) - left
        edges[0], edges[-1] = 0, width * height
        return np.repeat(np.arange(len(edges) - 1) % 2 == 1, edges[1:] - edges[:-1]).reshape(
            height, width
        )


def intersection(first: Corners, second: Corners) -> Corners:
    """Return the corners of what two rectangles share; if they share nothing, left >= right or top
    >= bottom.
    """
    return (
        max(first[0], second[0]),
        max(first[1], second[1]),
        min(first[2], second[2]),
        min(first[3], second[3]),
    )


def intersections(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the `intersection` of each pair of rectangles (n, 4) of two lists."""
    low = np.maximum(first[:, :2], second[:, :2])
    high = np.minimum(first[:, 2:], second[:, 2:])
    return np.hstack([low, high])


def hull(rectangles: list[Corners]) -> Corners:
    """Return the smallest rectangle around all rectangles."""
    left, top, right, bottom = zip(*rectangles, strict=True)
    return min(left), min(top), max(right), max(bottom)


def has_pixels(corners: Corners) -> bool:
    """Return whether a rectangle is not empty."""
    return corners[0] < corners[2] and corners[1] < corners[3]


@dataclass(frozen=True)
class Cells:
    """A mask's number of pixels in each cell of a grid over the photograph: float32 (h, w), from
    cell (left, top) on.
    """

    left: int
    top: int
    counts: np.ndarray

    @classmethod
    def of(cls, mask: Runs, cell_px: int) -> Cells:
        """Count a mask's pixels in square cells."""
        left, top, right, bottom = mask.corners
        left = left // cell_px
        top = top // cell_px
        right = -(-right // cell_px)
        bottom = -(-bottom // cell_px)
        counts = np.zeros((bottom - top, right - left), np.float32)
        _count_in_cells(mask.edges, cell_px, left, top, counts)
        return cls(left, top, counts)

    @property
    def corners(self) -> Corners:
        """The rectangle of cells."""
        return (
            self.left,
            self.top,
            self.left + self.counts.shape[1],
            self.top + self.counts.shape[0],
        )

    def crop(self, corners: Corners) -> np.ndarray:
        """Return the counts in a rectangle of cells: float32 (bottom - top, right - left), 0
        outside the mask's.
        """
        result = np.zeros((corners[3] - corners[1], corners[2] - corners[0]), np.float32)
        x1, y1, x2, y2 = intersection(corners, self.corners)
        if has_pixels((x1, y1, x2, y2)):
            cells = self.counts[y1 - self.top : y2 - self.top, x1 - self.left : x2 - self.left]
            result[y1 - corners[1] : y2 - corners[1], x1 - corners[0] : x2 - corners[0]] = cells
        return result


@compiled
def _count_in_cells(
    edges: np.ndarray, cell_px: int, left: int, top: int, counts: np.ndarray
) -> None:
    """Add the pixels of runs to the counts (h, w) of cells from (left, top) on."""
    for start in range(0, len(edges), 2):
        row, begin = divmod(edges[start], ROW)
        end = edges[start + 1] - row * ROW
        for cell in range(begin // cell_px, (end - 1) // cell_px + 1):
            shown = min(end, (cell + 1) * cell_px) - max(begin, cell * cell_px)
            counts[row // cell_px - top, cell - left] += shown


def shrunk(region: Region, photo_size: tuple[int, int], shown_size: tuple[int, int]) -> Region:
    """Return a mask in a smaller picture: a pixel belongs to it if any of the pixels that it stands
    for does.
    """
    rows, columns = np.nonzero(region.mask)
    if not len(rows):
        return Region(0, 0, np.zeros((1, 1), bool))
    y = (region.top + rows) * shown_size[1] // photo_size[1]
    x = (region.left + columns) * shown_size[0] // photo_size[0]
    mask = np.zeros((y.max() - y.min() + 1, x.max() - x.min() + 1), bool)
    mask[y - y.min(), x - x.min()] = True
    return Region(int(x.min()), int(y.min()), mask)
