"""Masks in the photographs' own pixels: predictions enlarged, labels filled from their outlines, and their IoU.

An object's mask is its whole outline, even where another object covers it. All masks are regions, cut to their boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np

from utils.data.dataset import Photo, Sample
from utils.data.images import upright_size
from utils.evaluation.metrics.matching import box_iou
from utils.evaluation.metrics.thin_objects import elongated_classes, elongation
from utils.predict.detections import Detections, Placement
from utils.predict.options import named_classes
from utils.predict.regions import Region, fill_outline

PIXELS_PER_PART = 100_000_000  # of the masks kept at a time, a byte each
THIN_PHOTOS = 64
THIN_PX, SMALL_PX = 4.0, 12.0  # width, and longer side, of labels in the network's input that are hard to learn
LARGER = 0.8  # scale of a photograph in the input below which a window shows more of it
WINDOWS_ADVICE = "train on windows of the photographs: --windows 8 (docs/windows.md)"
# Takes a sample, where its photograph lies, some detections and their masks in the photograph's pixels.
OnMasks = Callable[[Sample, Placement, Detections, list[Region]], None]


def sizes_on_disk(photos: list[Photo]) -> Callable[[int], tuple[int, int]]:
    """Return a function from an index to the width and height of that photograph's file, upright."""
    return cache(lambda index: upright_size(photos[index].file.read_bytes()))


def choose_thin_classes(
    asked: tuple[str, ...], photos: list[Photo], size_of: Callable[[int], tuple[int, int]], names: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the classes to judge by their centrelines, alike on all ranks: those of the given names, `auto` or `none`.

    `auto` takes the classes whose objects have a median elongation of MIN_ELONGATION or more in at most THIN_PHOTOS
    photographs, spread over the split. Raises UsageError for a name that is no class.
    """
    if asked == ("auto",):
        labelled = [index for index, photo in enumerate(photos) if len(photo.polygons)]
        chosen = labelled[:: max(1, len(labelled) // THIN_PHOTOS)][:THIN_PHOTOS]
        values = [elongation(outline * size_of(index)) for index in chosen for outline in photos[index].polygons]
        return elongated_classes((class_id for index in chosen for class_id in photos[index].class_ids), values)
    return named_classes(asked, names)


def small_labels_hint(photos: list[Photo], names: tuple[str, ...], size_px: int) -> str:
    """Return a line about the class whose labels are the smallest at a network input of size_px; empty if they are large enough.

    It is about photographs that are larger than the input, of which windows show more. A label's width is twice its area over its
    perimeter. At most THIN_PHOTOS photographs are looked at, spread over the split.
    """
    size_of, found = sizes_on_disk(photos), dict[int, list[tuple[float, float]]]()
    labelled = [index for index, photo in enumerate(photos) if len(photo.polygons)]
    for index in labelled[:: max(1, len(labelled) // THIN_PHOTOS)][:THIN_PHOTOS]:
        size = size_of(index)
        scale = size_px / max(size)
        for class_id, polygon in zip(photos[index].class_ids.tolist(), photos[index].polygons, strict=True):
            outline = (polygon * size * scale).astype(np.float32)
            width = 2 * cv2.contourArea(outline) / max(cv2.arcLength(outline, True), 1e-6)
            if scale < LARGER:
                found.setdefault(class_id, []).append((width, float(np.ptp(outline, axis=0).max())))
    medians = {class_id: np.median(np.array(values), axis=0) for class_id, values in found.items()}
    small = [
        (width / THIN_PX, f"half of the labels of {names[class_id]} are at most {width:.1f} px wide")
        for class_id, (width, _) in medians.items()
        if width < THIN_PX
    ] + [
        (long / SMALL_PX, f"half of the labels of {names[class_id]} are at most {long:.0f} px long")
        for class_id, (_, long) in medians.items()
        if long < SMALL_PX
    ]
    return f"Hint: {min(small)[1]} at an input of {size_px} px; {WINDOWS_ADVICE}" if small else ""


def place(sample: Sample, photo_size: tuple[int, int]) -> Placement:
    """Return where a photograph of (width, height) pixels on disk lies in a sample's input."""
    return Placement(sample.image.shape[0], sample.inner_size, sample.pad, photo_size)


def outlines_in_photo(sample: Sample, placement: Placement) -> list[np.ndarray]:
    """Return the targets' outlines in pixels of the photograph: float64 (V, 2) xy each."""
    enlarge = np.array(placement.photo_size) / placement.inner_size
    return [(polygon.astype(np.float64) - placement.pad) * enlarge for polygon in sample.polygons]


def target_areas(sample: Sample, placement: Placement) -> np.ndarray:
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
    sample: Sample, detections: Detections, regions: Iterable[Region], placement: Placement
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
