"""What a data set's labels say for predictions: how long objects are, at which objects wires end, and how wide they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from utils.data.labels import Photo
from utils.predict.lines import find_lines
from utils.predict.shapes import Line, fill_outline, find_routes
from utils.predict.visible import profiles
from utils.predict.wires import along, canvas_of, outside, parallel_shares, values_at

MIN_CUTS = 3  # labelled wires that go on after an object of a class, so that wires end there
MOST_WIRES, MIN_WIRES = 40, 10  # labelled wires that are compared with the photographs, for their width
MOST_GAIN = 2.0
USUAL = 0.8  # of a class's labels say how parallel wires are
MIN_SHARE = 0.2  # of length that runs alike; with less, wires run in all directions
MAX_SHARE = 0.5  # more is not asked for: two lines may cross
MIN_LABELS, MIN_SPREAD = 10, 0.5  # labels of a class whose lengths are a fact; what their logarithms spread at least
# What a label deviates from a parabola, and how far it sags, in its length, for three quarters of a class: real wires 0.003 and
# 0.004, drawn ones 0.005 to 0.009 and 0.03 to 0.08; plant roots 0.017 and 0.13, cracks in roads 0.05 and 0.23, vessels of the
# retina 0.25 and 0.9. The second limit is the sag of the wires that are drawn.
MOST_BENT, MOST_SAG, BENT_SHARE = 0.012, 0.12, 0.75
OUTLINE_POINTS = 256
LONG = 3.0  # an object has a direction if its smallest rectangle is this many times as long as wide
MIN_OBJECTS = 20  # of a class, for its directions to say anything
PHOTOS = 64  # whose objects are measured, spread over the split
MAX_SPREAD = 1.0  # where labels differ more, a short object is no worse than a long one


@dataclass(frozen=True)
class LabelledPhoto:
    """A photograph's labels: class ids int64 (N,), outlines (V, 2) xy in its pixels, its width and height; `read` it, RGB."""

    class_ids: np.ndarray
    outlines: list[np.ndarray]
    size: tuple[int, int]
    read: Callable[[], np.ndarray]


def label_lengths(class_ids: np.ndarray, lengths_px: np.ndarray) -> list[float]:
    """Return how long labels are: class id, median in pixels and spread of each class with MIN_LABELS, one after the other.

    class_ids: int (N,); lengths_px: float (N,), the longer sides of their boxes. The spread is the standard deviation of the
    natural logarithm, MIN_SPREAD at least. Classes with a spread above MAX_SPREAD are left out.
    """
    facts: list[float] = []
    for class_id in np.unique(class_ids).tolist():
        lengths = np.log(np.maximum(lengths_px[class_ids == class_id], 1))
        spread = max(MIN_SPREAD, float(lengths.std(ddof=1))) if len(lengths) >= MIN_LABELS else np.inf
        if spread <= MAX_SPREAD:
            facts += [class_id, round(float(np.exp(np.median(lengths))), 1), round(spread, 3)]
    return facts


def measure_wire_labels(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> dict[str, Any]:
    """Return the facts of `WireRules` for thin classes, as a model file names them; no width if unknown.

    Curved labels have no direction, so they are neither parallel nor do they continue each other.
    """
    bends = class_bends(((photo.class_ids, photo.outlines) for photo in photos), thin)
    straight = tuple(class_id for class_id in thin if bends.get(class_id, 0.0) <= 1)
    return {
        "wires_end_at": [*classes_at_ends(photos, straight)],
        "wire_width": [*label_width(photos, thin)],
        "wires_parallel": [fact for class_id in straight for fact in parallel_labels(photos, class_id)],
        "wires_bent": [class_id for class_id in thin if class_id not in straight],
    }


def class_bends(photos: Iterable[tuple[np.ndarray, Sequence[np.ndarray]]], thin: tuple[int, ...]) -> dict[int, float]:
    """Return for each thin class how curved BENT_SHARE of its labels are at most; 1 is the most that wires are.

    photos: class ids int (N,) and outlines (V, 2) xy in pixels, of each photograph.
    """
    found: dict[int, list[float]] = {}
    for class_ids, outlines in photos:
        for class_id, outline in zip(class_ids.tolist(), outlines, strict=True):
            if class_id in thin:
                found.setdefault(class_id, []).append(bend_of(outline))
    return {class_id: float(np.quantile(values, BENT_SHARE)) for class_id, values in found.items()}


def bend_of(outline: np.ndarray) -> float:
    """Return how curved an outline (V, 2) is: its deviation from a parabola (root mean square) and its sag, in its length.

    Each is divided by its limit; the larger one counts.
    """
    closed = np.vstack([outline, outline[:1]]).astype(float)
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(closed, axis=0).T))])
    places = np.linspace(0, along[-1], OUTLINE_POINTS, endpoint=False)
    points = np.stack([np.interp(places, along, closed[:, axis]) for axis in (0, 1)], axis=1)
    axis = _axis(outline)
    length = float(np.hypot(*np.diff(axis.points, axis=0)[0]))
    if length <= 0:
        return 0.0
    direction = np.diff(axis.points, axis=0)[0] / length
    x, y = ((points - axis.points.mean(axis=0)) @ np.array([direction, [-direction[1], direction[0]]]).T / length).T
    beside = float(np.mean((y - np.polyval(np.polyfit(x, y, 2), x)) ** 2))
    half_width = abs(float(cv2.contourArea(outline.astype(np.float32)))) / along[-1] / length
    sag = axis.width_px / length - 2 * half_width
    return max(float(np.sqrt(max(beside - half_width**2, 0.0))) / MOST_BENT, sag / MOST_SAG)


def parallel_labels(photos: Sequence[LabelledPhoto], class_id: int) -> tuple[int, float] | tuple[()]:
    """Return a thin class and the `parallel_shares` that USUAL of its labels have, MAX_SHARE at most.

    Nothing if wires run in all directions, or if fewer than MIN_WIRES labels have another one in their photograph.
    """
    shares: list[float] = []
    for photo in photos:
        lines = [_axis(photo.outlines[number]) for number in np.flatnonzero(photo.class_ids == class_id)]
        if len(lines) > 1:
            shares += parallel_shares(lines, np.ones(len(lines))).tolist()
    usual = round(float(np.quantile(shares, 1 - USUAL)), 3) if len(shares) >= MIN_WIRES else 0.0
    return (class_id, min(usual, MAX_SHARE)) if usual >= MIN_SHARE else ()


def classes_at_ends(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> tuple[int, ...]:
    """Return the classes at whose objects the labels of thin classes end, though the wires go on.

    A class is one if more labelled wires continue each other over its objects than pass through them, and MIN_CUTS at least.
    """
    ended: Counter[int] = Counter()
    passed: Counter[int] = Counter()
    for photo in photos:
        is_thin = np.isin(photo.class_ids, thin)
        others = np.unique(photo.class_ids[~is_thin]).tolist()
        lines = [_axis(photo.outlines[number]) for number in np.flatnonzero(is_thin)]
        gaps = [gap for route in find_routes(lines, photo.class_ids[is_thin]) for gap in route.line.gaps]
        for class_id in others if lines else []:
            same = np.flatnonzero(photo.class_ids == class_id)
            canvas = canvas_of((fill_outline(photo.outlines[number], photo.size) for number in same), photo.size)
            passed[class_id] += sum(len(outside(line, along(line, canvas))) > 1 for line in lines)
            ended[class_id] += sum(values_at(np.linspace(gap[0], gap[1], 64), canvas).mean() > 0.5 for gap in gaps)
    return tuple(class_id for class_id in sorted(ended) if ended[class_id] >= max(MIN_CUTS, passed[class_id] + 1))


def _axis(outline: np.ndarray) -> Line:
    """Return the line through the middle of the smallest rectangle around an outline (V, 2)."""
    centre, sides, angle_deg = cv2.minAreaRect(outline.astype(np.float32))
    angle = np.radians(angle_deg if sides[0] >= sides[1] else angle_deg + 90)
    half = max(sides) / 2 * np.array([np.cos(angle), np.sin(angle)])
    return Line(np.stack([centre - half, centre + half]), np.full(2, min(sides)), np.zeros((0, 2, 2)))


def label_width(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> tuple[float, ...]:
    """Return (gain, margin in pixels): labels of thin classes are gain times as wide as what is visible, plus the margin.

    Outlines are drawn with a margin, gain 1; wires that were labelled as lines all have one width, gain 0. The gain is the
    median over all pairs of wires (Theil and Sen). Empty if fewer than MIN_WIRES of those that are looked at can be seen.
    """
    from scipy.stats import theilslopes  # takes 0.5 s

    wires = [(n, k) for n, photo in enumerate(photos) for k in np.flatnonzero(np.isin(photo.class_ids, thin)).tolist()]
    chosen = wires[:: max(1, len(wires) // MOST_WIRES)][:MOST_WIRES]
    visible, labelled = [], []
    for number in sorted({number for number, _ in chosen}):
        photo, picture = photos[number], photos[number].read()
        for outline in (photo.outlines[position] for other, position in chosen if other == number):
            for line in find_lines(fill_outline(outline, photo.size))[:1]:
                _, _, widths = profiles(line, picture)
                if len(widths):
                    visible.append(float(np.median(widths)))
                    labelled.append(line.width_px)
    if len(visible) < MIN_WIRES or np.ptp(visible) == 0:
        return ()
    gain = float(np.clip(theilslopes(labelled, visible).slope, 0, MOST_GAIN))
    return round(gain, 3), round(float(np.median(np.array(labelled) - gain * np.array(visible))), 2)


def spread_out(positions: list[int]) -> list[int]:
    """Return at most PHOTOS of some positions, evenly spread."""
    return positions[:: max(1, len(positions) // PHOTOS)][:PHOTOS]


def common_direction(
    photos: list[Photo], size_of: Callable[[int], tuple[int, int]], curved: Sequence[int] = ()
) -> float | None:
    """Return how well the long objects of a class agree in their direction: from 0, no common direction, to 1.

    That is the length of the mean of exp(2i direction) over the objects, for the class where it is largest: photographs in
    which only poles agree have an up, too. Objects of `curved` classes have no direction. None if no class has MIN_OBJECTS
    long objects in PHOTOS of the photographs.
    """
    of_class: dict[int, list[complex]] = {}
    for index in spread_out([index for index, photo in enumerate(photos) if len(photo.polygons)]):
        for class_id, outline in zip(photos[index].class_ids.tolist(), photos[index].polygons, strict=True):
            _, (width, height), angle = cv2.minAreaRect((outline * size_of(index)).astype(np.float32))
            if class_id not in curved and max(width, height) >= LONG * min(width, height):
                direction = np.radians(angle if width >= height else angle + 90)
                of_class.setdefault(class_id, []).append(np.exp(2j * direction))
    agreements = [float(abs(np.mean(values))) for values in of_class.values() if len(values) >= MIN_OBJECTS]
    return max(agreements, default=None)
