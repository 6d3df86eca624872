"""Polygon arithmetic for labels: clipping, areas, boxes and index maps. Coordinates are pixels (x,
y).

"Joined outlines" are the vertices (V, 2) of several outlines in one array, with the row (N,) where
each begins.
"""

import itertools
from collections.abc import Iterable

import cv2
import numpy as np

SHIFT_BITS = 4  # cv2.fillPoly takes fixed-point coordinates: 1/16 of a pixel
MIN_SIDE_PX = 2.0  # of the longer side of an augmented outline; smaller ones are dropped
MIN_VISIBLE_FRACTION = 0.01  # of the area of an outline's box, as in YOLOv8
SIZES = ("small", "medium", "large")
SIZE_BOUNDS_PX2 = (32.0**2, 96.0**2)  # COCO's: small below the first, large from the second on
MIN_ELONGATION = 50.0  # of a class's median object; poles have 10 to 40, wires 70 to 900


def transform_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Map points (N, 2) through a (2, 3) affine."""
    return points @ matrix[:, :2].T + matrix[:, 2]


def visible_outlines(
    class_ids: np.ndarray, points: np.ndarray, starts: np.ndarray, size_px: int
) -> tuple[list[int], list[np.ndarray]]:
    """Clip joined outlines to the (size_px, size_px) image and drop those of which almost nothing
    is left.

    Negative classes are those of regions to ignore, of which any part is enough.
    Processes all outlines of an image at once, five times as fast as one by one.
    """
    low, high = extents(points, starts)
    whole = (high - low).prod(1)
    lengths = np.diff(starts, append=len(points))
    owner = np.repeat(np.arange(len(starts)), lengths)
    is_near = np.repeat(((high > 0) & (low < size_px)).all(axis=1), lengths)
    points, owner = clip_outlines(points[is_near], owner[is_near], size_px)
    if len(points) == 0:
        return [], []
    starts = starts_of(owner)
    kept = owner[starts]
    low, high = extents(points, starts)
    sides = high - low
    # The longer side: a horizontal wire is hundreds of pixels long and one high.
    is_enough = (sides.max(1) > MIN_SIDE_PX) & (sides.prod(1) >= MIN_VISIBLE_FRACTION * whole[kept])
    is_enough |= (class_ids[kept] < 0) & (sides.prod(1) > 0)
    is_enough &= np.diff(starts, append=len(points)) >= 3
    outlines = split_outlines(points, starts)
    return class_ids[kept[is_enough]].tolist(), [
        outlines[position] for position in np.flatnonzero(is_enough).tolist()
    ]


def clip_outlines(
    points: np.ndarray, owner: np.ndarray, width_px: float, height_px: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Clip joined outlines to [0, width_px] x [0, height_px], by default a square.

    `owner` (V,), ascending, is the outline of each vertex. Sutherland and Hodgman 1974. Clamping
    vertices instead would bend wires at the border. An outline that leaves and comes back stays
    one, with an edge along the border.
    """
    for axis, size_px in enumerate((width_px, width_px if height_px is None else height_px)):
        for limit, sign in ((0.0, 1.0), (size_px, -1.0)):
            distance = (points[:, axis] - limit) * sign
            if len(points) and distance.min() < 0:
                points, owner = _clip_half_plane(points, owner, distance)
    return points, owner


def _clip_half_plane(
    points: np.ndarray, owner: np.ndarray, distance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    following = following_vertex(starts_of(owner), len(owner))
    inside = distance >= 0
    crosses = inside != inside[following]
    starts, ends = points[crosses], points[following[crosses]]
    before, after = distance[crosses], distance[following[crosses]]
    # Each edge yields its start if inside, then its crossing: interleave both and keep those that
    # exist.
    both = np.repeat(points, 2, axis=0)
    both[1::2][crosses] = starts + (ends - starts) * (before / (before - after))[:, None]
    wanted = np.stack([inside, crosses], axis=1).reshape(-1)
    return both[wanted], np.repeat(owner, 2)[wanted]


def join_outlines(polygons: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Join at least one outline: return all vertices (V, 2) and the row (N,) where each outline
    begins.
    """
    lengths = [len(polygon) for polygon in polygons]
    return np.concatenate(polygons), np.cumsum([0, *lengths[:-1]])


def split_outlines(points: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    """Return joined outlines as a list of views."""
    bounds = [*starts.tolist(), len(points)]
    return [points[start:end] for start, end in itertools.pairwise(bounds)]


def extents(points: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum and the maximum x, y (N, 2) of each joined outline."""
    return np.minimum.reduceat(points, starts, axis=0), np.maximum.reduceat(points, starts, axis=0)


def starts_of(owner: np.ndarray) -> np.ndarray:
    """Return the row where each joined outline begins; `owner` (V,) is ascending."""
    return np.flatnonzero(np.diff(owner, prepend=-1))


def following_vertex(starts: np.ndarray, num_vertices: int) -> np.ndarray:
    """Return for each vertex of joined outlines the row of the next vertex of its outline."""
    following = np.arange(1, num_vertices + 1)
    following[np.append(starts[1:], num_vertices) - 1] = starts
    return following


def areas(points: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the area inside each joined outline."""
    x, y = points.T
    following = following_vertex(starts, len(points))
    # Rounded, so that copies of an object keep their order despite rounding errors.
    return (np.abs(np.add.reduceat(x * y[following] - y * x[following], starts)) / 2).round(6)


def large_to_small(polygons: list[np.ndarray]) -> np.ndarray:
    """Return the indices that sort outlines by area, largest first: drawn in this order, small ones
    lie on top.
    """
    return (
        np.argsort(-areas(*join_outlines(polygons)), kind="stable")
        if polygons
        else np.zeros(0, np.int64)
    )


def polygon_boxes(polygons: list[np.ndarray]) -> np.ndarray:
    """Return the boxes around outlines, xyxy: (N, 4) float64."""
    return np.hstack(extents(*join_outlines(polygons))) if polygons else np.zeros((0, 4))


def draw_index_map(polygons: list[np.ndarray], size_px: int) -> np.ndarray:
    """Fill outlines in order, with all pixels they touch: int32 (S, S), 0 is background, k + 1 the
    k-th outline.
    """
    index_map = np.zeros((size_px, size_px), np.int32)
    for value, polygon in enumerate(polygons, start=1):
        # In fillPoly integers are pixel centres, in outlines pixel corners.
        fixed = np.rint((polygon - 0.5) * (1 << SHIFT_BITS)).astype(np.int32)
        cv2.fillPoly(index_map, [fixed], value, lineType=cv2.LINE_8, shift=SHIFT_BITS)
    return index_map


def size_classes(areas: np.ndarray) -> np.ndarray:
    """Return the position in SIZES of each area in pixels of the photograph: uint8, the shape of
    `areas`.
    """
    return np.digitize(np.asarray(areas, np.float64), SIZE_BOUNDS_PX2).astype(np.uint8)


def elongation(outline: np.ndarray) -> float:
    """Return length over width of the straight or curved strip with the area and perimeter of an
    outline (V, 2); 1 at least.
    """
    (x, y), (next_x, next_y) = (
        outline.T.astype(np.float64),
        np.roll(outline, -1, axis=0).T.astype(np.float64),
    )
    area = abs(float(x @ next_y - y @ next_x)) / 2
    perimeter = float(np.hypot(next_x - x, next_y - y).sum())
    # The sides a >= b of a rectangle: a + b = perimeter / 2, a * b = area.
    half, root = perimeter / 4, max((perimeter / 4) ** 2 - area, 0.0) ** 0.5
    return (half + root) / max(half - root, 1e-6)


def elongated_classes(elongations: Iterable[tuple[int, float]]) -> tuple[int, ...]:
    """Return the classes whose objects have a median elongation of MIN_ELONGATION or more,
    ascending. elongations: each object's class and value.
    """
    of_class: dict[int, list[float]] = {}
    for class_id, value in elongations:
        of_class.setdefault(class_id, []).append(value)
    return tuple(
        sorted(
            class_id for class_id, values in of_class.items() if np.median(values) >= MIN_ELONGATION
        )
    )
