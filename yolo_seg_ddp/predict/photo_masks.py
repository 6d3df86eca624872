"""Masks in the pixels of a photograph: where it lies in the network's input, and how detections'
masks are enlarged to it.

Masks are interpolated linearly twice: from prototypes to the input, and from there to the
photograph. A compiled loop does this inside a mask's box, and in the photograph only where the
mask's edge may be: between input pixels of one sign every pixel has that sign.

Masks are taught as Ultralytics' validator draws them: a prototype pixel is on if the outline
touches half of its middle 2 x 2 pixels. That is one pixel of the input too wide on each side
(docs/research/design.md), so here the edge moves inwards by up to this pixel, and by less in small
boxes. Thin things keep it, because a mask narrower than a prototype pixel would fall apart.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from yolo_seg_ddp.predict.regions import ROW, Runs
from yolo_seg_ddp.utils.compiled import compiled

# detections whose prototype masks are kept at a time: 13 MB at an input of 1280 pixels
MASKS_PER_PRODUCT = 32
# Shorter side of a box in input pixels, below which a mask loses less of its edge: four prototype
# pixels, from measurements (docs/research/recipe.md).
SMALL_PX = 16


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
    prototypes: torch.Tensor,
    coefficients: torch.Tensor,
    boxes: torch.Tensor,
    is_thin: list[bool],
    placement: Letterbox,
) -> Iterator[Runs]:
    """Yield the mask of each detection in photograph pixels, cut to its box; boxes (n, 4) xyxy are
    in these pixels, too.

    prototypes float32 (32, h, w), coefficients (n, 32) and boxes lie in the host's memory. is_thin:
    which masks (n) keep the edge with which they are taught.
    """
    to_input = _neighbours(prototypes.shape[-1], placement.size_px)
    columns, rows = (_axis(placement, axis) for axis in (0, 1))
    # Where each group of photograph pixels with the same two neighbours ends.
    ends = np.searchsorted(columns[0], np.arange(placement.size_px), side="right")
    for start in range(0, len(coefficients), MASKS_PER_PRODUCT):
        part = slice(start, start + MASKS_PER_PRODUCT)
        logits = (
            (coefficients[part] @ prototypes.flatten(1)).view(-1, *prototypes.shape[1:]).numpy()
        )
        # a pixel belongs to a box if x1 <= its index < x2
        rectangles = boxes[part].ceil().long().numpy()
        for values, rectangle, keeps_edge in zip(logits, rectangles, is_thin[part], strict=True):
            edges, left, right = _edges(
                values, *to_input, *columns, ends, *rows, rectangle, keeps_edge
            )
            corners = (
                (left, int(edges[0]) // ROW, right, int(edges[-1]) // ROW + 1)
                if len(edges)
                else (0, 0, 0, 0)
            )
            yield Runs(corners, edges)


def _axis(placement: Letterbox, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return between which input pixels the photograph's pixels lie along the x (0) or y (1) axis:
    the first one, int64 (P,), and the next one's weight, float32 (P,).
    """
    low, high, share = _neighbours(placement.inner_size[axis], placement.photo_size[axis])
    return low + placement.pad[axis], share * (high > low)


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
def _without_edge(
    values: np.ndarray,
    lows: np.ndarray,
    highs: np.ndarray,
    shares: np.ndarray,
    rectangle: tuple[int, int, int, int],
    keeps_edge: bool,
) -> np.ndarray:
    """Enlarge prototype values (h, w) to a rectangle of the input, left, top, right, bottom, and
    move the mask's edge inwards unless it is kept: float32 (bottom - top, right - left).

    lows, highs and shares are those of `_neighbours` for each pixel of the input.
    """
    left, top, right, bottom = rectangle
    total, number = 0.0, 0
    for row in range(lows[top], highs[bottom - 1] + 1):
        for column in range(lows[left], highs[right - 1] + 1):
            if values[row, column] > 0:
                total += 1 / (1 + math.exp(-values[row, column]))
                number += 1
    # In input pixels: one if the network is sure. A mask of which it is not sure is narrow already,
    # and so is one of few prototype pixels, whose values rise from low ones around it.
    sureness = max(2 * total / max(number, 1) - 1, 0)
    size = min(right - left, bottom - top) / SMALL_PX
    distance = np.float32(0 if keeps_edge else sureness * min(size, 1))

    # with the pixels around the rectangle, which the input's border repeats
    wide = np.empty((bottom - top + 2, right - left + 2), np.float32)
    line = np.empty(values.shape[1], np.float32)
    for y in range(len(wide)):
        row = min(max(top + y - 1, 0), len(lows) - 1)
        for column in range(lows[max(left - 1, 0)], highs[min(right, len(lows) - 1)] + 1):
            low = values[lows[row], column]
            line[column] = low + (values[highs[row], column] - low) * shares[row]
        for x in range(wide.shape[1]):
            column = min(max(left + x - 1, 0), len(lows) - 1)
            low = line[lows[column]]
            wide[y, x] = low + (line[highs[column]] - low) * shares[column]

    inner = np.empty((bottom - top, right - left), np.float32)
    for y in range(len(inner)):
        for x in range(inner.shape[1]):
            value = wide[y + 1, x + 1]
            beside = min(wide[y + 1, x], wide[y + 1, x + 2])
            least = min(beside, wide[y, x + 1], wide[y + 2, x + 1], value)
            inner[y, x] = value + (least - value) * distance
    return inner


@compiled
def _edges(
    values: np.ndarray,
    lows: np.ndarray,
    highs: np.ndarray,
    shares: np.ndarray,
    first_columns: np.ndarray,
    column_weights: np.ndarray,
    ends: np.ndarray,
    first_rows: np.ndarray,
    row_weights: np.ndarray,
    rectangle: np.ndarray,
    keeps_edge: bool,
) -> tuple[np.ndarray, int, int]:
    """Return where prototype values (h, w), enlarged by `_without_edge`, exceed 0 in a rectangle of
    the photograph: left, top, right, bottom.

    Returns the edges of `Runs`, and the first column with such a pixel and the one after the last.
    """
    left, top, right, bottom = rectangle
    edges = np.empty(4 * max(bottom - top, 0) + max(right - left, 0) + 2, np.int64)
    number = 0
    lowest = right
    highest = left
    if left >= right or top >= bottom:
        return edges[:0], lowest, highest
    start, begin = first_columns[left], first_rows[top]
    stop = min(first_columns[right - 1] + 2, len(lows))
    end = min(first_rows[bottom - 1] + 2, len(lows))
    inner = _without_edge(values, lows, highs, shares, (start, begin, stop, end), keeps_edge)
    width = stop - start
    line = np.empty(width + 1, np.float32)
    is_positive = np.zeros(len(inner), np.bool_)
    for row in range(len(inner)):
        is_positive[row] = (inner[row] > 0).any()
    for y in range(top, bottom):
        row = first_rows[y] - begin
        following = min(row + 1, len(inner) - 1)
        if not (is_positive[row] or is_positive[following]):
            continue
        for x in range(width):
            line[x] = inner[row, x] + (inner[following, x] - inner[row, x]) * row_weights[y]
        line[width] = line[width - 1]
        if number + right - left + 2 > len(edges):
            edges = np.append(edges, np.empty(len(edges) + right - left, np.int64))
        x, is_inside = left, False
        while x < right:
            last = min(ends[first_columns[x]], right)
            one = line[first_columns[x] - start]
            two = line[first_columns[x] - start + 1]
            # all pixels up to `last` are as the first one
            stop_at = x + 1 if min(one, two) > 0 or max(one, two) <= 0 else last
            for pixel in range(x, stop_at):
                if (one + (two - one) * column_weights[pixel] > 0) != is_inside:
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
