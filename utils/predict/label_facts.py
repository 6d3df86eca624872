"""What a data set's labels say for predictions: how long objects are, at which objects wires end, and how wide they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

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
    """Return the facts of `WireRules` for thin classes, as a model file names them; no width if unknown."""
    return {
        "wires_end_at": [*classes_at_ends(photos, thin)],
        "wire_width": [*label_width(photos, thin)],
        "wires_parallel": [fact for class_id in thin for fact in parallel_labels(photos, class_id)],
    }


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
