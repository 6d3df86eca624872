"""Made-up results of an evaluation, shared by the tests of metrics and of the report."""

from dataclasses import replace
from typing import Any

import numpy as np

from yolo_seg_ddp.evaluation.metrics.matching import box_iou, confusion_pairs, hit_targets
from yolo_seg_ddp.evaluation.metrics.results import ImageResult


def image_result(image_id: int, *arrays: Any, **sizes: Any) -> ImageResult:
    """Return an ImageResult of anything that NumPy turns into arrays."""
    return ImageResult(image_id, *arrays, **sizes)


def random_scene(rng: np.random.Generator, num_classes: int) -> dict[str, np.ndarray]:
    """Targets, and predictions in descending order of confidence: some good, some misnamed, some
    made up.
    """
    num_targets = int(rng.integers(0, 9))
    corner = rng.random((num_targets, 2)) * 200
    targets = np.hstack([corner, corner + 20 + rng.random((num_targets, 2)) * 60])
    target_ids = rng.integers(0, num_classes, num_targets)
    seen = np.repeat(np.arange(num_targets), rng.integers(0, 4, num_targets))
    made_up = rng.random((int(rng.integers(0, 5)), 2)) * 200
    boxes = np.vstack(
        [targets[seen] + rng.normal(0, 4, (len(seen), 4)), np.hstack([made_up, made_up + 50])]
    )
    ids = np.concatenate([target_ids[seen], rng.integers(0, num_classes, len(made_up))])
    ids = np.where(rng.random(len(ids)) < 0.15, rng.integers(0, num_classes, len(ids)), ids)
    scores = np.sort(rng.random(len(ids)).astype(np.float32))[::-1].copy()
    order = rng.permutation(len(ids))
    return {
        "targets": targets.astype(np.float32),
        "target_ids": target_ids,
        "boxes": boxes[order].astype(np.float32),
        "ids": ids[order],
        "scores": scores,
    }


def result_of(image_id: int, scene: dict[str, np.ndarray], num_classes: int) -> ImageResult:
    iou = box_iou(scene["targets"], scene["boxes"])
    target_ids, ids = scene["target_ids"], scene["ids"]
    return ImageResult(
        image_id,
        scene["scores"],
        ids,
        (hit_targets(iou, target_ids, ids) >= 0),
        (hit_targets(iou * 0.9, target_ids, ids) >= 0),
        target_ids,
        confusion_pairs(iou, target_ids, ids, scene["scores"], num_classes),
    )


def random_results(
    seed: int, num_images: int = 12, num_classes: int = 5, decimals: int = 9
) -> list[ImageResult]:
    """Return results whose confidences are rounded: with few decimals they tie now and then."""
    rng = np.random.default_rng(seed)
    results = [
        result_of(index, random_scene(rng, num_classes), num_classes) for index in range(num_images)
    ]
    return [replace(result, scores=result.scores.round(decimals)) for result in results]


def one_image(
    scores: list[float], hits: list[bool], num_targets: int = 1, image_id: int = 0
) -> ImageResult:
    """One class, every prediction the same at all IoU thresholds."""
    wide = np.repeat(np.array(hits, bool)[:, None], 10, axis=1)
    ids = np.zeros(len(hits), int)
    return ImageResult(
        image_id,
        np.array(scores),
        ids,
        wide,
        wide,
        np.zeros(num_targets, int),
        np.zeros((0, 2), int),
    )
