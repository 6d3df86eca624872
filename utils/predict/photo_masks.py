"""Masks in the pixels of a photograph: where it lies in the network's input, and detections' masks enlarged to it.

Enlarging by linear interpolation twice, from prototypes to the input and from there to the photograph, is a product with
one matrix of rows and one of columns. So a mask is computed inside its box alone, and only where its edge may be:
between prototype pixels of one sign every pixel has that sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from utils.predict.regions import Region

TILE_PX = 256  # side of the squares of a mask that are computed or filled
MASKS_PER_PRODUCT = 32  # detections whose prototype masks are kept at a time: 13 MB at an input of 1280 pixels


@dataclass(frozen=True)
class Placement:
    """Where a photograph of (width, height) pixels lies in the square input: scaled to the inner size, then padded by
    (left, top)."""

    size_px: int
    inner_size: tuple[int, int]  # width, height in pixels of the input
    pad: tuple[int, int]
    photo_size: tuple[int, int]

    def boxes_to_photo(self, boxes: torch.Tensor) -> torch.Tensor:
        """Map xyxy boxes (n, 4) from input to photograph pixels, clipped to the photograph; what is no number becomes 0."""
        inner = boxes.new_tensor(self.inner_size * 2)
        photo = boxes.new_tensor(self.photo_size * 2)
        placed = (boxes - boxes.new_tensor(self.pad * 2)) / inner * photo
        return placed.nan_to_num().clamp(min=0).minimum(photo)


def photo_regions(
    prototypes: torch.Tensor, coefficients: torch.Tensor, boxes: torch.Tensor, placement: Placement
) -> Iterator[Region]:
    """Yield the mask of each detection in photograph pixels, cut to its box; boxes (n, 4) xyxy are in these pixels, too.

    prototypes float32 (32, h, w), coefficients (n, 32) and boxes lie in the host's memory.
    """
    columns, rows = (_Axis.of(placement, axis, prototypes.shape[-1]) for axis in (0, 1))
    for start in range(0, len(coefficients), MASKS_PER_PRODUCT):
        part = slice(start, start + MASKS_PER_PRODUCT)
        logits = (coefficients[part] @ prototypes.flatten(1)).view(-1, *prototypes.shape[1:])
        corners = boxes[part].ceil().int().tolist()  # a pixel belongs to a box if x1 <= its index < x2
        for values, window in zip(logits, corners, strict=True):
            yield _enlarge(values, columns, rows, window)


@dataclass(frozen=True)
class _Axis:
    """How photograph pixels along an axis follow from prototype pixels: each from three neighbours, some of weight 0."""

    first: np.ndarray  # int64 (P,): the first of the three
    weights: torch.Tensor  # float32 (P, prototypes)

    @classmethod
    def of(cls, placement: Placement, axis: int, side: int) -> _Axis:
        """Return the x (0) or y (1) axis for `side` prototype pixels."""
        inner_px, photo_px = placement.inner_size[axis], placement.photo_size[axis]
        low, high, share = _neighbours(inner_px, photo_px)
        at_input = [row[placement.pad[axis] :][:inner_px] for row in _neighbours(side, placement.size_px)]
        weights = np.zeros((photo_px, side), np.float32)
        pixels = np.arange(photo_px)
        for source, outer in ((low, 1 - share), (high, share)):
            for end, inner in ((0, 1 - at_input[2]), (1, at_input[2])):
                np.add.at(weights, (pixels, at_input[end][source]), outer * inner[source])
        return cls(at_input[0][low], torch.from_numpy(weights))

    def span(self, pixels: slice) -> slice:
        """Return the prototype pixels that follow from photograph pixels, of which there is at least one."""
        return slice(int(self.first[pixels.start]), min(int(self.first[pixels.stop - 1]) + 3, self.weights.shape[1]))


def _neighbours(small: int, large: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the lower and upper source of each of `large` pixels among `small`, and the upper one's weight, float32.

    As `F.interpolate(mode="bilinear", align_corners=False)` computes them, in float32: with 5472 pixels the rounding shows.
    """
    position = np.float32(small / large) * (np.arange(large, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
    position = position.clip(0)
    low = np.minimum(position.astype(np.int64), small - 1)
    return low, np.minimum(low + 1, small - 1), (position - low.astype(np.float32)).clip(0, 1)


def _enlarge(values: torch.Tensor, columns: _Axis, rows: _Axis, corners: list[int]) -> Region:
    """Return where prototype values (h, w), enlarged, exceed 0 in a window of the photograph: left, top, right, bottom.

    The region is the part of the window around the tiles that may have such pixels.
    """
    left, top, right, bottom = corners
    tiles = []
    for x in range(left, right, TILE_PX):
        across = slice(x, min(x + TILE_PX, right))
        for y in range(top, bottom, TILE_PX):
            down = slice(y, min(y + TILE_PX, bottom))
            near = values[rows.span(down), columns.span(across)]
            lowest, highest = near.aminmax()
            if highest > 0:
                tiles.append((across, down, None if lowest > 0 else near))
    if not tiles:
        return Region(left, top, np.zeros((0, 0), bool))
    left, right = min(across.start for across, _, _ in tiles), max(across.stop for across, _, _ in tiles)
    top, bottom = min(down.start for _, down, _ in tiles), max(down.stop for _, down, _ in tiles)
    mask = np.zeros((bottom - top, right - left), bool)
    for across, down, edge in tiles:
        tile = mask[down.start - top : down.stop - top, across.start - left : across.stop - left]
        if edge is None:
            tile[:] = True
        else:
            wide = edge @ columns.weights[across, columns.span(across)].T
            np.greater((rows.weights[down, rows.span(down)] @ wide).numpy(), 0, out=tile)
    return Region(left, top, mask)
