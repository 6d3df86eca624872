"""Masks at a quarter of the input size: the targets of training, and the ground truth of evaluation
by the same rules.

As Ultralytics' validator does: round outlines down to whole pixels, fill them with their edge,
shrink linearly; a pixel of several objects belongs to the one with the fewest pixels. Other rules
gave worse results: docs/research/design.md.
"""

from functools import lru_cache

import cv2
import numpy as np

from yolo_seg_ddp.data.polygons import extents, following_vertex, join_outlines, split_outlines

MASK_STRIDE = 4  # input pixels per mask pixel, that of YOLO's prototypes
FULL = 255
HALF = 128
STEPS_PER_PX = 4  # points per pixel on an outline's edges before rounding to whole pixels
MAX_STEPS = 4096  # points per edge
# of an outline in the ground truth; Ultralytics' value, which matters: points are cut to pixels
OUTLINE_POINTS = 1000


def draw_masks(polygons: list[np.ndarray], size_px: int) -> np.ndarray:
    """Draw outlines (pixels of the (S, S) input) at a quarter of the size: int32 (S/4, S/4).

    0 is background, k + 1 the k-th outline; smaller ones lie on top. An outline too small for any
    pixel gets the pixel that it covers most, unless a smaller outline has it.
    """
    return (
        _draw(*densify(*join_outlines(polygons)), size_px, keep_tiny=True)
        if polygons
        else _draw_nothing(size_px)
    )


def draw_truth(polygons: list[np.ndarray], size_px: int) -> np.ndarray:
    """Draw what detections are compared with, as Ultralytics' validator does, so that scores are
    comparable.

    The map is that of `draw_masks`, but an outline has OUTLINE_POINTS points, and may be too small
    for any pixel. That moves edges by up to half an input pixel: enough to matter for thin wires.
    """
    return (
        _draw(*_spread(polygons), size_px, keep_tiny=False) if polygons else _draw_nothing(size_px)
    )


def _draw_nothing(size_px: int) -> np.ndarray:
    return np.zeros((size_px // MASK_STRIDE,) * 2, np.int32)


def _draw(points: np.ndarray, starts: np.ndarray, size_px: int, keep_tiny: bool) -> np.ndarray:
    """Round joined outlines down to whole pixels, fill and shrink them: int32 (S/4, S/4), see
    `draw_masks`.
    """
    index_map = _draw_nothing(size_px)
    side = len(index_map)
    pixels, starts = _without_repeats(points, starts)
    first, last = (corner // MASK_STRIDE for corner in extents(pixels, starts))
    first = first.clip(0, side)
    sizes = (last.clip(-1, side - 1) + 1 - first).clip(0)
    # The corner of each point's outline; rows of int32 are repeated as int64, which is four times
    # as fast.
    corners = np.repeat(
        (first * MASK_STRIDE).view(np.int64)[:, 0], np.diff(starts, append=len(pixels))
    )
    outlines = split_outlines(pixels - corners.view(np.int32).reshape(-1, 2), starts)

    masks = [
        _small_mask(outline, width, height, keep_tiny)
        for outline, (width, height) in zip(outlines, sizes.tolist(), strict=True)
    ]
    areas = np.array([np.count_nonzero(mask) for mask in masks])
    for position in np.argsort(-areas, kind="stable").tolist():
        (left, top), (width, height) = first[position].tolist(), sizes[position].tolist()
        np.copyto(
            index_map[top : top + height, left : left + width], position + 1, where=masks[position]
        )
    return index_map


def densify(points: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Insert points into the edges of joined outlines, at most 1 / STEPS_PER_PX apart; return
    joined outlines.
    """
    # As complex numbers, which NumPy repeats and indexes several times faster than rows of two.
    places = np.ascontiguousarray(points, np.float64).view(np.complex128)[:, 0]
    edges = places[following_vertex(starts, len(places))] - places
    steps = np.ceil(np.abs(edges) * STEPS_PER_PX).astype(int).clip(1, MAX_STEPS)
    before = np.concatenate([[0], steps.cumsum()])
    share = (np.arange(before[-1]) - np.repeat(before[:-1], steps)) / np.repeat(steps, steps)
    walked = np.repeat(places, steps) + share * np.repeat(edges, steps)
    return walked.view(np.float64).reshape(-1, 2), before[starts]


def _spread(polygons: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return outlines with points spread evenly over their edges, OUTLINE_POINTS in all; joined
    outlines.
    """
    places = [_places(len(polygon) + 1) for polygon in polygons]
    counts = np.array([len(vertex) for vertex, _ in places])
    # Each outline is closed by its first vertex, once more so that an edge begins at its last point
    # too.
    closed = np.concatenate(
        [part for polygon in polygons for part in (polygon, polygon[:1], polygon[:1])]
    )
    closed = closed.astype(np.float64).view(np.complex128)[:, 0]
    first = np.cumsum([0] + [len(polygon) + 2 for polygon in polygons[:-1]])
    vertex = np.concatenate([vertex for vertex, _ in places]) + np.repeat(first, counts)
    points = (closed[1:] - closed[:-1]).take(vertex)
    points *= np.concatenate([share for _, share in places])
    points += closed.take(vertex)
    return points.view(np.float64).reshape(-1, 2), np.cumsum(counts) - counts


@lru_cache(maxsize=256)
def _places(num_vertices: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each point of an outline the vertex before it, and its share of the way to the
    next one.
    """
    last = num_vertices - 1
    spread = np.linspace(0, last, max(OUTLINE_POINTS - num_vertices, 0))
    position = np.sort(np.append(spread, np.arange(num_vertices, dtype=np.float64)))
    vertex = position.astype(np.int64)
    return vertex, position - vertex


def _without_repeats(points: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round joined outlines down to whole pixels int32 and drop consecutive repeats; return joined
    outlines.

    Filling them gives the same mask in half the time.
    """
    pixels = np.floor(points).astype(np.int32)
    both = pixels.view(np.int64)[:, 0]  # x and y as one number
    is_kept = np.append(True, both[1:] != both[:-1])
    is_kept[starts] = True
    kept = np.flatnonzero(is_kept)
    return pixels.take(kept, axis=0), np.searchsorted(kept, starts)


def _small_mask(outline: np.ndarray, width: int, height: int, keep_tiny: bool) -> np.ndarray:
    """Fill an outline int32 (V, 2), in input pixels relative to its window, and shrink it: bool
    (height, width).
    """
    if not width or not height:
        return np.zeros((height, width), bool)
    fine = np.zeros((height * MASK_STRIDE, width * MASK_STRIDE), np.uint8)
    cv2.fillPoly(fine, [outline], FULL)
    # Shrinking by four, linear interpolation averages the middle 2 x 2 of 4 x 4 pixels: none
    # outside the window.
    mask = cv2.resize(fine, (width, height), interpolation=cv2.INTER_LINEAR) >= HALF
    if keep_tiny and not mask.any():
        covered = cv2.resize(fine, (width, height), interpolation=cv2.INTER_AREA)
        mask.flat[covered.argmax()] = covered.any()
    return mask
