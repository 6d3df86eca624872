"""What a line is: points along the middle of a thin object, and a width at each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from yolo_seg_ddp.predict.lines.numbers import NUMBERS


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
        side = _across(self.points) * (self.widths / 2)[:, None]
        return np.concatenate([self.points + side, (self.points - side)[::-1]])

    def samples(
        self, step_px: float = NUMBERS.step_px
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return points about `step_px` apart, the unit vectors across the line and the widths
        there.

        float64 (n, 2), (n, 2), (n,).
        """
        places = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(self.points, axis=0).T))])
        wanted = np.linspace(0, places[-1], max(round(places[-1] / step_px), 1) + 1)
        x, y, widths = (
            np.interp(wanted, places, values) for values in (*self.points.T, self.widths)
        )
        points = np.stack([x, y], axis=1)
        return points, _across(points), widths

    @property
    def directions(self) -> np.ndarray:
        """The directions in which the line leaves its first and its last point, unit vectors:
        float64 (2, 2).
        """
        outward = self.points[[0, -1]] - self.points[[1, -2]]
        return outward / np.hypot(*outward.T)[:, None]

    def values_on(self, canvas: np.ndarray) -> np.ndarray:
        """Return the values of a canvas (H, W) at the line's samples: (n,)."""
        return values_at(self.samples()[0], canvas)

    def outside(self, is_inside: np.ndarray) -> list[Line]:
        """Return the parts outside some objects that are long enough to be lines; is_inside: bool
        (n,), of the samples.
        """
        points, _, widths = self.samples()
        if not is_inside.any():
            return [self]
        gap_at = np.abs(points[:, None] - self.gaps.mean(axis=1)).sum(axis=2).argmin(axis=0)
        parts = []
        for kept in np.split(np.arange(len(points)), np.flatnonzero(np.diff(is_inside)) + 1):
            is_long = (
                len(kept) > 1
                and len(kept) * NUMBERS.step_px >= NUMBERS.min_length_widths * widths[kept].mean()
            )
            if not is_inside[kept[0]] and is_long:
                parts.append(
                    Line(
                        points[kept],
                        widths[kept],
                        self.gaps[(gap_at > kept[0]) & (gap_at < kept[-1])],
                    )
                )
        return parts


def values_at(points: np.ndarray, canvas: np.ndarray) -> np.ndarray:
    """Return the values of a canvas (H, W) at points (N, 2) xy: (N,)."""
    column, row = points.astype(int).clip(0, np.array(canvas.shape[::-1]) - 1).T
    return canvas[row, column]


def _across(points: np.ndarray) -> np.ndarray:
    """Return the unit vectors across a line at its points (K, 2): float64 (K, 2)."""
    along = np.gradient(points, axis=0)
    return np.stack([-along[:, 1], along[:, 0]], axis=1) / np.hypot(*along.T)[:, None].clip(1e-9)
