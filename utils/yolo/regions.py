"""Masks of objects that take little memory in a large photograph: a bitmap cut to its box, or runs of pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Region:
    """A mask cut to its bounding box: bool (h, w), its upper left pixel at (left, top) of the photograph."""

    left: int
    top: int
    mask: np.ndarray

    def window(self, left: int, top: int, right: int, bottom: int) -> np.ndarray:
        """Return the part of the mask inside a window of the photograph, at most the window's size: bool, a view."""
        return self.mask[
            max(top - self.top, 0) : max(bottom - self.top, 0), max(left - self.left, 0) : max(right - self.left, 0)
        ]

    def shared_pixels(self, other: Region) -> int:
        """Count the pixels in both masks."""
        left, top = max(self.left, other.left), max(self.top, other.top)
        right = min(self.left + self.mask.shape[1], other.left + other.mask.shape[1])
        bottom = min(self.top + self.mask.shape[0], other.top + other.mask.shape[0])
        if left >= right or top >= bottom:
            return 0
        corners = (left, top, right, bottom)
        return int(np.count_nonzero(self.window(*corners) & other.window(*corners)))


Corners = tuple[int, int, int, int]  # left, top, right, bottom in pixels of the photograph; right and bottom excluded


@dataclass(frozen=True)
class Runs:
    """A mask cut to its bounding box, stored as its rows' runs of pixels: a wire takes some kB, its bitmap up to 20 MB.

    edges: int32, ascending; each run's first pixel and the pixel after its last one, in a bitmap of the box with one
    empty column more, so that no run continues in the next row.
    """

    left: int
    top: int
    width: int
    height: int
    edges: np.ndarray

    @classmethod
    def of(cls, mask: np.ndarray, left: int = 0, top: int = 0) -> Runs:
        """Cut a mask (H, W), its upper left pixel at (left, top), to its pixels and return it as runs."""
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        if not len(rows):
            return cls(left, top, 0, 0, np.zeros(0, np.int32))
        cut = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        padded = np.zeros((cut.shape[0], cut.shape[1] + 1), bool)
        padded[:, :-1] = cut
        flat = padded.ravel()
        edges = np.flatnonzero(flat[1:] != flat[:-1]).astype(np.int32) + 1
        edges = np.concatenate([np.zeros(int(flat[0]), np.int32), edges])
        return cls(left + int(columns[0]), top + int(rows[0]), cut.shape[1], cut.shape[0], edges)

    @property
    def corners(self) -> Corners:
        """The bounding box of the pixels; empty if there are none."""
        return self.left, self.top, self.left + self.width, self.top + self.height

    @property
    def area(self) -> int:
        """The number of pixels."""
        return int((self.edges[1::2] - self.edges[::2]).sum())

    def area_in(self, corners: Corners) -> int:
        """Count the pixels inside a window of the photograph."""
        left, top, right, bottom = corners
        if left <= self.left and top <= self.top and right >= self.corners[2] and bottom >= self.corners[3]:
            return self.area
        row, first = np.divmod(self.edges[::2], self.width + 1)
        last = first + self.edges[1::2] - self.edges[::2]
        inside = np.minimum(last, right - self.left) - np.maximum(first, left - self.left)
        is_row = (row >= top - self.top) & (row < bottom - self.top)
        return int(inside.clip(min=0)[is_row].sum())

    def window(self, corners: Corners) -> np.ndarray:
        """Draw the mask in a window of the photograph: bool (bottom - top, right - left)."""
        left, top, right, bottom = corners
        result = np.zeros((bottom - top, right - left), bool)
        x1, y1, x2, y2 = intersection(corners, self.corners)
        if x1 >= x2 or y1 >= y2:
            return result
        start, stop = ((y - self.top) * (self.width + 1) for y in (y1, y2))
        first, last = np.searchsorted(self.edges, (start, stop))
        # No run crosses the end of a row, so the window starts and ends between two runs.
        lengths = np.diff(self.edges[first:last], prepend=start, append=stop)
        pixels = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(y2 - y1, -1)
        result[y1 - top : y2 - top, x1 - left : x2 - left] = pixels[:, x1 - self.left : x2 - self.left]
        return result


def intersection(first: Corners, second: Corners) -> Corners:
    """Return the corners of what two rectangles share; if that is nothing, left >= right or top >= bottom."""
    return (
        max(first[0], second[0]),
        max(first[1], second[1]),
        min(first[2], second[2]),
        min(first[3], second[3]),
    )


def hull(rectangles: list[Corners]) -> Corners:
    """Return the smallest rectangle around some."""
    left, top, right, bottom = zip(*rectangles, strict=True)
    return min(left), min(top), max(right), max(bottom)


def has_pixels(corners: Corners) -> bool:
    """Return whether a rectangle is not empty."""
    return corners[0] < corners[2] and corners[1] < corners[3]


def shared_area(first: Runs, second: Runs) -> int:
    """Count the pixels in both masks."""
    both = intersection(first.corners, second.corners)
    return int(np.count_nonzero(first.window(both) & second.window(both))) if has_pixels(both) else 0


@dataclass(frozen=True)
class Cells:
    """A mask's number of pixels in each cell of a grid over the photograph: float32 (h, w), from cell (left, top) on."""

    left: int
    top: int
    counts: np.ndarray

    @classmethod
    def of(cls, mask: Runs, cell_px: int) -> Cells:
        """Count a mask's pixels in square cells."""
        left, top, right, bottom = mask.corners
        left, top, right, bottom = left // cell_px, top // cell_px, -(-right // cell_px), -(-bottom // cell_px)
        pixels = mask.window((left * cell_px, top * cell_px, right * cell_px, bottom * cell_px)).view(np.uint8)
        rows = np.add.reduceat(pixels, np.arange(0, pixels.shape[0], cell_px), axis=0, dtype=np.uint16)
        counts = np.add.reduceat(rows, np.arange(0, pixels.shape[1], cell_px), axis=1, dtype=np.uint32)
        return cls(left, top, counts.astype(np.float32))

    @property
    def corners(self) -> Corners:
        """The rectangle of cells."""
        return self.left, self.top, self.left + self.counts.shape[1], self.top + self.counts.shape[0]

    def window(self, corners: Corners) -> np.ndarray:
        """Return the counts in a rectangle of cells: float32 (bottom - top, right - left), 0 outside the mask's."""
        result = np.zeros((corners[3] - corners[1], corners[2] - corners[0]), np.float32)
        x1, y1, x2, y2 = intersection(corners, self.corners)
        if has_pixels((x1, y1, x2, y2)):
            cells = self.counts[y1 - self.top : y2 - self.top, x1 - self.left : x2 - self.left]
            result[y1 - corners[1] : y2 - corners[1], x1 - corners[0] : x2 - corners[0]] = cells
        return result
