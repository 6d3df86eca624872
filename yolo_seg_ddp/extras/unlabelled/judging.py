"""What a teacher sees in a photograph, on what both of its views agree, and from which confidence
on that is surely right.

Levels of confidence are tested from above, each with the exact upper bound of Clopper and Pearson
(1934) on the share of wrong detections. The first that fails ends it: this fixed order is why many
levels need no correction (Learn then Test, arXiv 2110.01052, section 4). Where it begins depends on
the number of detections alone, not on which of them are wrong.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.spatial import KDTree
from scipy.stats import beta

from yolo_seg_ddp.data.labels import ANY_CLASS, Photo
from yolo_seg_ddp.data.mask_rings import MAX_MASK_RINGS, join_rings, mask_rings
from yolo_seg_ddp.data.polygons import polygon_boxes
from yolo_seg_ddp.evaluation.metrics.matching import LEVELS, box_iou, hit_targets
from yolo_seg_ddp.evaluation.metrics.thin_objects import TOLERANCE_PX
from yolo_seg_ddp.evaluation.native_masks import areas_of, mask_iou
from yolo_seg_ddp.predict.detections import PhotoPrediction
from yolo_seg_ddp.predict.postprocess import Context, Step
from yolo_seg_ddp.predict.regions import LazyRegions, Region, fill_outline
from yolo_seg_ddp.predict.shift_features import image_statistics, photo_features
from yolo_seg_ddp.predict.thinning import centreline
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.text import counted
from yolo_seg_ddp.yolo.model import YoloModel, trained_wire_labels

LEAST = 0.2  # confidence below which a detection is background: README.md has the measurement
# of a thin object's centreline that lies near centrelines of its class, if it is right
MIN_ON_LINES = 0.8
# of a mask that lies in a labelled region to ignore, if the detection is not judged
MIN_IGNORED = 0.5
MOST_NEEDED = 1_000_000  # detections that are worth naming
# the second view's input over the first's, in pixels of a side: its outlines are finer
CLOSER = 1.5


def upper_bound(num_wrong: np.ndarray, num: np.ndarray, certainty: float) -> np.ndarray:
    """Return what the share of wrong detections exceeds with a probability of at most 1 -
    certainty.
    """
    return np.where(
        num_wrong < num, beta.ppf(certainty, num_wrong + 1, np.maximum(num - num_wrong, 1)), 1.0
    )


@cache
def num_needed(limit: float, certainty: float, num_wrong: int = 0, share: float = 0.0) -> int:
    """Return how many detections keep the limit if so many, or such a share, of them are wrong;
    MOST_NEEDED: no number does.
    """
    wrong = lambda num: np.array(max(num_wrong, round(share * num)))  # noqa: E731
    is_enough = lambda num: bool(upper_bound(wrong(num), np.array(num), certainty) <= limit)  # noqa: E731
    return bisect_left(range(MOST_NEEDED), True, lo=1, key=is_enough)


def lowest_level(
    num: np.ndarray, num_wrong: np.ndarray, limit: float, certainty: float
) -> int | None:
    """Return the last of the levels, from above, down to which at most the share `limit` of
    detections is wrong.

    num, num_wrong: of those with at least each level, (levels,). The first level has enough of them
    for as many mistakes, at most two, as all of them allow.
    """
    needed = [num_needed(limit, certainty, mistakes) for mistakes in (2, 1, 0)]
    is_tested = num >= next((each for each in needed if each <= num[-1]), needed[-1])
    fails = np.flatnonzero(is_tested & (upper_bound(num_wrong, num, certainty) > limit))
    last = int(fails[0]) - 1 if len(fails) else len(num) - 1
    return last if last >= 0 and is_tested[last] else None


def trained_counts(model: YoloModel, num_classes: int) -> np.ndarray | None:
    """Return the numbers of `count_at_levels` that a model's file holds of its training's
    validation; None if it holds none.
    """
    shape = (num_classes, 2, len(LEVELS))
    counts = np.array(model.args.get("precision"))
    is_whole = counts.dtype.kind == "i" and counts.size == np.prod(shape) and counts.min() >= 0
    return counts.reshape(shape) if is_whole else None


def sure_from(counts: np.ndarray, limit: float, certainty: float) -> tuple[float | None, str]:
    """Return the confidence from which a class's detections are sure, None if none is, and in words
    why.

    counts: (2, levels), see `count_at_levels`.
    """
    levels = LEVELS[LEVELS >= LEAST][::-1]
    from_above = counts[:, ::-1].cumsum(axis=1)[:, : len(levels)]
    num_wrong, num = from_above[0], from_above.sum(axis=0)
    bounds, last = (
        upper_bound(num_wrong, num, certainty),
        lowest_level(num, num_wrong, limit, certainty),
    )
    at = len(levels) - 1 - int(bounds[::-1].argmin()) if last is None else last
    of_all = counted(int(num[at]), "validation detection")
    words = f"{num_wrong[at]:,} of its {of_all} from confidence {levels[at]:.2f} on are wrong"
    if not num[at]:
        words = f"it has no validation detection from confidence {levels[at]:.2f} on"
    if last is not None:
        certain = f"at most {bounds[at]:.1%} with {certainty:.0%} certainty"
        return round(float(levels[at]), 3), f"these become labels, because {words}, {certain}"
    parts = [f"no detection becomes a label, because {words}"]
    if (
        num[at]
        < (enough := num_needed(limit, certainty, share=num_wrong[at] / max(num[at], 1)))
        < MOST_NEEDED
    ):
        kind = "as good one" if num[at] else "right one"
        parts.append(f"{counted(enough, kind)} would be enough")
    for share in range(int(100 * limit) + 1, 51):
        if lowest_level(num, num_wrong, share / 100, certainty) is not None:
            return None, "; ".join([*parts, f"--wrong {share / 100:g} would be kept now"])
    return None, "; ".join(parts)


@dataclass(frozen=True)
class Traits(Step):
    """Adds to a prediction what the photograph is like (yolo_seg_ddp/predict/shift_features.py)."""

    see = staticmethod(image_statistics)

    def __call__(
        self, prediction: PhotoPrediction, context: Context, seen: np.ndarray
    ) -> PhotoPrediction:
        """Return the prediction with features."""
        return replace(
            prediction,
            features=photo_features(prediction.detections, seen, context.placement.size_px),
        )


class Teacher:
    """Predicts on one photograph at a time, so that what it sees depends on no other.

    It looks twice: at the photograph, and at its mirror image in a larger network input. Tiles,
    which show all details, keep their size; in the mirror image they lie elsewhere.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.thin = (
            replace(predictor, steps=(*predictor.steps, Traits())),
            predictor.thin,
        )
        closer_px = round(CLOSER * predictor.size_px / 32) * 32
        self.closer = predictor if predictor.tiling else replace(predictor, size_px=closer_px)
        self.straight = set(self.thin) - set(trained_wire_labels(predictor.model)["wires_bent"])

    def see(self, photo: np.ndarray) -> tuple[PhotoPrediction, np.ndarray]:
        """Return what is found in a photograph, RGB uint8 (H, W, 3), and with what the second view
        agrees: bool (n,).

        Where it does, the mask is that of the second view.
        """
        ((_, _, found),) = self.predictor.predict([(0, photo)])
        ((_, _, other),) = self.closer.predict([(0, np.ascontiguousarray(photo[:, ::-1]))])
        back = LazyRegions(
            other.masks,
            lambda one: Region(photo.shape[1] - one.corners[2], one.top, one.mask[:, ::-1]),
        )
        agrees, partner = confirmed(found.masks, found.class_ids, back, other.class_ids, self.thin)
        if not self.predictor.tiling:
            pairs = zip(found.masks, partner.tolist(), strict=True)
            found = replace(found, masks=[mask if one < 0 else back[one] for mask, one in pairs])
        return found, agrees

    def judge(
        self, found: PhotoPrediction, labels: Photo, size: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which detections are right, and which can be judged, as none can in a region to
        ignore: bool (n,) each.
        """
        truth, ignored = (
            LazyRegions(outlines, lambda outline: fill_outline(outline * size, size))
            for outlines in (labels.polygons, labels.ignored)
        )
        is_right, _ = confirmed(found.masks, found.class_ids, truth, labels.class_ids, self.thin)
        if len(labels.boxed):
            overlap = self.overlap(found, labels, size)
            is_right |= hit_targets(overlap, labels.class_ids, found.class_ids)[:, 0] >= 0
        is_judged = np.ones(len(is_right), bool)
        for class_id, region in zip(labels.ignored_ids, ignored, strict=True):
            is_of_class = (class_id == ANY_CLASS) | (found.class_ids == class_id)
            for number in np.flatnonzero(~is_right & is_of_class).tolist():
                mask = found.masks[number]
                is_judged[number] &= region.shared_pixels(mask) < MIN_IGNORED * max(
                    mask.mask.sum(), 1
                )
        return is_right, is_judged

    def overlap(self, found: PhotoPrediction, labels: Photo, size: tuple[int, int]) -> np.ndarray:
        """Return the IoU of labels and detections of any classes, (m, n): of masks, or of boxes
        where a label has no outline.
        """
        truth = LazyRegions(labels.polygons, lambda outline: fill_outline(outline * size, size))
        areas = (areas_of(truth), areas_of(found.masks))
        overlap = mask_iou(truth, found.masks, areas)
        boxes = polygon_boxes(labels.polygons) * (size * 2)
        overlap[labels.boxed] = box_iou(boxes[labels.boxed], found.boxes)
        return overlap

    def outline(self, found: PhotoPrediction, number: int) -> np.ndarray:
        """Return a detection's outline (V, 2) in pixels: the strip of a line, all parts and holes
        of a mask, or its box.
        """
        line, mask = found.lines[number] if found.lines else None, found.masks[number]
        if line is not None and int(found.class_ids[number]) in self.straight:
            return line.outline
        rings = (
            mask_rings(mask.mask, mask.left, mask.top)[:MAX_MASK_RINGS] if mask.mask.any() else []
        )
        return (
            join_rings(rings)
            if rings
            else found.boxes[number][[0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2)
        )


def confirmed(
    found: Sequence[Region],
    class_ids: np.ndarray,
    others: Sequence[Region],
    other_ids: np.ndarray,
    thin: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Return which masks, best first, agree with one of `others` of their class that no better one
    took, and with which.

    bool (n,) and int (n,), -1 for none. They agree from an IoU of 0.5 on; a thin object, if its
    centreline lies on those of others, whatever its width: it agrees with no single one.
    """
    is_compared = (other_ids[:, None] == class_ids) & ~np.isin(class_ids, thin)
    iou = mask_iou(others, found, (areas_of(others), areas_of(found)), is_compared)
    partner = hit_targets(iou, other_ids, class_ids)[:, 0]
    result = partner >= 0
    for class_id in set(class_ids.tolist()) & set(thin):
        lines = [
            centreline(others[number]) for number in np.flatnonzero(other_ids == class_id).tolist()
        ]
        if any(map(len, lines)):
            tree = KDTree(np.concatenate(lines))
            for number in np.flatnonzero(class_ids == class_id).tolist():
                own = centreline(found[number])
                result[number] = (
                    len(own) > 0 and (tree.query(own)[0] <= TOLERANCE_PX).mean() >= MIN_ON_LINES
                )
    return result, partner
