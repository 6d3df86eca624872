"""The lines in a mask: each has a centreline, a width and gaps.

A line is the parabola that most of the mask's pixels lie about, bent a little towards them. A
crossarm, a shadow or a second wire in the same mask does not move it. A mask that bends more, such
as a jumper's loop, keeps its medial axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import cv2
import numpy as np

from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.predict.thinning import centreline

SLICE_PX = NUMBERS.step_px
# points that stand for a mask, and parabolas that are tried through three of them
NUM_GUESSES = 256
FIT_ROUNDS, GROWTH_ROUNDS = 5, 32  # of a robust fit; in which a line grows along its mask
TUKEY = 4.685  # of Tukey's biweight, in standard deviations: 95 % efficient for normal errors
CHORD_PX = 0.1  # how far the points' polyline may lie from the curve
MOST_LINES = 8  # of a mask


@dataclass(frozen=True, eq=False)
class Curve:
    """A parabola, and how far the line lies beside it: offsets at some knots, linear between them.

    across = polynomial(along) + offset, in a frame with its origin in `centre` (2,) and the columns
    of `axes` (2, 2) along and across the line.
    """

    centre: np.ndarray
    axes: np.ndarray
    polynomial: np.ndarray  # float64 (3,), highest power first
    knots: np.ndarray = field(default_factory=lambda: np.zeros(1))  # float64 (M,), ascending
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(1))  # float64 (M,)

    def across(self, along: np.ndarray) -> np.ndarray:
        """Return how far the line lies beside its axis at places along it, float64 like `along`."""
        result: np.ndarray = np.polyval(self.polynomial, along) + np.interp(
            along, self.knots, self.offsets
        )
        return result

    def local(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how far along the axis points (N, 2) xy lie, and how far beside the line."""
        along, across = ((points - self.centre) @ self.axes).T
        return along, across - self.across(along)

    def at(self, along: np.ndarray) -> np.ndarray:
        """Return the line's points at places along the axis (K,): float64 (K, 2) xy."""
        return np.stack([along, self.across(along)], axis=1) @ self.axes.T + self.centre

    def stretch(self, along: np.ndarray) -> np.ndarray:
        """Return how long the line is per pixel along its axis, at places (K,): float64 (K,)."""
        return np.hypot(1, np.polyval(np.polyder(self.polynomial), along))

    @classmethod
    def guess(cls, points: np.ndarray, width: float) -> Curve:
        """Draw parabolas through three random points each; return the one with the most points (N,
        2) within half a width.
        """
        first, middle, last = np.random.default_rng(0).integers(len(points), size=(3, NUM_GUESSES))
        length = np.hypot(*(points[last] - points[first]).T)
        kept = length > 2 * width
        # The straight line through the points' centre in their main direction.
        if not kept.any():
            centre = points.mean(axis=0)
            axes = np.linalg.eigh((points - centre).T @ (points - centre))[1][:, ::-1]
            return cls(centre, axes, np.zeros(3))
        first = first[kept]
        middle = middle[kept]
        last = last[kept]
        length = length[kept]
        along = (points[last] - points[first]) / length[:, None]
        across = np.stack([-along[:, 1], along[:, 0]], axis=1)
        offsets = points[None] - points[first][:, None]  # (guesses, points, 2)
        x, y = ((offsets @ axis[..., None])[..., 0] / length[:, None] for axis in (along, across))
        row = np.arange(len(x))
        share = x[row, middle]
        bend = np.where(
            (share > 0.2) & (share < 0.8), y[row, middle] / (share * (1 - share)).clip(0.1), 0
        )[:, None]
        near = np.abs(y - bend * x * (1 - x)) * length[:, None] <= max(width / 2, 2.0)
        best = int(near.sum(axis=1).argmax())
        scale = length[best]
        value = bend[best, 0]
        axes = np.stack([along[best], across[best]], axis=1)
        return cls(points[first[best]], axes, np.array([-value / scale, value, 0.0]))

    def refit(self, middles: np.ndarray, weights: np.ndarray, is_short: bool) -> Curve:
        """Fit a parabola, or a straight line if `is_short`, to points (K, 2); points far from it
        lose their weight.
        """
        along, across = ((middles - self.centre) @ self.axes).T
        scale = max(float(np.abs(along).max()), 1.0)
        degree = min(1 if is_short else 2, len(along) - 1)
        trust = np.ones(len(along))
        polynomial = np.zeros(3)
        for _ in range(FIT_ROUNDS):
            fitted = np.polyfit(along / scale, across, degree, w=np.sqrt(trust * weights))
            polynomial = np.concatenate([np.zeros(2 - degree), fitted]) / scale ** np.arange(
                2, -1, -1
            )
            trust = _trust(np.abs(across - np.polyval(polynomial, along)))
        return Curve(self.centre, self.axes, polynomial)

    def bent(self, middles: np.ndarray, weights: np.ndarray, width: float) -> Curve:
        """Return the parabola with offsets that are fitted to points (K, 2) in the same way, at
        knots `knot_widths` apart.
        """
        along, across = ((middles - self.centre) @ self.axes).T
        residuals = across - np.polyval(self.polynomial, along)
        count = 1 + round(float(np.ptp(along)) / (NUMBERS.knot_widths * width))
        if count < 3 or len(along) < 4 * count:
            return self
        knots = np.linspace(along.min(), along.max(), count)
        hats = np.stack([np.interp(along, knots, hat) for hat in np.eye(count)], axis=1)
        trust = np.ones(len(along))
        for _ in range(FIT_ROUNDS):
            weighted = hats * (trust * weights)[:, None]
            # knots without slices stay on the parabola
            stiff = 1e-3 * float(weights.sum()) / count * np.eye(count)
            offsets = np.linalg.solve(hats.T @ weighted + stiff, weighted.T @ residuals)
            trust = _trust(np.abs(residuals - hats @ offsets))
        # One more knot on each side continues the last two, so that the line can grow.
        outer = [2 * values[[0, -1]] - values[[1, -2]] for values in (knots, offsets)]
        knots, offsets = (
            np.insert(ends, 1, inner) for ends, inner in zip(outer, (knots, offsets), strict=True)
        )
        return replace(self, knots=knots, offsets=offsets)


def _trust(errors: np.ndarray) -> np.ndarray:
    """Return weights for errors in pixels (N,), from nearly 0 for outliers
    to 1: Tukey's biweight.
    """
    sigma = 1.4826 * float(np.median(errors)) + 0.25
    weights: np.ndarray = (1 - (errors / (TUKEY * sigma)).clip(max=1) ** 2) ** 2 + 1e-9
    return weights


@dataclass(frozen=True, eq=False)
class SlicedMask:
    """The pixels of a mask that lie near a curve, cut across the
    curve into slices SLICE_PX thick.
    """

    curve: Curve
    along: np.ndarray  # float64 (K,), ascending: where the slices are along the curve's axis
    middles: np.ndarray  # float64 (K, 2) xy
    widths: np.ndarray  # float64 (K,), across the curve
    explained: float  # share of the mask's pixels in the slices

    @classmethod
    def of(cls, points: np.ndarray, width: float, curve: Curve | None = None) -> SlicedMask | None:
        """Find the curve that most pixels of a mask about `width` wide lie along; None if it is too
        short.

        points: the pixels' centres (N, 2) xy. curve: a first guess, if there is one.
        """
        curve = curve or Curve.guess(points[:: max(1, len(points) // NUM_GUESSES)], width)
        for reach in (NUMBERS.reach_widths, 1.0):  # in widths, to both sides
            part = cls._near(curve, points, max(reach * width, 2.0))
            if part is None:
                return None
            is_short = len(part.along) * SLICE_PX < 2 * NUMBERS.min_length_widths * width
            curve = curve.refit(part.middles, part.widths, is_short)
        length = 0.0
        # Over several spans a wire is no parabola: each round follows it to the next knots.
        for _ in range(GROWTH_ROUNDS):
            part = cls._near(curve, points, max(width, 2.0))
            if part is None or np.ptp(part.ends) < length + SLICE_PX:
                break
            length = float(np.ptp(part.ends))
            curve = curve.bent(part.middles, part.widths, width)
        part = cls._near(curve, points, max(0.75 * width, 2.0))
        if part is None or len(part.along) * SLICE_PX < NUMBERS.min_length_widths * float(
            np.median(part.widths)
        ):
            return None
        return part

    @classmethod
    def _near(cls, curve: Curve, points: np.ndarray, reach: float) -> SlicedMask | None:
        """Slice the pixels within `reach` of a curve; None if they are few."""
        along, beside = curve.local(points)
        near = np.abs(beside) <= reach * curve.stretch(along)
        if np.count_nonzero(near) < 2 * SLICE_PX:
            return None
        start = float(along[near].min())
        number = ((along[near] - start) / SLICE_PX).astype(np.int64)
        counts = np.bincount(number)
        kept = _without_islands(np.flatnonzero(counts))
        middles = np.stack(
            [np.bincount(number, axis)[kept] / counts[kept] for axis in points[near].T], axis=1
        )
        places = start + (kept + 0.5) * SLICE_PX
        widths = counts[kept] / SLICE_PX / curve.stretch(places)
        return cls(curve, places, middles, widths, float(counts[kept].sum()) / len(points))

    @cached_property
    def ends(self) -> np.ndarray:
        """Where the slices begin and end along the axis: float64 (2,)."""
        return self.along[[0, -1]] + (-SLICE_PX / 2, SLICE_PX / 2)

    def line(self) -> Line:
        """Return the line.

        Its width follows that of the slices and changes evenly along it: far away a wire is
        thinner.
        """
        curve, (first, last) = self.curve, self.ends
        sagitta = abs(curve.polynomial[0]) * (last - first) ** 2 / 4
        along = np.linspace(first, last, 2 + int(np.ceil((sagitta / CHORD_PX) ** 0.5)))
        is_inner = (
            (curve.knots > first + SLICE_PX) & (curve.knots < last - SLICE_PX) & curve.offsets.any()
        )
        along = np.unique(np.concatenate([along, curve.knots[is_inner]]))
        wide = np.flatnonzero(np.diff(self.along) > NUMBERS.min_gap_px + SLICE_PX)
        gaps = [
            curve.at(self.along[[number, number + 1]] + (SLICE_PX / 2, -SLICE_PX / 2))
            for number in wide
        ]
        return Line(
            curve.at(along),
            _trend(self.along, self.widths, along),
            np.array(gaps).reshape(-1, 2, 2),
        )


def _without_islands(numbers: np.ndarray) -> np.ndarray:
    """Leave out slices at an end that are shorter than the gap before them; numbers: of the slices,
    ascending.
    """
    cuts = np.flatnonzero(np.diff(numbers) > NUMBERS.min_gap_px / SLICE_PX)
    parts = np.split(numbers, cuts + 1)
    longest = int(np.argmax([len(part) for part in parts]))
    first = last = longest
    while last + 1 < len(parts) and len(parts[last + 1]) >= parts[last + 1][0] - parts[last][-1]:
        last += 1
    while first > 0 and len(parts[first - 1]) >= parts[first][0] - parts[first - 1][-1]:
        first -= 1
    return np.concatenate(parts[first : last + 1])


def _trend(along: np.ndarray, widths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Fit widths at places `along` a line by a straight line; return it at `wanted` places, within
    half and twice the median.
    """
    median = float(np.median(widths))
    near = np.abs(widths - median) <= median / 2
    if np.count_nonzero(near) < 16:
        return np.full(len(wanted), median)
    centre = along.mean()
    slope, level = np.polyfit(along[near] - centre, widths[near], 1)
    trend: np.ndarray = (slope * (wanted - centre) + level).clip(median / 2, 2 * median)
    return trend


def find_lines(region: Region) -> list[Line]:
    """Return the lines in a mask, the one with the most pixels first; none if the mask is too short
    or empty.
    """
    if not region.mask.any():
        return []
    rows, columns = np.nonzero(region.mask)
    points = np.stack([columns + (region.left + 0.5), rows + (region.top + 0.5)], axis=1)
    width = _width_of(region.mask)
    total = len(points)
    lines: list[Line] = []
    while len(points) > NUMBERS.further_share * total and len(lines) < MOST_LINES:
        part = SlicedMask.of(points, width)
        if part is None:
            break
        share = part.explained * len(points) / total
        if not lines and share < NUMBERS.band_share and (bent := medial_line(region, width)):
            return [bent]
        is_short = np.ptp(part.ends) < 2 * NUMBERS.min_length_widths * width
        if lines and (share < NUMBERS.further_share or is_short):
            break
        lines.append(part.line())
        along, beside = part.curve.local(points)
        points = points[np.abs(beside) > width * part.curve.stretch(along)]
    return lines


def _width_of(mask: np.ndarray) -> float:
    """Return a thin mask's width, which is four times the mean distance of
    its pixels to the edge.
    """
    distances = cv2.distanceTransform(np.pad(mask.view(np.uint8), 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    return max(4 * float(distances[mask].mean()) - 1, 1.0)


def band_line(region: Region) -> Line | None:
    """Return the centreline of a mask that is a single band, however it bends; None for any other
    mask.
    """
    return medial_line(region, _width_of(region.mask)) if region.mask.any() else None


def medial_line(region: Region, width: float) -> Line | None:
    """Return the medial axis of a mask that is a single band; None if the mask has branches, parts
    or corners.
    """
    path = _longest_path(centreline(region)) + 0.5
    reach = max(1, round(2 * width))
    if len(path) < NUMBERS.min_length_widths * reach:
        return None
    kernel = np.ones(2 * reach + 1) / (2 * reach + 1)
    padded = np.pad(path, ((reach, reach), (0, 0)), mode="reflect", reflect_type="odd")
    smooth = np.stack([np.convolve(axis, kernel, mode="valid") for axis in padded.T], axis=1)
    points = smooth[
        np.unique(np.linspace(0, len(smooth) - 1, 2 + len(smooth) // reach).round().astype(int))
    ]
    steps = np.diff(points, axis=0)
    turns = np.abs(np.angle(np.exp(1j * np.diff(np.arctan2(steps[:, 1], steps[:, 0])))))
    aside = np.ones(region.mask.shape, np.uint8)
    aside[*(path - (region.left, region.top)).astype(int).T[::-1]] = 0
    near = cv2.distanceTransform(aside, cv2.DIST_L2, 3)[region.mask] <= max(width, 2.0)
    if turns.max(initial=0) > NUMBERS.max_turn or np.count_nonzero(near) < NUMBERS.band_share * len(
        near
    ):
        return None
    line = Line(points, np.zeros(len(points)), np.zeros((0, 2, 2)))
    return replace(line, widths=np.full(len(points), np.count_nonzero(near) / line.length_px))


def _longest_path(pixels: np.ndarray) -> np.ndarray:
    """Return the longest of the shortest paths between two pixels (N, 2) xy of a thinned mask:
    float64 (M, 2).
    """
    # Its import takes 0.2 s, and few masks bend.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import dijkstra
    from scipy.spatial import cKDTree

    pairs = cKDTree(pixels).query_pairs(1.5, output_type="ndarray")
    lengths = np.hypot(*(pixels[pairs[:, 0]] - pixels[pairs[:, 1]]).T)
    graph = coo_array((lengths, pairs.T), shape=(len(pixels),) * 2).tocsr()
    start = 0
    # From any pixel to the farthest one, and from there again.
    for _ in range(2):
        distances, before = dijkstra(graph, directed=False, indices=start, return_predecessors=True)
        first = start
        start = int(np.where(np.isfinite(distances), distances, -1).argmax())
    path = [start]
    while path[-1] != first:
        path.append(int(before[path[-1]]))
    return pixels[path].astype(np.float64)
