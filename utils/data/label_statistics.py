"""Statistics of a data set's labels: how long the objects of a class are, and whether they agree in their direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cv2
import numpy as np

from utils.data.labels import Photo

MIN_LABELS = 10  # of a class, for their lengths to be a fact
LEAST_SPREAD, MOST_SPREAD = (
    0.5,
    1.0,
)  # of the logarithms of lengths; where labels differ more, short objects are not worse
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
