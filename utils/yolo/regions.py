"""A mask as a small bitmap and its place in the photograph, so that memory follows the objects' sizes, not the photograph's."""

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
