"""Objects as annotators drew them (polygons, lines, boxes, masks). Each becomes one closed ring.

Coordinates are pixels of the photograph, x to the right and y down; the photograph covers 0..width
and 0..height.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import shapely
from shapely.geometry import LineString, Polygon
from shapely.geometry.base import BaseGeometry
from shapely.geometry.polygon import orient

from yolo_seg_ddp.data.images import points_upright
from yolo_seg_ddp.data.labels import LabelError
from yolo_seg_ddp.data.mask_rings import MAX_MASK_RINGS, join_rings, mask_rings, ring_area

MIN_PART_AREA_PX = 1.0  # smaller parts, in pixels of the original photograph, are dropped
# the same for polygons of annotation tools, which may outline one pixel of a mask (0.5)
MIN_TOOL_AREA_PX = 0.4
MAX_RINGS = 50  # parts and holes of an object; the smallest of more are dropped
MAX_COORDINATE_PX = 1e6
# Drawn outlines have tens of vertices and cross themselves a few times. Without limits 20,000
# points in a zigzag, or 4,000 random ones, took a minute and a half.
MAX_POINTS = 20_000
MAX_LINE_POINTS = 2_000  # after simplification; buffering takes quadratic time
MAX_CROSSINGS = 12_000
DENSE_VERTICES = 100  # outlines with more are simplified; hand-drawn ones have fewer
# of the photograph; dense polygons lose what changes a mask by less than 1 %
SHAPE_TOLERANCE_PX = 0.05
SAME_ASPECT = 0.01  # by how much the width and the height may be scaled differently
MAX_LOST_SHARE = 0.01  # of a mask's area, before it is reported
MAX_SIDE_PX = 1_000_000
MEETING_PX = 2.0  # ends of a line that are so near to each other meet


class OutlineError(ValueError):
    """An object without a visible area. The message is the reason."""


@dataclass(frozen=True)
class ShapeObject:
    """One object of an annotation file: the union of polygons, a line, or a mask.

    `name` identifies it in messages. `unit`: the whole image's width and height in the coordinates'
    unit; None: coordinates are the photograph's pixels. `size`: the image's size in pixels
    according to the file; it reveals a wrong photograph, and one that the tool did not turn
    upright. `draw` returns a mask bool (h, w) with the left and top of its corner.
    """

    value: str
    name: str
    unit: tuple[float, float] | None = None
    size: tuple[int, int] | None = None
    parts: tuple[np.ndarray, ...] = ()
    draw: Callable[[], tuple[np.ndarray, int, int]] | None = None
    is_line: bool = False  # `parts` holds one line instead of polygons
    is_box: bool = False  # the tool's box around the object, which has no outline
    is_region: bool = False  # a region to ignore for its class, or for all with an empty `value`
    # polygons of one label and one group of a photograph are parts of one object
    group: object = None
    error: str = ""  # why it cannot be used
    note: str = ""  # what is said about an object that is used
    members: int = 1  # objects of the file that were joined to this one
    closed: int = 0  # of these, lines whose ends meet

    def as_outline(self) -> ShapeObject:
        """Return the object; a line whose ends meet becomes an outline.

        A wire that was drawn there and back encloses hardly any area, and stays a line.
        """
        points = self.parts[0] if self.is_line and not self.error else np.zeros((0, 2))
        length_px = float(np.hypot(*np.diff(points, axis=0).T).sum())
        if (
            len(points) < 4
            or np.hypot(*(points[0] - points[-1])) > MEETING_PX
            or ring_area(points) <= length_px
        ):
            return self
        note = "; ".join(filter(None, [self.note, "a closed polyline, read as an outline"]))
        return replace(self, is_line=False, note=note, closed=1)

    def frame(self, upright: tuple[int, int], orientation: int, exif_frame: str) -> str:
        """Return whether the coordinates refer to `upright` or `stored` pixels of a photograph.
        `ambiguous` is treated as upright.

        Raises LabelError when `size` is that of another photograph.
        """
        stored = upright[::-1] if orientation >= 5 else upright
        fitting = [
            name
            for name, size in (("upright", upright), ("stored", stored))
            if exif_frame in ("auto", name) and (self.size is None or _same_aspect(self.size, size))
        ]
        if not fitting:
            width, height = self.size or upright
            raise LabelError(
                f"{self.name}: drawn on an image of {width}x{height} pixels, but the photograph "
                "has "
                f"{upright[0]}x{upright[1]}; put the right photograph there"
            )
        if orientation == 1:
            return "upright"
        is_certain = exif_frame != "auto" or (len(fitting) == 1 and self.size is not None)
        return fitting[0] if is_certain else "ambiguous"

    def ring(
        self, upright: tuple[int, int], orientation: int, frame: str, line_width_px: float
    ) -> tuple[np.ndarray, str]:
        """Return one ring (V, 2) in pixels of the upright photograph, and what was lost, usually
        nothing.

        A line becomes a strip of `line_width_px`. Raises OutlineError.
        """
        size = upright[::-1] if frame == "stored" and orientation >= 5 else upright
        scale = np.divide(size, self.unit) if self.unit else np.ones(2)

        def placed(points: np.ndarray) -> np.ndarray:
            points = points * scale
            return points_upright(points, orientation, *upright) if frame == "stored" else points

        if self.error:
            raise OutlineError(self.error)
        if self.is_line:
            return object_ring(
                "line", placed(self.parts[0]), upright, line_width_px, SHAPE_TOLERANCE_PX
            ), ""
        if self.draw is None:
            return parts_ring([placed(part) for part in self.parts], upright), ""
        try:
            rings = mask_rings(*self.draw())
        except ValueError as error:
            raise OutlineError(str(error)) from error
        kept, lost = rings[:MAX_MASK_RINGS], sum(map(ring_area, rings[MAX_MASK_RINGS:]))
        total = sum(map(ring_area, kept)) + lost
        text = (
            f"{len(rings):,} parts and holes; the largest {MAX_MASK_RINGS:,} are kept, "
            f"{lost / total:.0%} of the area is lost"
        )
        return placed(join_rings(kept)), text if lost > MAX_LOST_SHARE * total else ""


def object_ring(
    kind: Literal["polygon", "line"],
    points: np.ndarray,
    size: tuple[int, int],
    line_width_px: float,
    tolerance_px: float,
) -> np.ndarray:
    """Return the part of an object inside a photograph of `size` (width, height) as one ring (V,
    2).

    The first vertex is not repeated at the end. A polygon that crosses itself is repaired. A line
    becomes a strip of `line_width_px` with flat ends. More than DENSE_VERTICES points are
    simplified with `tolerance_px`. Raises OutlineError when nothing visible is left.
    """
    _check(kind, points)
    with _repairable(kind):
        shape = (
            _line_shape(points, line_width_px, tolerance_px)
            if kind == "line"
            else _polygon(points, tolerance_px)
        )
        return join_rings(_visible_rings(shape, size, MAX_RINGS, MIN_PART_AREA_PX))


def parts_ring(parts: list[np.ndarray], size: tuple[int, int]) -> np.ndarray:
    """Return the union of an object's polygons (V, 2) inside a photograph as one ring, like
    `object_ring`.
    """
    is_valid = len(parts) == 1 and len(parts[0]) > 2 and bool(shapely.is_valid(Polygon(parts[0])))
    _check("polygon", np.concatenate(parts), may_cross=not is_valid)
    with _repairable("polygons"):
        shape = shapely.union_all([_polygon(points, SHAPE_TOLERANCE_PX) for points in parts])
        return join_rings(_visible_rings(shape, size, MAX_MASK_RINGS, MIN_TOOL_AREA_PX))


@contextmanager
def _repairable(kind: str) -> Iterator[None]:
    try:
        yield
    except shapely.GEOSException as error:
        raise OutlineError(
            f"{kind} cannot be repaired ({' '.join(str(error).split())[:80]})"
        ) from error


def _check(kind: str, points: np.ndarray, may_cross: bool = True) -> None:
    """Raise OutlineError for points that would take too long, or that no photograph contains."""
    if len(points) and np.abs(points).max() > MAX_COORDINATE_PX:
        raise OutlineError(
            f"{kind} has the coordinate {np.abs(points).max():g}, far outside any photograph"
        )
    if len(points) > MAX_POINTS:
        raise OutlineError(f"{kind} of {len(points):,} points, more than {MAX_POINTS:,}")
    if may_cross and len(points) > DENSE_VERTICES and estimated_crossings(points) > MAX_CROSSINGS:
        raise OutlineError(f"{kind} crosses itself more than {MAX_CROSSINGS:,} times")


def _polygon(points: np.ndarray, tolerance_px: float) -> BaseGeometry:
    points = _without_repeats(points)
    if len(points) > 1 and np.array_equal(points[0], points[-1]):
        points = points[:-1]
    if len(points) < 3:
        raise OutlineError(f"polygon of {len(points)} different points, needs 3")
    # "structure" keeps areas that the outline covers twice; the default makes them holes.
    shape = shapely.make_valid(Polygon(points), method="structure", keep_collapsed=False)
    return shape.simplify(tolerance_px) if len(points) > DENSE_VERTICES else shape


def _line_shape(points: np.ndarray, line_width_px: float, tolerance_px: float) -> BaseGeometry:
    points = _without_repeats(points)
    if len(points) < 2:
        raise OutlineError(f"line of {len(points)} different points, needs 2")
    line = LineString(points)
    if len(points) > DENSE_VERTICES:
        line = line.simplify(tolerance_px)  # before buffering, so that the width stays exact
        if shapely.get_num_coordinates(line) > MAX_LINE_POINTS:
            raise OutlineError(
                f"line of {shapely.get_num_coordinates(line):,} corners, more than "
                f"{MAX_LINE_POINTS:,}"
            )
    # Mitre joins need few vertices; the limit turns the spike of a sharp turn into a bevel.
    return line.buffer(line_width_px / 2, cap_style="flat", join_style="mitre", mitre_limit=2.0)


def estimated_crossings(points: np.ndarray) -> float:
    """Return the number of crossings of the segments between points (V, 2); for many segments, an
    estimate.
    """
    starts, ends = points[:-1], points[1:]
    num_segments = len(starts)
    num_chosen = min(num_segments, max(50, 400_000 // num_segments))
    chosen = np.random.default_rng(0).choice(num_segments, num_chosen, replace=False)
    a, b = starts[chosen, None], ends[chosen, None]

    def side(of: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        towards, to_point = end - begin, of - begin
        return towards[..., 0] * to_point[..., 1] - towards[..., 1] * to_point[..., 0]

    cross = (side(starts, a, b) * side(ends, a, b) < 0) & (
        side(a, starts, ends) * side(b, starts, ends) < 0
    )
    return float(cross.sum()) / 2 * num_segments / num_chosen


def _without_repeats(points: np.ndarray) -> np.ndarray:
    # NaN differs from the first one
    return points[np.any(np.diff(points, axis=0, prepend=np.nan) != 0, axis=1)]


def _visible_rings(
    shape: BaseGeometry, size: tuple[int, int], max_rings: int, min_area_px: float
) -> list[np.ndarray]:
    if shape.area < min_area_px:
        raise OutlineError("has no area")
    visible = shapely.intersection(shape, shapely.box(0, 0, *size))
    parts = [part for part in shapely.get_parts(visible) if isinstance(part, Polygon)]
    parts = [orient(part) for part in parts if part.area >= min_area_px]
    if not parts:
        raise OutlineError(f"lies outside the photograph of {size[0]}x{size[1]}")
    rings = [ring for part in parts for ring in (part.exterior, *part.interiors)]
    areas = [Polygon(ring).area for ring in rings]
    largest = sorted(range(len(rings)), key=lambda index: -areas[index])[:max_rings]
    return [
        np.asarray(rings[index].coords)[:-1] for index in largest if areas[index] >= min_area_px
    ]


def read_points(numbers: Any, kind: Literal["polygon", "line"] = "polygon") -> np.ndarray:
    """Return a list [x, y, x, y, ...] or [[x, y], ...] as points (V, 2). Raises ValueError."""
    fewest = 3 if kind == "polygon" else 2
    if (
        isinstance(numbers, list)
        and numbers
        and all(isinstance(pair, list) and len(pair) == 2 for pair in numbers)
    ):
        numbers = [number for pair in numbers for number in pair]
    if not isinstance(numbers, list) or len(numbers) % 2 or len(numbers) < 2 * fewest:
        raise ValueError(f"a {kind} needs a list of {fewest} or more points, two numbers each")
    if len(numbers) > 2 * MAX_POINTS:
        raise ValueError(f"{kind} of {len(numbers) // 2:,} points, more than {MAX_POINTS:,}")
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
    """Return the corners of a box as points (4, 2); sides below 0 run to the left and up.

    Raises ValueError for an empty one.
    """
    if not width or not height:
        raise ValueError(f"box of width {width:g} and height {height:g}")
    return np.array(
        [(left, top), (left + width, top), (left + width, top + height), (left, top + height)]
    )


def _same_aspect(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Return whether two sizes have the same aspect ratio, up to rounding to whole pixels."""
    ratio = (first[0] / second[0]) / (first[1] / second[1])
    return abs(ratio - 1) <= SAME_ASPECT + 1 / min(*first, *second)
