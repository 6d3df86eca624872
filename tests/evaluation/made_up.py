"""Made-up results of an evaluation, shared by the tests of metrics and of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from utils.evaluation.metrics import ImageResult, box_iou, confusion_pairs, hit_targets


def image_result(image_id: int, *arrays: Any, **sizes: Any) -> ImageResult:
    """Return an ImageResult of anything that NumPy turns into arrays."""
    return ImageResult(image_id, *arrays, **sizes)


def random_scene(rng: np.random.Generator, num_classes: int) -> dict[str, np.ndarray]:
    """Targets, and predictions in descending order of confidence: some good, some misnamed, some made up."""
    num_targets = int(rng.integers(0, 9))
    corner = rng.random((num_targets, 2)) * 200
    targets = np.hstack([corner, corner + 20 + rng.random((num_targets, 2)) * 60])
    target_ids = rng.integers(0, num_classes, num_targets)
    seen = np.repeat(np.arange(num_targets), rng.integers(0, 4, num_targets))
    made_up = rng.random((int(rng.integers(0, 5)), 2)) * 200
    boxes = np.vstack([targets[seen] + rng.normal(0, 4, (len(seen), 4)), np.hstack([made_up, made_up + 50])])
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


def random_results(seed: int, num_images: int = 12, num_classes: int = 5) -> list[ImageResult]:
    rng = np.random.default_rng(seed)
    return [result_of(index, random_scene(rng, num_classes), num_classes) for index in range(num_images)]


def one_image(scores: list[float], hits: list[bool], num_targets: int = 1, image_id: int = 0) -> ImageResult:
    """One class, every prediction the same at all IoU thresholds."""
    wide = np.repeat(np.array(hits, bool)[:, None], 10, axis=1)
    ids = np.zeros(len(hits), int)
    return ImageResult(image_id, np.array(scores), ids, wide, wide, np.zeros(num_targets, int), np.zeros((0, 2), int))


def made_up_results(seed: int, num_images: int = 30, num_classes: int = 3) -> list[ImageResult]:
    """Return results whose confidences tie now and then."""
    results = []
    for index in range(num_images):
        rng = np.random.default_rng((seed, index))
        targets, count = rng.integers(0, num_classes, rng.integers(0, 6)), int(rng.integers(0, 12))
        scores = np.sort(rng.integers(1, 40, count) / 40)[::-1].astype(np.float32)
        class_ids = rng.integers(0, num_classes, count)
        hits = np.zeros((2, count, 10), bool)
        for kind in range(2):
            for class_id, free in enumerate(np.bincount(targets, minlength=num_classes)):
                mine = np.flatnonzero(class_ids == class_id)
                lucky = mine[rng.random(len(mine)) < scores[mine]][:free]
                hits[kind, lucky, 0] = True
        pairs = np.stack([rng.integers(0, num_classes + 1, len(targets)), targets], axis=1)
        results.append(ImageResult(index, scores, class_ids, hits[0], hits[1], targets, pairs))
    return results
