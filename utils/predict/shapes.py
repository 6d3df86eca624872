"""Lines with a width, and wires of several of them: lines that continue each other behind a pole or over a gap.

Also between outlines, masks and centrelines: outlines are filled, masks thinned to one pixel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from utils.predict.regions import Region

MAX_GAP = 1.0  # of the shorter line's length
MAX_KINK_DEG = 10.0  # change of direction over a gap
BESIDE = 0.1  # of the gap, and a width: how far an end may lie beside the other line's continuation
End = tuple[int, int]  # a line's number; 0: its first point, 1: its last


@dataclass(frozen=True, eq=False)
class Line:
    """A wire from end to end: points float64 (K, 2) xy in pixels of the photograph, and its width at each, float64 (K,).

    The centre of the photograph's first pixel lies at (0.5, 0.5). gaps: float64 (G, 2, 2), the first and the last point of
    each part that no mask shows.
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
        """The outline of the drawn line, float64 (2 K, 2) xy."""
        side = _across(self.points) * (self.widths / 2)[:, None]
        return np.concatenate([self.points + side, (self.points - side)[::-1]])

    def samples(self, step_px: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return points at equal distances of about `step_px`, the unit vectors across the line there, and its widths.

        float64 (n, 2), (n, 2), (n,).
        """
        places = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(self.points, axis=0).T))])
        wanted = np.linspace(0, places[-1], max(round(places[-1] / step_px), 1) + 1)
        x, y, widths = (np.interp(wanted, places, values) for values in (*self.points.T, self.widths))
        points = np.stack([x, y], axis=1)
        return points, _across(points), widths

    @property
    def directions(self) -> np.ndarray:
        """The unit vectors in which the line would go on at its first and at its last point: float64 (2, 2)."""
        outward = self.points[[0, -1]] - self.points[[1, -2]]
        return outward / np.hypot(*outward.T)[:, None]


def _across(points: np.ndarray) -> np.ndarray:
    """Return the unit vectors across a line at its points (K, 2): float64 (K, 2)."""
    along = np.gradient(points, axis=0)
    return np.stack([-along[:, 1], along[:, 0]], axis=1) / np.hypot(*along.T)[:, None].clip(1e-9)


def fill_outline(outline: np.ndarray, photo_size: tuple[int, int]) -> Region:
    """Fill an outline (V, 2) in pixels: a pixel belongs to it if its centre lies inside (even-odd rule).

    OpenCV's drawing also fills the pixels on the edge, which would double the width of a one-pixel wire. An outline that
    contains no centre becomes the pixels of its corners, so that it is not empty.
    """
    width, height = photo_size
    low = np.floor(outline.min(0)).astype(int).clip(0, (width - 1, height - 1))
    high = np.ceil(outline.max(0)).astype(int).clip(low + 1, (width, height))
    (left, top), (columns, rows) = low.tolist(), (high - low).tolist()
    row, x = _crossings(outline, top, rows)
    column = np.ceil(x - 0.5 - left).astype(int).clip(0, columns)
    toggles = np.zeros((rows, columns + 1), np.uint8)  # whether an odd number of edges lies just before each pixel
    np.bitwise_xor.at(toggles, (row, column), 1)
    mask = np.bitwise_xor.accumulate(toggles, axis=1)[:, :-1].view(bool)
    if not mask.any():
        corners = (np.floor(outline).astype(int) - low).clip(0, (columns - 1, rows - 1))
        mask[corners[:, 1], corners[:, 0]] = True
    return Region(left, top, mask)


def _crossings(outline: np.ndarray, top: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where an outline's edges cross the centres of the rows top..top + rows - 1: row from 0 (K,), x (K,)."""
    (x1, y1), (x2, y2) = outline.T, np.roll(outline, -1, axis=0).T
    centres = np.arange(top, top + rows) + 0.5
    first, last = np.searchsorted(centres, [np.minimum(y1, y2), np.maximum(y1, y2)])
    edge = np.repeat(np.arange(len(outline)), last - first)
    row = np.arange(len(edge)) - np.repeat((last - first).cumsum() - last, last - first)
    slope = (x2[edge] - x1[edge]) / (y2[edge] - y1[edge])
    return row, x1[edge] + (centres[row] - y1[edge]) * slope


def centreline(region: Region) -> np.ndarray:
    """Return the pixels of a mask's centreline: int64 (K, 2), column and row in the photograph.

    Thinning by Guo and Hall, "Parallel thinning with two-subiteration algorithms", CACM 32 (1989), algorithm A1: outline
    pixels are removed in two alternating passes as long as this changes neither connection nor ends. Lines are connected
    over corners, so K is the longer of the extents along x and y of a straight line. Each end is about half the mask's
    width short.
    """
    rows, columns = region.mask.shape
    stride = columns + 2
    alive = np.zeros((rows + 2) * stride, bool)
    alive.reshape(rows + 2, stride)[1:-1, 1:-1] = region.mask
    # Clockwise from above.
    around = np.array([-stride, -stride + 1, 1, stride + 1, stride, stride - 1, -1, -stride - 1])
    front = np.flatnonzero(alive)
    front = front[~(alive[front - stride] & alive[front + stride] & alive[front - 1] & alive[front + 1])]
    queued = np.zeros(len(alive), bool)
    queued[front] = True
    is_stable = False
    while not is_stable:
        is_stable = True
        for table in _removable():
            code = alive[front + around[0]].view(np.uint8)
            for bit in range(1, 8):
                code = code | (alive[front + around[bit]].view(np.uint8) << bit)
            is_removed = table[code]
            removed = front[is_removed]
            if not len(removed):
                continue
            is_stable = False
            alive[removed] = False
            bare = (removed[:, None] + around[::2]).ravel()
            bare = bare[alive[bare] & ~queued[bare]]
            queued[bare] = True
            front = np.concatenate([front[~is_removed], np.unique(bare)])
    row, column = np.divmod(np.flatnonzero(alive), stride)
    return np.stack([column - 1 + region.left, row - 1 + region.top], axis=1)


@cache
def _removable() -> tuple[np.ndarray, np.ndarray]:
    """Return for each pass whether a pixel is removed, by the bits of its neighbours, clockwise from above: bool (256,)."""
    n, ne, e, se, s, sw, w, nw = ((np.arange(256) >> bit & 1).astype(bool) for bit in range(8))
    connections = sum(
        (~side & (corner | following)).astype(int)
        for side, corner, following in ((n, ne, e), (e, se, s), (s, sw, w), (w, nw, n))
    )
    pairs = [
        sum((first | second).astype(int) for first, second in couples)
        for couples in (((nw, n), (ne, e), (se, s), (sw, w)), ((n, ne), (e, se), (s, sw), (w, nw)))
    ]
    fewest = np.minimum(*pairs)
    is_outline = (connections == 1) & (fewest >= 2) & (fewest <= 3)
    return is_outline & ~((s | sw | ~nw) & w), is_outline & ~((n | ne | ~se) & e)


@dataclass(frozen=True, eq=False)
class Route:
    """A wire from end to end: the numbers of its detections, and one line through all of them, gaps between them listed."""

    members: tuple[int, ...]
    line: Line

    @classmethod
    def through(cls, ends: Sequence[End], lines: Sequence[Line | None]) -> Route:
        """Join lines in the order in which they follow each other; of each the end that comes first is named."""
        parts = []
        for number, side in ends:
            line = lines[number]
            assert line is not None
            step = -1 if side else 1
            parts.append(Line(line.points[::step], line.widths[::step], line.gaps[::step, ::step]))
        gaps = [parts[0].gaps]
        for before, after in itertools.pairwise(parts):
            gaps += [np.stack([before.points[-1], after.points[0]])[None], after.gaps]
        points, widths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("points", "widths"))
        return cls(tuple(number for number, _ in ends), Line(points, widths, np.concatenate(gaps)))


def find_routes(lines: Sequence[Line | None], class_ids: np.ndarray) -> list[Route]:
    """Return the wires that detections form: each line is part of one, alone or with those of its class that it continues.

    Two ends are joined, the nearest first, if each lies where the other line goes on: a gap of at most MAX_GAP, a change of
    direction of at most MAX_KINK_DEG, and beside it by at most a width and BESIDE.
    """
    numbers = [number for number, line in enumerate(lines) if line is not None]
    partner: dict[End, End] = {}
    for first, second in continued_ends([line for line in lines if line is not None], class_ids[numbers]):
        ends = [(numbers[end // 2], end % 2) for end in (first, second)]
        if not any(end in partner for end in ends) and _last(ends[0], partner) != ends[1]:
            partner[ends[0]], partner[ends[1]] = ends[1], ends[0]
    routes = []
    for number in numbers:
        starts = [(number, side) for side in (0, 1) if (number, side) not in partner]
        for start in starts[:1]:
            if (start[0], start[1]) <= _last(start, partner):  # a route of several lines has two ends: from the lower
                chain = [start]
                while (far := (chain[-1][0], 1 - chain[-1][1])) in partner:
                    chain.append(partner[far])
                routes.append(Route.through(chain, lines))
    return routes


def _last(end: End, partner: dict[End, End]) -> End:
    """Return the other end of the joined lines that begin with an end."""
    far = (end[0], 1 - end[1])
    while far in partner:
        number, side = partner[far]
        far = (number, 1 - side)
    return far


def continued_ends(lines: Sequence[Line], class_ids: np.ndarray, reach_px: float = 0.0) -> list[tuple[int, int]]:
    """Return the pairs of ends, 2 * position + side each, that may be one wire, the nearest first.

    Gaps of up to `reach_px` count, too, however short the lines are.
    """
    if len(lines) < 2:
        return []
    at = np.concatenate([line.points[[0, -1]] for line in lines])  # (2 n, 2)
    outward = np.concatenate([line.directions for line in lines])
    width, length = (np.repeat([getattr(line, name) for line in lines], 2) for name in ("width_px", "length_px"))
    offset = at[None] - at[:, None]  # from the end of the row to that of the column
    ahead = (offset * outward[:, None]).sum(axis=-1)
    beside = np.abs(offset[..., 0] * outward[:, None, 1] - offset[..., 1] * outward[:, None, 0])
    gap, wide = np.hypot(*np.moveaxis(offset, -1, 0)), np.maximum(width[:, None], width)
    goes_on = (ahead >= -wide) & (beside <= wide + BESIDE * gap)
    fits = goes_on & goes_on.T & (outward @ outward.T <= -np.cos(np.deg2rad(MAX_KINK_DEG)))
    fits &= gap <= np.maximum(MAX_GAP * np.minimum(length[:, None], length), wide.clip(min=reach_px))
    line_of, of_class = np.arange(len(at)) // 2, np.repeat(class_ids, 2)
    fits &= (line_of[:, None] < line_of) & (of_class[:, None] == of_class)
    pairs = np.argwhere(fits)
    order = np.argsort(gap[fits], kind="stable")
    return [(int(first), int(second)) for first, second in pairs[order]]
