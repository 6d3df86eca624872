"""Calibration of the detections' confidence, and the best confidence threshold of each class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from utils.evaluation.metrics.results import ImageResult, merge_results, pack_results, pool_predictions
from utils.evaluation.metrics.summary import KINDS

CALIBRATION_BINS = 10
# Below it are hundreds of candidates per image that nobody uses; they would dominate the calibration error.
CALIBRATION_MIN_CONFIDENCE = 0.05


def calibration(results: Iterable[ImageResult]) -> dict[str, dict[str, Any]]:
    """Compare confidence with precision at IoU 0.5; return a dict for `box` and one for `mask`.

    `bins`: ten equal parts of 0 to 1 (the first from CALIBRATION_MIN_CONFIDENCE), each with `low`, `high`,
    `num_detections`, mean `confidence` and `precision`, both None in an empty bin. `error`: the expected calibration
    error, |confidence - precision| of the bins averaged over detections (Guo et al. 2017; for detection Küppers et al.
    2020). `excess`: mean confidence minus precision over all detections, above 0 for an overconfident model. Both are
    None without detections.
    """
    packed = pack_results(merge_results([results]))
    scores = packed["scores"].astype(np.float64)
    kept = scores >= CALIBRATION_MIN_CONFIDENCE
    scores = scores[kept]
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    number = np.minimum((scores * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    counts = np.bincount(number, minlength=CALIBRATION_BINS)
    confidence_sums = np.bincount(number, scores, CALIBRATION_BINS)
    answer: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        hit_sums = np.bincount(number, packed[f"{kind}_hits"][kept, 0], CALIBRATION_BINS)
        answer[kind] = {
            "error": float(np.abs(confidence_sums - hit_sums).sum() / len(scores)) if len(scores) else None,
            "excess": float((confidence_sums - hit_sums).sum() / len(scores)) if len(scores) else None,
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


def operating_points(results: Iterable[ImageResult], names: Sequence[str]) -> dict[str, list[dict[str, Any] | None]]:
    """Find for each class the confidence threshold with the highest F1 at IoU 0.5.

    For `box` and `mask` a list over all classes: `threshold` (keep confidence >= it), `precision`, `recall`, `f1`,
    `num_hits`, `num_false`, `num_missed`; None for a class without targets or without any hit. The values are counted,
    not read off interpolated curves. Of several thresholds with equal F1 the highest is taken.
    """
    pool = pool_predictions(merge_results([results]))
    is_of_class = [pool["class_ids"] == class_id for class_id in range(len(names))]
    num_targets = np.bincount(pool["target_class_ids"], minlength=len(names)).tolist()
    return {
        kind: [
            _best_point(pool["scores"][chosen], pool[f"{kind}_hits"][chosen, 0], number)
            for chosen, number in zip(is_of_class, num_targets, strict=True)
        ]
        for kind in KINDS
    }


def _best_point(scores: np.ndarray, hits: np.ndarray, num_targets: int) -> dict[str, Any] | None:
    """Return the best threshold of one class from its predictions (p,) in descending order of confidence."""
    if not num_targets or not hits.any():
        return None
    is_last_of_equals = np.append(scores[1:] != scores[:-1], True)  # a threshold keeps all of equal confidence
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
