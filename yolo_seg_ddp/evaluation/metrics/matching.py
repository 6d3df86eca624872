"""Matching within one image: which predictions hit which targets, and in which size class they
count.
"""

import numpy as np

from yolo_seg_ddp.data.labels import ANY_CLASS

IOU_THRESHOLDS = (np.arange(50, 100, 5) / 100).astype(np.float32)  # 0.50, 0.55, ... 0.95
# Confidences for which a guarantee is sought, the same whatever the data are
# (yolo_seg_ddp/extras/guarantee/bounds.py).
LEVELS = np.array([0.001, 0.002, 0.005, *(np.arange(1, 100) / 100)], np.float32)
CONFUSION_MIN_SCORE = 0.25  # the confusion matrix ignores less confident predictions
CONFUSION_MIN_IOU = 0.45


def box_iou(first: np.ndarray, second: np.ndarray, *, of_second: bool = False) -> np.ndarray:
    """Return the pairwise IoU, shape (m, n), of boxes (m, 4) and (n, 4) in xyxy; 0 where both are
    empty.

    of_second: return the intersection's share of the second box instead, as COCO does for crowds.
    """
    a = np.asarray(first, np.float64).reshape(-1, 1, 4)
    b = np.asarray(second, np.float64).reshape(1, -1, 4)
    # One axis after the other: NumPy takes several times as long for a product over an axis of two.
    width, height = (
        (
            np.minimum(a[..., axis + 2], b[..., axis + 2]) - np.maximum(a[..., axis], b[..., axis])
        ).clip(min=0)
        for axis in (0, 1)
    )
    overlap = width * height
    union = (b[..., 2:] - b[..., :2]).prod(axis=-1)
    if not of_second:
        union = (a[..., 2:] - a[..., :2]).prod(axis=-1) + union - overlap
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)


def hit_targets(
    iou: np.ndarray, target_class_ids: np.ndarray, predicted_class_ids: np.ndarray
) -> np.ndarray:
    """Return the target that each prediction hits, -1 for none: int64 (n, 10), a column for each of
    IOU_THRESHOLDS.

    iou: (m targets, n predictions), the most confident prediction first. At each threshold the
    predictions choose in this order: each takes the free target of its class with the highest IoU,
    if that IoU reaches the threshold.
    """
    targets, predictions = np.asarray(target_class_ids), np.asarray(predicted_class_ids)
    hits = np.full((len(predictions), len(IOU_THRESHOLDS)), -1, dtype=np.int64)
    if hits.size == 0 or len(targets) == 0:
        return hits
    same_class = targets[:, None] == predictions[None, :]
    overlap = np.where(same_class, np.asarray(iou).reshape(same_class.shape), 0).astype(np.float32)
    # Pairs sorted by prediction, then by IoU; of equal targets the first comes first, as with
    # argmax.
    target, prediction = np.nonzero(overlap >= IOU_THRESHOLDS[0])
    order = np.lexsort((target, -overlap[target, prediction], prediction))
    pairs = np.stack([prediction, target], axis=1)[order]
    reached = np.searchsorted(IOU_THRESHOLDS, overlap[target, prediction][order], side="right")
    # A number has a bit for each threshold at which a target is free, or at which a prediction has
    # no target yet.
    every = 2 ** len(IOU_THRESHOLDS) - 1
    free, waiting = [every] * len(targets), [every] * len(predictions)
    taken = []
    for (p, t), count in zip(pairs.tolist(), reached.tolist(), strict=True):
        hit = free[t] & waiting[p] & (2**count - 1)
        free[t] -= hit
        waiting[p] -= hit
        taken.append(hit)
    pair, column = np.nonzero(
        np.array(taken, np.int64)[:, None] >> np.arange(len(IOU_THRESHOLDS)) & 1
    )
    hits[pairs[pair, 0], column] = pairs[pair, 1]
    return hits


def count_at_levels(
    num_classes: int, class_ids: np.ndarray, is_right: np.ndarray, scores: np.ndarray
) -> np.ndarray:
    """Return how many detections (n,) of each class are wrong, and how many right, at each of
    LEVELS: int64 (classes, 2, levels).

    A detection counts at the highest level that its confidence reaches.
    """
    counts = np.zeros((num_classes, 2, len(LEVELS)), np.int64)
    reached = np.searchsorted(LEVELS, scores.astype(np.float32), side="right") - 1
    rows = (class_ids.astype(np.int64), is_right.astype(np.int64), reached.clip(0))
    np.add.at(counts, rows, 1)
    return counts


def ignored_shares(
    shares: np.ndarray, region_class_ids: np.ndarray, predicted_class_ids: np.ndarray
) -> np.ndarray:
    """Return each prediction's largest share in a region to ignore of its class, float32 (n,), from
    shares (regions, n).
    """
    is_of_class = np.isin(region_class_ids, ANY_CLASS)[:, None] | (
        region_class_ids[:, None] == predicted_class_ids
    )
    return np.where(is_of_class, shares, 0).max(axis=0, initial=0).astype(np.float32)


def sizes_of_predictions(
    hits: np.ndarray, target_sizes: np.ndarray, own_sizes: np.ndarray
) -> np.ndarray:
    """Return the size class in which each prediction counts, at each IoU threshold: uint8 (n, 10).

    A hit counts in the size class of its target, a false positive in that of its own area (COCO's
    rule, cocoeval's `areaRng`). hits: (n, 10) from `hit_targets`; target_sizes (m,) and own_sizes
    (n,) from `size_classes`.
    """
    own = np.repeat(np.asarray(own_sizes, np.uint8)[:, None], hits.shape[1], axis=1)
    return np.where(hits >= 0, target_sizes[hits], own) if len(target_sizes) else own


def confusion_pairs(
    iou: np.ndarray,
    target_class_ids: np.ndarray,
    predicted_class_ids: np.ndarray,
    scores: np.ndarray,
    num_classes: int,
    ignored: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Pair predictions and targets of any classes for the confusion matrix: int64 (k, 2).

    iou: (m targets, n predictions). Rows are (predicted class, true class); `num_classes` means a
    missed target in the first column and background in the second. See `pair_ignoring_class`;
    without partner, what is ignored is no row.
    """
    targets, predictions = (
        np.asarray(target_class_ids, np.int64),
        np.asarray(predicted_class_ids, np.int64),
    )
    partner = pair_ignoring_class(iou, len(targets), scores)
    named = np.append(predictions, num_classes)[partner]  # -1, no partner, picks the last
    unpaired = np.ones(len(predictions), np.bool_)
    unpaired[partner[partner >= 0]] = False
    is_false = (
        unpaired
        & (np.asarray(scores) > CONFUSION_MIN_SCORE)
        & (np.asarray(ignored) <= CONFUSION_MIN_IOU)
    )
    false_alarms = np.flatnonzero(is_false)
    background = np.full(len(false_alarms), num_classes, np.int64)
    return np.concatenate(
        [
            np.stack([named, targets], axis=1),
            np.stack([predictions[false_alarms], background], axis=1),
        ]
    )


def pair_ignoring_class(iou: np.ndarray, num_targets: int, scores: np.ndarray) -> np.ndarray:
    """Return the prediction that is paired with each target, whatever their classes, -1 for none:
    int64 (m,).

    iou: (m targets, n predictions). In descending order of confidence, each prediction above
    CONFUSION_MIN_SCORE takes the free target with the highest IoU, if above CONFUSION_MIN_IOU
    (Ultralytics' ConfusionMatrix and its defaults).
    """
    confidence = np.asarray(scores)
    overlap = np.array(iou, np.float64).reshape(num_targets, len(confidence))
    confident = np.flatnonzero(confidence > CONFUSION_MIN_SCORE)
    partner = np.full(num_targets, -1, np.int64)
    for prediction in (
        confident[np.argsort(-confidence[confident], kind="stable")] if num_targets else ()
    ):
        target = overlap[:, prediction].argmax()
        if overlap[target, prediction] > CONFUSION_MIN_IOU:
            partner[target] = prediction
            overlap[target] = 0
    return partner
