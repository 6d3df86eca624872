"""Masks to learn from: outlines drawn at a quarter of the input, true in area where objects are thick, and thin wires unbroken.

Filling an outline at mask resolution colours every pixel it touches: half a mask pixel, two of the input, too much on
each side, which doubles a wire. Sampling pixel centres is true in area, but breaks wires thinner than a mask pixel.
Here a mask pixel belongs to an object that covers at least half of it, or that is too thin to cover half of any pixel
around and covers this one most.
"""

from __future__ import annotations

import cv2
import numpy as np

MASK_STRIDE = 4  # YOLO's prototypes, and so the masks, are a quarter of the image
SHIFT_BITS = 4  # vertices are drawn to 1/16 pixel
FULL = 255
HALF = 128
_CROSS_SECTION = np.ones((2, 2), np.uint8)
_AROUND = np.ones((3, 3), np.uint8)


def draw_masks(polygons: list[np.ndarray], size_px: int) -> np.ndarray:
    """Draw outlines (pixels of the input (S, S), in the order given) at a quarter of the size: int32 (S/4, S/4).

    0 is background, k + 1 the k-th outline; a later one lies on top.
    """
    side = size_px // MASK_STRIDE
    index_map = np.zeros((side, side), np.int32)
    for value, polygon in enumerate(polygons, start=1):
        # One mask pixel more on each side: what decides about a pixel are its neighbours.
        left, top = np.maximum(np.floor(polygon.min(0) / MASK_STRIDE).astype(int) - 1, 0).tolist()
        right, bottom = np.minimum(np.ceil(polygon.max(0) / MASK_STRIDE).astype(int) + 1, side).tolist()
        if right > left and bottom > top:
            inside = belongs(coverage(polygon, left, top, right - left, bottom - top))
            index_map[top:bottom, left:right][inside] = value
    return index_map


def coverage(polygon: np.ndarray, left: int, top: int, width: int, height: int) -> np.ndarray:
    """Return how much of each mask pixel of a window an outline covers, 0 to 255: uint8 (height, width).

    The window is given in mask pixels, the outline (V, 2) in pixels of the input.
    """
    fine = np.zeros((height * MASK_STRIDE, width * MASK_STRIDE), np.uint8)
    origin = (left * MASK_STRIDE, top * MASK_STRIDE)
    # OpenCV counts from pixel centres, outlines from pixel corners.
    fixed = [np.rint((polygon - origin - 0.5) * (1 << SHIFT_BITS)).astype(np.int32)]
    cv2.fillPoly(fine, fixed, FULL, shift=SHIFT_BITS)
    # fillPoly counts the pixels under the outline as inside; about half of each is.
    cv2.polylines(fine, fixed, True, HALF, shift=SHIFT_BITS)
    return cv2.resize(fine, (width, height), interpolation=cv2.INTER_AREA)


def belongs(covered: np.ndarray) -> np.ndarray:
    """Return which mask pixels belong to an object, given how much of each it covers: bool, the shape of `covered`."""
    solid = (covered >= HALF).astype(np.uint8)
    body = cv2.dilate(cv2.morphologyEx(solid, cv2.MORPH_OPEN, _CROSS_SECTION), _AROUND)
    thin = (covered > 0) & (body == 0)
    if not thin.any():
        return solid > 0
    padded = np.pad(covered, 1)
    centre = padded[1:-1, 1:-1]
    # Of two equal neighbours one must win, or a wire between two rows would be two pixels wide.
    is_ridge = (centre >= padded[:-2, 1:-1]) & (centre > padded[2:, 1:-1])
    is_ridge |= (centre >= padded[1:-1, :-2]) & (centre > padded[1:-1, 2:])
    return (solid > 0) | (thin & is_ridge)
