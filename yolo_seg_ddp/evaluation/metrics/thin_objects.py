"""How well wires and other thin objects are found: their centrelines, and in how many pieces.

The IoU of a wire 5 pixels wide says little: a mask beside it by 2 pixels has 0.43. What counts is
whether its centreline is found, and whether as one object. Lengths are in pixels of the photograph:
those of a centreline (see `centreline`), times the length that its direction gives each of them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from yolo_seg_ddp.data.labels import ANY_CLASS
from yolo_seg_ddp.evaluation.metrics.matching import LEVELS
from yolo_seg_ddp.evaluation.metrics.results import ImageResult
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.predict.thinning import centreline

TOLERANCE_PX = 3.0
MIN_SCORE = 0.25
MIN_SHARE = 0.5  # of a prediction's centreline that must lie on an object whose piece it is
# The columns of `ImageResult.centrelines`.
COLUMNS = ("class_id", "true_px", "found_px", "predicted_px", "right_px", "num_found", "num_pieces")


@dataclass(frozen=True)
class ThinRule:
    """Which classes are thin, how far a centreline may lie from the true one, and which predictions
    count.
    """

    classes: tuple[int, ...]
    tolerance_px: float = TOLERANCE_PX
    min_score: float = MIN_SCORE
    # whether lengths are measured at each of LEVELS, too, see `found_lengths`
    at_levels: bool = False


def measure(
    truth: Sequence[Region],
    truth_class_ids: np.ndarray,
    predictions: Sequence[Region],
    class_ids: np.ndarray,
    scores: np.ndarray,
    rule: ThinRule,
    ignored: Sequence[tuple[int, Region]] = (),
) -> np.ndarray:
    """Compare the centrelines of one photograph's objects and predictions: int64 (classes, 7),
    columns COLUMNS.

    There is a row for each thin class that occurs. true_px and predicted_px are the lengths of all
    centrelines, found_px and right_px the parts of them within the tolerance of a centreline of the
    other kind: completeness and correctness of Wiedemann et al., "Empirical evaluation of
    automatically extracted road axes" (1998), which are clDice's terms (arXiv 2003.07311, section
    3) with the other mask replaced by its widened centreline, so that a fat mask gains nothing. A
    prediction is a piece of the object whose centreline is near the largest part of its own, if
    that is MIN_SHARE or more; num_found objects have num_pieces pieces together. Parts of
    predictions in a region to ignore of their class count neither as predicted nor as right.
    ignored: classes and regions.
    """
    rows = []
    for class_id in rule.classes:
        labelled = np.flatnonzero(np.asarray(truth_class_ids) == class_id).tolist()
        true_lines = [centreline(truth[index]) for index in labelled]
        chosen = np.flatnonzero(
            (np.asarray(class_ids) == class_id) & (np.asarray(scores) >= rule.min_score)
        ).tolist()
        found_lines = [
            line for line in (centreline(predictions[index]) for index in chosen) if len(line)
        ]
        if not true_lines and not found_lines:
            continue
        found_near, _ = _near(true_lines, found_lines, rule.tolerance_px)
        for region in (region for number, region in ignored if number in (class_id, ANY_CLASS)):
            found_lines = [rest for line in found_lines if len(rest := line[~region.covers(line)])]
        right_near, shared_px = _near(found_lines, true_lines, rule.tolerance_px)
        lengths = np.array([len(line) for line in found_lines], np.int64)
        pieces = np.zeros(len(true_lines), np.int64)
        if true_lines and found_lines:
            is_piece = shared_px.max(axis=1) >= MIN_SHARE * lengths
            np.add.at(pieces, shared_px.argmax(axis=1)[is_piece], 1)
        (true_px, found_px), (predicted_px, right_px) = (
            (
                np.stack([[len(line) for line in lines], near])
                @ [_pixel_length(line) for line in lines]
            ).round()
            for lines, near in ((true_lines, found_near), (found_lines, right_near))
        )
        rows.append(
            [
                class_id,
                true_px,
                found_px,
                predicted_px,
                right_px,
                np.count_nonzero(pieces),
                pieces.sum(),
            ]
        )
    return np.array(rows, np.int64).reshape(-1, len(COLUMNS))


def found_lengths(
    truth: Sequence[Region],
    truth_class_ids: np.ndarray,
    predictions: Sequence[Region],
    class_ids: np.ndarray,
    scores: np.ndarray,
    rule: ThinRule,
) -> np.ndarray:
    """Return how much of one photograph's centrelines is found at each confidence: int64 (classes,
    2 + levels).

    A row for each thin class with objects: the class, the length of their centrelines, and of the
    parts within the tolerance of a prediction with at least each of LEVELS. Predictions in
    descending order of confidence.
    """
    rows = []
    for class_id in rule.classes:
        lines = [
            centreline(truth[index])
            for index in np.flatnonzero(np.asarray(truth_class_ids) == class_id).tolist()
        ]
        if not any(map(len, lines)):
            continue
        chosen = np.flatnonzero(np.asarray(class_ids) == class_id)[::-1].tolist()
        found = [centreline(predictions[index]) for index in chosen]
        at, disc, num_pixels = _on_grid([*lines, *found], rule.tolerance_px)
        best = np.zeros(num_pixels, np.float32)
        for place, index in zip(at[len(lines) :], chosen, strict=True):
            best[(place[:, None] + disc).ravel()] = scores[index]  # the most confident comes last
        near_px = np.stack(
            [(best[place][:, None] >= LEVELS).sum(axis=0) for place in at[: len(lines)]]
        )
        per_pixel = np.array([_pixel_length(line) for line in lines])
        rows.append(
            [class_id, *(per_pixel @ np.column_stack([list(map(len, lines)), near_px])).round()]
        )
    return np.array(rows, np.int64).reshape(-1, 2 + len(LEVELS))


def _on_grid(
    lines: Sequence[np.ndarray], reach_px: float
) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Return the pixels of lines (each (K, 2)) as places in a flat grid, what a disc around a place
    adds, and the grid's size.
    """
    reach = int(reach_px)
    x, y = np.meshgrid(np.arange(-reach, reach + 1), np.arange(-reach, reach + 1))
    everything = np.concatenate(lines)
    low = everything.min(axis=0) - reach
    width, height = (everything.max(axis=0) + reach + 1 - low).tolist()
    disc = (y * width + x)[x**2 + y**2 <= reach_px**2]
    return [(line - low) @ np.array([1, width]) for line in lines], disc, width * height


def summarise_thin(
    results: Iterable[ImageResult], num_classes: int, thin_classes: Collection[int]
) -> list[dict[str, float | None]]:
    """Return each class's centreline_recall, centreline_precision and pieces_per_object, from sums
    over all images.

    None for a class that is not thin, and where there is nothing to divide by: no object, no
    prediction, no object found. length_px, missed_px and invented_px: of all wires in pixels of the
    photographs, of which so much was not found, and of predictions where no wire is; None for a
    class that is not thin.
    """
    sums = np.zeros((num_classes, len(COLUMNS)), np.int64)
    for result in results:
        np.add.at(sums, result.centrelines[:, 0], result.centrelines)
    answer: list[dict[str, float | None]] = []
    for class_id, row in enumerate(sums.tolist()):
        _, true_px, found_px, predicted_px, right_px, num_found, num_pieces = row
        values: dict[str, float | None] = {
            "centreline_recall": found_px / true_px if true_px else None,
            "centreline_precision": right_px / predicted_px if predicted_px else None,
            "pieces_per_object": num_pieces / num_found if num_found else None,
            "length_px": true_px,
            "missed_px": true_px - found_px,
            "invented_px": predicted_px - right_px,
        }
        answer.append(values if class_id in thin_classes else dict.fromkeys(values))
    return answer


def _pixel_length(line: np.ndarray) -> float:
    """Return how long a centreline (K, 2) is for each of its pixels: 1 if it is level or upright,
    √2 if slanted by 45 degrees.
    """
    width, height = np.ptp(line, axis=0) if len(line) else (0, 0)
    return float(np.hypot(width, height) / max(width, height, 1)) or 1.0


def _near(
    lines: Sequence[np.ndarray], others: Sequence[np.ndarray], tolerance_px: float
) -> tuple[np.ndarray, np.ndarray]:
    """Count the pixels of `lines` (each (K, 2)) within a distance of any of `others`, int64
    (lines,), and of each of them.
    """
    counts = np.zeros((len(lines), len(others)), np.int64)
    if not lines or not others:
        return np.zeros(len(lines), np.int64), counts
    places, disc, num_pixels = _on_grid([*lines, *others], tolerance_px)
    at = places[: len(lines)]
    canvas = np.zeros(num_pixels, bool)  # the system gives the pages that are touched
    is_near = [np.zeros(len(line), bool) for line in at]
    for number, other in enumerate(places[len(lines) :]):
        grown = (other[:, None] + disc).ravel()
        canvas[grown] = True
        for line, place in enumerate(at):
            hits = canvas[place]
            counts[line, number] = np.count_nonzero(hits)
            is_near[line] |= hits
        canvas[grown] = False
    return np.array([np.count_nonzero(hits) for hits in is_near], np.int64), counts
