"""Compares what a coarser pass found, on larger tiles or the whole photograph, with the objects from smaller tiles.

A coarser pass shows larger objects at once, but its masks are coarse: a pixel of a mask may be tens of pixels of the
photograph. So a mask from smaller tiles is preferred wherever there is one:

- fragments, cut off by their tiles' borders, that lie mostly inside one coarse mask become one object; if no smaller tile
  found anything in a quarter of the coarse mask, it fills the gap;
- a coarse mask that is at least half covered by objects from smaller tiles is dropped. If one object covers half of it,
  and lies half in it, both passes found that object, which raises its confidence;
- any other coarse mask stays, unless it is only about one of its own pixels thick: smaller tiles show that better, and
  found nothing.

If two fragments of one tile lie in a coarse mask, it shows several objects as one: it joins nothing.

No tile shows both sides of an object that is as thick as the tile is wide: pieces of wood, sky or rock look like pieces
of any large object. So the coarser pass decides there. A coarse mask that thick replaces the less confident objects that
lie mostly in it or agree with it, unless a more confident one agrees with it or more confident ones cover half of it. An
object that is as thick as its own tiles counts only where a coarse mask agrees with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import cv2
import numpy as np

from utils.predict.joining import MIN_AGREEMENT, MOSTLY, SCORE_RATIO, JoinedObject, Piece, is_cut
from utils.predict.regions import Cells, Corners, Runs, hull

MIN_COVERED = 0.5
MIN_CELLS = 3  # thickness of a coarse mask that counts although no smaller tile shows it; a cell is half a mask pixel
MIN_GAP = 0.25  # of a coarse mask: less may be the mask's coarse edge
ONE_CELL, TWO_CELLS = np.ones((3, 3), np.uint8), np.ones((5, 5), np.uint8)


def add_overview(
    objects: list[JoinedObject], coarse: list[JoinedObject], tiles: list[Corners], tile_px: int, mask_px: float
) -> list[JoinedObject]:
    """Add the objects of a coarser pass, of whose masks a pixel is `mask_px` of the photograph's. Best first.

    `tiles` are those of all passes. `tile_px` is the side of the tiles of the next finer pass.
    """
    cell_px = max(1, round(mask_px / 2))
    of_class: dict[int, list[JoinedObject]] = {thing.class_id: [] for thing in coarse}
    for thing in objects:
        of_class.setdefault(thing.class_id, []).append(thing)
    candidates = {class_id: _Candidates(things, cell_px, tiles) for class_id, things in of_class.items()}
    kept: list[JoinedObject] = []
    for thing in sorted(coarse, key=lambda thing: (-thing.score, thing.pieces[0].order)):
        kept += _place(thing, candidates[thing.class_id], cell_px, tile_px)
    for group in candidates.values():
        free = [group.all[number] for number in np.flatnonzero(group.is_free)]
        kept += [candidate.thing for candidate in free if candidate.thing.support or not candidate.is_thick]
    return sorted(kept, key=lambda thing: (-thing.score, thing.pieces[0].order))


def longest_side(tiles: list[Corners]) -> int:
    """Return the longest side of any tile in pixels."""
    return max(max(right - left, bottom - top) for left, top, right, bottom in tiles)


class _Candidate:
    """An object from tiles that a coarse mask may cover."""

    def __init__(self, thing: JoinedObject, cell_px: int, tiles: list[Corners]) -> None:
        self.thing = thing
        self._cell_px, self._tiles = cell_px, tiles

    def support(self, score: float) -> None:
        """Note that a coarser pass found the object, too."""
        self.thing = replace(self.thing, support=max(self.thing.support, score))

    @cached_property
    def is_thick(self) -> bool:
        """Whether the object is as thick as a tile is wide."""
        left, top, right, bottom = self.thing.corners
        tile_px = longest_side([self._tiles[piece.tile] for piece in self.thing.pieces])
        return (
            min(right - left, bottom - top) >= tile_px and _thickness(self.cells.counts > 0) * self._cell_px >= tile_px
        )

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


class _Candidates:
    """The objects of a class that coarse masks may cover."""

    def __init__(self, things: list[JoinedObject], cell_px: int, tiles: list[Corners]) -> None:
        self.all = [_Candidate(thing, cell_px, tiles) for thing in things]
        self.is_free = np.ones(len(things), bool)
        self._scores = np.array([thing.score for thing in things])
        self._corners = np.array([thing.corners for thing in things]).reshape(-1, 4)

    def score(self, near: _Near) -> float:
        """Return an object's confidence."""
        return self.all[near.number].thing.score

    def near(self, coarse: JoinedObject, corners: tuple[int, ...]) -> list[int]:
        """Return the numbers of the objects in a rectangle that are as confident as a coarse mask, to SCORE_RATIO."""
        is_near = (self._corners[:, :2] < corners[2:]).all(axis=1) & (self._corners[:, 2:] > corners[:2]).all(axis=1)
        ratio = np.minimum(self._scores, coarse.score) >= SCORE_RATIO * np.maximum(self._scores, coarse.score)
        return np.flatnonzero(is_near & ratio & self.is_free).tolist()


@dataclass(frozen=True, eq=False)
class _Near:
    """How an object from tiles lies to a coarse mask: its cells there, the share of it inside, whether both agree."""

    number: int
    cells: np.ndarray
    inside: float
    agrees: bool


def _place(coarse: JoinedObject, candidates: _Candidates, cell_px: int, tile_px: int) -> list[JoinedObject]:
    """Return the object that a coarse mask becomes, if any. The objects that it joins or replaces are no longer free."""
    grid = Cells.of(coarse.mask, cell_px)
    left, top, right, bottom = grid.corners
    around = (left - 2, top - 2, right + 2, bottom + 2)
    is_coarse = grid.window(around) >= min(grid.counts.max(), cell_px**2 / 4)
    seen = _look(coarse, candidates, is_coarse, around, cell_px)
    if _thickness(is_coarse) * cell_px >= tile_px:
        replaced = [near for near in seen if near.agrees or near.inside >= MOSTLY]
        replaced = [near for near in replaced if candidates.score(near) < coarse.score]
        others = [near for near in seen if near not in replaced]
        if not any(near.agrees for near in others) and not _cover(others, is_coarse):
            candidates.is_free[[near.number for near in replaced]] = False
            support = max((candidates.score(near) for near in replaced if near.agrees), default=0.0)
            return [replace(coarse, support=max(coarse.support, support))]
    fragments = [near.number for near in seen if near.inside >= MOSTLY and candidates.all[near.number].is_fragment]
    things = [candidates.all[number].thing for number in fragments]
    tiles = [tile for thing in things for tile in {part.tile for part in thing.pieces}]
    if not fragments or len(set(tiles)) < len(tiles):
        if not _cover(seen, is_coarse):
            return [coarse] if _thickness(is_coarse) >= MIN_CELLS else []
        most = max(seen, key=lambda near: int((near.cells & is_coarse).sum()))
        if most.inside >= MIN_COVERED and _cover([most], is_coarse):
            candidates.all[most.number].support(coarse.score)
        return []
    candidates.is_free[fragments] = False
    pieces = sorted((part for thing in things for part in thing.pieces), key=lambda part: part.order)
    missing = is_coarse & ~_found(seen)
    if missing.sum() < MIN_GAP * is_coarse.sum():
        return [JoinedObject(tuple(pieces))]
    gap = cv2.dilate(missing.view(np.uint8), TWO_CELLS).view(bool)  # up to the fragments
    rest = [_inside_cells(piece, is_coarse & gap, around, cell_px) for piece in coarse.pieces]
    return [JoinedObject((*pieces, *(piece for piece in rest if not piece.mask.is_empty)))]


def _look(
    coarse: JoinedObject, candidates: _Candidates, is_coarse: np.ndarray, around: Corners, cell_px: int
) -> list[_Near]:
    """Compare the objects near a coarse mask with it, except those of which only the coarse mask can decide."""
    reach = cv2.dilate(is_coarse.view(np.uint8), ONE_CELL).view(bool)
    found = []
    for number in candidates.near(coarse, tuple(cell_px * side for side in around)):
        candidate = candidates.all[number]
        counts = candidate.cells.window(around)
        shared = ((counts > 0) & is_coarse).sum()
        agrees = shared >= MIN_AGREEMENT * (is_coarse.sum() + (candidate.cells.counts > 0).sum() - shared)
        if agrees or not candidate.is_thick:
            inside = float(counts[reach].sum() / candidate.cells.counts.sum())
            found.append(_Near(number, counts > 0, inside, bool(agrees)))
    return found


def _found(seen: list[_Near]) -> np.ndarray:
    """Return the cells of some objects, widened by one pixel of the coarse mask."""
    cells = np.any([near.cells for near in seen], axis=0)
    return cv2.dilate(cells.view(np.uint8), TWO_CELLS).view(bool)


def _cover(seen: list[_Near], is_coarse: np.ndarray) -> bool:
    """Return whether some objects together cover half of a coarse mask."""
    return bool(seen) and bool((_found(seen) & is_coarse).sum() >= MIN_COVERED * is_coarse.sum())


def _thickness(cells: np.ndarray) -> float:
    """Return the diameter of the largest circle inside a mask; a photograph's edge is an edge of the mask."""
    padded = np.pad(cells.view(np.uint8), 1)
    return 2 * float(cv2.distanceTransform(padded, cv2.DIST_L2, 5).max())


def _inside_cells(piece: Piece, is_kept: np.ndarray, around: Corners, cell_px: int) -> Piece:
    """Return a piece with the part of its mask in some cells of a rectangle `around` it."""
    left, top, right, bottom = piece.mask.corners
    rows = np.arange(top, bottom) // cell_px - around[1]
    columns = np.arange(left, right) // cell_px - around[0]
    rest = Runs.of(piece.mask.window(piece.mask.corners) & is_kept[np.ix_(rows, columns)], left, top)
    return replace(piece, mask=rest, box=np.array(rest.corners, np.float32))
