"""The metrics of a data set from its images' results: AP, precision, recall, F1, confusion matrix,
AP by size.

Also the calibration of the detections' confidence, the best confidence threshold of each class, and
the errors of each image.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from yolo_seg_ddp.data.labels import Photo
from yolo_seg_ddp.data.polygons import SIZES
from yolo_seg_ddp.evaluation.metrics.matching import IOU_THRESHOLDS, LEVELS, count_at_levels
from yolo_seg_ddp.evaluation.metrics.results import (
    ImageResult,
    merge_results,
    pack_results,
    pool_predictions,
)

KINDS = ("box", "mask")
_AXIS = np.linspace(0, 1, 1000)  # the confidences and recalls of the curves
# width of the box filter over the mean F1 curve, as a fraction of the confidence axis
_SMOOTHING = 0.1
_EPSILON = 1e-16
CALIBRATION_BINS = 10
# Below it are hundreds of candidates per image that nobody uses; they would dominate the
# calibration error.
CALIBRATION_MIN_CONFIDENCE = 0.05
MAX_WORST = 12
KINDS_OF_ERROR = ("missed", "false", "confused")


def summarise(results: Iterable[ImageResult], names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of a data set as plain numbers, lists and dicts, ready for JSON and free
    of NaN.

    For `box` and `mask`: `<kind>_map50`, `<kind>_map50_95`, and `<kind>_precision`, `_recall`,
    `_f1` at `<kind>_best_confidence`. These are means over the classes that have targets.
    `per_class` lists every class; one without targets has zeros and `num_targets` 0. If some
    targets have no outline, `num_outlined` counts the others, on which masks are judged.
    `confusion_matrix` has nc + 1 rows (predicted, last: missed) and columns (true, last:
    background). Without images, targets or predictions the values are 0. Raises ValueError if a
    class id has no name or an image occurs twice with different results.
    """
    num_classes = len(names)
    images, pool = _checked_pool(results, num_classes)
    num_targets = _count_targets(pool, "box", num_classes)
    num_images = np.zeros(num_classes, np.int64)
    confusion = np.zeros((num_classes + 1, num_classes + 1), np.int64)
    for image in images:
        num_images[np.unique(image.target_class_ids)] += 1
        np.add.at(confusion, (image.box_confusion[:, 0], image.box_confusion[:, 1]), 1)
    summary: dict[str, Any] = {"num_images": len(images), "num_targets": int(num_targets.sum())}
    per_class: list[dict[str, Any]] = [
        {
            "class_id": index,
            "name": name,
            "num_images": int(num_images[index]),
            "num_targets": int(num_targets[index]),
        }
        for index, name in enumerate(names)
    ]
    for kind in KINDS:
        num_judged = _count_targets(pool, kind, num_classes)
        if (num_judged < num_targets).any():
            numbers = [num_judged.sum(), *num_judged]
            for row, number in zip([summary, *per_class], numbers, strict=True):
                row["num_outlined"] = int(number)
        class_ids = np.flatnonzero(num_judged)
        curves, best = _class_curves(pool, kind, class_ids, num_judged)
        values = {
            "map50": curves["average_precision"][:, 0],
            "map50_95": curves["average_precision"].mean(axis=1),
        }
        values |= {name: curves[name][:, best] for name in ("precision", "recall", "f1")}
        for name, value_k in values.items():
            summary[f"{kind}_{name}"] = float(value_k.mean()) if len(class_ids) else 0.0
            for row in per_class:
                row[f"{kind}_{name}"] = 0.0
            for class_id, value in zip(class_ids.tolist(), value_k.tolist(), strict=True):
                per_class[class_id][f"{kind}_{name}"] = value
        summary[f"{kind}_best_confidence"] = curves["best_confidence"]
    return {**summary, "per_class": per_class, "confusion_matrix": confusion.tolist()}


def summarise_sizes(
    results: Iterable[ImageResult], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return AP for small, medium and large targets: for each of SIZES `num_targets` and
    `<kind>_map50`, `_map50_95`.

    Means over the classes that have targets of that size; None if there are none. The results must
    contain sizes. Raises ValueError as `summarise` does.
    """
    _, pool = _checked_pool(results, len(names))
    answer: dict[str, dict[str, Any]] = {}
    for position, size in enumerate(SIZES):
        is_of_size = pool["target_sizes"] == position
        values: dict[str, Any] = {"num_targets": int(is_of_size.sum())}
        for kind in KINDS:
            num_targets = _count_targets(pool, kind, len(names), is_of_size)
            of_class = [
                (pool["class_ids"] == class_id, number)
                for class_id, number in enumerate(num_targets)
                if number
            ]
            hits, counted = (
                pool[f"{kind}_hits"],
                (pool[f"{kind}_sizes"] == position) & _is_counted(pool, kind),
            )
            table = np.array(
                [
                    _average_precisions(hits[mine], counted[mine], number)
                    for mine, number in of_class
                ]
            )
            values[f"{kind}_map50"] = float(table[:, 0].mean()) if len(table) else None
            values[f"{kind}_map50_95"] = float(table.mean()) if len(table) else None
        answer[size] = values
    return answer


def precision_counts(results: Iterable[ImageResult], num_classes: int) -> list[int]:
    """Return the numbers of `count_at_levels` in one list, of what `ImageResult.judged` judges."""
    counts = np.zeros((num_classes, 2, len(LEVELS)), np.int64)
    for result in results:
        is_right, is_counted = result.judged()
        columns = (result.class_ids, is_right, result.scores)
        counts += count_at_levels(num_classes, *(column[is_counted] for column in columns))
    return counts.ravel().tolist()


def precision_recall_curves(results: Iterable[ImageResult], names: Sequence[str]) -> dict[str, Any]:
    """Return the curves to plot: for `box` and for `mask` a dict with the curves of the k classes
    that have targets.

    `class_ids` (k,), `axis` (1000,) from 0 to 1, `precision_at_recall` (k, 1000) at IoU 0.5 over
    recall, `average_precision` (k, 10), `precision`, `recall` and `f1` (k, 1000) over confidence,
    `best_confidence`. Raises ValueError as `summarise` does.
    """
    _, pool = _checked_pool(results, len(names))
    num_targets = {kind: _count_targets(pool, kind, len(names)) for kind in KINDS}
    return {
        kind: _class_curves(pool, kind, np.flatnonzero(counts), counts)[0]
        for kind, counts in num_targets.items()
    }


def _checked_pool(
    results: Iterable[ImageResult], num_classes: int
) -> tuple[list[ImageResult], dict[str, np.ndarray]]:
    """Merge results by image id and pool their predictions.

    Raises ValueError for class ids out of range.
    """
    images = merge_results([results])
    for image in images:
        # In the confusion pairs, `num_classes` means missed or background.
        for ids, limit in (
            (image.class_ids, num_classes),
            (image.target_class_ids, num_classes),
            (image.box_confusion, num_classes + 1),
        ):
            if ids.size and not (ids.min() >= 0 and ids.max() < limit):
                raise ValueError(
                    f"image {image.image_id}: class id {ids.max()}, but there are {num_classes} "
                    "classes"
                )
    return images, pool_predictions(images)


def _count_targets(
    pool: dict[str, np.ndarray], kind: str, num_classes: int, chosen: np.ndarray | bool = True
) -> np.ndarray:
    """Return the number of targets of each class, for masks of those with an outline, among the
    `chosen`, bool (m,): int64 (classes,).
    """
    kept = chosen & ((pool["boxed"] == 0) | (kind == "box"))
    return np.bincount(pool["target_class_ids"][kept], minlength=num_classes)


def _is_counted(packed: dict[str, np.ndarray], kind: str) -> np.ndarray:
    """Return which predictions are right or wrong, at each of IOU_THRESHOLDS: hits, and what is not
    ignored; bool (p, 10).
    """
    return packed[f"{kind}_hits"].astype(bool) | (
        packed[f"{kind}_ignored"][:, None] < IOU_THRESHOLDS
    )


def _class_curves(
    pool: dict[str, np.ndarray], kind: str, class_ids: np.ndarray, num_targets: np.ndarray
) -> tuple[dict[str, Any], int]:
    """Return the curves of `class_ids` as in `precision_recall_curves`, and the position of the
    best confidence.

    pool: of `pool_predictions`. The best confidence has the highest smoothed mean F1.
    """
    hits, scores, axis, is_counted = (
        pool[f"{kind}_hits"],
        pool["scores"],
        _AXIS,
        _is_counted(pool, kind),
    )
    average_precision = np.zeros((len(class_ids), len(IOU_THRESHOLDS)))
    precision, recall, precision_at_recall = (
        np.zeros((len(class_ids), len(axis))) for _ in range(3)
    )
    for row, class_id in enumerate(class_ids):
        mine = pool["class_ids"] == class_id
        average_precision[row] = _average_precisions(
            hits[mine], is_counted[mine], num_targets[class_id]
        )
        mine &= is_counted[:, 0]
        if not mine.any():
            continue
        # at IoU 0.5, among the first 1, 2, ... p predictions
        hit_counts = hits[mine, 0].cumsum(dtype=np.int64)
        recalls = hit_counts / num_targets[class_id]
        precisions = hit_counts / np.arange(1, len(hit_counts) + 1)
        # np.interp needs an ascending axis and the confidences descend, so both are negated. Above
        # the highest confidence there is no prediction: recall is 0 and precision 1.
        recall[row] = np.interp(-axis, -scores[mine], recalls, left=0)
        precision[row] = np.interp(-axis, -scores[mine], precisions, left=1)
        precision_at_recall[row] = np.interp(axis, *_precision_envelope(recalls, precisions))
    f1 = 2 * precision * recall / (precision + recall + _EPSILON)
    best = int(_smooth(f1.mean(axis=0)).argmax()) if len(class_ids) else 0
    curves = {
        "class_ids": class_ids,
        "axis": axis,
        "average_precision": average_precision,
        "precision": precision,
    }
    curves |= {"recall": recall, "f1": f1, "precision_at_recall": precision_at_recall}
    return {**curves, "best_confidence": float(axis[best])}, best


def _average_precisions(hits: np.ndarray, is_counted: np.ndarray, num_targets: int) -> list[float]:
    """Return a class's AP at each of IOU_THRESHOLDS from hits (p, 10) in descending order of
    confidence.
    """
    if not len(hits):
        return [0.0] * len(IOU_THRESHOLDS)
    # among the first 1, 2, ... p predictions
    found = (hits & is_counted).cumsum(axis=0, dtype=np.int64)
    # What is not counted repeats the point before it, which changes no curve.
    recalls, precisions = found / num_targets, found / is_counted.cumsum(axis=0).clip(min=1)
    return [
        _area_101(*_precision_envelope(*pair)) for pair in zip(recalls.T, precisions.T, strict=True)
    ]


def _precision_envelope(recall: np.ndarray, precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (recalls, highest precision at that recall or above), with end points; 0 above the
    last recall.
    """
    steps = np.concatenate([[0.0], recall, [recall[-1], 1.0]])
    heights = np.concatenate([[1.0], precision, [0.0, 0.0]])
    return steps, np.maximum.accumulate(heights[::-1])[::-1]


def _area_101(steps: np.ndarray, envelope: np.ndarray) -> float:
    """Return the area under the envelope, sampled at 101 recalls (COCO) and summed by the
    trapezoidal rule.
    """
    sampled = np.interp(np.linspace(0, 1, 101), steps, envelope)
    return float((sampled[1:] + sampled[:-1]).sum() / 200)


def _smooth(curve: np.ndarray) -> np.ndarray:
    """Average over an odd window of about `_SMOOTHING` times the curve's length, with the end
    values repeated.
    """
    half = round(len(curve) * _SMOOTHING * 2) // 4
    padded = np.pad(curve, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


def calibration(results: Iterable[ImageResult]) -> dict[str, dict[str, Any]]:
    """Compare confidence with precision at IoU 0.5; return a dict for `box` and one for `mask`.

    `bins`: ten equal parts of 0 to 1 (the first from CALIBRATION_MIN_CONFIDENCE), each with `low`,
    `high`, `num_detections`, mean `confidence` and `precision`, both None in an empty bin. `error`:
    the expected calibration error, |confidence - precision| of the bins averaged over detections
    (Guo et al. 2017; for detection Küppers et al. 2020). `excess`: mean confidence minus precision
    over all detections, above 0 for an overconfident model. Both are None without detections.
    """
    packed = pack_results(merge_results([results]))
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    answer: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        scores = packed["scores"].astype(np.float64)
        kept = _is_counted(packed, kind)[:, 0] & (scores >= CALIBRATION_MIN_CONFIDENCE)
        scores = scores[kept]
        number = np.minimum((scores * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
        counts = np.bincount(number, minlength=CALIBRATION_BINS)
        confidence_sums = np.bincount(number, scores, CALIBRATION_BINS)
        hit_sums = np.bincount(number, packed[f"{kind}_hits"][kept, 0], CALIBRATION_BINS)
        answer[kind] = {
            "error": float(np.abs(confidence_sums - hit_sums).sum() / len(scores))
            if len(scores)
            else None,
            "excess": float((confidence_sums - hit_sums).sum() / len(scores))
            if len(scores)
            else None,
            "num_detections": len(scores),
            "bins": [
                {
                    "low": max(float(edges[row]), CALIBRATION_MIN_CONFIDENCE),
                    "high": float(edges[row + 1]),
                    "num_detections": int(count),
                    "confidence": float(confidence_sums[row] / count) if count else None,
                    "precision": float(hit_sums[row] / count) if count else None,
                }
                for row, count in enumerate(counts)
            ],
        }
    return answer


def operating_points(
    results: Iterable[ImageResult], names: Sequence[str]
) -> dict[str, list[dict[str, Any] | None]]:
    """Find for each class the confidence threshold with the highest F1 at IoU 0.5.

    For `box` and `mask` a list over all classes: `threshold` (keep confidence >= it), `precision`,
    `recall`, `f1`, `num_hits`, `num_false`, `num_missed`; None for a class without targets or
    without any hit. The values are counted, not read off interpolated curves. Of several thresholds
    with equal F1 the highest is taken.
    """
    pool = pool_predictions(merge_results([results]))
    points: dict[str, list[dict[str, Any] | None]] = {}
    for kind in KINDS:
        num_targets = _count_targets(pool, kind, len(names)).tolist()
        is_counted = _is_counted(pool, kind)[:, 0]
        pairs = [
            ((pool["class_ids"] == class_id) & is_counted, number)
            for class_id, number in enumerate(num_targets)
        ]
        points[kind] = [
            _best_point(pool["scores"][one], pool[f"{kind}_hits"][one, 0], number)
            for one, number in pairs
        ]
    return points


def _best_point(scores: np.ndarray, hits: np.ndarray, num_targets: int) -> dict[str, Any] | None:
    """Return the best threshold of one class from its predictions (p,) in descending order of
    confidence.
    """
    if not num_targets or not hits.any():
        return None
    # a threshold keeps all of equal confidence
    is_last_of_equals = np.append(scores[1:] != scores[:-1], True)
    num_hits = hits.cumsum()
    num_kept = np.arange(1, len(hits) + 1)
    f1 = np.where(is_last_of_equals, 2 * num_hits / (num_kept + num_targets), -1)
    best = int(f1.argmax())
    found, kept = int(num_hits[best]), int(num_kept[best])
    return {
        "threshold": float(scores[best]),
        "precision": found / kept,
        "recall": found / num_targets,
        "f1": float(f1[best]),
        "num_hits": found,
        "num_false": kept - found,
        "num_missed": num_targets - found,
    }


def count_errors(
    results: Sequence[ImageResult], num_classes: int, photos: Sequence[Photo]
) -> list[dict[str, Any]]:
    """Count each image's errors as in the confusion matrix: `file`, `image_id`, `num_targets` and
    KINDS_OF_ERROR.
    """
    counted = []
    for result in results:
        predicted, true = result.box_confusion.T
        is_missed, is_false = predicted == num_classes, true == num_classes
        is_confused = (predicted != true) & ~is_missed & ~is_false
        kinds = zip(KINDS_OF_ERROR, (is_missed, is_false, is_confused), strict=True)
        counts = {kind: int(found.sum()) for kind, found in kinds}
        image = {"file": photos[result.image_id].file.name, "image_id": result.image_id}
        counted.append({**image, "num_targets": len(result.target_class_ids), **counts})
    return counted


def choose_worst(errors: Sequence[dict[str, Any]], most: int = MAX_WORST) -> list[dict[str, Any]]:
    """Choose images in turn from four rankings: most errors, most missed, most false, most
    confused.
    """
    rankings = [
        sorted(
            (row for row in errors if num_errors(row, kinds)),
            key=lambda row: -num_errors(row, kinds),
        )
        for kinds in (KINDS_OF_ERROR, *((kind,) for kind in KINDS_OF_ERROR))
    ]
    chosen: dict[int, dict[str, Any]] = {}
    for place_in_ranking in range(most):
        for ranking in rankings:
            if place_in_ranking < len(ranking) and len(chosen) < most:
                row = ranking[place_in_ranking]
                chosen.setdefault(row["image_id"], row)
    return sorted(chosen.values(), key=lambda row: (-num_errors(row), row["image_id"]))


def num_errors(row: dict[str, Any], kinds: Sequence[str] = KINDS_OF_ERROR) -> int:
    """Return the errors of these kinds in an image, from `count_errors`."""
    return sum(row[kind] for kind in kinds)
