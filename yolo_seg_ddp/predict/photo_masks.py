"""Masks in the pixels of a photograph: where it lies in the network's input, and how detections'
masks are enlarged to it.

Masks are interpolated linearly twice: from prototypes to the input, and from there to the
photograph. Together this is a product with one matrix for the rows and one for the columns. So a
compiled loop computes a mask row by row inside its box, and only where its edge may be: between
prototype pixels of one sign every pixel has that sign.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from yolo_seg_ddp.predict.regions import ROW, Runs
from yolo_seg_ddp.utils.compiled import compiled

# detections whose prototype masks are kept at a time: 13 MB at an input of 1280 pixels
MASKS_PER_PRODUCT = 32


@dataclass(frozen=True)
class Letterbox:
    """Where a photograph of (width, height) pixels lies in the square input: scaled to the inner
    size, then padded by (left, top).
    """

    size_px: int
    inner_size: tuple[int, int]  # width, height in pixels of the input
    pad: tuple[int, int]
    photo_size: tuple[int, int]

    def boxes_to_photo(self, boxes: torch.Tensor) -> torch.Tensor:
        """Map xyxy boxes (n, 4) from input to photograph pixels, clipped to the photograph; NaN
        becomes 0.
        """
        inner = boxes.new_tensor(self.inner_size * 2)
        photo = boxes.new_tensor(self.photo_size * 2)
        placed = (boxes - boxes.new_tensor(self.pad * 2)) / inner * photo
        return placed.nan_to_num().clamp(min=0).minimum(photo)


def enlarge(
    prototypes: torch.Tensor, coefficients: torch.Tensor, boxes: torch.Tensor, placement: Letterbox
) -> Iterator[Runs]:
    """Yield the mask of each detection in photograph pixels, cut to its box; boxes (n, 4) xyxy are
    in these pixels, too.

    prototypes float32 (32, h, w), coefficients (n, 32) and boxes lie in the host's memory.
    """
    columns, rows = (_axis(placement, axis, prototypes.shape[-1]) for axis in (0, 1))
    # Where each group of photograph pixels with the same three neighbours ends.
    ends = np.searchsorted(columns[0], np.arange(prototypes.shape[-1]), side="right")
    for start in range(0, len(coefficients), MASKS_PER_PRODUCT):
        part = slice(start, start + MASKS_PER_PRODUCT)
        logits = (
            (coefficients[part] @ prototypes.flatten(1)).view(-1, *prototypes.shape[1:]).numpy()
        )
        # a pixel belongs to a box if x1 <= its index < x2
        rectangles = boxes[part].ceil().long().numpy()
        for values, rectangle in zip(logits, rectangles, strict=True):
            edges, left, right = _edges(values, *columns, ends, *rows, rectangle)
            corners = (
                (left, int(edges[0]) // ROW, right, int(edges[-1]) // ROW + 1)
                if len(edges)
                else (0, 0, 0, 0)
            )
            yield Runs(corners, edges)


def _axis(placement: Letterbox, axis: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how `side` prototype pixels make up the photograph's pixels along the x (0) or y (1)
    axis.

    Each pixel is a weighted sum of three neighbours: the first of them, int64 (P,), and the
    weights, float32 (P, 3).
    """
    inner_px, photo_px = placement.inner_size[axis], placement.photo_size[axis]
    low, high, share = _neighbours(inner_px, photo_px)
    at_input = [
        row[placement.pad[axis] :][:inner_px] for row in _neighbours(side, placement.size_px)
    ]
    first = at_input[0][low]
    weights = np.zeros((photo_px, 3), np.float32)
    pixels = np.arange(photo_px)
    for source, outer in ((low, 1 - share), (high, share)):
        for end, inner in ((0, 1 - at_input[2]), (1, at_input[2])):
            np.add.at(weights, (pixels, at_input[end][source] - first), outer * inner[source])
    return first, weights


def _neighbours(small: int, large: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return between which two of `small` pixels each of `large` pixels lies, and the second one's
    weight, float32.

    `F.interpolate(mode="bilinear", align_corners=False)` computes them in float32, too: at 5472
    pixels the rounding shows.
    """
    position = np.float32(small / large) * (
        np.arange(large, dtype=np.float32) + np.float32(0.5)
    ) - np.float32(0.5)
    position = position.clip(0)
    low = np.minimum(position.astype(np.int64), small - 1)
    return low, np.minimum(low + 1, small - 1), (position - low.astype(np.float32)).clip(0, 1)


@compiled
def _edges(
    values: np.ndarray,
    first_columns: np.ndarray,
    column_weights: np.ndarray,
    ends: np.ndarray,
    first_rows: np.ndarray,
    row_weights: np.ndarray,
    rectangle: np.ndarray,
) -> tuple[np.ndarray, int, int]:
    """Return where prototype values (h, w), enlarged, exceed 0 in a rectangle of the photograph:
    left, top, right, bottom.

    Returns the edges of `Runs`, and the first column with such a pixel and the one after the last.
    """
    left, top, right, bottom = rectangle
    edges = np.empty(4 * max(bottom - top, 0) + max(right - left, 0) + 2, np.int64)
    number = 0
    lowest = right
    highest = left
    if left >= right or top >= bottom:
        return edges[:0], lowest, highest
    start = first_columns[left]
    stop = min(first_columns[right - 1] + 3, values.shape[1])
    line = np.zeros(values.shape[1] + 2, np.float32)
    is_positive = np.zeros(values.shape[0] + 2, np.bool_)  # rows of prototypes
    for row in range(first_rows[top], min(first_rows[bottom - 1] + 3, values.shape[0])):
        for x in range(start, stop):
            is_positive[row] |= values[row, x] > 0
    for y in range(top, bottom):
        weights, first = row_weights[y], first_rows[y]
        if not is_positive[first : first + 3].any():
            continue
        for x in range(start, stop):
            line[x] = 0
            for further in range(min(3, values.shape[0] - first)):
                line[x] += weights[further] * values[first + further, x]
        if number + right - left + 2 > len(edges):
            edges = np.append(edges, np.empty(len(edges) + right - left, np.int64))
        x, is_inside = left, False
        while x < right:
            column = first_columns[x]
            last = min(ends[column], right)
            one = line[column]
            two = line[column + 1]
            three = line[column + 2]
            # all pixels up to `last` are as the first one
            if min(one, two, three) > 0 or max(one, two, three) <= 0:
                stop_at = x + 1
            else:
                stop_at = last
            for pixel in range(x, stop_at):
                part = column_weights[pixel]
                if (part[0] * one + part[1] * two + part[2] * three > 0) != is_inside:
                    edges[number] = y * ROW + pixel
                    number = number + 1
                    is_inside = not is_inside
                    lowest, highest = min(lowest, pixel), max(highest, pixel)
            x = last
        if is_inside:
            edges[number] = y * ROW + right
            number = number + 1
            highest = right
    return edges[:number].copy(), lowest, highest
