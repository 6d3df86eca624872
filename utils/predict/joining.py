"""Joins what was found in overlapping tiles of a photograph, so that each object is one detection again.

Masks decide, not boxes: two parallel wires that cross many tiles have nearly the same boxes, and the two halves of a wire
in neighbouring tiles have boxes that hardly overlap.

docs/windows.md lists the rules: duplicates in a tile, links between tiles, objects, fragments (1 to 4). What larger tiles and
the whole photograph show is compared with the result in utils/predict/overview.py (5 and 6).

All decisions follow from sorted lists, so the order of tiles and the batch size do not matter.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import cv2
import numpy as np

from utils.predict.regions import Cells, Corners, Region, Runs, has_pixels, hull, intersection, shared_areas

Pair = tuple[int, int, int, float]  # positions of two pieces; what their widened masks share: number of pixels, IoU

MIN_AGREEMENT = 0.5  # IoU of two masks where both tiles look
MIN_SHARED = 0.25  # of the smaller of two masks, where both tiles look: masks that share less are not compared
MIN_SHARED_PX = 16  # length of the part that two incomplete detections of a wire must both show
THIN = 8  # a mask is thin if it is this many times as long as wide
WIDEN_PX = 2  # masks are widened before they are compared: the edges of a thin wire are uncertain by a pixel
WIDEN_KERNEL = np.ones((2 * WIDEN_PX + 1,) * 2, np.uint8)
MOSTLY = 0.7  # the share of a fragment that has to lie inside another object
SCORE_RATIO = 0.1  # a detection with less than this share of another's confidence is never joined to it
EDGE_PX = 6  # a mask that comes this close to its tile's border is cut off by it
CELL_PX = 16  # of the grid that finds pairs worth comparing
DRAWN_PX = 20_000_000  # of the masks that are drawn in a strip and kept, two bytes each
CONNECT_PX = 4  # of the grid that tells whether parts of an object are connected


@dataclass(frozen=True, eq=False)
class Piece:
    """A detection in one tile, in pixels of the photograph: its box float32 (4,) xyxy and its mask."""

    tile: int  # position in the list of tiles; -1 in the pass over the whole photograph
    class_id: int
    score: float
    box: np.ndarray
    mask: Runs

    @cached_property
    def order(self) -> tuple[float, ...]:
        """What pieces are sorted by, independent of the order in which tiles were processed."""
        return (-self.score, self.tile, self.class_id, *self.box.tolist(), *self.mask.corners)


@dataclass(frozen=True, eq=False)
class JoinedObject:
    """An object: the pieces it was joined from, and the confidence with which a coarser pass found it, if it did."""

    pieces: tuple[Piece, ...]
    support: float = 0.0

    @property
    def class_id(self) -> int:
        """The class of all pieces."""
        return self.pieces[0].class_id

    @cached_property
    def score(self) -> float:
        """The pieces' mean confidence, weighted by area; with support, the chance that not both passes are wrong."""
        areas = [piece.mask.area for piece in self.pieces]
        mean = sum(piece.score * area for piece, area in zip(self.pieces, areas, strict=True)) / sum(areas)
        return 1 - (1 - mean) * (1 - self.support) if self.support else mean

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
        """Draw the mask, the union of the pieces' masks. A wire across a photograph takes as much memory as that."""
        left, top, right, bottom = self.corners
        mask = np.zeros((bottom - top, right - left), bool)
        for piece in self.pieces:
            x1, y1, x2, y2 = piece.mask.corners
            mask[y1 - top : y2 - top, x1 - left : x2 - left] |= piece.mask.window((x1, y1, x2, y2))
        return Region(left, top, mask)


def widen(mask: Runs, limits: Corners) -> Runs:
    """Widen a mask by WIDEN_PX on all sides, inside `limits`."""
    left, top, right, bottom = mask.corners
    around = intersection((left - WIDEN_PX, top - WIDEN_PX, right + WIDEN_PX, bottom + WIDEN_PX), limits)
    return Runs.of_cut(cv2.dilate(mask.window(around).view(np.uint8), WIDEN_KERNEL).view(bool), *around[:2])


class Seen:
    """A mask in a strip that two tiles show: drawn, widened, and in how many connected parts; each made when needed."""

    def __init__(self, mask: Runs, strip: Corners) -> None:
        self.mask, self.strip = mask, strip

    @cached_property
    def drawn(self) -> np.ndarray:
        """The mask in the strip: uint8 (h, w)."""
        return self.mask.window(self.strip).view(np.uint8)

    @cached_property
    def wide(self) -> np.ndarray:
        """The widened mask in the strip: uint8 (h, w)."""
        return cv2.dilate(self.drawn, WIDEN_KERNEL)

    @cached_property
    def parts(self) -> int:
        """The number of connected parts in the strip."""
        return int(cv2.connectedComponents(self.drawn, connectivity=8)[0]) - 1

    @cached_property
    def area(self) -> int:
        """The number of pixels in the strip."""
        return self.mask.area_in(self.strip)


def agreement(first: Seen, second: Seen) -> float:
    """Return how well two masks agree in a strip that both tiles show; thin masks: in the part of it that both reach.

    That part must be at least MIN_SHARED_PX long.
    """
    around = _slices(intersection(first.strip, hull([first.mask.corners, second.mask.corners])), first.strip)
    are_connected = first.parts == second.parts == 1
    drawn = first.drawn[around], second.drawn[around]
    wide = first.wide[around], second.wide[around]
    agreed = _agreement_in(drawn, wide, are_connected)
    if agreed >= MIN_AGREEMENT or not (_is_thin(first.mask) and _is_thin(second.mask)):
        return agreed
    both = intersection(first.strip, intersection(first.mask.corners, second.mask.corners))
    if not has_pixels(both) or _longest_side(both) < MIN_SHARED_PX:
        return agreed
    inner = _slices(both, first.strip)
    drawn = first.drawn[inner], second.drawn[inner]
    return max(agreed, _agreement_in(drawn, (cv2.dilate(drawn[0], WIDEN_KERNEL), cv2.dilate(drawn[1], WIDEN_KERNEL))))


def _slices(corners: Corners, strip: Corners) -> tuple[slice, slice]:
    """Return the rows and columns of a strip that are in a rectangle inside it."""
    return slice(corners[1] - strip[1], corners[3] - strip[1]), slice(corners[0] - strip[0], corners[2] - strip[0])


def _is_thin(mask: Runs) -> bool:
    return THIN * mask.area <= _longest_side(mask.corners) ** 2


def _longest_side(corners: Corners) -> int:
    return max(corners[2] - corners[0], corners[3] - corners[1])


def _agreement_in(
    drawn: tuple[np.ndarray, np.ndarray], wide: tuple[np.ndarray, np.ndarray], are_connected: bool = False
) -> float:
    """Return the IoU of two widened masks, without connected parts that only one of them has.

    A wire that leaves a tile and returns is two masks there and one in the next tile: each of the two agrees with that.
    0 if less than half of the smaller mask is shared. are_connected: each mask is known to be connected.
    """
    (first, second), (one, two) = drawn, wide
    shared = one & two
    count = int(np.count_nonzero(shared))
    if 2 * count < min(np.count_nonzero(one), np.count_nonzero(two)):
        return 0.0
    if are_connected and (first & second).any():
        return count / max(int(np.count_nonzero(one | two)), 1)
    # Parts are told apart before they are widened: the two ends of a bend lie close together.
    number, labels = cv2.connectedComponents(first | second, connectivity=8)
    is_shared = np.zeros(number, np.uint8)
    is_shared[labels[shared.view(bool)]] = 1
    is_shared[0] = 0
    kept = cv2.dilate(is_shared[labels], WIDEN_KERNEL)
    return int(np.count_nonzero(shared & kept)) / max(int(np.count_nonzero(kept)), 1)


def join_tiles(pieces: list[Piece], tiles: list[Corners], iou: float) -> list[JoinedObject]:
    """Join the pieces of all tiles by rules 1 to 4, with duplicates in a tile above `iou`. Best first."""
    pieces = sorted((piece for piece in pieces if not piece.mask.is_empty), key=lambda piece: piece.order)
    comparison = _Comparison(pieces, tiles)
    in_tiles = sorted(comparison.pairs_in_tiles())
    dropped: set[int] = set()
    for p, q, _, overlap in in_tiles:
        if p not in dropped and overlap >= iou:
            dropped.add(q)
    comparison.leave_out(dropped)
    pairs = [*(pair for pair in in_tiles if dropped.isdisjoint(pair[:2])), *comparison.pairs_across()]
    groups = _group(pieces, comparison.wide, dropped, _links(pieces, tiles, pairs))
    objects = [JoinedObject(tuple(pieces[position] for position in group)) for group in groups]
    return _drop_fragments(objects, _shares_inside(groups, comparison.wide, pairs), tiles)


class _Comparison:
    """Finds the pairs of masks of one class that share enough of the smaller one (MIN_SHARED), where their tiles overlap.

    Pieces are named by their position. Masks are widened. A product of small matrices bounds from above what two masks
    share, from the pixels n and m that they have in each cell of a grid: at most the sum of sqrt(n * m).
    """

    def __init__(self, pieces: list[Piece], tiles: list[Corners]) -> None:
        self.tiles = tiles
        self.wide = [widen(piece.mask, tiles[piece.tile]) for piece in pieces]
        self._cells: dict[int, Cells] = {}
        self._members: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for position, piece in enumerate(pieces):
            self._members[piece.class_id][piece.tile].append(position)

    def leave_out(self, dropped: set[int]) -> None:
        """Forget some pieces."""
        for tiles in self._members.values():
            for tile, positions in tiles.items():
                tiles[tile] = [position for position in positions if position not in dropped]

    def pairs_in_tiles(self) -> Iterator[Pair]:
        """Yield the pairs (p, q, …) in one tile, p < q."""
        for tiles in self._members.values():
            for tile, positions in tiles.items():
                yield from self._pairs(positions, positions, self.tiles[tile])

    def pairs_across(self) -> Iterator[Pair]:
        """Yield the pairs (p, q, …) in two tiles, p < q."""
        for tiles in self._members.values():
            for first, second in itertools.combinations(tiles, 2):
                strip = intersection(self.tiles[first], self.tiles[second])
                if has_pixels(strip):
                    yield from self._pairs(tiles[first], tiles[second], strip)

    def _pairs(self, first: list[int], second: list[int], strip: Corners) -> Iterator[Pair]:
        seen = [
            [position for position in group if has_pixels(intersection(self.wide[position].corners, strip))]
            for group in (first, second)
        ]
        areas = {position: self.wide[position].area_in(strip) for position in {*seen[0], *seen[1]}}
        candidates = self._candidates(seen[0], seen[1], strip, areas)
        if first is second:
            candidates = candidates[candidates[:, 0] < candidates[:, 1]]
        masks = [[self.wide[position] for position in group] for group in seen]
        counts = shared_areas(masks[0], masks[0] if first is second else masks[1], candidates, strip)
        for (row, column), shared in zip(candidates.tolist(), counts.tolist(), strict=True):
            p, q = seen[0][row], seen[1][column]
            if shared and shared >= MIN_SHARED * min(areas[p], areas[q]):
                yield min(p, q), max(p, q), shared, shared / (areas[p] + areas[q] - shared)

    def _candidates(self, first: list[int], second: list[int], strip: Corners, areas: dict[int, int]) -> np.ndarray:
        """Return rows and columns of the pairs that may share enough of the smaller mask: int64 (k, 2)."""
        if not first or not second:
            return np.zeros((0, 2), int)
        one, two = (np.array([self.wide[position].corners for position in group]) for group in (first, second))
        low = np.maximum(one[:, None, :2], two[None, :, :2])
        is_near = (low < np.minimum(one[:, None, 2:], two[None, :, 2:])).all(axis=2)
        if np.count_nonzero(is_near) > 100:
            enough = MIN_SHARED * np.minimum.outer([areas[p] for p in first], [areas[q] for q in second])
            # Not `@`: on small matrices BLAS's threads cost more than they save. 0.999 is for rounding.
            bound = np.einsum("ik,jk->ij", self._roots(first, strip), self._roots(second, strip))
            is_near &= bound >= 0.999 * enough
        return np.argwhere(is_near)

    def _roots(self, positions: list[int], strip: Corners) -> np.ndarray:
        """Return the square roots of the pieces' pixels in each cell of a strip: float32 (n, cells)."""
        left, top, right, bottom = strip
        corners = (left // CELL_PX, top // CELL_PX, -(-right // CELL_PX), -(-bottom // CELL_PX))
        for position in positions:
            if position not in self._cells:
                self._cells[position] = Cells.of(self.wide[position], CELL_PX)
        return np.sqrt(np.stack([self._cells[position].window(corners).ravel() for position in positions]))


def _links(pieces: list[Piece], tiles: list[Corners], pairs: list[Pair]) -> list[tuple[float, int, int]]:
    """Return (strength, p, q) of the pairs that may be one object, strongest first."""
    links = []
    is_thin = [_is_thin(piece.mask) for piece in pieces]
    seen: dict[int, Seen] = {}
    seen_strip, most = (0, 0, 0, 0), 0
    for p, q, shared, overlap in sorted(pairs, key=lambda pair: (pieces[pair[0]].tile, pieces[pair[1]].tile)):
        first, second = pieces[p], pieces[q]  # the more confident one first
        both_thin = is_thin[p] and is_thin[q]
        if (first.tile == second.tile and not both_thin) or second.score < SCORE_RATIO * first.score:
            continue
        agreed = overlap
        if overlap < MIN_AGREEMENT:
            strip = intersection(tiles[first.tile], tiles[second.tile])
            if strip != seen_strip or len(seen) >= most:
                seen, seen_strip, most = {}, strip, 2 + DRAWN_PX // ((strip[2] - strip[0]) * (strip[3] - strip[1]))
            one, two = (seen.setdefault(position, Seen(pieces[position].mask, strip)) for position in (p, q))
            if not both_thin and 2 * shared < min(one.area, two.area):
                continue  # the masks that `agreement` widens have these pixels at least and share no more: it is 0
            agreed = agreement(one, two)
        if agreed >= MIN_AGREEMENT:
            links.append((agreed * second.score, p, q))
    return sorted(links, key=lambda link: (-link[0], *link[1:]))


def _group(
    pieces: list[Piece], wide: list[Runs], dropped: set[int], links: list[tuple[float, int, int]]
) -> list[list[int]]:
    """Unite the pieces that are linked, as far as they may be in one object."""
    group_of = {position: [position] for position in range(len(pieces)) if position not in dropped}
    # Sets of positions are the bits of numbers, so that two groups are compared at once.
    rivals, overlapping = _rivals(pieces, [position for _, *pair in links for position in pair], links)
    members, rivals_of, refused = (
        {p: values.get(p, 0) for p in group_of} for values in ({p: 1 << p for p in group_of}, rivals, overlapping)
    )
    cells = cache(lambda position: Cells.of(wide[position], CONNECT_PX))
    for _, p, q in links:
        first, second = group_of[p], group_of[q]
        one, two = first[0], second[0]  # name the groups: a group only grows at its end
        if first is second or refused[one] & members[two]:
            continue
        if rivals_of[one] & members[two]:
            pairs = [(a, b) for b in second if rivals[b] & members[one] for a in first if rivals[b] >> a & 1]
            if not _are_connected(pairs, {position: cells(position) for position in first + second}):
                continue
        first += second
        group_of.update(dict.fromkeys(second, first))
        for sets in (members, rivals_of, refused):
            sets[one] |= sets[two]
    return list({id(group): sorted(group) for group in group_of.values()}.values())


def _rivals(
    pieces: list[Piece], positions: list[int], links: list[tuple[float, int, int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return, as bits, for each piece those of its tile that are not linked to it, and those of them that overlap it."""
    in_tile: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position in sorted(set(positions)):
        in_tile[pieces[position].class_id, pieces[position].tile].append(position)
    linked = {pair for _, p, q in links for pair in ((p, q), (q, p))}
    rivals: dict[int, int] = defaultdict(int)
    overlapping: dict[int, int] = defaultdict(int)
    for group in in_tile.values():
        masks = [pieces[position].mask for position in group]
        pairs = np.argwhere(np.triu(np.ones((len(group),) * 2, bool), 1))
        counts = shared_areas(masks, masks, pairs, hull([mask.corners for mask in masks]))
        for (row, column), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            p, q = group[row], group[column]
            if (p, q) not in linked:
                for sets in (rivals, overlapping) if count else (rivals,):
                    sets[p] |= 1 << q
                    sets[q] |= 1 << p
    return rivals, overlapping


def _are_connected(pairs: list[tuple[int, int]], cells: dict[int, Cells]) -> bool:
    """Return whether the two masks of each pair belong to one connected part of the union of all."""
    corners = hull([grid.corners for grid in cells.values()])
    union = np.zeros((corners[3] - corners[1], corners[2] - corners[0]), np.uint8)
    places = {}
    for position, grid in cells.items():
        left, top, right, bottom = grid.corners
        places[position] = slice(top - corners[1], bottom - corners[1]), slice(left - corners[0], right - corners[0])
        union[places[position]] |= grid.counts > 0
    _, labels = cv2.connectedComponents(union, connectivity=8)
    rivals = {position for pair in pairs for position in pair}
    parts = {position: set(labels[places[position]][cells[position].counts > 0].tolist()) for position in rivals}
    return all(parts[a] & parts[b] for a, b in pairs)


def _shares_inside(groups: list[list[int]], wide: list[Runs], pairs: list[Pair]) -> dict[int, dict[int, float]]:
    """Return for each group the groups that it shares pixels with, and the share of its area that lies in them."""
    group_of = {position: number for number, group in enumerate(groups) for position in group}
    shared: dict[int, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for p, q, count, _ in pairs:
        for one, other in ((p, q), (q, p)):
            if group_of[one] != group_of[other]:
                counts = shared[group_of[one]][group_of[other]]
                counts[one] = max(counts[one], count)
    areas = [sum(wide[position].area for position in group) for group in groups]
    return {
        number: {other: sum(counts.values()) / areas[number] for other, counts in others.items()}
        for number, others in shared.items()
    }


def _drop_fragments(
    objects: list[JoinedObject], inside: dict[int, dict[int, float]], tiles: list[Corners]
) -> list[JoinedObject]:
    """Return the objects without fragments that lie mostly inside a more confident one; best first."""
    order = sorted(range(len(objects)), key=lambda number: (-objects[number].score, objects[number].pieces[0].order))
    kept: set[int] = set()
    for number in order:
        is_inside = any(share >= MOSTLY and other in kept for other, share in inside.get(number, {}).items())
        if not (is_inside and is_cut(objects[number], tiles)):
            kept.add(number)
    return [objects[number] for number in order if number in kept]


def is_cut(thing: JoinedObject, tiles: list[Corners]) -> bool:
    """Return whether a tile's border cuts the object off: no piece of a tile that looks further continues it there."""
    photo = (0, 0, max(tile[2] for tile in tiles), max(tile[3] for tile in tiles))
    for piece in thing.pieces:
        tile = tiles[piece.tile]
        for side in range(4):
            inwards = 1 if side < 2 else -1
            band = list(tile)
            band[(side + 2) % 4] = tile[side] + inwards * EDGE_PX
            corners = (band[0], band[1], band[2], band[3])
            if tile[side] == photo[side] or not has_pixels(intersection(corners, piece.mask.corners)):
                continue
            at_border = piece.mask.window(corners)
            continued = np.zeros(at_border.shape, bool)
            for other in thing.pieces:
                is_near = has_pixels(intersection(corners, other.mask.corners))
                if is_near and inwards * tiles[other.tile][side] < inwards * tile[side]:
                    continued |= other.mask.window(corners)
            continued = cv2.dilate(continued.view(np.uint8), WIDEN_KERNEL).view(bool)
            if 2 * np.count_nonzero(continued[at_border]) < np.count_nonzero(at_border):
                return True
    return False
