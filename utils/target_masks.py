"""Masks to learn from: outlines drawn at a quarter of the input as they will be judged, and thin wires unbroken.

Ultralytics' validator, and ours, cut outlines down to whole pixels, fill them with their edge and shrink linearly: the
truth a network is measured by. A mask pixel belongs to an object that covers half of it by that drawing or by its area, or
that is too thin to cover half of any pixel around and covers this one most. Without the last rule wires thinner than a
mask pixel break; filling all mask pixels that an outline touches would double them.

Each outline is judged in a window of its own. All windows of an image lie side by side on one sheet and are judged in
one go: one by one they cost more than three times as much.
"""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np

from utils.augment import extents, join_outlines, split_outlines

MASK_STRIDE = 4  # YOLO's prototypes, and so the masks, are a quarter of the image
FULL = 255
HALF = 128
_CROSS_SECTION = np.ones((2, 2), np.uint8)
_REACH = np.ones((4, 4), np.uint8)  # the cross-section put back, and one pixel around it
_GAP = 2  # mask pixels between windows: what decides about a pixel lies at most so far away
_SHEET_AREA = 1 << 18  # mask pixels of windows on one sheet, which bounds the memory

Slices = tuple[slice, slice]


def draw_masks(polygons: list[np.ndarray], size_px: int) -> np.ndarray:
    """Draw outlines (pixels of the input (S, S), in the order given) at a quarter of the size: int32 (S/4, S/4).

    0 is background, k + 1 the k-th outline; a later one lies on top.
    """
    side = size_px // MASK_STRIDE
    index_map = np.zeros((side, side), np.int32)
    if not polygons:
        return index_map
    points, starts = join_outlines(polygons)
    low, high = extents(points, starts)
    # One mask pixel more on each side: what decides about a pixel are its neighbours.
    first = np.maximum(np.floor(low / MASK_STRIDE).astype(int) - 1, 0)
    sizes = (np.minimum(np.ceil(high / MASK_STRIDE).astype(int) + 1, side) - first).clip(0)
    # Cut down, and filled with the edge, an outline stays where it is and grows by half a pixel on each side.
    corners = np.repeat(first * MASK_STRIDE, np.diff(starts, append=len(points)), axis=0)
    outlines = split_outlines((np.floor(points) - corners).astype(np.int32), starts)
    for group in _groups(sizes.prod(1)):
        places, shape = _arrange(sizes[group], 2 * (side + _GAP))
        covered = np.zeros(shape, np.uint8)
        for position, place in zip(group.tolist(), places, strict=True):
            _cover(covered[place], outlines[position])
        on_sheet = belongs(covered)
        for position, place in zip(group.tolist(), places, strict=True):
            (left, top), (width, height) = first[position].tolist(), sizes[position].tolist()
            np.copyto(index_map[top : top + height, left : left + width], position + 1, where=on_sheet[place])
    return index_map


def belongs(covered: np.ndarray) -> np.ndarray:
    """Return which mask pixels belong to an object, given how much of each it covers: bool, the shape of `covered`.

    `covered` uint8 (H, W), 0 to 255, is one window, or a sheet of them.
    """
    solid = covered >= HALF
    # 2 x 2 solid pixels are a body. Both anchors together leave it where it was; the wider kernel adds its soft edge.
    body = cv2.dilate(cv2.erode(solid.astype(np.uint8), _CROSS_SECTION, anchor=(0, 0)), _REACH, anchor=(2, 2))
    thin = (covered > 0) & (body == 0)
    padded = cv2.copyMakeBorder(covered, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    centre = padded[1:-1, 1:-1]
    # Of two equal neighbours one must win, or a wire between two rows would be two pixels wide.
    is_ridge = (centre >= padded[:-2, 1:-1]) & (centre > padded[2:, 1:-1])
    is_ridge |= (centre >= padded[1:-1, :-2]) & (centre > padded[1:-1, 2:])
    return solid | (thin & is_ridge)


def _groups(areas: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the positions of the windows that are not empty, in order, as many at a time as fit on a sheet."""
    positions = np.flatnonzero(areas)
    sheets = areas[positions].cumsum() // _SHEET_AREA
    yield from np.split(positions, np.flatnonzero(np.diff(sheets)) + 1)


def _arrange(sizes: np.ndarray, width: int) -> tuple[list[Slices], tuple[int, int]]:
    """Place windows of (width, height) on shelves, the highest first; return them and the sheet's (height, width)."""
    places: list[Slices] = [(slice(0), slice(0))] * len(sizes)
    left, top, shelf_height = _GAP, _GAP, 0
    for position in np.argsort(-sizes[:, 1], kind="stable").tolist():
        window_width, window_height = sizes[position].tolist()
        if left + window_width + _GAP > width:
            left, top, shelf_height = _GAP, top + shelf_height + _GAP, 0
        places[position] = (slice(top, top + window_height), slice(left, left + window_width))
        left += window_width + _GAP
        shelf_height = max(shelf_height, window_height)
    return places, (top + shelf_height + _GAP, width)


def _cover(window: np.ndarray, outline: np.ndarray) -> None:
    """Write into a window uint8 (H, W) how much of each mask pixel an outline covers, 0 to 255.

    The larger of two: its area, and what linear interpolation makes of it, the middle 2 x 2 of 4 x 4 pixels. The outline
    int32 (V, 2) is in input pixels from the corner of the window.
    """
    height, width = window.shape
    fine = np.zeros((height * MASK_STRIDE, width * MASK_STRIDE), np.uint8)
    cv2.fillPoly(fine, [outline], FULL)
    cv2.resize(fine, (width, height), dst=window, interpolation=cv2.INTER_AREA)
    np.maximum(window, cv2.resize(fine, (width, height), interpolation=cv2.INTER_LINEAR), out=window)
