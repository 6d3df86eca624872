"""How a data set's labels show wires: at which objects they end, and how much wider they are than the wires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from utils.predict.lines import find_lines
from utils.predict.routes import find_routes
from utils.predict.shapes import Line, fill_outline
from utils.predict.visible import profiles
from utils.predict.wires import canvas_of, outside, values_at

MIN_CUTS = 3  # labelled wires that go on behind objects of a class, so that wires end there
MOST_WIRES, MIN_WIRES = 64, 10  # labelled wires that are compared with the photographs; for a margin


@dataclass(frozen=True)
class LabelledPhoto:
    """A photograph's labels: class ids int64 (N,), outlines (V, 2) xy in its pixels, its width and height; `read` it, RGB."""

    class_ids: np.ndarray
    outlines: list[np.ndarray]
    size: tuple[int, int]
    read: Callable[[], np.ndarray]


def measure_wire_labels(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> dict[str, Any]:
    """Return the facts `end_at` and `margin_px` of `WireRules` for thin classes, as a model file names them."""
    return {"wires_end_at": [*classes_at_ends(photos, thin)], "wire_margin_px": label_margin_px(photos, thin)}


def classes_at_ends(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> tuple[int, ...]:
    """Return the classes at whose objects the labels of thin classes end, though the wires go on behind them.

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
            passed[class_id] += sum(len(outside(line, canvas)) > 1 for line in lines)
            ended[class_id] += sum(values_at(np.linspace(gap[0], gap[1], 64), canvas).mean() > 0.5 for gap in gaps)
    return tuple(class_id for class_id in sorted(ended) if ended[class_id] >= max(MIN_CUTS, passed[class_id] + 1))


def _axis(outline: np.ndarray) -> Line:
    """Return the line through the middle of the smallest rectangle around an outline (V, 2)."""
    centre, sides, angle_deg = cv2.minAreaRect(outline.astype(np.float32))
    angle = np.radians(angle_deg if sides[0] >= sides[1] else angle_deg + 90)
    half = max(sides) / 2 * np.array([np.cos(angle), np.sin(angle)])
    return Line(np.stack([centre - half, centre + half]), np.full(2, min(sides)), np.zeros((0, 2, 2)))


def label_margin_px(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> float | None:
    """Return by how many pixels labels of thin classes are wider than the wires that the photographs show, the median.

    None if fewer than MIN_WIRES of the MOST_WIRES that are looked at can be seen.
    """
    wires = [(n, k) for n, photo in enumerate(photos) for k in np.flatnonzero(np.isin(photo.class_ids, thin)).tolist()]
    chosen = wires[:: max(1, len(wires) // MOST_WIRES)][:MOST_WIRES]
    margins = []
    for number in sorted({number for number, _ in chosen}):
        photo, picture = photos[number], photos[number].read()
        for outline in (photo.outlines[position] for other, position in chosen if other == number):
            for line in find_lines(fill_outline(outline, photo.size))[:1]:
                _, _, widths = profiles(line, picture)
                margins += [line.width_px - float(np.median(widths))] if len(widths) else []
    return round(float(np.median(margins)), 1) if len(margins) >= MIN_WIRES else None
