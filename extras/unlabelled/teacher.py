"""What a teacher sees in a photograph and in its mirror image, where both views agree, and which detections are right."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from scipy.spatial import KDTree

from utils.data.labels import ANY_CLASS, Photo
from utils.evaluation.metrics.matching import hit_targets
from utils.evaluation.metrics.thin_objects import TOLERANCE_PX
from utils.evaluation.native_masks import areas_of, mask_iou
from utils.predict.detections import PhotoPrediction
from utils.predict.lines.thinning import centreline
from utils.predict.photo_masks import Letterbox
from utils.predict.postprocess import Context, Step
from utils.predict.regions import LazyRegions, Region, fill_outline
from utils.predict.shift_features import image_statistics, photo_traits
from utils.predict.tiles import Predictor
from utils.sources.mask_rings import MAX_MASK_RINGS, join_rings, mask_rings
from utils.yolo.model import YoloModel, trained_wire_labels

MIN_ON_LINES = 0.8  # of a thin object's centreline that lies near centrelines of its class, if it is right
MIN_IGNORED = 0.5  # of a detection's mask that lies in a region to ignore, if it is not judged


@dataclass(frozen=True)
class Traits(Step):
    """Adds to a prediction what the photograph is like."""

    def see(self, prototypes: torch.Tensor, canvas: np.ndarray, placement: Letterbox) -> np.ndarray:
        """Return the `image_statistics`."""
        return image_statistics(prototypes, canvas, placement)

    def __call__(self, prediction: PhotoPrediction, context: Context, seen: np.ndarray) -> PhotoPrediction:
        """Return the prediction with traits."""
        return replace(prediction, traits=photo_traits(prediction.detections, seen, context.placement.size_px))


class Teacher:
    """Predicts on one photograph at a time, so that what it sees depends on no other."""

    def __init__(self, predictor: Predictor, model: YoloModel) -> None:
        self.predictor = replace(predictor, steps=(*predictor.steps, Traits()))
        curved = trained_wire_labels(model)["wires_bent"] if predictor.thin else ()
        self.thin, self.straight = predictor.thin, set(predictor.thin) - set(curved)

    def see(self, photo: np.ndarray) -> tuple[PhotoPrediction, np.ndarray]:
        """Return what is found in a photograph, RGB uint8 (H, W, 3), and on which detections both views agree: bool (n,)."""
        mirrored = np.ascontiguousarray(photo[:, ::-1])
        (_, _, found), (_, _, other) = self.predictor.predict([(0, photo), (1, mirrored)])

        def turned(number: int) -> Region:
            region = other.masks[number]
            return Region(photo.shape[1] - region.corners[2], region.top, region.mask[:, ::-1])

        back = LazyRegions(range(len(other.masks)), turned)
        return found, confirmed(found.masks, found.class_ids, back, other.class_ids, self.thin)

    def judge(self, found: PhotoPrediction, labels: Photo, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return which detections are right, and which can be judged, as none can in a region to ignore: bool (n,) each."""
        truth, ignored = (
            LazyRegions([outline * size for outline in outlines], partial(fill_outline, photo_size=size))
            for outlines in (labels.polygons, labels.ignored)
        )
        is_right = confirmed(found.masks, found.class_ids, truth, labels.class_ids, self.thin)
        is_judged = np.ones(len(is_right), bool)
        for class_id, region in zip(labels.ignored_ids, ignored, strict=True):
            for number in np.flatnonzero(~is_right & ((class_id == ANY_CLASS) | (found.class_ids == class_id))):
                mask = found.masks[number]
                is_judged[number] &= region.shared_pixels(mask) < MIN_IGNORED * max(mask.mask.sum(), 1)
        return is_right, is_judged

    def outline(self, found: PhotoPrediction, number: int) -> np.ndarray:
        """Return a detection's outline (V, 2) in pixels: the strip of a line, all parts and holes of a mask, or its box."""
        line = found.lines[number] if found.lines else None
        if line is not None and int(found.class_ids[number]) in self.straight:
            return line.outline
        mask = found.masks[number]
        rings = mask_rings(mask.mask, mask.left, mask.top)[:MAX_MASK_RINGS] if mask.mask.any() else []
        return join_rings(rings) if rings else found.boxes[number][[0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2)


def confirmed(
    found: Sequence[Region], class_ids: np.ndarray, others: Sequence[Region], other_ids: np.ndarray, thin: Sequence[int]
) -> np.ndarray:
    """Return which masks, best first, agree with one of `others` of their class that no better one took: bool (n,).

    They agree from an IoU of 0.5 on. A thin object agrees if its centreline lies on those of others; its width is not judged.
    """
    is_compared = (other_ids[:, None] == class_ids) & ~np.isin(class_ids, thin)
    iou = mask_iou(others, found, (areas_of(others), areas_of(found)), is_compared)
    result = hit_targets(iou, other_ids, class_ids)[:, 0] >= 0
    for class_id in set(class_ids.tolist()) & set(thin):
        lines = [centreline(others[number]) for number in np.flatnonzero(other_ids == class_id)]
        if any(map(len, lines)):
            tree = KDTree(np.concatenate(lines))
            for number in np.flatnonzero(class_ids == class_id):
                own = centreline(found[number])
                distances = tree.query(own)[0] if len(own) else np.full(1, np.inf)
                result[number] = (distances <= TOLERANCE_PX).mean() >= MIN_ON_LINES
    return result
