"""Joins the detections in overlapping tiles of a photograph, so that each object is one detection
again.

Masks decide, not boxes: two parallel wires that cross many tiles have nearly the same boxes, and
the two halves of a wire in neighbouring tiles have boxes that hardly overlap.

docs/research/tiles.md lists the rules: duplicates in a tile, links between tiles, objects,
fragments (1 to 4). yolo_seg_ddp/predict/overview.py compares the result with what larger tiles and
the whole photograph show (5 and 6), and yolo_seg_ddp/predict/postprocess.py the boxes (8).

All decisions follow from sorted lists, so the order of tiles and the batch size do not matter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property

import cv2
import numpy as np

from yolo_seg_ddp.predict.agreement import WIDEN_PX, Masks, widen
from yolo_seg_ddp.predict.regions import (
    Cells,
    Corners,
    Region,
    Runs,
    has_pixels,
    hull,
    intersection,
    intersections,
)

# Of the rules in docs/research/tiles.md. Only SCORE_RATIO was measured alone
# (docs/research/wires.md): mask AP50 0.214 instead of 0.196 with 0.1.
MIN_AGREEMENT = 0.5  # rule 2: IoU of two masks where both tiles look
# of the smaller of two masks, where both tiles look: masks that share less are not compared
MIN_SHARED = 0.25
# rule 2: length of the part that two incomplete detections of a wire must both show
MIN_SHARED_PX = 16
THIN_RATIO = 8  # rule 2: a mask is thin if it is this many times as long as wide
# rule 2: a detection with less than this share of another's confidence is never joined to it
SCORE_RATIO = 0.3
MOSTLY = 0.7  # rule 4: the share of a fragment that has to lie inside another object
WIDEN_KERNEL = np.ones((2 * WIDEN_PX + 1,) * 2, np.uint8)
TILE_EDGE_PX = 6  # rule 4: a mask that comes this close to its tile's border is cut off by it
# rule 3: side of the cells of the grid that tells whether parts of an object are connected
CONNECT_PX = 4


@dataclass(frozen=True, eq=False)
class TileDetection:
    """A detection in one tile, in pixels of the photograph: its box float32
    (4,) xyxy and its mask.
    """

    tile: int  # position in the list of tiles; -1 in the pass over the whole photograph
    class_id: int
    score: float
    box: np.ndarray
    mask: Runs

    @cached_property
    def order(self) -> tuple[float, ...]:
        """What pieces are sorted by; it does not depend on the order
        in which tiles were processed.
        """
        return (-self.score, self.tile, self.class_id, *self.box.tolist(), *self.mask.corners)


@dataclass(frozen=True, eq=False)
class MergedInstance:
    """An object: the pieces it is joined from, and how confident coarser passes are that it is
    there.
    """

    pieces: tuple[TileDetection, ...]
    support: float = 0.0  # the highest confidence of the passes that hardly show it
    # the confidences of the passes that show it well; 0 where nothing was found
    others: tuple[float, ...] = ()
    factor: float = 1.0  # lower for an object that is short for its class

    @property
    def class_id(self) -> int:
        """The class of all pieces."""
        return self.pieces[0].class_id

    @cached_property
    def score(self) -> float:
        """The mean confidence of the pieces, weighted by area; `support` raises it, `others` and
        `factor` change it, too.
        """
        areas = [piece.mask.area for piece in self.pieces]
        # A detection without a mask is one piece.
        areas = areas if any(areas) else [1]
        mean = sum(
            piece.score * area for piece, area in zip(self.pieces, areas, strict=True)
        ) / sum(areas)
        confidence = 1 - (1 - mean) * (1 - self.support) if self.support else mean
        return self.factor * (confidence + sum(self.others)) / (1 + len(self.others))

    @cached_property
    def box(self) -> np.ndarray:
        """The box around the pieces' boxes: float32 (4,) xyxy."""
        boxes = np.stack([piece.box for piece in self.pieces])
        return np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])

    @property
    def corners(self) -> Corners:
        """The bounding box of the mask's pixels."""
        return hull([piece.mask.corners for piece in self.pieces])

    @cached_property
    def mask(self) -> Runs:
        """The union of the pieces' masks."""
        if len(self.pieces) == 1:
            return self.pieces[0].mask
        drawn = self.region()
        return Runs.of_cut(drawn.mask, drawn.left, drawn.top)

    def region(self) -> Region:
        """Draw the mask, the union of the pieces' masks.

        For a wire across a photograph it is as large as the photograph.
        """
        left, top, right, bottom = self.corners
        mask = np.zeros((bottom - top, right - left), bool)
        for piece in self.pieces:
            x1, y1, x2, y2 = piece.mask.corners
            mask[y1 - top : y2 - top, x1 - left : x2 - left] |= piece.mask.crop((x1, y1, x2, y2))
        return Region(left, top, mask)


def join_tiles(
    pieces: list[TileDetection], tiles: list[Corners], iou: float
) -> list[MergedInstance]:
    """Join the pieces of all tiles by rules 1 to 4, with duplicates in a tile above `iou`; return
    the objects, best first.
    """
    pieces = sorted(
        (piece for piece in pieces if not piece.mask.is_empty), key=lambda piece: piece.order
    )
    if not pieces:
        return []
    table = _Pieces(pieces, tiles)
    wide = [widen(piece.mask, tiles[piece.tile]) for piece in pieces]
    comparison = _Comparison(table, wide)
    in_tiles = comparison.pairs(np.arange(len(pieces)), in_tiles=True)
    dropped: set[int] = set()
    for p, q in in_tiles.positions[in_tiles.iou >= iou].tolist():
        if p not in dropped:
            dropped.add(q)
    left = np.setdiff1d(np.arange(len(pieces)), list(dropped))
    are_left = np.isin(in_tiles.positions[:, 0], left) & np.isin(in_tiles.positions[:, 1], left)
    pairs = in_tiles.chosen(are_left) + comparison.pairs(left, in_tiles=False)
    groups = _group(table, wide, left.tolist(), _links(table, pairs))
    objects = [MergedInstance(tuple(pieces[position] for position in group)) for group in groups]
    around = _groups_around(groups, wide, pairs)
    order = sorted(
        range(len(objects)),
        key=lambda number: (-objects[number].score, objects[number].pieces[0].order),
    )
    kept: dict[int, MergedInstance] = {}
    # Fragments that lie mostly inside a more confident object are left out.
    for number in order:
        if not (kept.keys() & around[number] and is_cut(objects[number], tiles)):
            kept[number] = objects[number]
    return list(kept.values())


class _Pieces:
    """The properties of pieces as arrays (n,), corners as (n, 4).

    A piece is named by its position, the best first.
    """

    def __init__(self, pieces: list[TileDetection], tiles: list[Corners]) -> None:
        self.masks = [piece.mask for piece in pieces]
        self.score = np.array([piece.score for piece in pieces])
        self.class_id = np.array([piece.class_id for piece in pieces])
        self.tile = np.array([piece.tile for piece in pieces])
        self.seen = np.array(tiles)[self.tile]  # corners of the tile
        self.corners = np.array([mask.corners for mask in self.masks])
        longest = (self.corners[:, 2:] - self.corners[:, :2]).max(axis=1)
        self.is_thin = THIN_RATIO * np.array([mask.area for mask in self.masks]) <= longest**2

    def near(self, positions: np.ndarray, corners: np.ndarray, in_tiles: bool) -> np.ndarray:
        """Return the pairs p < q of pieces of a class whose corners overlap: int64 (k, 2), sorted.

        Both are pieces of one tile if `in_tiles`, else of two. positions: of the pieces to look at,
        ascending. corners (n, 4): of all pieces.
        """
        order = positions[np.lexsort((self.tile[positions], self.class_id[positions]))]
        cuts = np.flatnonzero(np.diff(self.class_id[order]) | np.diff(self.tile[order])) + 1
        groups = [group for group in np.split(order, cuts) if len(group)]
        first = np.array([group[0] for group in groups], int)
        class_id, seen = self.class_id[first], self.seen[first]
        pairs = [np.zeros((0, 2), int)]
        for number, group in enumerate(groups):
            others = group
            if not in_tiles:
                end = int(np.searchsorted(class_id, class_id[number], side="right"))
                is_near = _overlap(seen[number], seen[number + 1 : end])
                others = np.concatenate(
                    [group[:0], *(groups[number + 1 + step] for step in np.flatnonzero(is_near))]
                )
            one, two = np.nonzero(_overlap(corners[group][:, None], corners[others]))
            pairs.append(np.sort(np.stack([group[one], others[two]], axis=1), axis=1))
            if in_tiles:
                pairs[-1] = pairs[-1][one < two]
        near_pairs = np.concatenate(pairs)
        return near_pairs[np.lexsort((near_pairs[:, 1], near_pairs[:, 0]))]


def _overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return whether rectangles (..., 4) share pixels."""
    return (
        np.maximum(first[..., :2], second[..., :2]) < np.minimum(first[..., 2:], second[..., 2:])
    ).all(axis=-1)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of pieces (n, 2), the more confident one first; what their widened masks share: pixels
    (n,) and IoU (n,).
    """

    positions: np.ndarray
    shared: np.ndarray
    iou: np.ndarray

    def chosen(self, which: np.ndarray) -> _Pairs:
        """Return some of the pairs."""
        return _Pairs(self.positions[which], self.shared[which], self.iou[which])

    def __add__(self, other: _Pairs) -> _Pairs:
        parts = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Pairs(*(np.concatenate(part) for part in parts))


class _Comparison:
    """Finds the pairs of widened masks of one class that share at least MIN_SHARED of the smaller
    one, where both tiles look.
    """

    def __init__(self, pieces: _Pieces, wide: list[Runs]) -> None:
        self.pieces = pieces
        self.masks = Masks(wide)
        self.corners = np.array([mask.corners for mask in wide])

    def pairs(self, positions: np.ndarray, in_tiles: bool) -> _Pairs:
        """Return the pairs among some pieces, of one tile if `in_tiles`, else of two."""
        pairs = self.pieces.near(positions, self.corners, in_tiles)
        shared = self.masks.shared(pairs)
        pairs, shared = pairs[shared > 0], shared[shared > 0]
        seen = self.pieces.seen
        strips = intersections(seen[pairs[:, 0]], seen[pairs[:, 1]])
        one, two = (
            self._areas(pairs[:, side], self.pieces.tile[pairs[:, 1 - side]], strips)
            for side in (0, 1)
        )
        overlapping = _Pairs(pairs, shared, shared / (one + two - shared))
        return overlapping.chosen(shared >= MIN_SHARED * np.minimum(one, two))

    def _areas(self, positions: np.ndarray, others: np.ndarray, strips: np.ndarray) -> np.ndarray:
        """Count the pixels of pieces in the strips that they share with other tiles."""
        _, first, number = np.unique(
            np.stack([positions, others]), axis=1, return_index=True, return_inverse=True
        )
        return self.masks.areas(positions[first], strips[first])[number]


def _links(pieces: _Pieces, pairs: _Pairs) -> list[tuple[float, int, int]]:
    """Return the pairs of pieces that may be one object as (strength,
    p, q), the strongest first.
    """
    p, q = pairs.positions.T
    both_thin = pieces.is_thin[p] & pieces.is_thin[q]
    may_link = ((pieces.tile[p] != pieces.tile[q]) | both_thin) & (
        pieces.score[q] >= SCORE_RATIO * pieces.score[p]
    )
    p = p[may_link]
    q = q[may_link]
    both_thin = both_thin[may_link]
    agreed = pairs.iou[may_link]
    one, two = pieces.corners[p], pieces.corners[q]
    strips = intersections(pieces.seen[p], pieces.seen[q])
    outer = intersections(
        strips, np.hstack([np.minimum(one[:, :2], two[:, :2]), np.maximum(one[:, 2:], two[:, 2:])])
    )
    inner = intersections(strips, intersections(one, two))
    size = inner[:, 2:] - inner[:, :2]
    is_long = both_thin & (size > 0).all(axis=1) & (size.max(axis=1) >= MIN_SHARED_PX)
    masks = Masks(pieces.masks)
    for can_agree, rectangles in ((True, outer), (is_long, inner)):
        chosen = np.flatnonzero((agreed < MIN_AGREEMENT) & can_agree)
        agreed[chosen] = masks.agreement(
            np.stack([p[chosen], q[chosen]], axis=1), rectangles[chosen]
        )
    strength = agreed * pieces.score[q]
    order = np.lexsort((q, p, -strength))
    order = order[agreed[order] >= MIN_AGREEMENT]
    return list(zip(strength[order].tolist(), p[order].tolist(), q[order].tolist(), strict=True))


def _group(
    pieces: _Pieces, wide: list[Runs], left: list[int], links: list[tuple[float, int, int]]
) -> list[list[int]]:
    """Unite linked pieces, the strongest link first, unless rule 3 refuses it.

    `left`: the pieces that are no duplicates.
    """
    group_of = {position: [position] for position in left}
    # A set of positions is a number with a bit for each position, so that one operation compares
    # two groups.
    rivals, overlapping = _rivals(pieces, links)
    members, rivals_of, refused = (
        {p: values.get(p, 0) for p in group_of}
        for values in ({p: 1 << p for p in group_of}, rivals, overlapping)
    )
    cells = cache(lambda position: Cells.of(wide[position], CONNECT_PX))
    for _, p, q in links:
        first, second = group_of[p], group_of[q]
        # the first position names a group, because a group only grows at its end
        one, two = first[0], second[0]
        if first is second or refused[one] & members[two]:
            continue
        if rivals_of[one] & members[two]:
            pairs = [
                (a, b)
                for b in second
                if rivals[b] & members[one]
                for a in first
                if rivals[b] >> a & 1
            ]
            if not _are_connected(
                pairs, {position: cells(position) for position in first + second}
            ):
                continue
        first += second
        group_of.update(dict.fromkeys(second, first))
        for sets in (members, rivals_of, refused):
            sets[one] |= sets[two]
    return list({id(group): sorted(group) for group in group_of.values()}.values())


def _rivals(
    pieces: _Pieces, links: list[tuple[float, int, int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the rivals of each linked piece, and those rivals that overlap it; both as bits.

    A piece's rivals are the linked pieces of its class and tile that are not linked to the piece
    itself.
    """
    linked: dict[int, int] = defaultdict(int)
    for _, p, q in links:
        linked[p] |= 1 << q
        linked[q] |= 1 << p
    in_tile: dict[tuple[int, int], int] = defaultdict(int)
    names = list(zip(pieces.class_id.tolist(), pieces.tile.tolist(), strict=True))
    for position in linked:
        in_tile[names[position]] |= 1 << position
    rivals = {
        position: in_tile[names[position]] & ~(others | 1 << position)
        for position, others in linked.items()
    }
    near = pieces.near(np.array(sorted(linked), int), pieces.corners, in_tiles=True)
    overlapping: dict[int, int] = defaultdict(int)
    for p, q in near[Masks(pieces.masks).shared(near) > 0].tolist():
        overlapping[p] |= 1 << q & rivals[p]
        overlapping[q] |= 1 << p & rivals[q]
    return rivals, overlapping


def _are_connected(pairs: list[tuple[int, int]], cells: dict[int, Cells]) -> bool:
    """Return whether the union of all masks connects the two masks of each pair.

    `cells`: the masks on a grid, by position.
    """
    corners = hull([grid.corners for grid in cells.values()])
    union = np.zeros((corners[3] - corners[1], corners[2] - corners[0]), np.uint8)
    places = {}
    for position, grid in cells.items():
        left, top, right, bottom = grid.corners
        places[position] = (
            slice(top - corners[1], bottom - corners[1]),
            slice(left - corners[0], right - corners[0]),
        )
        union[places[position]] |= grid.counts > 0
    _, labels = cv2.connectedComponents(union, connectivity=8)
    rivals = {position for pair in pairs for position in pair}
    parts = {
        position: set(labels[places[position]][cells[position].counts > 0].tolist())
        for position in rivals
    }
    return all(parts[a] & parts[b] for a, b in pairs)


def _groups_around(groups: list[list[int]], wide: list[Runs], pairs: _Pairs) -> dict[int, set[int]]:
    """Return for each group the groups that cover MOSTLY of its area.

    `wide`: the widened masks of all pieces.
    """
    group_of = np.zeros(len(wide), int)
    group_of[np.concatenate(groups)] = np.repeat(
        np.arange(len(groups)), [len(group) for group in groups]
    )
    shared = np.tile(pairs.shared, 2)
    order = np.argsort(-shared, kind="stable")
    piece, partner = np.concatenate([pairs.positions, pairs.positions[:, ::-1]])[order].T
    # A piece shares with a group at least what it shares with each of its pieces, so the largest of
    # these counts.
    _, most = np.unique(piece * len(groups) + group_of[partner], return_index=True)
    places, place = np.unique(
        (group_of[piece] * len(groups) + group_of[partner])[most], return_inverse=True
    )
    one, other = np.divmod(places, len(groups))
    areas = np.array([sum(wide[position].area for position in group) for group in groups])
    is_around = (one != other) & (np.bincount(place, shared[order][most]) >= MOSTLY * areas[one])
    result: dict[int, set[int]] = defaultdict(set)
    for inside, around in zip(one[is_around].tolist(), other[is_around].tolist(), strict=True):
        result[inside].add(around)
    return result


def is_cut(instance: MergedInstance, tiles: list[Corners]) -> bool:
    """Return whether the object ends at a tile's border, and no piece of a tile that reaches
    further continues it there.
    """
    photo = hull(tiles)
    masks = np.array([piece.mask.corners for piece in instance.pieces])
    seen = np.array([tiles[piece.tile] for piece in instance.pieces])
    for piece in instance.pieces:
        tile = tiles[piece.tile]
        for side in range(4):
            inwards = 1 if side < 2 else -1
            band = list(tile)
            band[(side + 2) % 4] = tile[side] + inwards * TILE_EDGE_PX
            corners = (band[0], band[1], band[2], band[3])
            if tile[side] == photo[side] or not has_pixels(
                intersection(corners, piece.mask.corners)
            ):
                continue
            at_border = piece.mask.crop(corners)
            continued = np.zeros(at_border.shape, bool)
            looks_further = inwards * seen[:, side] < inwards * tile[side]
            for number in np.flatnonzero(looks_further & _overlap(np.array(corners), masks)):
                continued |= instance.pieces[number].mask.crop(corners)
            continued = cv2.dilate(continued.view(np.uint8), WIDEN_KERNEL).view(bool)
            if 2 * np.count_nonzero(continued[at_border]) < np.count_nonzero(at_border):
                return True
    return False
