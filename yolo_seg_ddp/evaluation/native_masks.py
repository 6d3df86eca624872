"""Masks in the photographs' own pixels: predictions enlarged, labels filled from their outlines,
and their IoU.

An object's mask is its whole outline, even where another object covers it. All masks are regions,
cut to their boxes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch

from yolo_seg_ddp.data.dataset import Sample
from yolo_seg_ddp.data.polygons import polygon_boxes
from yolo_seg_ddp.evaluation.metrics.matching import box_iou
from yolo_seg_ddp.predict.detections import Detections, Letterbox
from yolo_seg_ddp.predict.regions import Region, fill_outline

PIXELS_PER_PART = 100_000_000  # of the masks kept at a time, a byte each
# Takes a sample, where its photograph lies, some detections and their masks in the photograph's
# pixels.
OnMasks = Callable[[Sample, Letterbox, Detections, list[Region]], None]


def place(sample: Sample, photo_size: tuple[int, int]) -> Letterbox:
    """Return where a photograph of (width, height) pixels on disk lies in a sample's input."""
    return Letterbox(sample.image.shape[0], sample.inner_size, sample.pad, photo_size)


def regions_to_ignore(sample: Sample) -> Sample:
    """Return the sample with its regions to ignore in place of its targets."""
    boxes = polygon_boxes(sample.ignored).astype(np.float32)
    return replace(sample, class_ids=sample.ignored_ids, boxes=boxes, polygons=sample.ignored)


def without_boxed(sample: Sample) -> Sample:
    """Return the sample with its outlined targets alone; the boxes of the others are regions to
    ignore.

    Of a class without any outline here no mask is judged, as if nobody had looked for it: else its
    false alarms would count and its hits would not.
    """
    if not len(sample.boxed):
        return sample
    kept = np.delete(np.arange(len(sample.class_ids)), sample.boxed)
    boxed_ids = sample.class_ids[sample.boxed]
    bare = np.flatnonzero(~np.isin(boxed_ids, sample.class_ids[kept]))
    return replace(
        sample,
        class_ids=sample.class_ids[kept],
        boxes=sample.boxes[kept],
        polygons=[sample.polygons[number] for number in kept],
        ignored_ids=np.concatenate([sample.ignored_ids, boxed_ids]),
        ignored=[*sample.ignored, *(sample.polygons[number] for number in sample.boxed)],
        unsearched=np.concatenate([sample.unsearched, len(sample.ignored) + bare]),
    )


def outlines_in_photo(sample: Sample, placement: Letterbox) -> list[np.ndarray]:
    """Return the targets' outlines in pixels of the photograph: float64 (V, 2) xy each."""
    enlarge = np.array(placement.photo_size) / placement.inner_size
    return [(polygon.astype(np.float64) - placement.pad) * enlarge for polygon in sample.polygons]


def compare_boxes(
    sample: Sample, found: Detections, placement: Letterbox | None = None
) -> np.ndarray:
    """Return the overlap of boxes, as `region_iou` does that of masks. placement: compare in the
    photograph's pixels.
    """
    inputs = (
        torch.from_numpy(sample.boxes),
        torch.from_numpy(regions_to_ignore(sample).boxes),
        found.boxes,
    )
    truth, regions, boxes = (
        (placement.boxes_to_photo(one) if placement else one).numpy() for one in inputs
    )
    return np.concatenate([box_iou(truth, boxes), box_iou(regions, boxes, of_second=True)])


def target_areas(sample: Sample, placement: Letterbox) -> np.ndarray:
    """Return the area inside each target's outline in pixels of the photograph: float64 (m,)."""
    outlines = outlines_in_photo(sample, placement)
    return np.array(
        [cv2.contourArea(outline.astype(np.float32)) for outline in outlines], np.float64
    )


@dataclass(frozen=True)
class PhotoMasks:
    """A photograph's labels and some of its detections, as regions in the photograph's pixels."""

    truth: list[Region]
    truth_areas: np.ndarray  # float64 (m,)
    truth_class_ids: np.ndarray  # int64 (m,)
    ignored: list[Region]  # the regions to ignore
    found: list[Region]
    detections: Detections  # those of `found`


def masks_in_photo(
    sample: Sample, detections: Detections, regions: Iterable[Region], placement: Letterbox
) -> Iterator[PhotoMasks]:
    """Yield all labels with some of the detections at a time, in order, at least once. `regions`
    are their masks.

    The regions of a part have about PIXELS_PER_PART pixels, so memory does not grow with the number
    of detections.
    """
    truth, ignored = (
        [
            fill_outline(outline, placement.photo_size)
            for outline in outlines_in_photo(one, placement)
        ]
        for one in (sample, regions_to_ignore(sample))
    )
    labels = (truth, areas_of(truth), sample.class_ids, ignored)
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
    """Return the overlap with detections (m + regions, n), and the detections' areas (n,).

    It is the IoU of a label, 0 between different classes, and the share of a detection in a region
    to ignore.
    """
    areas = areas_of(masks.found)
    same_class = masks.truth_class_ids[:, None] == masks.detections.class_ids.numpy()
    iou = mask_iou(masks.truth, masks.found, (masks.truth_areas, areas), same_class)
    shared = [region.shared_pixels(one) for region in masks.ignored for one in masks.found]
    return np.concatenate(
        [iou, np.reshape(shared, (len(masks.ignored), len(areas))) / areas.clip(min=1)]
    ), areas


def mask_iou(
    first: Sequence[Region],
    second: Sequence[Region],
    areas: Sequence[np.ndarray],
    is_compared: np.ndarray | bool = True,
) -> np.ndarray:
    """Return the IoU of each pair of regions, float64 (m, n), from their areas; 0 where they are
    not compared.
    """
    iou = np.zeros((len(first), len(second)))
    boxes = (
        np.array([region.corners for region in regions]).reshape(-1, 4)
        for regions in (first, second)
    )
    for one, other in np.argwhere((box_iou(*boxes) > 0) & is_compared):
        shared = first[one].shared_pixels(second[other])
        iou[one, other] = shared / max(areas[0][one] + areas[1][other] - shared, 1)
    return iou
