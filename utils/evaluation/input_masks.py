"""Masks at the resolution of the prototypes, a quarter of the input's: labels as Ultralytics draws them, and their IoU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import cv2
import numpy as np
import torch

from utils.common.devices import copy_to_device, copy_to_host
from utils.data.dataset import Sample
from utils.data.target_masks import MASK_STRIDE
from utils.yolo.predict import Detections, prototype_masks

OUTLINE_POINTS = 1000  # per target; Ultralytics' value, which matters because points are cut to whole pixels
# IoU float32 (m, n) of an image's labels and detections, and the detections' areas float64 (n,) in input pixels.
Overlap = tuple[np.ndarray, np.ndarray]


def begin_mask_overlaps(
    samples: Sequence[Sample], found: Sequence[Detections], prototypes: torch.Tensor
) -> Callable[[], list[Overlap]]:
    """Begin to compare the masks of a batch; return a function that ends it. Only that function waits for a GPU.

    prototypes (B, 32, h, w).
    """
    owners = [truth_owners(sample) for sample in samples]
    compare = _shared_on_host if prototypes.device.type == "cpu" else _shared_on_device
    shared_of = compare(samples, found, prototypes, owners)

    def end() -> list[Overlap]:
        overlaps = []
        for owner, sample, shared in zip(owners, samples, shared_of(), strict=True):
            targets = np.bincount(owner.flat, minlength=len(sample.polygons) + 1)[1:].astype(np.float32)
            union = targets[:, None] + shared[-1] - shared[:-1]
            iou = shared[:-1] / union.clip(min=np.float32(1e-7))
            overlaps.append((iou, shared[-1].astype(np.float64) * MASK_STRIDE**2))
        return overlaps

    return end


def _shared_on_host(
    samples: Sequence[Sample], found: Sequence[Detections], prototypes: torch.Tensor, owners: Sequence[np.ndarray]
) -> Callable[[], list[np.ndarray]]:
    """Count the pixels that each detection shares with each label, and, in the last row, all it has: float32 (m + 1, n).

    Only the pixels inside a detection's box are looked at.
    """
    counts = []
    # All images use the same memory for their logits: fetching new memory takes longer than the product.
    logits_memory = torch.empty(max(map(len, found), default=0), *prototypes.shape[2:])
    for sample, detections, maps, owner in zip(samples, found, prototypes, owners, strict=True):
        logits = logits_memory[: len(detections)]
        torch.matmul(detections.coefficients, maps.float().flatten(1), out=logits.flatten(1))
        boxes = detections.boxes * (maps.shape[-1] / sample.image.shape[0])
        corners = boxes.ceil().clamp(0, maps.shape[-1]).int().tolist()
        shared = np.zeros((len(detections), len(sample.polygons) + 1), np.float32)
        for row, values, (left, top, right, bottom) in zip(shared, logits.numpy(), corners, strict=True):
            inside = slice(top, bottom), slice(left, right)
            row[:] = np.bincount(owner[inside][values[inside] > 0], minlength=len(row))
        counts.append(np.concatenate([shared[:, 1:], shared.sum(1, keepdims=True)], axis=1).T)
    return lambda: counts


def _shared_on_device(
    samples: Sequence[Sample], found: Sequence[Detections], prototypes: torch.Tensor, owners: Sequence[np.ndarray]
) -> Callable[[], list[np.ndarray]]:
    """Do what `_shared_on_host` does with matrix products, without waiting for the device."""
    sizes = [(len(sample.polygons) + 1, len(detections)) for sample, detections in zip(samples, found, strict=True)]
    owner_maps = copy_to_device(torch.from_numpy(np.stack(owners)), prototypes.device)
    counts = [prototypes.new_zeros(0, dtype=torch.float32)]
    for sample, detections, maps, owner in zip(samples, found, prototypes, owner_maps, strict=True):
        masks = prototype_masks(maps, detections, sample.image.shape[0]).flatten(1).float()
        labels = owner.flatten() == torch.arange(1, len(sample.polygons) + 1, device=owner.device)[:, None]
        every_pixel = masks.new_ones(1, masks.shape[1])
        counts.append((torch.cat([labels.float(), every_pixel]) @ masks.T).flatten())  # exact: they are below 2**24
    joined = copy_to_host(torch.cat(counts))

    def split() -> list[np.ndarray]:
        parts = np.split(joined().numpy(), np.cumsum([rows * columns for rows, columns in sizes])[:-1])
        return [part.reshape(size) for part, size in zip(parts, sizes, strict=True)]

    return split


def truth_masks(sample: Sample) -> np.ndarray:
    """Draw a sample's masks as Ultralytics' validator does, so that scores are comparable: bool (m, S/4, S/4).

    An outline becomes 1000 points cut to whole pixels, which moves edges by half a pixel: enough to matter for thin
    wires. It is filled at full size and shrunk by linear interpolation. A pixel of several masks is the smallest's.
    """
    return truth_owners(sample) == np.arange(1, len(sample.polygons) + 1)[:, None, None]


def truth_owners(sample: Sample) -> np.ndarray:
    """Return the masks of `truth_masks` in one map: int64 (S/4, S/4), k + 1 where the k-th mask is, else 0."""
    size_px = sample.image.shape[0]
    side = size_px // MASK_STRIDE
    owner = np.zeros((side, side), np.int64)
    drawn = [_drawn(polygon, side) for polygon in sample.polygons]
    areas = np.array([mask.sum() for _, mask in drawn])
    for position in np.argsort(-areas, kind="stable").tolist():
        part, mask = drawn[position]
        owner[part][mask] = position + 1
    return owner


def _drawn(polygon: np.ndarray, side: int) -> tuple[tuple[slice, slice], np.ndarray]:
    """Return an outline's mask in its part of the (side, side) map: (part, bool).

    Shrinking by four, linear interpolation looks at the middle 2 x 2 of 4 x 4 pixels only, so the part is enough.
    """
    outline = _spread_points(polygon)
    x, y, width, height = cv2.boundingRect(outline)
    left, right, top, bottom = (
        min(max(edge, 0), side)
        for low, length in ((x, width), (y, height))
        for edge in (low // MASK_STRIDE, (low + length - 1) // MASK_STRIDE + 1)
    )
    part = slice(top, bottom), slice(left, right)
    full = np.zeros(((bottom - top) * MASK_STRIDE, (right - left) * MASK_STRIDE), np.uint8)
    if not full.size:
        return part, np.zeros((bottom - top, right - left), bool)
    cv2.fillPoly(full, [outline], 1, offset=(-left * MASK_STRIDE, -top * MASK_STRIDE))
    return part, cv2.resize(full, (right - left, bottom - top)) > 0


def _spread_points(polygon: np.ndarray) -> np.ndarray:
    """Return the pixels of an outline's vertices and of points spread evenly between them, OUTLINE_POINTS in all.

    int32 (P, 2), without repeats of the pixel before.
    """
    vertex, share = _places(len(polygon) + 1)
    closed = np.concatenate([polygon, polygon[:1], polygon[:1]]).astype(np.float64).view(np.complex128)[:, 0]
    points = (closed[1:] - closed[:-1]).take(vertex)
    points *= share
    points += closed.take(vertex)
    pixels = points.view(np.float64).astype(np.int32)
    both = pixels.view(np.int64)  # x and y as one number
    return pixels.reshape(-1, 2)[np.append(True, both[1:] != both[:-1])]


@lru_cache(maxsize=256)
def _places(num_vertices: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each point the vertex before it, and its share of the way to the next one."""
    last = num_vertices - 1
    spread = np.linspace(0, last, max(OUTLINE_POINTS - num_vertices, 0))
    position = np.sort(np.append(spread, np.arange(num_vertices, dtype=np.float64)))
    vertex = position.astype(np.int64)
    return vertex, position - vertex
