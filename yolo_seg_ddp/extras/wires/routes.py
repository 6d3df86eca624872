"""Which lines continue each other, behind a pole or over a gap, and so are one wire."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from yolo_seg_ddp.extras.wires.along import directions
from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.predict.line import Line

End = tuple[int, int]  # a line's number; 0: its first point, 1: its last


@dataclass(frozen=True, eq=False)
class Route:
    """A wire from end to end: the numbers of its lines, and one line through all of them, with the
    gaps between them.
    """

    members: tuple[int, ...]
    line: Line

    @classmethod
    def through(cls, ends: Sequence[End], lines: Sequence[Line | None]) -> Route:
        """Join lines in the order of `ends`, which names the end of each line that comes first."""
        parts = []
        for number, side in ends:
            line = lines[number]
            assert line is not None
            step = -1 if side else 1
            parts.append(Line(line.points[::step], line.widths[::step], line.gaps[::step, ::step]))
        gaps = [parts[0].gaps]
        for before, after in itertools.pairwise(parts):
            gaps += [np.stack([before.points[-1], after.points[0]])[None], after.gaps]
        points, widths = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("points", "widths")
        )
        return cls(tuple(number for number, _ in ends), Line(points, widths, np.concatenate(gaps)))


def find_routes(lines: Sequence[Line | None], class_ids: np.ndarray) -> list[Route]:
    """Join lines that continue each other (`continued_ends`), the nearest ends first. Each line is
    part of one route.

    lines: of detections, None for one without a line; class_ids (N,) of all detections.
    """
    numbers = [number for number, line in enumerate(lines) if line is not None]
    partner: dict[End, End] = {}
    far = {
        (number, side): (number, 1 - side) for number in numbers for side in (0, 1)
    }  # the other end of a route's end
    for ends in continued_ends([line for line in lines if line is not None], class_ids[numbers]):
        one, two = ((numbers[end // 2], end % 2) for end in ends)
        # else the route would be a ring
        if one not in partner and two not in partner and far[one] != two:
            partner[one], partner[two] = two, one
            far[far[one]], far[far[two]] = far[two], far[one]
    routes = []
    for start, end in far.items():
        # a route has two ends: begin it once, at the lower one
        if start not in partner and start < end:
            chain = [start]
            while (other := (chain[-1][0], 1 - chain[-1][1])) in partner:
                chain.append(partner[other])
            routes.append(Route.through(chain, lines))
    return routes


def continued_ends(lines: Sequence[Line], class_ids: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs of ends of lines of one class that may be one wire, the nearest first; an
    end is 2 * position + side.

    Each end must lie where the other line goes on: ahead of it, hardly beside it, and with hardly a
    change of direction. The gap is at most as long as the shorter line, or as the wider one is
    wide.
    """
    if len(lines) < 2:
        return []
    at = np.concatenate([line.points[[0, -1]] for line in lines])  # (2 n, 2)
    outward = np.concatenate([directions(line) for line in lines])
    width, length = (
        np.repeat([getattr(line, name) for line in lines], 2) for name in ("width_px", "length_px")
    )
    offset = at[None] - at[:, None]  # from the end of the row to that of the column
    ahead = (offset * outward[:, None]).sum(axis=-1)
    beside = np.abs(offset[..., 0] * outward[:, None, 1] - offset[..., 1] * outward[:, None, 0])
    gap = np.hypot(*np.moveaxis(offset, -1, 0))
    wide = np.maximum(width[:, None], width)
    goes_on = (ahead >= -wide) & (beside <= wide + NUMBERS.parallel * gap)
    fits = goes_on & goes_on.T & (outward @ outward.T <= -np.sqrt(1 - NUMBERS.parallel**2))
    fits &= gap <= np.maximum(np.minimum(length[:, None], length), wide)
    line_of = np.arange(len(at)) // 2
    of_class = np.repeat(class_ids, 2)
    fits &= (line_of[:, None] < line_of) & (of_class[:, None] == of_class)
    pairs = np.argwhere(fits)
    order = np.argsort(gap[fits], kind="stable")
    return [(int(first), int(second)) for first, second in pairs[order]]
