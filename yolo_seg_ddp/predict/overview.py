"""Compares the detections of a coarser pass, on larger tiles or the whole photograph, with the
objects from smaller tiles.

A coarser pass shows larger objects whole, but a pixel of its masks may be tens of pixels of the
photograph. So masks from smaller tiles are preferred (docs/research/tiles.md, rule 5). But no tile
shows an object whole that is longer than the tile, and pieces of wood, sky or rock look like pieces
of any large object. There the coarser pass decides (rule 6). `_decide` applies the rules in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.predict.merge_tiles import (
    MIN_AGREEMENT,
    MOSTLY,
    SCORE_RATIO,
    TILE_EDGE_PX,
    MergedInstance,
    TileDetection,
    is_cut,
)
from yolo_seg_ddp.predict.regions import Cells, Corners, Runs, hull, intersections

MIN_COVERED = 0.5  # share of a coarse mask that objects cover, so that they stand for it
# thickness of a coarse mask that counts even if no smaller tile shows it; a cell is half a mask
# pixel
MIN_CELLS = 3
# thickness from which the coarser pass shows an object well: 12 pixels of the network's input
WELL_SHOWN = 6
# share of a coarse mask that no fragment shows, to be filled; less may be the mask's coarse edge
MIN_GAP = 0.25
ONE_CELL, TWO_CELLS = np.ones((3, 3), np.uint8), np.ones((5, 5), np.uint8)


def merge_coarse_level(
    objects: list[MergedInstance],
    coarse: list[MergedInstance],
    tiles: list[Corners],
    finer_px: int,
    coarse_px: int,
    mask_px: float,
) -> list[MergedInstance]:
    """Compare objects with those of a coarser pass; return the objects of both, best first.

    tiles: of all passes. finer_px, coarse_px: a tile's side in the pass before and in the coarser
    pass, for the whole photograph its longer side. mask_px: the side of a pixel of the coarser
    pass's masks. All are in pixels of the photograph.
    """
    cell_px = max(1, round(mask_px / 2))
    of_class: dict[int, list[MergedInstance]] = {instance.class_id: [] for instance in coarse}
    for instance in objects:
        of_class.setdefault(instance.class_id, []).append(instance)
    candidates = {
        class_id: _Candidates(instances, cell_px, tiles) for class_id, instances in of_class.items()
    }
    kept: list[MergedInstance] = []
    for instance in sorted(coarse, key=best_first):
        kept += _decide(instance, candidates[instance.class_id], cell_px, finer_px)
    for group in candidates.values():
        for candidate in (group.all[number] for number in np.flatnonzero(group.is_free)):
            judged = candidate.judged(coarse_px)
            if judged.support or any(judged.others) or not candidate.is_thick:
                kept.append(judged)
    return sorted(kept, key=best_first)


def best_first(instance: MergedInstance) -> tuple[Any, ...]:
    """What objects are sorted by."""
    return -instance.score, instance.pieces[0].order


def longest_side(tiles: list[Corners]) -> int:
    """Return the longest side of any tile in pixels."""
    return max(max(right - left, bottom - top) for left, top, right, bottom in tiles)


class _Candidate:
    """An object from smaller tiles that a coarse mask may cover."""

    def __init__(
        self, number: int, instance: MergedInstance, cell_px: int, tiles: list[Corners]
    ) -> None:
        self.number = number
        self.instance = instance
        self._cell_px = cell_px
        self._tiles = tiles
        self.support = 0.0  # the confidence of the coarser pass

    @cached_property
    def tile_px(self) -> int:
        """The longest side of the tiles that show parts of the object."""
        return longest_side([self._tiles[piece.tile] for piece in self.instance.pieces])

    @cached_property
    def sides(self) -> tuple[int, int]:
        """The shorter and the longer side of the mask's bounding box."""
        left, top, right, bottom = self.instance.corners
        return min(right - left, bottom - top), max(right - left, bottom - top)

    @cached_property
    def thickness(self) -> float:
        """The thickness in cells."""
        is_possible = self.sides[0] >= MIN_CELLS * self._cell_px
        return _thickness(self.cells.counts >= self._cell_px**2 / 2) if is_possible else 0.0

    @property
    def is_thick(self) -> bool:
        """Whether the object is as thick as a tile is wide."""
        return self.sides[0] >= self.tile_px and self.thickness * self._cell_px >= self.tile_px

    @property
    def is_too_long(self) -> bool:
        """Whether no tile shows the object whole, and it is not too thin for the coarser pass."""
        return self.sides[1] >= self.tile_px and self.thickness >= MIN_CELLS

    def judged(self, coarse_px: int) -> MergedInstance:
        """Return the object with the coarser pass's confidence in it: among `others` if that pass
        shows it well, else as `support`.
        """
        if self.sides[1] <= coarse_px and self.thickness >= WELL_SHOWN:
            return replace(self.instance, others=(*self.instance.others, self.support))
        return replace(self.instance, support=max(self.instance.support, self.support))

    @cached_property
    def is_fragment(self) -> bool:
        """Whether a tile's border cuts the object off."""
        return is_cut(self.instance, self._tiles)

    @cached_property
    def cells(self) -> Cells:
        """The mask's pixels in each cell."""
        parts = [Cells.of(piece.mask, self._cell_px) for piece in self.instance.pieces]
        corners = hull([part.corners for part in parts])
        return Cells(*corners[:2], np.maximum.reduce([part.crop(corners) for part in parts]))


class _Candidates:
    """The objects of a class that coarse masks may cover, and which of them are still free."""

    def __init__(self, instances: list[MergedInstance], cell_px: int, tiles: list[Corners]) -> None:
        self.all = [
            _Candidate(number, instance, cell_px, tiles)
            for number, instance in enumerate(instances)
        ]
        self.is_free = np.ones(len(instances), bool)
        self._scores = np.array([instance.score for instance in instances])
        self._corners = np.array([instance.corners for instance in instances]).reshape(-1, 4)

    def near(self, coarse: MergedInstance, corners: tuple[int, ...]) -> list[_Candidate]:
        """Return the free objects in a rectangle whose confidence differs from the coarse mask's by
        SCORE_RATIO at most.
        """
        is_near = (self._corners[:, :2] < corners[2:]).all(axis=1) & (
            self._corners[:, 2:] > corners[:2]
        ).all(axis=1)
        ratio = np.minimum(self._scores, coarse.score) >= SCORE_RATIO * np.maximum(
            self._scores, coarse.score
        )
        return [self.all[number] for number in np.flatnonzero(is_near & ratio & self.is_free)]

    def take(self, neighbours: list[_Neighbour]) -> None:
        """Mark objects that a coarse mask joins or replaces as no longer free."""
        self.is_free[[neighbour.candidate.number for neighbour in neighbours]] = False


@dataclass(frozen=True, eq=False)
class _Neighbour:
    """An object from smaller tiles beside a coarse mask: its cells there, its share inside the
    mask, whether both agree.
    """

    candidate: _Candidate
    cells: np.ndarray
    inside: float
    agrees: bool


@dataclass(frozen=True, eq=False)
class _CoarseMask:
    """A coarse mask on the grid, and the objects from smaller tiles that it is compared with."""

    instance: MergedInstance
    cells: np.ndarray  # bool (h, w): where the mask is
    around: Corners  # the rectangle of `cells`, in cells
    neighbours: list[_Neighbour]

    @cached_property
    def thickness(self) -> float:
        """The thickness in cells."""
        return _thickness(self.cells)

    def is_covered_by(self, some: list[_Neighbour]) -> bool:
        """Return whether some objects together cover half of the mask."""
        return bool(some) and bool(
            (_widened(some) & self.cells).sum() >= MIN_COVERED * self.cells.sum()
        )


def _decide(
    coarse: MergedInstance, candidates: _Candidates, cell_px: int, tile_px: int
) -> list[MergedInstance]:
    """Return the object that a coarse mask becomes, if any.

    The objects that it joins or replaces are no longer free.
    """
    mask = _look(coarse, candidates, cell_px)
    replaced = _replaced(mask) if mask.thickness * cell_px >= tile_px else None
    if replaced is not None:
        candidates.take(replaced)
        scores = [neighbour.candidate.instance.score for neighbour in replaced if neighbour.agrees]
        return [replace(coarse, others=(*coarse.others, max(scores))) if scores else coarse]
    fragments = [
        part for part in mask.neighbours if part.inside >= MOSTLY and part.candidate.is_fragment
    ]
    tiles = [
        tile
        for part in fragments
        for tile in {piece.tile for piece in part.candidate.instance.pieces}
    ]
    # Two from one tile are two objects.
    if fragments and len(set(tiles)) == len(tiles):
        candidates.take(fragments)
        return [_join(mask, fragments, cell_px)]
    # if one object alone covers half of it, that is supported
    if mask.is_covered_by(mask.neighbours):
        most = max(mask.neighbours, key=lambda neighbour: int((neighbour.cells & mask.cells).sum()))
        if most.inside >= MIN_COVERED and mask.is_covered_by([most]):
            most.candidate.support = max(most.candidate.support, coarse.score)
        return []
    return [coarse] if mask.thickness >= MIN_CELLS else []


def _look(coarse: MergedInstance, candidates: _Candidates, cell_px: int) -> _CoarseMask:
    """Compare a coarse mask with the objects near it.

    Those that are too long for a tile count only if both agree.
    """
    grid = Cells.of(coarse.mask, cell_px)
    left, top, right, bottom = grid.corners
    around = (left - 2, top - 2, right + 2, bottom + 2)
    cells = grid.crop(around) >= min(grid.counts.max(), cell_px**2 / 4)
    reach = cv2.dilate(cells.view(np.uint8), ONE_CELL).view(bool)
    neighbours = []
    for candidate in candidates.near(coarse, tuple(cell_px * side for side in around)):
        counts = candidate.cells.crop(around)
        shared = ((counts > 0) & cells).sum()
        agrees = shared >= MIN_AGREEMENT * (
            cells.sum() + (candidate.cells.counts > 0).sum() - shared
        )
        if agrees or not candidate.is_too_long:
            inside = float(counts[reach].sum() / candidate.cells.counts.sum())
            neighbours.append(_Neighbour(candidate, counts > 0, inside, bool(agrees)))
    return _CoarseMask(coarse, cells, around, neighbours)


def _replaced(mask: _CoarseMask) -> list[_Neighbour] | None:
    """Return the less confident objects that a thick coarse mask replaces; None if more confident
    objects forbid it (rule 6).
    """
    replaced: list[_Neighbour] = []
    others: list[_Neighbour] = []
    for neighbour in mask.neighbours:
        is_same = neighbour.agrees or neighbour.inside >= MOSTLY
        (
            replaced
            if is_same and neighbour.candidate.instance.score < mask.instance.score
            else others
        ).append(neighbour)
    is_refused = any(neighbour.agrees for neighbour in others) or mask.is_covered_by(others)
    return None if is_refused else replaced


def _join(mask: _CoarseMask, fragments: list[_Neighbour], cell_px: int) -> MergedInstance:
    """Join fragments to one object; where they leave a large gap, the coarse mask fills it."""
    pieces = sorted(
        (piece for part in fragments for piece in part.candidate.instance.pieces),
        key=lambda piece: piece.order,
    )
    missing = mask.cells & ~_widened(mask.neighbours)
    if missing.sum() >= MIN_GAP * mask.cells.sum():
        # Wide enough to reach the fragments.
        gap = cv2.dilate(missing.view(np.uint8), TWO_CELLS).view(bool)
        rest = [
            _inside_cells(piece, mask.cells & gap, mask.around, cell_px)
            for piece in mask.instance.pieces
        ]
        pieces += [piece for piece in rest if not piece.mask.is_empty]
    return MergedInstance(tuple(pieces))


def _widened(neighbours: list[_Neighbour]) -> np.ndarray:
    """Return the cells of all these objects, widened by one pixel of the coarse mask."""
    cells = np.any([neighbour.cells for neighbour in neighbours], axis=0)
    return cv2.dilate(cells.view(np.uint8), TWO_CELLS).view(bool)


def _thickness(cells: np.ndarray) -> float:
    """Return the diameter of the largest circle inside a mask; a photograph's edge is an edge of
    the mask.
    """
    padded = np.pad(cells.view(np.uint8), 1)
    return 2 * float(cv2.distanceTransform(padded, cv2.DIST_L2, 5).max())


def _inside_cells(
    piece: TileDetection, is_kept: np.ndarray, around: Corners, cell_px: int
) -> TileDetection:
    """Return a piece with the part of its mask that lies in the kept cells of the rectangle
    `around`.
    """
    left, top, right, bottom = piece.mask.corners
    rows = np.arange(top, bottom) // cell_px - around[1]
    columns = np.arange(left, right) // cell_px - around[0]
    rest = Runs.of(piece.mask.crop(piece.mask.corners) & is_kept[np.ix_(rows, columns)], left, top)
    return replace(piece, mask=rest, box=np.array(rest.corners, np.float32))


def without_mask(
    pieces: list[TileDetection], objects: list[MergedInstance], tiles: list[Corners], iou: float
) -> list[MergedInstance]:
    """Return the detections with an empty mask, best first. Their boxes decide which ones are left
    out.

    A box is left out if its IoU with a more confident box, or with the box of one of `objects`, of
    its class is above `iou`. A box that its tile's border cuts off is also left out if MOSTLY of it
    lies in another box.
    """
    photo = hull(tiles)
    cut = {piece: _is_cut_off(piece, tiles, photo) for piece in pieces if piece.mask.is_empty}
    kept: list[MergedInstance] = []
    # Of the objects, then of the detections that are kept.
    boxes = np.zeros((len(objects) + len(cut), 4), np.float32)
    boxes[: len(objects)] = np.array([instance.box for instance in objects], np.float32).reshape(
        -1, 4
    )
    classes = np.array([instance.class_id for instance in objects] + [-1] * len(cut), int)
    for piece in sorted(cut, key=lambda piece: (cut[piece], piece.order)):
        others = boxes[classes == piece.class_id]
        overlap, inside = box_overlap(piece.box, others)
        if not ((overlap > iou).any() or (cut[piece] and (inside >= MOSTLY).any())):
            row = len(objects) + len(kept)
            boxes[row] = piece.box
            classes[row] = piece.class_id
            kept.append(MergedInstance((piece,)))
    return sorted(kept, key=lambda instance: instance.pieces[0].order)


def box_overlap(box: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the IoU of a box (4,) with others (n, 4), float32 (n,), and the share of the box that
    lies in each of them.
    """
    sides = intersections(box[None], others)
    shared = (sides[:, 2:] - sides[:, :2]).clip(0).prod(axis=1)
    area = np.prod(box[2:] - box[:2])
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1)
    return shared / (area + areas - shared).clip(1e-9), shared / max(area, 1e-9)


def _is_cut_off(piece: TileDetection, tiles: list[Corners], photo: Corners) -> bool:
    """Return whether a piece's box comes within TILE_EDGE_PX of a border of its tile that is not
    the photograph's.
    """
    if piece.tile < 0:
        return False
    distances = np.abs(piece.box - np.array(tiles[piece.tile]))
    return bool(
        ((distances < TILE_EDGE_PX) & (np.array(tiles[piece.tile]) != np.array(photo))).any()
    )
