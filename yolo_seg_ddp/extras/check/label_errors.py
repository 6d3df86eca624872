"""Compares labels with a trained model's predictions: missing labels, labels on nothing, other
classes.

All masks are compared on a grid of at most 1024 pixels, so photographs of any size take the same
memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
from tqdm import tqdm

from yolo_seg_ddp.data.images import scaled_size
from yolo_seg_ddp.data.labels import ANY_CLASS
from yolo_seg_ddp.evaluation.evaluate import AP_IOU
from yolo_seg_ddp.evaluation.metrics.matching import pair_ignoring_class
from yolo_seg_ddp.evaluation.native_masks import areas_of, mask_iou
from yolo_seg_ddp.evaluation.tile_search import read_photo
from yolo_seg_ddp.extras.check.findings import Finding, Mark, View
from yolo_seg_ddp.extras.check.reading import Entry
from yolo_seg_ddp.predict.detections import PhotoPrediction
from yolo_seg_ddp.predict.prediction_files import outline
from yolo_seg_ddp.predict.regions import Region, canvas_of, shrunk
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.threads import ordered_map

GRID_PX = 1024
UNSURE = 0.05  # confidence from which a prediction supports a label
SURE = 0.5  # confidence from which a prediction contradicts the labels
LIMITS: dict[str, Any] = {"confidence": UNSURE, "iou": AP_IOU}
# share of a prediction without a label that labels of any class, or regions to ignore, cover
MAX_LABELLED = 0.3
MAX_SEEN = 0.1  # share of an unseen label that predictions of any class cover
MIN_SEEN = 0.5  # share of a label that predictions of its class cover
NEAR_PX = 2  # of the grid: masks this near to each other overlap, because wires are thin
# share of a class's labels that the model must find before an unseen one is worth a look
MIN_RECALL = 0.5


@dataclass(frozen=True)
class Object:
    """A label or a prediction on the grid; `score` is None for a label."""

    class_id: int
    mask: Region
    mark: Mark
    score: float | None = None
    line: int | None = None


def find_contradictions(
    entries: Sequence[Entry], predictor: Predictor, names: tuple[str, ...]
) -> tuple[list[Finding], list[str]]:
    """Return what a model contradicts, and notes on the classes that it finds too seldom to judge
    their labels.
    """
    findings: list[Finding] = []
    unseen: list[tuple[int, Finding]] = []
    counts = np.zeros((2, len(names)), np.int64)
    readable = [entry for entry in entries if entry.picture]
    predictions = predictor.predict(read_photos(readable, predictor))
    for entry, photo, prediction in tqdm(
        predictions, "predicting", len(readable), unit="photo", disable=None
    ):
        contradicted, not_seen, of_photo = compare(
            entry, (photo.shape[1], photo.shape[0]), prediction, names
        )
        findings += contradicted
        unseen += not_seen
        counts += of_photo
    num_labels, num_seen = counts
    shares = num_seen / num_labels.clip(min=1)
    findings += [
        replace(
            one,
            weight=float(shares[class_id]),
            details={"class_found": round(float(shares[class_id]), 3)},
        )
        for class_id, one in unseen
        if shares[class_id] >= MIN_RECALL
    ]
    seldom = np.flatnonzero((num_labels > 0) & (shares < MIN_RECALL)).tolist()
    after = "so labels that it does not see are not listed"
    return findings, [
        f"{names[number]}: the model finds {shares[number]:.0%} of {num_labels[number]} labels, "
        f"{after}"
        for number in seldom
    ]


def read_photos(
    entries: Sequence[Entry], predictor: Predictor | None
) -> Iterator[tuple[Entry, np.ndarray]]:
    """Yield photographs, decoded as small as the predictor allows; at full size without one.

    Raises UserError.
    """
    min_side_px = predictor.size_px if predictor else None
    full_above_px = predictor.tiling.size_px if predictor and predictor.tiling else None
    photos = ordered_map(
        lambda one: read_photo(one.file, min_side_px, full_above_px), entries, usable_cpu_count()
    )
    return zip(entries, photos, strict=True)


def compare(
    entry: Entry, size: tuple[int, int], prediction: PhotoPrediction, names: tuple[str, ...]
) -> tuple[list[Finding], list[tuple[int, Finding]], list[np.ndarray]]:
    """Compare a photograph's labels with the predictions, which are in pixels of a photograph of
    `size` (w, h).

    Returns the contradictions, the unseen labels with their classes, and each class's labels, all
    and seen: int64 (classes,).
    """
    grid = scaled_size(*size, min(1.0, GRID_PX / max(size)))
    labels = [
        Object(
            row.class_id,
            _fill(row.polygon, grid),
            Mark(row.polygon, names[row.class_id]),
            None,
            row.line,
        )
        for row in entry.rows
    ]
    predicted = list(_predicted(prediction, size, grid, names))
    # Of a class that has boxes here the boxes are compared.
    boxed = {row.class_id for row in entry.rows if row.is_box}
    for one in (*labels, *predicted):
        if one.class_id in boxed:
            one.mask.mask[:] = True
    scores = np.array([one.score for one in predicted], np.float64)
    masks = [one.mask for one in labels], [one.mask for one in predicted]
    partner = pair_ignoring_class(
        mask_iou(*masks, [*map(areas_of, masks)]), len(labels), scores
    ).tolist()
    classes = {one.class_id for one in labels}
    near_same_class = {
        number: _near([one for one in predicted if one.class_id == number], grid)
        for number in classes
    }
    is_seen = [_covered(label, near_same_class[label.class_id]) >= MIN_SEEN for label in labels]

    findings = []
    for label, position, is_label_seen in zip(labels, partner, is_seen, strict=True):
        other = predicted[position] if position >= 0 else label
        if other.class_id != label.class_id and scores[position] >= SURE and not is_label_seen:
            text = f"labelled {names[label.class_id]}; the model says {other.mark.text}"
            findings.append(_finding("other_class", entry, text, label, other))
    near_labels, near_predicted = _near(labels, grid), _near(predicted, grid)
    for position, other in enumerate(predicted):
        is_sure = scores[position] >= SURE and position not in partner
        regions = (
            _fill(each, grid)
            for number, each in entry.ignored
            if number in (other.class_id, ANY_CLASS)
        )
        known = near_labels | canvas_of(regions, grid)
        if is_sure and _covered(other, known) < MAX_LABELLED:
            text = f"no label; the model says {other.mark.text}"
            findings.append(_finding("missed_label", entry, text, None, other))
    unseen = []
    for label in labels:
        if _covered(label, near_predicted) < MAX_SEEN:
            text = f"{label.mark.text} that the model does not see"
            unseen.append((label.class_id, _finding("unfound_label", entry, text, label, None)))
    class_ids = np.array([label.class_id for label in labels], np.int64)
    count = [
        np.bincount(ids, minlength=len(names))
        for ids in (class_ids, class_ids[np.array(is_seen, bool)])
    ]
    return findings, unseen, count


def _finding(
    kind: str, entry: Entry, text: str, label: Object | None, other: Object | None
) -> Finding:
    details: dict[str, Any] = {}
    if other is not None:
        box = np.concatenate([other.mark.outline.min(axis=0), other.mark.outline.max(axis=0)])
        details = {
            "confidence": round(other.score or 0.0, 4),
            "box": [round(value, 5) for value in box.tolist()],
        }
    marks = [one.mark for one in (label, other) if one is not None]
    context = [
        Mark(row.polygon, is_subject=False)
        for row in entry.rows
        if label is None or row.line != label.line
    ]
    bare = [replace(mark, is_drawn=False) for mark in marks]
    views = (
        View(entry.file, entry.file.name, [*context, *marks]),
        View(entry.file, "without outlines", bare),
    )
    line = None if label is None else label.line
    weight = 0.0 if other is None else other.score or 0.0
    return Finding(kind, entry.split, entry.label_file, text, line, weight, details, views)


def _predicted(
    prediction: PhotoPrediction,
    size: tuple[int, int],
    grid: tuple[int, int],
    names: tuple[str, ...],
) -> Iterator[Object]:
    """Yield the predictions on the grid, the most confident first."""
    rows = zip(
        prediction.class_ids.tolist(),
        prediction.detections.scores.tolist(),
        prediction.masks,
        strict=True,
    )
    for class_id, score, region in rows:
        mask = shrunk(region, size, grid)
        parts = outline(mask)
        shown = parts[0] if parts else np.array([[mask.left, mask.top]])
        mark = Mark(shown / grid, f"{names[class_id]} {score:.2f}", is_prediction=True)
        yield Object(class_id, mask, mark, score)


def _fill(polygon: np.ndarray, grid: tuple[int, int]) -> Region:
    """Fill an outline in 0..1 on the grid, with all cells that it touches."""
    points = (
        np.floor(polygon.astype(np.float64) * grid).astype(np.int32).clip(0, np.array(grid) - 1)
    )
    low = points.min(axis=0)
    width, height = (points.max(axis=0) - low + 1).tolist()
    mask = np.zeros((height, width), np.uint8)
    cv2.fillPoly(mask, [points - low], 1)
    return Region(int(low[0]), int(low[1]), mask.astype(bool))


def _near(objects: Iterable[Object], grid: tuple[int, int]) -> np.ndarray:
    """Return the cells of the grid that objects cover or come near: bool (H, W)."""
    cells = canvas_of((one.mask for one in objects), grid)
    side = 2 * NEAR_PX + 1
    return cv2.dilate(cells.view(np.uint8), np.ones((side, side), np.uint8)).view(bool)


def _covered(one: Object, cells: np.ndarray) -> float:
    """Return the share of an object's cells that are among `cells`."""
    left, top, right, bottom = one.mask.corners
    shared = int((one.mask.mask & cells[top:bottom, left:right]).sum())
    return shared / max(int(one.mask.mask.sum()), 1)
