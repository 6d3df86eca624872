"""Detection and instance-segmentation metrics, built from per-image results that merge across ranks by image id.

Everything follows the definitions of Ultralytics 8.4 (`utils/metrics.py`, `engine/validator.py`), so that numbers can
be compared: greedy one-to-one matching in the order of confidence, 101-point average precision (COCO), precision,
recall and F1 at the confidence where the smoothed mean F1 is highest. Predictions of equal confidence are ordered by
(image id, position within the image), so the order in which ranks deliver their images changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

IOU_THRESHOLDS = (np.arange(50, 100, 5) / 100).astype(np.float32)  # 0.50, 0.55, ... 0.95
KINDS = ("box", "mask")
_CURVE_POINTS = 1000
_SMOOTHING = 0.1  # width of the box filter over the mean F1 curve, as a fraction of the confidence axis
_EPSILON = 1e-16


@dataclass(frozen=True, eq=False)
class ImageResult:
    """What one image adds to the metrics. `n` predictions in descending order of confidence, `m` targets.

    box_hits, mask_hits: whether a prediction matched a target of its class at each of IOU_THRESHOLDS.
    box_confusion: pairs (predicted class, true class), see `confusion_pairs`.
    Raises ValueError when shapes disagree.
    """

    image_id: int
    scores: np.ndarray  # (n,) float32, 0-1
    class_ids: np.ndarray  # (n,) int64
    box_hits: np.ndarray  # (n, 10) bool
    mask_hits: np.ndarray  # (n, 10) bool
    target_class_ids: np.ndarray  # (m,) int64
    box_confusion: np.ndarray  # (k, 2) int64

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_id", int(self.image_id))
        for name, (dtype, width) in _ARRAYS.items():
            array: np.ndarray = np.asarray(getattr(self, name), dtype=dtype)
            array = array.reshape(-1, width) if width and array.size == 0 else array
            if array.shape[1:] != ((width,) if width else ()) or array.ndim == 0:
                raise ValueError(f"image {self.image_id}: {name} has the shape {array.shape}")
            object.__setattr__(self, name, array)
        if not len(self.scores) == len(self.class_ids) == len(self.box_hits) == len(self.mask_hits):
            raise ValueError(f"image {self.image_id}: scores, class_ids, box_hits and mask_hits differ in length")


_ARRAYS: dict[str, tuple[type, int]] = {  # name: (dtype, columns or 0 for one dimension)
    "scores": (np.float32, 0),
    "class_ids": (np.int64, 0),
    "box_hits": (np.bool_, len(IOU_THRESHOLDS)),
    "mask_hits": (np.bool_, len(IOU_THRESHOLDS)),
    "target_class_ids": (np.int64, 0),
    "box_confusion": (np.int64, 2),
}


# --- one image -----------------------------------------------------------------------------------------------------


def box_iou(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the pairwise IoU, shape (m, n), of boxes (m, 4) and (n, 4) in xyxy; 0 where both are empty."""
    a = np.asarray(first, np.float64).reshape(-1, 1, 4)
    b = np.asarray(second, np.float64).reshape(1, -1, 4)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    overlap = sides.clip(min=0).prod(axis=-1)
    union = (a[..., 2:] - a[..., :2]).prod(axis=-1) + (b[..., 2:] - b[..., :2]).prod(axis=-1) - overlap
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)


def match_predictions(iou: np.ndarray, target_class_ids: np.ndarray, predicted_class_ids: np.ndarray) -> np.ndarray:
    """Decide which predictions hit a target: bool (n, 10), one column for each of IOU_THRESHOLDS.

    iou: (m targets, n predictions), predictions in descending order of confidence. At each threshold the predictions
    choose in that order: each takes the free target of its class with the highest IoU, if that reaches the threshold.
    """
    targets, predictions = np.asarray(target_class_ids), np.asarray(predicted_class_ids)
    hits = np.zeros((len(predictions), len(IOU_THRESHOLDS)), dtype=bool)
    if hits.size == 0 or len(targets) == 0:
        return hits
    same_class = targets[:, None] == predictions[None, :]
    overlap = np.where(same_class, np.asarray(iou).reshape(same_class.shape), 0).astype(np.float32)
    columns = np.arange(len(IOU_THRESHOLDS))
    is_free = np.ones((len(targets), len(columns)), dtype=bool)
    for prediction in np.flatnonzero(overlap.max(axis=0) >= IOU_THRESHOLDS[0]):
        free_overlap = np.where(is_free, overlap[:, prediction, None], 0)
        chosen = free_overlap.argmax(axis=0)
        is_hit = free_overlap[chosen, columns] >= IOU_THRESHOLDS
        is_free[chosen[is_hit], columns[is_hit]] = False
        hits[prediction] = is_hit
    return hits


def confusion_pairs(
    iou: np.ndarray,
    target_class_ids: np.ndarray,
    predicted_class_ids: np.ndarray,
    scores: np.ndarray,
    num_classes: int,
    *,
    min_score: float = 0.25,
    min_iou: float = 0.45,
) -> np.ndarray:
    """Pair predictions and targets for the confusion matrix, whatever their classes: int64 (k, 2).

    iou: (m targets, n predictions). Rows are (predicted class, true class); `num_classes` stands for a missed target
    in the first column and for background in the second. Predictions above `min_score` choose in descending order of
    confidence the free target with the highest IoU above `min_iou` (Ultralytics' ConfusionMatrix and its defaults).
    """
    targets = np.asarray(target_class_ids, np.int64)
    predictions, confidence = np.asarray(predicted_class_ids, np.int64), np.asarray(scores)
    overlap = np.array(iou, np.float64).reshape(len(targets), len(predictions))
    confident = np.flatnonzero(confidence > min_score)
    predicted_for_target = np.full(len(targets), num_classes, np.int64)
    true_for_prediction = np.full(len(predictions), num_classes, np.int64)
    for prediction in confident[np.argsort(-confidence[confident], kind="stable")] if len(targets) else ():
        target = overlap[:, prediction].argmax()
        if overlap[target, prediction] > min_iou:
            predicted_for_target[target] = predictions[prediction]
            true_for_prediction[prediction] = targets[target]
            overlap[target] = 0
    false_alarms = confident[true_for_prediction[confident] == num_classes]
    background = np.full(len(false_alarms), num_classes, np.int64)
    return np.concatenate(
        [np.stack([predicted_for_target, targets], axis=1), np.stack([predictions[false_alarms], background], axis=1)]
    )


# --- many images, many ranks ---------------------------------------------------------------------------------------


def pack_results(results: Iterable[ImageResult]) -> dict[str, np.ndarray]:
    """Flatten results into arrays that ranks can exchange as tensors: ids, counts per image, and joined values.

    Booleans travel as uint8 (a dtype that every backend moves).
    """
    results = list(results)
    packed = {"image_ids": np.array([result.image_id for result in results], np.int64)}
    for name, count_name in (("scores", "predictions"), ("target_class_ids", "targets"), ("box_confusion", "pairs")):
        packed[f"num_{count_name}"] = np.array([len(getattr(result, name)) for result in results], np.int64)
    for name, (dtype, width) in _ARRAYS.items():
        empty: np.ndarray = np.zeros((0, width) if width else 0, dtype)
        joined = np.concatenate([empty, *(getattr(result, name) for result in results)])
        packed[name] = joined.astype(np.uint8) if dtype is np.bool_ else joined
    return packed


def unpack_results(packed: dict[str, np.ndarray]) -> list[ImageResult]:
    """Undo `pack_results`. Raises ValueError when lengths disagree, as after an incomplete transfer."""
    count_names = {"target_class_ids": "num_targets", "box_confusion": "num_pairs"}
    image_ids = packed["image_ids"].tolist()
    columns: dict[str, list[np.ndarray]] = {}
    for name in _ARRAYS:
        counts = packed[count_names.get(name, "num_predictions")]
        if len(counts) != len(image_ids) or counts.sum() != len(packed[name]):
            raise ValueError(f"packed results: {name} has {len(packed[name])} rows, {counts.sum()} were announced")
        columns[name] = np.split(packed[name], np.cumsum(counts)[:-1]) if len(counts) else []
    return [
        ImageResult(image_id, **{name: column[index] for name, column in columns.items()})
        for index, image_id in enumerate(image_ids)
    ]


def merge_results(parts: Iterable[Iterable[ImageResult]]) -> list[ImageResult]:
    """Join the results of several ranks: sorted by image id, each image exactly once.

    An image that arrives twice with the same content is kept once; with different content it raises ValueError.
    """
    merged: dict[int, ImageResult] = {}
    for part in parts:
        for result in part:
            known = merged.setdefault(result.image_id, result)
            if known is not result and not _is_same(known, result):
                raise ValueError(f"image {result.image_id} was evaluated twice, with different results")
    return [merged[image_id] for image_id in sorted(merged)]


def _is_same(first: ImageResult, second: ImageResult) -> bool:
    return all(np.array_equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(ImageResult))


# --- the numbers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curves:
    """Curves of the k classes that have targets; `c` confidences and `r` recalls from 0 to 1."""

    average_precision: np.ndarray  # (k, 10)
    precision: np.ndarray  # (k, c)
    recall: np.ndarray  # (k, c)
    f1: np.ndarray  # (k, c)
    precision_at_recall: np.ndarray  # (k, r), at IoU 0.5
    best: int  # index into c of the highest smoothed mean F1


def summarise(results: Iterable[ImageResult], names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of a data set as plain numbers, lists and dicts, ready for JSON and free of NaN.

    For `box` and `mask`: `_map50`, `_map50_95`, and `_precision`, `_recall`, `_f1` at `_best_confidence`. These are
    means over the classes that have targets. `per_class` lists every class; one without targets has zeros and
    `num_targets` 0. `confusion_matrix` has nc + 1 rows (predicted, last: missed) and columns (true, last: background).
    Without images, targets or predictions the values are 0.
    Raises ValueError when a class id has no name or an image appears twice with different results.
    """
    images = merge_results([results])
    num_classes = len(names)
    _check_class_ids(images, num_classes)
    pool, class_ids, num_targets = _pool(images, num_classes)
    num_images = np.zeros(num_classes, np.int64)
    confusion = np.zeros((num_classes + 1, num_classes + 1), np.int64)
    for image in images:
        num_images[np.unique(image.target_class_ids)] += 1
        np.add.at(confusion, (image.box_confusion[:, 0], image.box_confusion[:, 1]), 1)
    summary: dict[str, Any] = {"num_images": len(images), "num_targets": int(num_targets.sum())}
    per_class: list[dict[str, Any]] = [
        {"class_id": index, "name": name, "num_images": int(num_images[index]), "num_targets": int(num_targets[index])}
        for index, name in enumerate(names)
    ]
    for kind in KINDS:
        curves = _class_curves(pool[kind], pool["scores"], pool["class_ids"], class_ids, num_targets)
        values = _values_of_classes(curves)
        for name, value_k in values.items():
            summary[f"{kind}_{name}"] = float(value_k.mean()) if len(class_ids) else 0.0
            for row in per_class:
                row[f"{kind}_{name}"] = 0.0
            for class_id, value in zip(class_ids.tolist(), value_k.tolist(), strict=True):
                per_class[class_id][f"{kind}_{name}"] = value
        summary[f"{kind}_best_confidence"] = float(_confidence_axis()[curves.best])
    return {**summary, "per_class": per_class, "confusion_matrix": confusion.tolist()}


def precision_recall_curves(results: Iterable[ImageResult], names: Sequence[str]) -> dict[str, Any]:
    """Return the curves to plot: for each of `box` and `mask` a dict about the k classes that have targets.

    `class_ids` (k,), `axis` (1000,) from 0 to 1, `precision_at_recall` (k, 1000) at IoU 0.5 over recall,
    `average_precision` (k, 10), `precision`, `recall` and `f1` (k, 1000) over confidence, `best_confidence`.
    Raises ValueError as `summarise` does.
    """
    images = merge_results([results])
    _check_class_ids(images, len(names))
    pool, class_ids, num_targets = _pool(images, len(names))
    axis = _confidence_axis()
    answer: dict[str, Any] = {}
    for kind in KINDS:
        curves = _class_curves(pool[kind], pool["scores"], pool["class_ids"], class_ids, num_targets)
        arrays = {field.name: getattr(curves, field.name) for field in fields(curves) if field.name != "best"}
        best_confidence = float(axis[curves.best])
        answer[kind] = {"class_ids": class_ids, "axis": axis, **arrays, "best_confidence": best_confidence}
    return answer


def _check_class_ids(images: list[ImageResult], num_classes: int) -> None:
    for image in images:
        # In the confusion pairs, `num_classes` stands for missed or background.
        for ids, limit in (
            (image.class_ids, num_classes),
            (image.target_class_ids, num_classes),
            (image.box_confusion, num_classes + 1),
        ):
            if ids.size and not (ids.min() >= 0 and ids.max() < limit):
                raise ValueError(f"image {image.image_id}: class id {ids.max()}, but there are {num_classes} classes")


def _pool(images: list[ImageResult], num_classes: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Join all predictions in descending order of confidence; return them, the classes with targets, and counts."""
    packed = pack_results(images)
    order = np.argsort(-packed["scores"], kind="stable")
    pool = {
        "scores": packed["scores"][order].astype(np.float64),
        "class_ids": packed["class_ids"][order],
        "box": packed["box_hits"][order],
        "mask": packed["mask_hits"][order],
    }
    num_targets = np.bincount(packed["target_class_ids"], minlength=num_classes)
    return pool, np.flatnonzero(num_targets), num_targets


def _class_curves(
    hits: np.ndarray, scores: np.ndarray, predicted: np.ndarray, class_ids: np.ndarray, num_targets: np.ndarray
) -> _Curves:
    """Compute the curves of `class_ids` from predictions in descending order of confidence."""
    axis = _confidence_axis()
    average_precision = np.zeros((len(class_ids), len(IOU_THRESHOLDS)))
    precision, recall, precision_at_recall = (np.zeros((len(class_ids), len(axis))) for _ in range(3))
    for row, class_id in enumerate(class_ids):
        mine = predicted == class_id
        if not mine.any():
            continue
        hit_counts = hits[mine].cumsum(axis=0, dtype=np.int64)  # (p, 10): among the first 1, 2, ... p predictions
        recalls = hit_counts / num_targets[class_id]
        precisions = hit_counts / np.arange(1, len(hit_counts) + 1)[:, None]
        # np.interp wants a rising axis, and confidence falls: both are negated. Above the highest confidence there
        # is no prediction: nothing is found (recall 0) and nothing is wrong (precision 1).
        recall[row] = np.interp(-axis, -scores[mine], recalls[:, 0], left=0)
        precision[row] = np.interp(-axis, -scores[mine], precisions[:, 0], left=1)
        for column in range(len(IOU_THRESHOLDS)):
            steps, envelope = _precision_envelope(recalls[:, column], precisions[:, column])
            average_precision[row, column] = _area_101(steps, envelope)
            if column == 0:
                precision_at_recall[row] = np.interp(axis, steps, envelope)
    f1 = 2 * precision * recall / (precision + recall + _EPSILON)
    best = int(_smooth(f1.mean(axis=0)).argmax()) if len(class_ids) else 0
    return _Curves(average_precision, precision, recall, f1, precision_at_recall, best)


def _precision_envelope(recall: np.ndarray, precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (recalls, highest precision at that recall or beyond), closed at both ends: 0 beyond the last recall."""
    steps = np.concatenate([[0.0], recall, [recall[-1], 1.0]])
    heights = np.concatenate([[1.0], precision, [0.0, 0.0]])
    return steps, np.maximum.accumulate(heights[::-1])[::-1]


def _area_101(steps: np.ndarray, envelope: np.ndarray) -> float:
    """Return the area under the envelope, sampled at 101 recalls (COCO) and summed by the trapezoidal rule."""
    sampled = np.interp(np.linspace(0, 1, 101), steps, envelope)
    return float((sampled[1:] + sampled[:-1]).sum() / 200)


def _smooth(curve: np.ndarray) -> np.ndarray:
    """Average over a window of about `_SMOOTHING` of the curve's length (odd), the ends extended by their values."""
    half = round(len(curve) * _SMOOTHING * 2) // 4
    padded = np.pad(curve, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


def _values_of_classes(curves: _Curves) -> dict[str, np.ndarray]:
    return {
        "map50": curves.average_precision[:, 0],
        "map50_95": curves.average_precision.mean(axis=1),
        "precision": curves.precision[:, curves.best],
        "recall": curves.recall[:, curves.best],
        "f1": curves.f1[:, curves.best],
    }


def _confidence_axis() -> np.ndarray:
    return np.linspace(0, 1, _CURVE_POINTS)
