"""Objects of annotation tools: polygons of several parts, boxes and masks, with the image size they refer to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.data.images import points_upright
from utils.data.labels import LabelError
from utils.sources.mask_rings import MAX_MASK_RINGS, join_rings, mask_rings, ring_area
from utils.sources.parsing.outlines import MAX_POINTS, OutlineError, parts_ring

SHAPE_TOLERANCE_PX = 0.05  # of the photograph; dense polygons lose what changes a mask by less than 1 %
SAME_ASPECT = 0.01  # by how much the width and the height may be scaled differently
MAX_LOST_SHARE = 0.01  # of a mask's area, before it is reported
MAX_SIDE_PX = 1_000_000

DrawMask = Callable[[], tuple[np.ndarray, int, int]]


@dataclass(frozen=True)
class ShapeObject:
    """One object of an annotation file: the union of polygons, or a mask.

    `name` says which one, for messages. Coordinates are in `unit` (width, height) for the whole image; None: in the
    photograph's pixels. `size` is the image's size in pixels as the file says it, to find a wrong photograph or one that
    the tool did not turn upright. `draw` returns a mask bool (h, w) with the left and top of its corner.
    """

    value: str
    name: str
    unit: tuple[float, float] | None
    size: tuple[int, int] | None
    parts: tuple[np.ndarray, ...] = ()
    draw: DrawMask | None = None

    def frame(self, upright: tuple[int, int], orientation: int, exif_frame: str) -> str:
        """Return whether the coordinates refer to `upright` or `stored` pixels of a photograph; `ambiguous`: upright.

        Raises LabelError when `size` is that of another photograph.
        """
        stored = upright[::-1] if orientation >= 5 else upright
        candidates = {"upright": upright, "stored": stored} if exif_frame == "auto" else {exif_frame: upright}
        if exif_frame == "stored":
            candidates = {"stored": stored}
        fitting = [name for name, size in candidates.items() if self.size is None or _same_aspect(self.size, size)]
        if not fitting:
            width, height = self.size or upright
            raise LabelError(
                f"{self.name}: drawn on an image of {width}x{height} pixels, but the photograph has "
                f"{upright[0]}x{upright[1]}; put the right photograph there"
            )
        if orientation == 1:
            return "upright"
        is_certain = exif_frame != "auto" or (len(fitting) == 1 and self.size is not None)
        return fitting[0] if is_certain else "ambiguous"

    def ring(self, upright: tuple[int, int], orientation: int, frame: str) -> tuple[np.ndarray, str]:
        """Return one ring (V, 2) in pixels of the upright photograph, and what was lost, usually nothing.

        Raises OutlineError.
        """
        size = upright[::-1] if frame == "stored" and orientation >= 5 else upright
        scale = np.divide(size, self.unit) if self.unit else np.ones(2)

        def placed(points: np.ndarray) -> np.ndarray:
            points = points * scale
            return points_upright(points, orientation, *upright) if frame == "stored" else points

        if self.draw is None:
            return parts_ring([placed(part) for part in self.parts], upright, SHAPE_TOLERANCE_PX), ""
        try:
            rings = mask_rings(*self.draw())
        except ValueError as error:
            raise OutlineError(str(error)) from error
        kept, lost = rings[:MAX_MASK_RINGS], sum(map(ring_area, rings[MAX_MASK_RINGS:]))
        total = sum(map(ring_area, kept)) + lost
        text = f"{len(rings):,} parts and holes; the largest {MAX_MASK_RINGS:,} are kept, {lost / total:.0%} of the area is lost"
        return placed(join_rings(kept)), text if lost > MAX_LOST_SHARE * total else ""


def read_points(numbers: Any) -> np.ndarray:
    """Return a list [x, y, x, y, ...] or [[x, y], ...] as points (V, 2). Raises ValueError."""
    if isinstance(numbers, list) and numbers and all(isinstance(pair, list) and len(pair) == 2 for pair in numbers):
        numbers = [number for pair in numbers for number in pair]
    if not isinstance(numbers, list) or len(numbers) % 2 or len(numbers) < 6:
        raise ValueError("a polygon needs a list of 3 or more points, two numbers each")
    if len(numbers) > 2 * MAX_POINTS:
        raise ValueError(f"polygon of {len(numbers) // 2:,} points, more than {MAX_POINTS:,}")
    return np.array([read_number(number) for number in numbers]).reshape(-1, 2)


def read_number(number: Any) -> float:
    """Return a finite number. Raises ValueError."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
        raise ValueError(f"{str(number)[:40]} is not a finite number")
    return float(number)


def read_size(width: Any, height: Any) -> tuple[int, int] | None:
    """Return an image's size, None if it is not given. Raises ValueError."""
    if width is None and height is None:
        return None
    sides = [read_number(side) for side in (width, height)]
    if not all(1 <= side <= MAX_SIDE_PX and side == int(side) for side in sides):
        raise ValueError(f"image of {sides[0]:g}x{sides[1]:g} pixels")
    return int(sides[0]), int(sides[1])


def box_corners(left: float, top: float, width: float, height: float) -> np.ndarray:
    """Return the corners of a box as points (4, 2). Raises ValueError for an empty one."""
    if width <= 0 or height <= 0:
        raise ValueError(f"box of width {width:g} and height {height:g}")
    return np.array([(left, top), (left + width, top), (left + width, top + height), (left, top + height)])


def _same_aspect(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Return whether a size is another one scaled, up to rounding to whole pixels."""
    ratio = (first[0] / second[0]) / (first[1] / second[1])
    return abs(ratio - 1) <= SAME_ASPECT + 1 / min(*first, *second)
