"""Labels of a window: outlines cut at its border, and which pieces are large enough to see.

A cut can split an object, for example a wire that leaves the window and comes back. Each piece is
an instance of its own, because the window does not show that they belong together.
"""

import itertools

import numpy as np

from yolo_seg_ddp.data.polygons import (
    areas,
    clip_outlines,
    extents,
    following_vertex,
    join_outlines,
    split_outlines,
    starts_of,
)

# A piece cut off an object is kept with this share of the object's area. A smaller one must be long
# enough, which keeps wires, and must reach deeper into the window than a sliver.
MIN_AREA_SHARE = 0.25
MIN_LENGTH_PX = 16.0  # of the piece's longer side, in pixels of the network input: four mask pixels
MIN_DEPTH_PX = 4.0  # from the cut: one mask pixel; more for a thick object, at most MIN_LENGTH_PX
# MIN_LENGTH_PX is at most this share of the input's side: it is that of 640
SMALL_INPUT_SHARE = 1 / 40

Sides = tuple[bool, bool, bool, bool]  # of a window: left, top, right, bottom


def pieces_in(
    polygons: list[np.ndarray],
    width: float,
    height: float,
    cut_sides: Sides,
    side_px: int,
    is_region: np.ndarray,
) -> tuple[list[int], list[np.ndarray]]:
    """Cut outlines, in pixels of the photograph from the upper left corner of a window, to the
    window.

    `cut_sides` are those inside the photograph. The window's longer side is shown with `side_px`
    pixels. is_region, bool (N,): no piece of a region to ignore is too small. Returns for each
    visible piece the position of its outline in `polygons`, and the piece.
    """
    if not polygons:
        return [], []
    points, starts = join_outlines(polygons)
    low, high = extents(points, starts)
    size = np.array([width, height])
    is_near = ((high > 0) & (low < size)).all(axis=1)
    following = following_vertex(starts, len(points))
    is_inside = np.hstack([points >= 0, points <= size])  # (V, 4)
    num_crossings = np.add.reduceat(
        is_inside != is_inside[following], starts, axis=0, dtype=np.int64
    )
    # it leaves the window and returns
    is_split = is_near & np.asarray((num_crossings > 2).any(axis=1))
    owner = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(points)))
    is_clipped = (is_near & ~is_split)[owner]
    clipped, clipped_owner = clip_outlines(points[is_clipped], owner[is_clipped], width, height)
    first = starts_of(clipped_owner)
    found = list(zip(clipped_owner[first].tolist(), split_outlines(clipped, first), strict=True))
    for position in np.flatnonzero(is_split).tolist():
        found += [
            (position, piece) for piece in split_at_rectangle(polygons[position], width, height)
        ]
    if not found:
        return [], []
    found.sort(key=lambda entry: entry[0])
    owners, pieces = [position for position, _ in found], [piece for _, piece in found]
    kept = _are_seen(pieces, (points, starts), owners, size, cut_sides, side_px)
    kept = (kept | is_region[owners] & (areas(*join_outlines(pieces)) > 0)).tolist()
    return list(itertools.compress(owners, kept)), list(itertools.compress(pieces, kept))


def _are_seen(
    pieces: list[np.ndarray],
    objects: tuple[np.ndarray, np.ndarray],
    owners: list[int],
    size: np.ndarray,
    cut_sides: Sides,
    side_px: int,
) -> np.ndarray:
    """Return which pieces of objects, joined outlines, are large enough to see: bool (N,)."""
    joined = join_outlines(pieces)
    low, high = extents(*joined)
    per_pixel = float(size.max()) / side_px
    length_px = min(MIN_LENGTH_PX, side_px * SMALL_INPUT_SHARE)
    points, starts = objects
    whole = areas(points, starts)[owners]
    edges = points[following_vertex(starts, len(points))] - points
    perimeter = np.add.reduceat(np.hypot(*edges.T), starts)[owners]
    thickness = 2 * whole / perimeter.clip(1e-9)  # of a wire: its width
    min_depth = thickness.clip(min(MIN_DEPTH_PX, length_px) * per_pixel, length_px * per_pixel)
    # of each piece's farthest point from each side of the window
    depths = np.hstack([high, size - low])
    is_sliver = ((depths <= min_depth[:, None]) & np.array(cut_sides)).any(axis=1)
    is_long = (high - low).max(axis=1) >= length_px * per_pixel
    return (areas(*joined) >= MIN_AREA_SHARE * whole) | (is_long & ~is_sliver)


def split_at_rectangle(outline: np.ndarray, width: float, height: float) -> list[np.ndarray]:
    """Return the pieces of an outline inside [0, width] x [0, height], each an outline; empty if
    there are none.
    """
    pieces = [outline]
    for axis, limit, sign in ((0, 0.0, 1.0), (0, width, -1.0), (1, 0.0, 1.0), (1, height, -1.0)):
        pieces = [
            part
            for piece in pieces
            for part in _in_half_plane(piece, axis, (piece[:, axis] - limit) * sign)
        ]
    return pieces


def _in_half_plane(outline: np.ndarray, axis: int, distance: np.ndarray) -> list[np.ndarray]:
    """Return the pieces of an outline where `distance` (V,), from a line across `axis`, is not
    negative.

    The outline enters and leaves the half plane in turn. Sorted along the line, the first and the
    second of these crossings are the ends of one stretch of the inside, the third and the fourth of
    the next, and so on: join chains of vertices there. This is right for outlines that cross
    themselves too, by the even-odd rule that fills them.
    """
    inside = distance >= 0
    if inside.all():
        return [outline]
    following = np.roll(np.arange(len(outline)), -1)
    entries = np.flatnonzero(~inside & inside[following])
    if not len(entries):
        return []
    # From the first entry on, so that no chain passes the end of the array.
    order = np.roll(np.arange(len(outline)), -int(entries[0]))
    crosses = np.flatnonzero(inside[order] != inside[following[order]])
    before, after = order[crosses], following[order[crosses]]
    share = distance[before] / (distance[before] - distance[after])
    crossings = outline[before] + (outline[after] - outline[before]) * share[:, None]
    chains = [
        np.concatenate(
            [
                crossings[k : k + 1],
                outline[order[crosses[k] + 1 : crosses[k + 1] + 1]],
                crossings[k + 1 : k + 2],
            ]
        )
        for k in range(0, len(crosses), 2)
    ]
    return (
        chains
        if len(chains) == 1
        else _joined(chains, np.argsort(crossings[:, 1 - axis], kind="stable"))
    )


def _joined(chains: list[np.ndarray], along_line: np.ndarray) -> list[np.ndarray]:
    """Join chains into closed outlines.

    `along_line` sorts their ends: end 2k is the start of chain k, 2k + 1 its end.
    """
    partner = np.empty(len(along_line), int)
    partner[along_line[0::2]], partner[along_line[1::2]] = along_line[1::2], along_line[0::2]
    left, outlines = set(range(len(chains))), []
    while left:
        end, parts = 2 * min(left), []
        while end // 2 in left:
            chain = end // 2
            left.discard(chain)
            parts.append(chains[chain] if end % 2 == 0 else chains[chain][::-1])
            end = int(partner[end ^ 1])  # from the chain's other end along the line
        outlines.append(np.concatenate(parts))
    return outlines
