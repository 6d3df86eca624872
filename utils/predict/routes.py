"""Wires of several detections: lines that continue each other behind a pole or over a part that was not found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from utils.predict.shapes import Line

MAX_GAP = 1.0  # of the shorter line's length
MAX_KINK_DEG = 10.0  # change of direction over a gap
BESIDE = 0.1  # of the gap, and a width: how far an end may lie beside the other line's continuation
End = tuple[int, int]  # a line's number; 0: its first point, 1: its last


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
    for first, second in _continued_ends([line for line in lines if line is not None], class_ids[numbers]):
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


def _continued_ends(lines: Sequence[Line], class_ids: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs of ends, 2 * position + side each, that may be one wire, the nearest first."""
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
    fits &= gap <= np.maximum(MAX_GAP * np.minimum(length[:, None], length), wide)
    line_of, of_class = np.arange(len(at)) // 2, np.repeat(class_ids, 2)
    fits &= (line_of[:, None] < line_of) & (of_class[:, None] == of_class)
    pairs = np.argwhere(fits)
    order = np.argsort(gap[fits], kind="stable")
    return [(int(first), int(second)) for first, second in pairs[order]]
