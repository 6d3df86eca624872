"""Statistics of a data set's labels: how long and how curved the objects of a class are, and in which direction they lie."""

from collections.abc import Callable, Iterable, Sequence

import cv2
import numpy as np

from utils.data.drawn_wires import MAX_SAG
from utils.data.labels import Photo

MIN_LABELS = 10  # of a class, for their lengths to be a fact
LEAST_SPREAD, MOST_SPREAD = (
    0.5,
    1.0,
)  # of the logarithms of lengths; where labels differ more, short objects are not worse
# What labels deviate from a parabola, in their length, for STRAIGHT_SHARE of a class: real wires 0.003, drawn ones 0.005 to 0.009;
# roots of plants 0.017, cracks in roads 0.05, vessels of the retina 0.25. How far they sag is limited to what drawn wires sag
# (MAX_SAG): real wires 0.004, drawn ones 0.03 to 0.08; roots 0.13, cracks 0.23, vessels 0.9.
MAX_BEND, STRAIGHT_SHARE = 0.012, 0.75
BEND_POINTS = 256  # that stand for an outline in `bend_of`
LONG = 3.0  # an object has a direction if its smallest rectangle is this many times as long as wide
MIN_LONG_OBJECTS = 20  # of a class, for their directions to say anything
DIRECTION_PHOTOS = 64  # whose objects' directions are measured, spread over the split


def label_lengths(class_ids: np.ndarray, lengths_px: np.ndarray) -> list[float]:
    """Return how long labels are: class id, median in pixels and spread of each class with MIN_LABELS, one after the other.

    class_ids: int (N,); lengths_px: float (N,), the longer sides of their boxes. The spread is the standard deviation of the
    natural logarithm, LEAST_SPREAD at least. Classes with a spread above MOST_SPREAD are left out.
    """
    facts: list[float] = []
    for class_id in np.unique(class_ids).tolist():
        lengths = np.log(np.maximum(lengths_px[class_ids == class_id], 1))
        spread = max(LEAST_SPREAD, float(lengths.std(ddof=1))) if len(lengths) >= MIN_LABELS else np.inf
        if spread <= MOST_SPREAD:
            facts += [class_id, round(float(np.exp(np.median(lengths))), 1), round(spread, 3)]
    return facts


def class_bends(photos: Iterable[tuple[np.ndarray, Sequence[np.ndarray]]], thin: tuple[int, ...]) -> dict[int, float]:
    """Return for each thin class how curved its labels are: STRAIGHT_SHARE of them are at most that curved, and wires at most 1.

    photos: class ids int (N,) and outlines (V, 2) xy in pixels, of each photograph.
    """
    found: dict[int, list[float]] = {}
    for class_ids, outlines in photos:
        for class_id, outline in zip(class_ids.tolist(), outlines, strict=True):
            if class_id in thin:
                found.setdefault(class_id, []).append(bend_of(outline))
    return {class_id: float(np.quantile(values, STRAIGHT_SHARE)) for class_id, values in found.items()}


def bend_of(outline: np.ndarray) -> float:
    """Return how curved an outline (V, 2) is, relative to what wires are at most.

    Two values count: the deviation from a parabola (root mean square) and the sag, both as shares of the length. Each is divided
    by its limit, and the larger quotient is returned.
    """
    closed = np.vstack([outline, outline[:1]]).astype(float)
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(closed, axis=0).T))])
    places = np.linspace(0, along[-1], BEND_POINTS, endpoint=False)
    points = np.stack([np.interp(places, along, closed[:, axis]) for axis in (0, 1)], axis=1)
    ends, width = long_axis(outline)
    length = float(np.hypot(*(ends[1] - ends[0])))
    if length <= 0:
        return 0.0
    direction = (ends[1] - ends[0]) / length
    x, y = ((points - ends.mean(axis=0)) @ np.array([direction, [-direction[1], direction[0]]]).T / length).T
    beside = float(np.mean((y - np.polyval(np.polyfit(x, y, 2), x)) ** 2))
    half_width = abs(float(cv2.contourArea(outline.astype(np.float32)))) / along[-1] / length
    sag = width / length - 2 * half_width
    return max(float(np.sqrt(max(beside - half_width**2, 0.0))) / MAX_BEND, sag / MAX_SAG)


def long_axis(outline: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the ends of the line through the middle of the smallest rectangle around an outline (V, 2), and its width.

    float64 (2, 2) xy.
    """
    centre, sides, angle_deg = cv2.minAreaRect(outline.astype(np.float32))
    angle = np.radians(angle_deg if sides[0] >= sides[1] else angle_deg + 90)
    half = max(sides) / 2 * np.array([np.cos(angle), np.sin(angle)])
    return np.stack([centre - half, centre + half]), min(sides)


def spread_out(positions: list[int]) -> list[int]:
    """Return at most DIRECTION_PHOTOS of some positions, evenly spread."""
    return positions[:: max(1, len(positions) // DIRECTION_PHOTOS)][:DIRECTION_PHOTOS]


def common_direction(
    photos: list[Photo], size_of: Callable[[int], tuple[int, int]], curved: Sequence[int] = ()
) -> float | None:
    """Return how well the long objects of a class agree in their direction: from 0, no common direction, to 1.

    That is the length of the mean of exp(2i direction) over the objects, for the class where it is largest: photographs in
    which only poles agree have an up, too. Objects of `curved` classes have no direction. None if no class has MIN_LONG_OBJECTS
    long objects in DIRECTION_PHOTOS of the photographs.
    """
    of_class: dict[int, list[complex]] = {}
    for index in spread_out([index for index, photo in enumerate(photos) if len(photo.polygons)]):
        for class_id, outline in zip(photos[index].class_ids.tolist(), photos[index].polygons, strict=True):
            _, (width, height), angle = cv2.minAreaRect((outline * size_of(index)).astype(np.float32))
            if class_id not in curved and max(width, height) >= LONG * min(width, height):
                direction = np.radians(angle if width >= height else angle + 90)
                of_class.setdefault(class_id, []).append(np.exp(2j * direction))
    agreements = [float(abs(np.mean(values))) for values in of_class.values() if len(values) >= MIN_LONG_OBJECTS]
    return max(agreements, default=None)
