"""What a line is: points along the middle of a thin object, and a width at each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Line:
    """A wire from end to end: points float64 (K, 2) xy in pixels of the photograph, and its width
    at each, float64 (K,).

    The centre of the photograph's first pixel lies at (0.5, 0.5). No mask shows the line in its
    gaps: float64 (G, 2, 2), the first and the last point of each.
    """

    points: np.ndarray
    widths: np.ndarray
    gaps: np.ndarray

    @property
    def length_px(self) -> float:
        """The length in pixels of the photograph, gaps included."""
        return float(np.hypot(*np.diff(self.points, axis=0).T).sum())

    @property
    def width_px(self) -> float:
        """The mean width in pixels of the photograph."""
        return float(self.widths.mean())

    @cached_property
    def outline(self) -> np.ndarray:
        """The outline of the line at its width, float64 (2 K, 2) xy."""
        side = across(self.points) * (self.widths / 2)[:, None]
        return np.concatenate([self.points + side, (self.points - side)[::-1]])


def across(points: np.ndarray) -> np.ndarray:
    """Return the unit vectors across a line at its points (K, 2): float64 (K, 2)."""
    along = np.gradient(points, axis=0)
    return np.stack([-along[:, 1], along[:, 0]], axis=1) / np.hypot(*along.T)[:, None].clip(1e-9)
