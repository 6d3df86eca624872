"""Compares what the pass over the whole photograph found with the objects that were joined from tiles.

The whole photograph shows large objects at once, but its masks are coarse: a pixel of the mask is tens of pixels of the
photograph. So a mask from tiles is preferred wherever there is one:

- fragments, cut off by their tiles' borders, that lie mostly inside one coarse mask become one object; where no tile
  found anything, the coarse mask fills the gap;
- a coarse mask that is at least half covered by objects from tiles is dropped;
- any other coarse mask stays.

If two fragments of one tile lie in a coarse mask, it shows several objects as one: it joins nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property

import cv2
import numpy as np

from utils.yolo.joining import MOSTLY, SCORE_RATIO, JoinedObject, Piece, is_cut
from utils.yolo.regions import Cells, Corners, Runs, has_pixels, hull, intersection

MIN_COVERED = 0.5
ONE_CELL, TWO_CELLS = np.ones((3, 3), np.uint8), np.ones((5, 5), np.uint8)


def add_overview(
    objects: list[JoinedObject], whole: list[Piece], tiles: list[Corners], mask_px: float
) -> list[JoinedObject]:
    """Add the pieces of the whole photograph, of whose masks a pixel is `mask_px` of the photograph's. Best first."""
    cell_px = max(1, round(mask_px / 2))
    of_class: dict[int, list[_Candidate]] = defaultdict(list)
    for thing in objects:
        of_class[thing.class_id].append(_Candidate(thing, cell_px, tiles))
    kept: list[JoinedObject] = []
    for piece in sorted((piece for piece in whole if not piece.mask.is_empty), key=lambda piece: piece.order):
        kept += _place(piece, of_class[piece.class_id], cell_px)
    kept += [candidate.thing for candidates in of_class.values() for candidate in candidates]
    return sorted(kept, key=lambda thing: (-thing.score, thing.pieces[0].order))


class _Candidate:
    """An object from tiles that a coarse mask may cover."""

    def __init__(self, thing: JoinedObject, cell_px: int, tiles: list[Corners]) -> None:
        self.thing = thing
        self._cell_px, self._tiles = cell_px, tiles
        left, top, right, bottom = thing.corners
        self._corners = (left // cell_px, top // cell_px, right // cell_px + 1, bottom // cell_px + 1)

    @cached_property
    def is_fragment(self) -> bool:
        """Whether a tile's border cuts the object off."""
        return is_cut(self.thing, self._tiles)

    @cached_property
    def cells(self) -> Cells:
        """The mask's pixels in each cell."""
        parts = [Cells.of(piece.mask, self._cell_px) for piece in self.thing.pieces]
        corners = hull([part.corners for part in parts])
        return Cells(*corners[:2], np.maximum.reduce([part.window(corners) for part in parts]))

    def may_be_in(self, piece: Piece, corners: Corners) -> bool:
        """Return whether the object is near a coarse mask and of comparable confidence."""
        low, high = sorted((piece.score, self.thing.score))
        return low >= SCORE_RATIO * high and has_pixels(intersection(corners, self._corners))


def _place(piece: Piece, candidates: list[_Candidate], cell_px: int) -> list[JoinedObject]:
    """Return the object that a coarse mask becomes, if any; the fragments it joins are removed from `candidates`."""
    grid = Cells.of(piece.mask, cell_px)
    left, top, right, bottom = grid.corners
    around = (left - 2, top - 2, right + 2, bottom + 2)
    is_coarse = grid.window(around) >= min(grid.counts.max(), cell_px**2 / 4)
    reach = cv2.dilate(is_coarse.view(np.uint8), ONE_CELL).view(bool)
    near = [candidate for candidate in candidates if candidate.may_be_in(piece, around)]
    seen = [candidate.cells.window(around) for candidate in near]
    is_inside = [
        counts[reach].sum() >= MOSTLY * candidate.cells.counts.sum()
        for candidate, counts in zip(near, seen, strict=True)
    ]
    found = np.zeros(is_coarse.shape, np.uint8)
    for counts in seen:
        found |= counts > 0
    found = cv2.dilate(found, TWO_CELLS).view(bool)  # one pixel of the coarse mask
    is_covered = np.count_nonzero(found & is_coarse) >= MIN_COVERED * np.count_nonzero(is_coarse)
    fragments = [one for one, inside in zip(near, is_inside, strict=True) if inside and one.is_fragment]
    tiles = [tile for one in fragments for tile in {part.tile for part in one.thing.pieces}]
    if not fragments or len(set(tiles)) < len(tiles):
        return [] if is_covered else [JoinedObject((piece,))]
    for fragment in fragments:
        candidates.remove(fragment)
    pieces = [part for fragment in fragments for part in fragment.thing.pieces]
    rest = _inside_cells(piece, is_coarse & ~found, around, cell_px)
    return [JoinedObject((*sorted(pieces, key=lambda part: part.order), *([rest] if not rest.mask.is_empty else [])))]


def _inside_cells(piece: Piece, is_kept: np.ndarray, around: Corners, cell_px: int) -> Piece:
    """Return a piece with the part of its mask in some cells of a rectangle `around` it."""
    left, top, right, bottom = piece.mask.corners
    rows = np.arange(top, bottom) // cell_px - around[1]
    columns = np.arange(left, right) // cell_px - around[0]
    rest = Runs.of(piece.mask.window(piece.mask.corners) & is_kept[np.ix_(rows, columns)], left, top)
    return replace(piece, mask=rest, box=np.array(rest.corners, np.float32))
