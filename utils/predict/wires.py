"""Wires as lines: detections of thin classes become lines, as confident as they look like a wire, cut where labels end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import cv2
import numpy as np
import torch

from utils.predict.detections import Detections, PhotoPrediction, Placement, boxes_to_input
from utils.predict.joining import MOSTLY
from utils.predict.likeness import length_factor, likeness
from utils.predict.lines import STEP_PX, find_lines
from utils.predict.medial import MIN_LENGTH
from utils.predict.regions import LazyRegions, Region
from utils.predict.routes import find_routes
from utils.predict.shapes import Line, fill_outline

# Less confident detections keep their masks: they are most of those that AP asks for, and change it by 0.001.
MIN_SCORE = 0.02
END_SCORE = 0.25  # of an object at which wires end
MIN_CUTS = 3  # labelled wires that go on behind objects of a class, so that wires end there
Labels = tuple[
    np.ndarray, list[np.ndarray], tuple[int, int]
]  # class ids, outlines in pixels, the photograph's width and height


@dataclass(frozen=True)
class WireRules:
    """Which classes become lines, and at which classes' objects the lines end because labels do."""

    classes: tuple[int, ...] = ()
    end_at: tuple[int, ...] = ()


def classes_at_ends(photos: Iterable[Labels], thin: tuple[int, ...]) -> tuple[int, ...]:
    """Return the classes at whose objects the labels of thin classes end, though the wires go on behind them.

    A class is one if more labelled wires continue each other over its objects than pass through them, and MIN_CUTS at least.
    """
    ended: Counter[int] = Counter()
    passed: Counter[int] = Counter()
    for class_ids, outlines, size in photos:
        others = sorted({class_id for class_id in class_ids.tolist() if class_id not in thin})
        is_thin = np.isin(class_ids, thin)
        if not others or not is_thin.any():
            continue
        lines = [_axis(outlines[number]) for number in np.flatnonzero(is_thin)]
        gaps = [gap for route in find_routes(lines, class_ids[is_thin]) for gap in route.line.gaps]
        for class_id in others:
            canvas = _drawn(
                (fill_outline(outlines[number], size) for number in np.flatnonzero(class_ids == class_id)), size
            )
            passed[class_id] += sum(len(_outside(line, canvas)) > 1 for line in lines)
            ended[class_id] += sum(_seen(np.linspace(*gap, 64), canvas).mean() > 0.5 for gap in gaps)
    return tuple(class_id for class_id in sorted(ended) if ended[class_id] >= max(MIN_CUTS, passed[class_id] + 1))


def _axis(outline: np.ndarray) -> Line:
    """Return the line through the middle of the smallest rectangle around an outline (V, 2)."""
    centre, sides, angle_deg = cv2.minAreaRect(outline.astype(np.float32))
    angle = np.radians(angle_deg if sides[0] >= sides[1] else angle_deg + 90)
    half = max(sides) / 2 * np.array([np.cos(angle), np.sin(angle)])
    return Line(np.stack([centre - half, centre + half]), np.full(2, min(sides)), np.zeros((0, 2, 2)))


def with_lines(
    prediction: PhotoPrediction,
    rules: WireRules,
    placement: Placement,
    photo: np.ndarray,
    min_score: float = 0.0,
) -> PhotoPrediction:
    """Return a prediction for a photograph, RGB uint8 (H, W, 3), with lines in the place of the masks of some classes.

    A mask that shows several lines becomes several detections. One without a line keeps its mask. The confidence of both is
    multiplied by how much they look like a wire (`likeness`, for a mask its length alone); below `min_score` they are
    dropped. So are lines that lie mostly in more confident ones of their class, and what lies in objects of `rules.end_at`.
    """
    if not rules.classes:
        return prediction
    grey, ends = cv2.cvtColor(photo, cv2.COLOR_RGB2GRAY), _objects_at_ends(prediction, rules, placement.photo_size)
    rows: list[_Row] = []
    for number, class_id in enumerate(prediction.class_ids.tolist()):
        score = float(prediction.found.scores[number])
        if class_id not in rules.classes:
            rows.append(_Row(score, number))
            continue
        region = prediction.masks[number]
        if lines := find_lines(region) if score >= MIN_SCORE else []:
            parts = [part for line in lines for part in _outside(line, ends)]
            drawn = [_Row(score * likeness(part, grey), number, part) for part in parts]
        else:
            drawn = [_Row(score * length_factor(float(np.hypot(*region.mask.shape)), grey), number)]
        rows += [row for row in drawn if row.score >= min_score]
    return _lined(prediction, _without_copies(rows, prediction.class_ids, placement.photo_size), placement)


def _objects_at_ends(prediction: PhotoPrediction, rules: WireRules, size: tuple[int, int]) -> np.ndarray:
    """Return where confident objects of `rules.end_at` are in a photograph of (width, height) pixels: bool (H, W)."""
    is_end = np.isin(prediction.class_ids, rules.end_at) & (prediction.found.scores.numpy() >= END_SCORE)
    return _drawn([prediction.masks[number] for number in np.flatnonzero(is_end).tolist()], size)


def _drawn(regions: Iterable[Region], size: tuple[int, int]) -> np.ndarray:
    canvas = np.zeros(size[::-1], bool)
    for region in regions:
        height, width = region.mask.shape
        canvas[region.top : region.top + height, region.left : region.left + width] |= region.mask
    return canvas


def _seen(points: np.ndarray, canvas: np.ndarray) -> np.ndarray:
    """Return a canvas (H, W) at points (N, 2) xy."""
    column, row = points.astype(int).clip(0, np.array(canvas.shape[::-1]) - 1).T
    return canvas[row, column]


def _outside(line: Line, ends: np.ndarray) -> list[Line]:
    """Return the parts of a line that lie outside some objects, bool (H, W), and are long enough to be a line."""
    points, _ = line.samples(STEP_PX)
    is_inside = _seen(points, ends)
    if not is_inside.any():
        return [line]
    places = np.linspace(0, 1, len(points))
    known = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(line.points, axis=0).T))])
    widths = np.interp(places * known[-1], known, line.widths)
    gap_at = (
        np.abs(points[:, None] - line.gaps.mean(axis=1)).sum(axis=2).argmin(axis=0) if len(line.gaps) else np.zeros(0)
    )
    parts = []
    for kept in np.split(np.arange(len(points)), np.flatnonzero(np.diff(is_inside)) + 1):
        if not is_inside[kept[0]] and len(kept) * STEP_PX >= MIN_LENGTH * widths[kept].mean():
            gaps = line.gaps[(gap_at > kept[0]) & (gap_at < kept[-1])]
            parts.append(Line(points[kept], widths[kept], gaps))
    return parts


@dataclass(frozen=True, eq=False)
class _Row:
    """A detection: its confidence, the number of the detection that it was before, and its line, if it has one."""

    score: float
    number: int
    line: Line | None = None


def _without_copies(rows: list[_Row], class_ids: np.ndarray, size: tuple[int, int]) -> list[_Row]:
    """Return rows, best first, without lines of which more than MOSTLY lies in more confident ones of their class."""
    taken = {class_id: np.zeros(size[::-1], bool) for class_id in {class_ids[row.number] for row in rows if row.line}}
    kept = []
    for row in sorted(rows, key=lambda row: -row.score):
        if row.line is not None:
            canvas = taken[class_ids[row.number]]
            if _seen(row.line.samples(STEP_PX)[0], canvas).mean() > MOSTLY:
                continue
            drawn = fill_outline(row.line.outline, size)
            height, width = drawn.mask.shape
            canvas[drawn.top : drawn.top + height, drawn.left : drawn.left + width] |= drawn.mask
        kept.append(row)
    return kept


def _lined(prediction: PhotoPrediction, rows: list[_Row], placement: Placement) -> PhotoPrediction:
    """Return the prediction that consists of some rows."""
    numbers, masks, size = [row.number for row in rows], prediction.masks, placement.photo_size
    found, boxes = prediction.found, prediction.boxes[numbers]
    in_input = found.boxes[numbers]
    for position, row in enumerate(rows):
        if row.line is not None:
            corners = np.concatenate([row.line.outline.min(axis=0), row.line.outline.max(axis=0)])
            boxes[position] = corners.clip(0, size * 2)
            in_input[position] = boxes_to_input(torch.from_numpy(boxes[position]), placement)
    scores = torch.tensor([row.score for row in rows], dtype=torch.float32)
    return PhotoPrediction(
        Detections(in_input, scores, found.class_ids[numbers], found.coefficients[numbers]),
        LazyRegions(rows, lambda row: fill_outline(row.line.outline, size) if row.line else masks[row.number]),
        boxes,
        [row.line for row in rows],
    )
