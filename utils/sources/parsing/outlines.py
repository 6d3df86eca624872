"""Converts an annotated polygon or polyline to one closed ring inside the photograph.

Coordinates are pixels of the photograph, x to the right and y down; the photograph covers 0..width and 0..height.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import shapely
from shapely.geometry import LineString, Polygon
from shapely.geometry.base import BaseGeometry
from shapely.geometry.polygon import orient

from utils.sources.mask_rings import MAX_MASK_RINGS, join_rings

MIN_PART_AREA_PX = 1.0  # smaller parts, in pixels of the original photograph, are dropped
MIN_TOOL_AREA_PX = 0.4  # the same for polygons of annotation tools, which may outline one pixel of a mask (0.5)
MAX_RINGS = 50  # parts and holes of an object; the smallest of more are dropped
MAX_COORDINATE_PX = 1e6
# Drawn outlines have tens of vertices and cross themselves a few times. Without limits 20,000 points in a zigzag, or
# 4,000 random ones, took a minute and a half.
MAX_POINTS = 20_000
MAX_LINE_POINTS = 2_000  # after simplification; buffering takes quadratic time
MAX_CROSSINGS = 12_000
DENSE_VERTICES = 100  # outlines with more are simplified; hand-drawn ones have fewer


class OutlineError(ValueError):
    """An object without a visible area. The message is the reason."""


def object_ring(
    kind: Literal["polygon", "line"],
    points: np.ndarray,
    size: tuple[int, int],
    line_width_px: float,
    tolerance_px: float,
) -> np.ndarray:
    """Return the part of an object inside a photograph of `size` (width, height) as one ring (V, 2).

    The first vertex is not repeated at the end. A polygon that crosses itself is repaired. A line becomes a strip of
    `line_width_px` with flat ends. More than DENSE_VERTICES points are simplified with `tolerance_px`. Raises
    OutlineError when nothing visible is left.
    """
    _check(kind, points)
    try:
        shape = _line_shape(points, line_width_px, tolerance_px) if kind == "line" else _polygon(points, tolerance_px)
        return join_rings(_visible_rings(shape, size, MAX_RINGS, MIN_PART_AREA_PX))
    except shapely.GEOSException as error:
        raise OutlineError(f"{kind} cannot be repaired ({' '.join(str(error).split())[:80]})") from error


def parts_ring(parts: list[np.ndarray], size: tuple[int, int], tolerance_px: float) -> np.ndarray:
    """Return the union of an object's polygons (V, 2) inside a photograph as one ring, like `object_ring`."""
    is_valid = len(parts) == 1 and len(parts[0]) > 2 and bool(shapely.is_valid(Polygon(parts[0])))
    _check("polygon", np.concatenate(parts), may_cross=not is_valid)
    try:
        shape = shapely.union_all([_polygon(points, tolerance_px) for points in parts])
        return join_rings(_visible_rings(shape, size, MAX_MASK_RINGS, MIN_TOOL_AREA_PX))
    except shapely.GEOSException as error:
        raise OutlineError(f"polygons cannot be repaired ({' '.join(str(error).split())[:80]})") from error


def _check(kind: str, points: np.ndarray, may_cross: bool = True) -> None:
    """Raise OutlineError for points that would take too long, or that no photograph contains."""
    if len(points) and np.abs(points).max() > MAX_COORDINATE_PX:
        raise OutlineError(f"{kind} has the coordinate {np.abs(points).max():g}, far outside any photograph")
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
            raise OutlineError(f"line of {shapely.get_num_coordinates(line):,} corners, more than {MAX_LINE_POINTS:,}")
    # Mitre joins need few vertices; the limit turns the spike of a sharp turn into a bevel.
    return line.buffer(line_width_px / 2, cap_style="flat", join_style="mitre", mitre_limit=2.0)


def estimated_crossings(points: np.ndarray) -> float:
    """Return the number of crossings of the segments between points (V, 2); for many segments, an estimate."""
    starts, ends = points[:-1], points[1:]
    num_segments = len(starts)
    num_chosen = min(num_segments, max(50, 400_000 // num_segments))
    chosen = np.random.default_rng(0).choice(num_segments, num_chosen, replace=False)
    a, b = starts[chosen, None], ends[chosen, None]

    def side(of: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        towards, to_point = end - begin, of - begin
        return towards[..., 0] * to_point[..., 1] - towards[..., 1] * to_point[..., 0]

    cross = (side(starts, a, b) * side(ends, a, b) < 0) & (side(a, starts, ends) * side(b, starts, ends) < 0)
    return float(cross.sum()) / 2 * num_segments / num_chosen


def _without_repeats(points: np.ndarray) -> np.ndarray:
    if len(points) < 2:
        return points
    moved = np.any(points[1:] != points[:-1], axis=1)
    return points[np.concatenate([[True], moved])]


def _visible_rings(shape: BaseGeometry, size: tuple[int, int], max_rings: int, min_area_px: float) -> list[np.ndarray]:
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
    return [np.asarray(rings[index].coords)[:-1] for index in largest if areas[index] >= min_area_px]
