"""Turns masks into outlines: rings around the masks' pixels and around their holes."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import shapely

# A ring passes halfway between the centres of neighbouring pixels, and 0.35 px from the centres at
# its corners: a simplification by less than that encloses the same centres.
SAME_PIXELS_PX = 0.35
# a wire across 20 megapixels has 15,000; noise of that size would take minutes
MAX_CORNERS = 1_000_000
MAX_MASK_RINGS = 5000  # parts and holes of a mask; the smallest of more are dropped


def mask_rings(mask: np.ndarray, left: float = 0.0, top: float = 0.0) -> list[np.ndarray]:
    """Return the outlines of a bitmap bool (H, W), its upper left corner at (left, top), as rings
    (V, 2) in pixels, xy.

    Under the even-odd rule the rings enclose the centres of exactly the mask's pixels. Rings of
    holes run in the opposite direction. Pixels that touch at a corner are joined. A pixel's centre
    lies at (0.5, 0.5) from its corner. Corners are cut at the middle of the pixels' sides (marching
    squares), so that slanted edges need few vertices. The largest ring comes first. Raises
    ValueError for a mask of more than MAX_CORNERS corners.
    """
    rings = []
    for ring in _corner_rings(mask):
        following = np.roll(ring, -1, axis=0)
        half = np.sign(following - ring) / 2
        cut = np.stack([ring + half, following - half], axis=1).reshape(-1, 2)
        # a side of one pixel has one middle
        cut = cut[(cut != np.roll(cut, 1, axis=0)).any(axis=1)]
        # Of a LinearRing the end would be removed without regard to the rest.
        closed = shapely.LineString([*cut, cut[0]])
        simple = shapely.simplify(closed, SAME_PIXELS_PX - 0.01, preserve_topology=False)
        rings.append(np.asarray(simple.coords)[:-1] + np.array([left, top]))
    return sorted(rings, key=lambda ring: -ring_area(ring))


def outline_of(mask: np.ndarray, left: float = 0.0, top: float = 0.0) -> shapely.MultiPolygon:
    """Return the rings of a bitmap, as `mask_rings` describes them, as polygons with holes."""
    rings = [shapely.LinearRing(ring) for ring in mask_rings(mask, left, top)]
    # even-odd
    return shapely.MultiPolygon(
        list(shapely.get_parts(shapely.build_area(shapely.MultiLineString(rings))))
    )


def join_rings(rings: list[np.ndarray]) -> np.ndarray:
    """Join rings into one by short bridges of zero width. The joined ring passes each bridge in
    both directions.

    Under the even-odd rule parts stay separate and holes stay holes. The bridges are the edges of a
    Delaunay triangulation that form the minimum spanning tree, so the time hardly grows with the
    number of rings.
    """
    if len(rings) == 1:
        return rings[0]
    points = np.concatenate(rings)
    owner = np.repeat(np.arange(len(rings)), [len(ring) for ring in rings])
    begin = np.flatnonzero(np.diff(owner, prepend=-1))
    bridges = _spanning_tree(points, owner, len(rings))
    joined: list[int] = []
    waiting = [iter(_walk(int(begin[0]), begin, len(points), bridges))]
    is_visited = {0}
    while waiting:
        step = next(waiting[-1], None)
        if step is None:
            waiting.pop()
            continue
        joined.append(step[0])
        if step[1] is not None and owner[step[1]] not in is_visited:
            is_visited.add(owner[step[1]])
            waiting.append(iter(_walk(step[1], begin, len(points), bridges)))
    return points[joined]


def _walk(
    first: int, begin: np.ndarray, num_points: int, bridges: dict[int, list[int]]
) -> Iterator[tuple[int, int | None]]:
    """Yield the vertices of a ring from `first` on and back to it, each with the other end of a
    bridge, or None.

    A vertex with bridges comes once for each bridge, and once more: the path returns to it.
    """
    place = int(np.searchsorted(begin, first, "right")) - 1
    start, end = int(begin[place]), int(begin[place + 1]) if place + 1 < len(begin) else num_points
    for vertex in [*range(first, end), *range(start, first)]:
        for other in bridges.get(vertex, ()):
            yield vertex, other
        yield vertex, None
    yield first, None


def _spanning_tree(points: np.ndarray, owner: np.ndarray, num_rings: int) -> dict[int, list[int]]:
    """Return the bridges between rings: for each vertex with bridges their other ends."""
    from scipy.cluster.hierarchy import DisjointSet  # takes 0.2 s, and most objects have one ring

    neighbours: dict[int, list[int]] = defaultdict(list)
    edges = shapely.get_coordinates(
        shapely.get_parts(shapely.delaunay_triangles(shapely.multipoints(points), only_edges=True))
    ).reshape(-1, 2, 2)
    number = {place: index for index, place in enumerate(map(tuple, points.tolist()))}
    ends = np.array([(number[tuple(a)], number[tuple(b)]) for a, b in edges.tolist()])
    order = np.lexsort(points.T)  # rings may touch: common vertices are bridges of no length
    is_common = (points[order][1:] == points[order][:-1]).all(axis=1)
    ends = np.concatenate([ends, np.stack([order[:-1], order[1:]], axis=1)[is_common]])
    ends = ends[owner[ends[:, 0]] != owner[ends[:, 1]]]
    lengths = np.hypot(*(points[ends[:, 0]] - points[ends[:, 1]]).T)
    rings = DisjointSet(range(num_rings))
    for first, second in ends[np.lexsort((ends[:, 1], ends[:, 0], lengths))].tolist():
        if rings.merge(int(owner[first]), int(owner[second])):
            neighbours[first].append(second)
            neighbours[second].append(first)
    return neighbours


def ring_area(ring: np.ndarray) -> float:
    """Return the area inside a ring (V, 2)."""
    return abs(signed_area(ring))


def signed_area(ring: np.ndarray) -> float:
    """Return the area inside a ring (V, 2), with a sign that tells its direction."""
    x, y = (ring - ring[0]).T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _corner_rings(mask: np.ndarray) -> list[np.ndarray]:
    """Return the rings along the sides of the pixels, through their corners
    only: float64 (V, 2).
    """
    x, y, across, down = _corners(mask)
    rings = []
    is_free = np.ones(len(x), bool)
    next_across, next_down = across.tolist(), down.tolist()
    for first in range(len(x)):
        if is_free[first]:
            ring, corner = [], first
            while True:
                ring += [corner, next_across[corner]]
                corner = next_down[next_across[corner]]
                if corner == first:
                    break
            is_free[ring] = False
            # the pixel inside the ring's first corner: upper row, leftmost
            if not mask[y[first], x[first]]:
                ring.reverse()
            rings.append(np.stack([x[ring], y[ring]], axis=1).astype(np.float64))
    return rings


def _corners(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the corners of the outlines, x and y, and for each the next one in its row and the
    next in its column.

    A corner has an odd number of the mask's pixels around it, or two pixels that only touch there.
    The latter is listed twice.
    """
    padded = np.zeros((mask.shape[0] + 2, mask.shape[1] + 2), bool)
    padded[1:-1, 1:-1] = mask
    upper_left, upper_right = padded[:-1, :-1], padded[:-1, 1:]
    lower_left, lower_right = padded[1:, :-1], padded[1:, 1:]
    is_crossing = (
        (upper_left == lower_right) & (upper_right == lower_left) & (upper_left != upper_right)
    )
    is_corner = (upper_left ^ upper_right ^ lower_left ^ lower_right) | is_crossing
    y, x = np.nonzero(is_corner)
    if len(x) > MAX_CORNERS:
        raise ValueError(f"a mask with {len(x):,} corners is noise, not an object")
    times = 1 + is_crossing[y, x]
    # At a crossing the first copy ends the side from the left, the second begins the one to the
    # right.
    copy = np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
    y, x = np.repeat(y, times), np.repeat(x, times)
    across = np.arange(len(x)) ^ 1  # corners lie in pairs along a row: one side of the outline
    # Pixels that touch are joined: the left side goes on upwards if the upper right and lower left
    # pixels are inside.
    is_swapped = is_crossing[y, x] & upper_left[y, x]
    in_columns = np.lexsort((np.where(is_swapped, 1 - copy, copy), y, x))
    down = np.empty(len(x), np.int64)
    down[in_columns] = in_columns[np.arange(len(x)) ^ 1]
    return x, y, across, down
