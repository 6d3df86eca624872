"""Masks in the photographs' own pixels: predictions enlarged, labels filled from their outlines, and their IoU.

An object's mask is its whole outline, even where another object covers it. All masks are regions, cut to their boxes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from utils.data.dataset import Sample
from utils.evaluation.metrics.matching import box_iou
from utils.predict.detections import Detections, Letterbox
from utils.predict.regions import Region, fill_outline

PIXELS_PER_PART = 100_000_000  # of the masks kept at a time, a byte each
# Takes a sample, where its photograph lies, some detections and their masks in the photograph's pixels.
OnMasks = Callable[[Sample, Letterbox, Detections, list[Region]], None]


def place(sample: Sample, photo_size: tuple[int, int]) -> Letterbox:
    """Return where a photograph of (width, height) pixels on disk lies in a sample's input."""
    return Letterbox(sample.image.shape[0], sample.inner_size, sample.pad, photo_size)


def outlines_in_photo(sample: Sample, placement: Letterbox) -> list[np.ndarray]:
    """Return the targets' outlines in pixels of the photograph: float64 (V, 2) xy each."""
    enlarge = np.array(placement.photo_size) / placement.inner_size
    return [(polygon.astype(np.float64) - placement.pad) * enlarge for polygon in sample.polygons]


def target_areas(sample: Sample, placement: Letterbox) -> np.ndarray:
    """Return the area inside each target's outline in pixels of the photograph: float64 (m,)."""
    outlines = outlines_in_photo(sample, placement)
    return np.array([cv2.contourArea(outline.astype(np.float32)) for outline in outlines], np.float64)


@dataclass(frozen=True)
class PhotoMasks:
    """A photograph's labels and some of its detections, as regions in the photograph's pixels."""

    truth: list[Region]
    truth_areas: np.ndarray  # float64 (m,)
    truth_class_ids: np.ndarray  # int64 (m,)
    found: list[Region]
    detections: Detections  # those of `found`


def masks_in_photo(
    sample: Sample, detections: Detections, regions: Iterable[Region], placement: Letterbox
) -> Iterator[PhotoMasks]:
    """Yield all labels with some of the detections at a time, in order, at least once. `regions` are their masks.

    The regions of a part have about PIXELS_PER_PART pixels, so memory does not grow with the number of detections.
    """
    truth = [fill_outline(outline, placement.photo_size) for outline in outlines_in_photo(sample, placement)]
    labels = (truth, areas_of(truth), sample.class_ids)
    found: list[Region] = []
    for end, region in enumerate(regions, start=1):
        found.append(region)
        if end < len(detections) and sum(one.mask.size for one in found) >= PIXELS_PER_PART:
            yield PhotoMasks(*labels, found, detections[end - len(found) : end])
            found = []
    yield PhotoMasks(*labels, found, detections[len(detections) - len(found) :])


def areas_of(regions: Sequence[Region]) -> np.ndarray:
    """Return the regions' numbers of pixels: float64 (n,)."""
    return np.array([np.count_nonzero(region.mask) for region in regions], np.float64)


def region_iou(masks: PhotoMasks) -> tuple[np.ndarray, np.ndarray]:
    """Return the IoU of labels and detections (m, n), 0 between different classes, and the detections' areas (n,)."""
    areas = areas_of(masks.found)
    same_class = masks.truth_class_ids[:, None] == masks.detections.class_ids.numpy()
    return mask_iou(masks.truth, masks.found, (masks.truth_areas, areas), same_class), areas


def mask_iou(
    first: Sequence[Region],
    second: Sequence[Region],
    areas: Sequence[np.ndarray],
    is_compared: np.ndarray | bool = True,
) -> np.ndarray:
    """Return the IoU of each pair of regions, float64 (m, n), from their areas; 0 where they are not compared."""
    iou = np.zeros((len(first), len(second)))
    boxes = (np.array([region.corners for region in regions]).reshape(-1, 4) for regions in (first, second))
    for one, other in np.argwhere((box_iou(*boxes) > 0) & is_compared):
        shared = first[one].shared_pixels(second[other])
        iou[one, other] = shared / max(areas[0][one] + areas[1][other] - shared, 1)
    return iou
