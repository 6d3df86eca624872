"""Masks to learn from, drawn exactly as the truth that judges them: at a quarter of the input.

Ultralytics' validator, and ours, cut outlines down to whole pixels, fill them with their edge and shrink linearly; of a
pixel that several share, the object with the fewest pixels is the owner. Other rules were tried, and a network trained
by them measured worse: see docs/design.md.
"""

from __future__ import annotations

import cv2
import numpy as np

from utils.augment import extents, join_outlines, split_outlines

MASK_STRIDE = 4  # YOLO's prototypes, and so the masks, are a quarter of the image
FULL = 255
HALF = 128
STEPS_PER_PX = 4  # how finely an outline is walked before its points are cut down to whole pixels
MOST_STEPS = 4096  # per edge


def draw_masks(polygons: list[np.ndarray], size_px: int) -> np.ndarray:
    """Draw outlines (pixels of the input (S, S)) at a quarter of the size: int32 (S/4, S/4).

    0 is background, k + 1 the k-th outline; smaller ones lie on top. An outline too small for any pixel gets the one
    it covers most, so that there is something to learn, unless another lies on it.
    """
    side = size_px // MASK_STRIDE
    index_map = np.zeros((side, side), np.int32)
    if not polygons:
        return index_map
    points, starts = join_outlines(polygons)
    low, high = extents(points, starts)
    first = np.floor(low / MASK_STRIDE).astype(int).clip(0, side)
    sizes = (np.floor(high / MASK_STRIDE).astype(int).clip(-1, side - 1) + 1 - first).clip(0)
    points, starts = walk(points, starts)
    corners = np.repeat(first * MASK_STRIDE, np.diff(starts, append=len(points)), axis=0)
    outlines = split_outlines((np.floor(points) - corners).astype(np.int32), starts)
    masks = [_shrunk(outline, *size) for outline, size in zip(outlines, sizes.tolist(), strict=True)]
    areas = np.array([np.count_nonzero(mask) for mask in masks])
    for position in np.argsort(-areas, kind="stable").tolist():
        (left, top), (width, height) = first[position].tolist(), sizes[position].tolist()
        np.copyto(index_map[top : top + height, left : left + width], position + 1, where=masks[position])
    return index_map


def walk(points: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put points between the vertices of closed outlines, at most 1 / STEPS_PER_PX apart; return them as they came.

    `points` (V, 2) are all vertices, `starts` (m,) where each outline's begin.
    """
    following = np.arange(1, len(points) + 1)
    following[np.append(starts[1:], len(points)) - 1] = starts
    edges = points[following] - points
    steps = np.ceil(np.hypot(edges[:, 0], edges[:, 1]) * STEPS_PER_PX).astype(int).clip(1, MOST_STEPS)
    before = np.concatenate([[0], steps.cumsum()])
    share = (np.arange(before[-1]) - np.repeat(before[:-1], steps)) / np.repeat(steps, steps)
    return np.repeat(points, steps, axis=0) + share[:, None] * np.repeat(edges, steps, axis=0), before[starts]


def _shrunk(outline: np.ndarray, width: int, height: int) -> np.ndarray:
    """Fill an outline int32 (V, 2), in input pixels from the corner of its window, and shrink it: bool (height, width)."""
    if not width or not height:
        return np.zeros((height, width), bool)
    fine = np.zeros((height * MASK_STRIDE, width * MASK_STRIDE), np.uint8)
    cv2.fillPoly(fine, [outline], FULL)
    # By four, linear interpolation looks at the middle 2 x 2 of 4 x 4 pixels: nothing outside the window matters.
    mask = cv2.resize(fine, (width, height), interpolation=cv2.INTER_LINEAR) >= HALF
    if not mask.any():
        covered = cv2.resize(fine, (width, height), interpolation=cv2.INTER_AREA)
        mask.flat[covered.argmax()] = covered.any()
    return mask
