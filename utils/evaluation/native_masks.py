"""Masks in the photographs' own pixels: predictions enlarged, labels filled from their outlines, and their IoU.

An object's mask is its whole outline, even where another object covers it. A few detections are enlarged at a time, and
a target is stored as the region around it, so memory does not grow with the number of detections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import cv2
import numpy as np
import torch

from utils.data.dataset import Photo, Sample
from utils.data.images import upright_size
from utils.yolo.predict import Detections, Placement, photo_masks
from utils.yolo.regions import Region

PIXELS_PER_PART = 20_000_000  # mask pixels made at a time: 16 detections at 1280 x 960, one at 20 megapixels
MAX_PER_PART = 16  # detections
OnMasks = Callable[[Sample, Placement, Detections, np.ndarray], None]


def sizes_on_disk(photos: list[Photo]) -> Callable[[int], tuple[int, int]]:
    """Return a function from an index to the width and height of that photograph's file, upright."""
    return cache(lambda index: upright_size(photos[index].file.read_bytes()))


def place(sample: Sample, photo_size: tuple[int, int]) -> Placement:
    """Return where a photograph of (width, height) pixels on disk lies in a sample's input."""
    size_px = sample.image.shape[0]
    return Placement(size_px, size_px / max(photo_size), sample.pad, photo_size)


def outlines_in_photo(sample: Sample, placement: Placement) -> list[np.ndarray]:
    """Return the targets' outlines in pixels of the photograph: float64 (V, 2) xy each."""
    enlarge = np.array(placement.photo_size) / placement.inner_size
    return [(polygon.astype(np.float64) - placement.pad) * enlarge for polygon in sample.polygons]


def target_areas(sample: Sample, placement: Placement) -> np.ndarray:
    """Return the area inside each target's outline in pixels of the photograph: float64 (m,)."""
    outlines = outlines_in_photo(sample, placement)
    return np.array([cv2.contourArea(outline.astype(np.float32)) for outline in outlines], np.float64)


def fill_outline(outline: np.ndarray, photo_size: tuple[int, int]) -> Region:
    """Fill an outline (V, 2) in pixels: a pixel belongs to it if its centre lies inside (even-odd rule).

    OpenCV's drawing also fills the pixels on the edge, which would double the width of a one-pixel wire. An outline that
    contains no centre becomes the pixels of its corners, so that it is not empty.
    """
    width, height = photo_size
    low = np.floor(outline.min(0)).astype(int).clip(0, (width - 1, height - 1))
    high = np.ceil(outline.max(0)).astype(int).clip(low + 1, (width, height))
    (left, top), (columns, rows) = low.tolist(), (high - low).tolist()
    toggles = np.zeros((rows, columns + 1), np.int32)  # edges crossed just before each pixel of a row
    centres = np.arange(top, top + rows) + 0.5
    for (x1, y1), (x2, y2) in zip(outline, np.roll(outline, -1, axis=0), strict=True):
        first, last = np.searchsorted(centres, sorted((y1, y2)))
        if first < last:
            x = x1 + (centres[first:last] - y1) * ((x2 - x1) / (y2 - y1))
            toggles[np.arange(first, last), np.ceil(x - 0.5 - left).astype(int).clip(0, columns)] += 1
    mask = toggles[:, :-1].cumsum(axis=1) % 2 == 1
    if not mask.any():
        corners = (np.floor(outline).astype(int) - low).clip(0, (columns - 1, rows - 1))
        mask[corners[:, 1], corners[:, 0]] = True
    return Region(left, top, mask)


def photo_mask_parts(
    prototypes: torch.Tensor, detections: Detections, placement: Placement
) -> Iterator[tuple[slice, Detections, np.ndarray]]:
    """Yield a few detections at a time: positions, detections, and masks bool (k, H, W) in photograph pixels."""
    width, height = placement.photo_size
    count = max(1, min(MAX_PER_PART, PIXELS_PER_PART // (width * height)))
    for start in range(0, len(detections), count):
        part = slice(start, min(start + count, len(detections)))
        chosen = Detections(
            detections.boxes[part], detections.scores[part], detections.class_ids[part], detections.coefficients[part]
        )
        yield part, chosen, photo_masks(prototypes, chosen, placement)


def compare_in_photo(
    sample: Sample,
    detections: Detections,
    prototypes: torch.Tensor,
    placement: Placement,
    on_masks: OnMasks | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks' IoU (m, n), 0 between different classes, and the predictions' areas (n,), in photograph pixels.

    `on_masks(sample, placement, some detections, their masks (k, H, W))` is called for each few detections.
    """
    truth = [fill_outline(outline, placement.photo_size) for outline in outlines_in_photo(sample, placement)]
    boxes = placement.boxes_to_photo(detections.boxes).cpu().numpy()
    bounds = np.concatenate([np.floor(boxes[:, :2]), np.ceil(boxes[:, 2:])], axis=1).astype(int)
    class_ids = detections.class_ids.cpu().numpy()
    iou, areas = np.zeros((len(truth), len(detections))), np.zeros(len(detections))
    truth_areas = [np.count_nonzero(region.mask) for region in truth]
    for part, chosen, masks in photo_mask_parts(prototypes, detections, placement):
        for position, mask in zip(range(part.start, part.stop), masks, strict=True):
            x1, y1, x2, y2 = bounds[position]
            region = Region(x1, y1, mask[y1:y2, x1:x2])
            areas[position] = np.count_nonzero(region.mask)
            for target in np.flatnonzero(sample.class_ids == class_ids[position]):
                shared = truth[target].shared_pixels(region)
                iou[target, position] = shared / max(truth_areas[target] + areas[position] - shared, 1)
        if on_masks is not None:
            on_masks(sample, placement, chosen, masks)
    return iou, areas
