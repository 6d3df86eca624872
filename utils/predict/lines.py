"""The lines that a mask shows: a centreline, a width and gaps each.

The parabola that most of a mask lies about is its line, bent a little to the mask: what the mask has of a crossarm, a shadow
or a second wire does not move it. A mask that bends more, such as a jumper's loop, keeps its medial axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import cv2
import numpy as np

from utils.predict.regions import Region
from utils.predict.shapes import Line, centreline

STEP_PX = 4.0  # thickness of a slice
MIN_GAP_PX = 16.0  # between slices; less is the mask's ragged edge
MIN_SHARE, MOST_LINES = 0.15, 8  # of a mask's pixels, so that they are a further line; lines of a mask
EXPLAINED = 0.95  # share of a mask's pixels about its line; with less it may be a band that bends
NUM_POINTS, NUM_GUESSES = 256, 256  # of a mask, and parabolas tried through three of them
MAX_SAG = 0.1  # of a guess, in its length
TUKEY = 4.685  # of Tukey's biweight, in standard deviations: 95 % efficient for normal errors
ROUNDS, MOST_ROUNDS = 5, 32  # of a robust fit; in which a line grows
REACH, KNOT_WIDTHS = 1.5, 16.0  # in widths: where a parabola's slices are looked for at first; between knots
CHORD_PX = 0.1  # how far the points' polyline may lie from the curve
MIN_LENGTH = 4.0  # of a line, in widths: shorter ones have no direction
BAND, MAX_TURN = 0.9, 0.5  # the least share of the mask's pixels; radians in two widths, at most


@dataclass(frozen=True, eq=False)
class Curve:
    """A parabola, and how far the wire lies beside it at some knots, linear between them.

    In the frame of `axes` (2, 2), columns along and across, and `centre` (2,): across = polynomial(along) + offset.
    """

    centre: np.ndarray
    axes: np.ndarray
    polynomial: np.ndarray  # float64 (3,), highest power first
    knots: np.ndarray = field(default_factory=lambda: np.zeros(1))  # float64 (M,), ascending
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(1))  # float64 (M,)

    def across(self, along: np.ndarray) -> np.ndarray:
        """Return where the line lies across its axis, float64 like `along`."""
        result: np.ndarray = np.polyval(self.polynomial, along) + np.interp(along, self.knots, self.offsets)
        return result

    def local(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where points (N, 2) xy lie along the line, and how far beside it."""
        along, across = ((points - self.centre) @ self.axes).T
        return along, across - self.across(along)

    def at(self, along: np.ndarray) -> np.ndarray:
        """Return points of the line, float64 (K, 2) xy."""
        return np.stack([along, self.across(along)], axis=1) @ self.axes.T + self.centre

    def stretch(self, along: np.ndarray) -> np.ndarray:
        """Return the line's length per length along its axis."""
        return np.hypot(1, np.polyval(np.polyder(self.polynomial), along))

    @classmethod
    def guess(cls, points: np.ndarray, width: float) -> Curve:
        """Return of the parabolas through three of the points (N, 2) that with most points within half a width."""
        first, middle, last = np.random.default_rng(0).integers(len(points), size=(3, NUM_GUESSES))
        length = np.hypot(*(points[last] - points[first]).T)
        kept = length > 2 * width
        if not kept.any():
            return cls._level(points)
        first, middle, last, length = first[kept], middle[kept], last[kept], length[kept]
        along = (points[last] - points[first]) / length[:, None]
        across = np.stack([-along[:, 1], along[:, 0]], axis=1)
        offsets = points[None] - points[first][:, None]  # (guesses, points, 2)
        x, y = ((offsets @ axis[..., None])[..., 0] / length[:, None] for axis in (along, across))
        row = np.arange(len(x))
        share = x[row, middle]
        bend = np.where((share > 0.2) & (share < 0.8), y[row, middle] / (share * (1 - share)).clip(0.1), 0)
        bend = np.where(np.abs(bend) <= 4 * MAX_SAG, bend, 0)[:, None]  # the sag is a quarter of it
        near = np.abs(y - bend * x * (1 - x)) * length[:, None] <= max(width / 2, 2.0)
        best = int(near.sum(axis=1).argmax())
        scale, value = length[best], bend[best, 0]
        axes = np.stack([along[best], across[best]], axis=1)
        return cls(points[first[best]], axes, np.array([-value / scale, value, 0.0]))

    @classmethod
    def _level(cls, points: np.ndarray) -> Curve:
        """Return the straight line through the points' centre in their main direction."""
        centre = points.mean(axis=0)
        axes = np.linalg.eigh((points - centre).T @ (points - centre))[1][:, ::-1]
        return cls(centre, axes, np.zeros(3))

    def refit(self, middles: np.ndarray, weights: np.ndarray, is_short: bool) -> Curve:
        """Fit to points so that those far from it have no weight (iteratively reweighted, Tukey's biweight)."""
        along, across = ((middles - self.centre) @ self.axes).T
        scale = max(float(np.abs(along).max()), 1.0)
        degree = min(1 if is_short else 2, len(along) - 1)
        trust, polynomial = np.ones(len(along)), np.zeros(3)
        for _ in range(ROUNDS):
            fitted = np.polyfit(along / scale, across, degree, w=np.sqrt(trust * weights))
            polynomial = np.concatenate([np.zeros(2 - degree), fitted]) / scale ** np.arange(2, -1, -1)
            residuals = np.abs(across - np.polyval(polynomial, along))
            sigma = 1.4826 * float(np.median(residuals)) + 0.25
            trust = (1 - (residuals / (TUKEY * sigma)).clip(max=1) ** 2) ** 2 + 1e-9
        return Curve(self.centre, self.axes, polynomial)

    def bent(self, middles: np.ndarray, weights: np.ndarray, width: float) -> Curve:
        """Return the parabola with offsets fitted to points, in the same way, at knots KNOT_WIDTHS apart."""
        along, across = ((middles - self.centre) @ self.axes).T
        residuals = across - np.polyval(self.polynomial, along)
        count = 1 + round(float(np.ptp(along)) / (KNOT_WIDTHS * width))
        if count < 3 or len(along) < 4 * count:
            return self
        knots = np.linspace(along.min(), along.max(), count)
        hats = np.stack([np.interp(along, knots, hat) for hat in np.eye(count)], axis=1)
        trust = np.ones(len(along))
        for _ in range(ROUNDS):
            weighted = hats * (trust * weights)[:, None]
            stiff = 1e-3 * float(weights.sum()) / count * np.eye(count)  # knots without slices stay on the parabola
            offsets = np.linalg.solve(hats.T @ weighted + stiff, weighted.T @ residuals)
            errors = np.abs(residuals - hats @ offsets)
            sigma = 1.4826 * float(np.median(errors)) + 0.25
            trust = (1 - (errors / (TUKEY * sigma)).clip(max=1) ** 2) ** 2 + 1e-9
        # One more on each side, where the last two lead.
        outer = [2 * values[[0, -1]] - values[[1, -2]] for values in (knots, offsets)]
        knots, offsets = (np.insert(ends, 1, inner) for ends, inner in zip(outer, (knots, offsets), strict=True))
        return replace(self, knots=knots, offsets=offsets)


@dataclass(frozen=True, eq=False)
class Wire:
    """The part of some masks that lies about a parabola, cut across it into slices STEP_PX thick."""

    curve: Curve
    along: np.ndarray  # float64 (K,), ascending: the slices' places
    middles: np.ndarray  # float64 (K, 2) xy
    widths: np.ndarray  # float64 (K,), across the line
    explained: float  # share of the masks' pixels in the slices

    @classmethod
    def of(cls, points: np.ndarray, width: float, curve: Curve | None = None) -> Wire | None:
        """Return the wire among the pixels' centres (N, 2) xy of masks about `width` wide; None: there is none."""
        curve = curve or Curve.guess(points[:: max(1, len(points) // NUM_POINTS)], width)
        for reach in (REACH, 1.0):  # in widths, to both sides
            wire = cls._about(curve, points, max(reach * width, 2.0))
            if wire is None:
                return None
            curve = curve.refit(wire.middles, wire.widths, len(wire.along) * STEP_PX < 2 * MIN_LENGTH * width)
        length = 0.0
        # Over several spans a wire is no parabola: each round follows it to the next knots.
        for _ in range(MOST_ROUNDS):
            wire = cls._about(curve, points, max(width, 2.0))
            if wire is None or np.ptp(wire.ends) < length + STEP_PX:
                break
            length = float(np.ptp(wire.ends))
            curve = curve.bent(wire.middles, wire.widths, width)
        wire = cls._about(curve, points, max(0.75 * width, 2.0))
        is_long = wire is not None and len(wire.along) * STEP_PX >= MIN_LENGTH * float(np.median(wire.widths))
        return wire if is_long else None

    @classmethod
    def _about(cls, curve: Curve, points: np.ndarray, reach: float) -> Wire | None:
        along, beside = curve.local(points)
        near = np.abs(beside) <= reach * curve.stretch(along)
        if np.count_nonzero(near) < 2 * STEP_PX:
            return None
        start = float(along[near].min())
        number = ((along[near] - start) / STEP_PX).astype(np.int64)
        counts = np.bincount(number)
        kept = _without_islands(np.flatnonzero(counts))
        middles = np.stack([np.bincount(number, axis)[kept] / counts[kept] for axis in points[near].T], axis=1)
        places = start + (kept + 0.5) * STEP_PX
        widths = counts[kept] / STEP_PX / curve.stretch(places)
        return cls(curve, places, middles, widths, float(counts[kept].sum()) / len(points))

    @cached_property
    def ends(self) -> np.ndarray:
        """Where the line begins and ends along its axis: float64 (2,)."""
        return self.along[[0, -1]] + (-STEP_PX / 2, STEP_PX / 2)

    def line(self) -> Line:
        """Return the line, as wide as its slices: linear in their place, because a wire far away is thinner."""
        curve, (first, last) = self.curve, self.ends
        sagitta = abs(curve.polynomial[0]) * (last - first) ** 2 / 4
        along = np.linspace(first, last, 2 + int(np.ceil((sagitta / CHORD_PX) ** 0.5)))
        is_inner = (curve.knots > first + STEP_PX) & (curve.knots < last - STEP_PX) & curve.offsets.any()
        along = np.unique(np.concatenate([along, curve.knots[is_inner]]))
        wide = np.flatnonzero(np.diff(self.along) > MIN_GAP_PX + STEP_PX)
        gaps = [curve.at(self.along[[number, number + 1]] + (STEP_PX / 2, -STEP_PX / 2)) for number in wide]
        return Line(curve.at(along), _trend(self.along, self.widths, along), np.array(gaps).reshape(-1, 2, 2))


def _without_islands(numbers: np.ndarray) -> np.ndarray:
    """Return ascending slices' numbers without those at an end that are fewer than the missing ones before them."""
    cuts = np.flatnonzero(np.diff(numbers) > MIN_GAP_PX / STEP_PX)
    parts = np.split(numbers, cuts + 1)
    longest = int(np.argmax([len(part) for part in parts]))
    first = last = longest
    while last + 1 < len(parts) and len(parts[last + 1]) >= parts[last + 1][0] - parts[last][-1]:
        last += 1
    while first > 0 and len(parts[first - 1]) >= parts[first][0] - parts[first - 1][-1]:
        first -= 1
    return np.concatenate(parts[first : last + 1])


def _trend(along: np.ndarray, widths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return a straight line through widths at `wanted` places, between half and twice their median."""
    median = float(np.median(widths))
    near = np.abs(widths - median) <= median / 2
    if np.count_nonzero(near) < 16:
        return np.full(len(wanted), median)
    centre = along.mean()
    slope, level = np.polyfit(along[near] - centre, widths[near], 1)
    trend: np.ndarray = (slope * (wanted - centre) + level).clip(median / 2, 2 * median)
    return trend


def find_lines(region: Region) -> list[Line]:
    """Return the lines that a mask shows, that with most pixels first; none if it is too short or empty."""
    if not region.mask.any():
        return []
    rows, columns = np.nonzero(region.mask)
    points = np.stack([columns + (region.left + 0.5), rows + (region.top + 0.5)], axis=1)
    width, total = _width_of(region.mask), len(points)
    lines: list[Line] = []
    while len(points) > MIN_SHARE * total and len(lines) < MOST_LINES:
        wire = Wire.of(points, width)
        if wire is None:
            break
        share = wire.explained * len(points) / total
        if not lines and share < EXPLAINED and (bent := medial_line(region, width)):
            return [bent]
        if lines and (share < MIN_SHARE or np.ptp(wire.ends) < 2 * MIN_LENGTH * width):
            break
        lines.append(wire.line())
        along, beside = wire.curve.local(points)
        points = points[np.abs(beside) > width * wire.curve.stretch(along)]
    return lines


def _width_of(mask: np.ndarray) -> float:
    """Return a thin mask's width: the mean distance to its edge is a quarter of it."""
    distances = cv2.distanceTransform(np.pad(mask.view(np.uint8), 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    return max(4 * float(distances[mask].mean()) - 1, 1.0)


def medial_line(region: Region, width: float) -> Line | None:
    """Return the medial axis of a mask that is one band without corners; None: it has branches, parts or corners."""
    path = _longest_path(centreline(region)) + 0.5
    reach = max(1, round(2 * width))
    if len(path) < MIN_LENGTH * reach:
        return None
    kernel = np.ones(2 * reach + 1) / (2 * reach + 1)
    padded = np.pad(path, ((reach, reach), (0, 0)), mode="reflect", reflect_type="odd")
    smooth = np.stack([np.convolve(axis, kernel, mode="valid") for axis in padded.T], axis=1)
    points = smooth[np.unique(np.linspace(0, len(smooth) - 1, 2 + len(smooth) // reach).round().astype(int))]
    steps = np.diff(points, axis=0)
    turns = np.abs(np.angle(np.exp(1j * np.diff(np.arctan2(steps[:, 1], steps[:, 0])))))
    aside = np.ones(region.mask.shape, np.uint8)
    aside[*(path - (region.left, region.top)).astype(int).T[::-1]] = 0
    near = cv2.distanceTransform(aside, cv2.DIST_L2, 3)[region.mask] <= max(width, 2.0)
    if turns.max(initial=0) > MAX_TURN or np.count_nonzero(near) < BAND * len(near):
        return None
    line = Line(points, np.zeros(len(points)), np.zeros((0, 2, 2)))
    return replace(line, widths=np.full(len(points), np.count_nonzero(near) / line.length_px))


def _longest_path(pixels: np.ndarray) -> np.ndarray:
    """Return the pixels (N, 2) xy on the shortest way between the two of a thin line that are farthest apart."""
    from scipy.sparse import coo_array  # takes 0.2 s, and few masks bend
    from scipy.sparse.csgraph import dijkstra
    from scipy.spatial import cKDTree

    pairs = cKDTree(pixels).query_pairs(1.5, output_type="ndarray")
    lengths = np.hypot(*(pixels[pairs[:, 0]] - pixels[pairs[:, 1]]).T)
    graph = coo_array((lengths, pairs.T), shape=(len(pixels),) * 2).tocsr()
    start = 0
    for _ in range(2):  # from any pixel to the farthest one, and from there
        distances, before = dijkstra(graph, directed=False, indices=start, return_predecessors=True)
        first, start = start, int(np.where(np.isfinite(distances), distances, -1).argmax())
    path = [start]
    while path[-1] != first:
        path.append(int(before[path[-1]]))
    return pixels[path].astype(np.float64)
