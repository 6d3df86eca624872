"""What is read along a line: samples, values of a canvas, the parts outside some objects."""

from __future__ import annotations

import numpy as np

from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.predict.line import Line, across


def samples(
    line: Line, step_px: float = NUMBERS.step_px
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points about `step_px` apart, the unit vectors across the line and the widths there.

    float64 (n, 2), (n, 2), (n,).
    """
    places = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(line.points, axis=0).T))])
    wanted = np.linspace(0, places[-1], max(round(places[-1] / step_px), 1) + 1)
    x, y, widths = (np.interp(wanted, places, values) for values in (*line.points.T, line.widths))
    points = np.stack([x, y], axis=1)
    return points, across(points), widths


def directions(line: Line) -> np.ndarray:
    """Return the directions in which a line leaves its first and its last point, unit vectors:
    float64 (2, 2).
    """
    outward = line.points[[0, -1]] - line.points[[1, -2]]
    return outward / np.hypot(*outward.T)[:, None]


def values_at(points: np.ndarray, canvas: np.ndarray) -> np.ndarray:
    """Return the values of a canvas (H, W) at points (N, 2) xy: (N,)."""
    column, row = points.astype(int).clip(0, np.array(canvas.shape[::-1]) - 1).T
    return canvas[row, column]


def values_on(line: Line, canvas: np.ndarray) -> np.ndarray:
    """Return the values of a canvas (H, W) at a line's samples: (n,)."""
    return values_at(samples(line)[0], canvas)


def outside(line: Line, is_inside: np.ndarray) -> list[Line]:
    """Return the parts of a line outside some objects that are long enough to be lines.

    is_inside: bool (n,), of the line's samples.
    """
    points, _, widths = samples(line)
    if not is_inside.any():
        return [line]
    gap_at = np.abs(points[:, None] - line.gaps.mean(axis=1)).sum(axis=2).argmin(axis=0)
    parts = []
    for kept in np.split(np.arange(len(points)), np.flatnonzero(np.diff(is_inside)) + 1):
        is_long = (
            len(kept) > 1
            and len(kept) * NUMBERS.step_px >= NUMBERS.min_length_widths * widths[kept].mean()
        )
        if not is_inside[kept[0]] and is_long:
            gaps = line.gaps[(gap_at > kept[0]) & (gap_at < kept[-1])]
            parts.append(Line(points[kept], widths[kept], gaps))
    return parts
