"""How unsure a model is of photographs without labels, and the features by which photographs are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata

from utils.common.errors import UserError
from utils.common.progress import Progress
from utils.data.images import fit_long_side
from utils.evaluation.contradictions import read_photos
from utils.evaluation.metrics.matching import CONFUSION_MIN_SCORE, box_iou
from utils.predict.detections import PhotoPrediction
from utils.predict.tiles import Predictor
from utils.sources.checks.reading import Entry
from utils.yolo.model import YoloModel

THRESHOLD = CONFUSION_MIN_SCORE  # from which a detection counts, as in inference.py
MIN_SEEN_PX = 16  # longer side, in pixels of the input, of objects that the whole photograph can show
FAR = 1e-6  # added to lengths that divide


@dataclass(frozen=True)
class Found:
    """A photograph's detections: int64 (n,), float (n,), and boxes float (n, 4) xyxy as shares of its sides."""

    class_ids: np.ndarray
    scores: np.ndarray
    boxes: np.ndarray

    @classmethod
    def of(cls, photo: np.ndarray, prediction: PhotoPrediction) -> Found:
        """Take the detections from a prediction on `photo`, (H, W, 3)."""
        height, width = photo.shape[:2]
        boxes = prediction.boxes / np.array([width, height, width, height])
        return cls(prediction.class_ids, prediction.found.scores.numpy(), boxes)

    def mirrored(self) -> Found:
        """Swap left and right."""
        left, top, right, bottom = self.boxes.T
        return replace(self, boxes=np.stack([1 - right, top, 1 - left, bottom], 1))

    def at_least(self, side: float) -> Found:
        """Return the detections whose longer side is at least this share of the photograph's."""
        kept = (self.boxes[:, 2:] - self.boxes[:, :2]).max(1, initial=0) >= side
        return Found(self.class_ids[kept], self.scores[kept], self.boxes[kept])


def look(entries: Sequence[Entry], predictor: Predictor, title: str) -> tuple[list[Found], list[Found], np.ndarray]:
    """Return what is found in each whole photograph and in its mirror image, turned back, and its features float32 (N, d).

    The features are the means over the input of the maps that the network's last layer gets. Raises UserError if some are
    no numbers.
    """
    whole = replace(predictor, tiling=None)
    pooled: list[torch.Tensor] = []

    def keep(_: Any, inputs: Any) -> None:
        pooled.append(torch.cat([level.float().mean((2, 3)) for level in inputs[0]], 1).cpu())

    def views() -> Iterator[tuple[bool, np.ndarray]]:
        for _, photo in Progress(title, len(entries))(read_photos(entries, whole)):
            small = fit_long_side(photo, predictor.size_px)
            yield False, small
            yield True, np.ascontiguousarray(small[:, ::-1])

    network: YoloModel = predictor.model
    hook = network.model[-1].register_forward_pre_hook(keep)
    found: dict[bool, list[Found]] = {False: [], True: []}
    try:
        for is_mirrored, photo, prediction in whole.predict(views()):
            found[is_mirrored].append(Found.of(photo, prediction))
    finally:
        hook.remove()
    features = torch.cat(pooled).view(len(entries), 2, -1).mean(1).numpy()
    if not np.isfinite(features).all():
        raise UserError("--model: its network gives values that are no numbers; train it again, or pass --amp off")
    return found[False], [each.mirrored() for each in found[True]], features


def find_doubts(
    entries: Sequence[Entry], seen: Sequence[list[Found]], predictor: Predictor, importance: np.ndarray
) -> tuple[dict[str, np.ndarray], list[Found]]:
    """Return what the model is unsure of in each photograph, float (N,), higher is less sure; and what it finds.

    near_threshold: `near_threshold`; mirrored, tiles: `disagreement` with the mirror image and, if the predictor has tiles,
    of these with the whole photograph, for objects that both can show. importance: of each class, float (classes,).
    """
    found, mirrored = seen
    doubts = {"mirrored": np.array([disagreement(*pair) for pair in zip(found, mirrored, strict=True)])}
    if predictor.tiling:
        photos = Progress("photographs in tiles", len(entries))(read_photos(entries, predictor))
        in_tiles = [Found.of(photo, prediction) for _, photo, prediction in predictor.predict(photos)]
        side = MIN_SEEN_PX / predictor.size_px
        pairs = [(one.at_least(side), other.at_least(side)) for one, other in zip(in_tiles, found, strict=True)]
        doubts["tiles"] = np.array([disagreement(*pair) for pair in pairs])
        found = in_tiles
    return {"near_threshold": np.array([near_threshold(each, importance) for each in found]), **doubts}, found


def near_threshold(found: Found, importance: np.ndarray) -> float:
    """Return how many detections could as well be left out: each counts by its class and its distance from THRESHOLD.

    A detection at the threshold counts as 1, one with twice or half its odds as 1/2, and so on.
    """
    ratio = found.scores / (1 - found.scores).clip(FAR) * (1 - THRESHOLD) / THRESHOLD
    return float((np.minimum(ratio, 1 / ratio.clip(FAR)) * importance[found.class_ids]).sum())


def disagreement(first: Found, second: Found) -> float:
    """Return 0 if two sets of detections are equal, 1 if they share nothing: 1 - Dice's coefficient of their confidences.

    Detections of one class are paired so that the sum of IoU times the lower confidence is the highest.
    """
    total = float(first.scores.sum() + second.scores.sum())
    shared = box_iou(first.boxes, second.boxes) * np.minimum.outer(first.scores, second.scores)
    shared *= first.class_ids[:, None] == second.class_ids
    return 1 - 2 * float(shared[linear_sum_assignment(-shared)].sum()) / total if total else 0.0


def joined(doubts: dict[str, np.ndarray]) -> np.ndarray:
    """Return the mean of each photograph's ranks among all, in (0, 1]: float (N,). Their units differ, ranks have none."""
    return np.mean([rankdata(values) / len(values) for values in doubts.values()], axis=0)
