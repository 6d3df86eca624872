"""How well masks from two tiles agree: pairs of masks are compared run
by run, in compiled loops.
"""

import numpy as np

from yolo_seg_ddp.predict.regions import ROW, Corners, Runs, intersection
from yolo_seg_ddp.utils.compiled import compiled

# masks are widened before they are compared: the edges of a thin wire are uncertain by a pixel
WIDEN_PX = 2
_ONES = np.uint64(2**64 - 1)
# a one in two bits, two in four, ...
_PAIRS, _FOURS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_EIGHTS, _BYTES = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)


def widen(mask: Runs, limits: Corners) -> Runs:
    """Widen a mask by WIDEN_PX on all sides, inside `limits`."""
    left, top, right, bottom = mask.corners
    around = intersection(
        (left - WIDEN_PX, top - WIDEN_PX, right + WIDEN_PX, bottom + WIDEN_PX), limits
    )
    return Runs(around, _widened(mask.edges, np.array(around)))


@compiled
def _widened(edges: np.ndarray, corners: np.ndarray) -> np.ndarray:
    left, top, right, bottom = corners
    result = np.empty(len(edges) * (2 * WIDEN_PX + 1), np.int64)
    number = 0
    # runs of the rows around a row, by their first pixel
    near = np.empty((len(edges) // 2, 2), np.int64)
    start = 0
    for row in range(top, bottom):
        while edges[start] < (row - WIDEN_PX) * ROW:
            start += 2
        at, count = start, 0
        while at < len(edges) and edges[at] < (row + WIDEN_PX + 1) * ROW:
            first = max(edges[at] % ROW - WIDEN_PX, left)
            last = min(edges[at + 1] % ROW + WIDEN_PX, right)
            place = count
            while place > 0 and near[place - 1, 0] > first:
                near[place] = near[place - 1]
                place -= 1
            near[place, 0], near[place, 1] = first, last
            at, count = at + 2, count + 1
        begin = number
        for first, last in near[:count]:
            if number > begin and row * ROW + first <= result[number - 1]:
                result[number - 1] = max(result[number - 1], row * ROW + last)
            else:
                result[number], result[number + 1] = row * ROW + first, row * ROW + last
                number += 2
    return result[:number].copy()


class Masks:
    """Masks in a photograph that are compared in pairs. A position names a mask; pairs are int64
    (n, 2).

    rectangles int64 (n, 4): left, top, right, bottom in pixels of the photograph, not empty.
    """

    def __init__(self, masks: list[Runs]) -> None:
        self._edges = np.concatenate([np.zeros(0, np.int64), *(mask.edges for mask in masks)])
        self._starts = np.cumsum([0, *(len(mask.edges) for mask in masks)])

    def areas(self, masks: np.ndarray, rectangles: np.ndarray) -> np.ndarray:
        """Count the pixels of some masks, each in a rectangle: int64 (n,)."""
        return _areas(self._edges, self._starts, masks, rectangles)

    def shared(self, pairs: np.ndarray) -> np.ndarray:
        """Count the pixels that both masks of each pair have: int64 (n,)."""
        return _shared(self._edges, self._starts, pairs)

    def agreement(self, pairs: np.ndarray, rectangles: np.ndarray) -> np.ndarray:
        """Return how well the two masks of each pair agree in its rectangle, float64 (n,).

        It is the IoU of the widened masks, without connected parts that only one of them has. So a
        wire that leaves a tile and returns, which is two masks there and one in the next tile,
        agrees in both. It is 0 if less than half of the smaller mask is shared.
        """
        return _agreements(self._edges, self._starts, pairs, rectangles)


@compiled
def _runs_inside(
    edges: np.ndarray, first: int, last: int, rectangle: np.ndarray, runs: np.ndarray
) -> int:
    """Write the runs of the mask edges[first:last] in a rectangle to runs (row, left, right);
    return their number.
    """
    left, top, right, bottom = rectangle
    at = first + np.searchsorted(edges[first:last], top * ROW)
    number = 0
    while at < last and edges[at] < bottom * ROW:
        row = edges[at] // ROW
        one = max(edges[at] - row * ROW, left)
        two = min(edges[at + 1] - row * ROW, right)
        if one < two:
            runs[number, 0], runs[number, 1], runs[number, 2] = row - top, one - left, two - left
            number += 1
        at += 2
    return number


@compiled
def _areas(
    edges: np.ndarray, starts: np.ndarray, masks: np.ndarray, rectangles: np.ndarray
) -> np.ndarray:
    counts = np.zeros(len(masks), np.int64)
    if not len(masks):
        return counts
    runs = np.empty(((starts[1:] - starts[:-1]).max() // 2, 3), np.int64)
    for number, mask in enumerate(masks):
        for run in runs[
            : _runs_inside(edges, starts[mask], starts[mask + 1], rectangles[number], runs)
        ]:
            counts[number] += run[2] - run[1]
    return counts


@compiled
def _shared(edges: np.ndarray, starts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    counts = np.zeros(len(pairs), np.int64)
    for number in range(len(pairs)):
        one = starts[pairs[number, 0]]
        end_one = starts[pairs[number, 0] + 1]
        two = starts[pairs[number, 1]]
        end_two = starts[pairs[number, 1] + 1]
        one += np.searchsorted(edges[one:end_one], edges[two] // ROW * ROW)
        two += np.searchsorted(edges[two:end_two], edges[one] // ROW * ROW) if one < end_one else 0
        while one < end_one and two < end_two:
            counts[number] += max(
                min(edges[one + 1], edges[two + 1]) - max(edges[one], edges[two]), 0
            )
            if edges[one + 1] < edges[two + 1]:
                one += 2
            else:
                two += 2
    return counts


@compiled
def _draw(runs: np.ndarray, bits: np.ndarray, size: tuple[int, int]) -> None:
    """Draw runs, widened by WIDEN_PX on all sides, into bits (rows, words): pixel x is bit x % 64
    of word x // 64.

    size: rows and columns of the rectangle.
    """
    for row, left, right in runs:
        left = max(left - WIDEN_PX, 0)
        right = min(right + WIDEN_PX, size[1])
        for line in range(max(row - WIDEN_PX, 0), min(row + WIDEN_PX + 1, size[0])):
            for word in range(left >> 6, ((right - 1) >> 6) + 1):
                bits[line, word] |= _ones(word, left, right)


@compiled
def _ones(word: int, left: int, right: int) -> np.uint64:
    """Return the bits of a word that stand for the pixels of a run."""
    low, high = max(left - 64 * word, 0), min(right - 64 * word, 64)
    return (_ONES >> np.uint64(64 - high + low)) << np.uint64(low)


@compiled
def _count(word: np.uint64) -> int:
    """Count the ones of an uint64."""
    word -= (word >> np.uint64(1)) & _PAIRS
    word = (word & _FOURS) + ((word >> np.uint64(2)) & _FOURS)
    return int(np.int64((((word + (word >> np.uint64(4))) & _EIGHTS) * _BYTES) >> np.uint64(56)))


@compiled
def _mark_connected(runs: np.ndarray, parts: np.ndarray, is_kept: np.ndarray) -> None:
    """Mark the runs that are connected with a marked run; pixels touch by a side or corner. parts:
    room to work.
    """
    above = start = 0  # the first run of the row above that may touch, and of this row
    for number in range(len(runs)):
        parts[number] = number
        if runs[number, 0] != runs[start, 0]:
            above = start if runs[number, 0] == runs[start, 0] + 1 else number
            start = number
        while above < start and runs[above, 2] < runs[number, 1]:
            above += 1
        other = above
        while other < start and runs[other, 1] <= runs[number, 2]:
            one, two = _root(parts, number), _root(parts, other)
            parts[max(one, two)] = min(one, two)
            is_kept[min(one, two)] |= is_kept[max(one, two)]
            other += 1
    for number in range(len(runs)):
        is_kept[number] = is_kept[_root(parts, number)]


@compiled
def _root(parts: np.ndarray, number: int) -> int:
    while parts[number] != number:
        parts[number] = parts[parts[number]]
        number = parts[number]
    return number


@compiled
def _agreements(
    edges: np.ndarray, starts: np.ndarray, pairs: np.ndarray, rectangles: np.ndarray
) -> np.ndarray:
    result = np.zeros(len(pairs))
    if not len(pairs):
        return result
    longest = (starts[1:] - starts[:-1]).max() // 2
    runs = np.empty((2, longest, 3), np.int64)
    parts = np.empty(longest, np.int64)
    is_kept = np.empty((2, longest), np.bool_)
    rows = (rectangles[:, 3] - rectangles[:, 1]).max()
    columns = (rectangles[:, 2] - rectangles[:, 0]).max()
    room = np.empty((2, rows, (columns - 1) // 64 + 1), np.uint64)
    for number in range(len(pairs)):
        rectangle = rectangles[number]
        size = rectangle[3] - rectangle[1], rectangle[2] - rectangle[0]
        bits = room[:, : size[0], : (size[1] - 1) // 64 + 1]
        bits[:] = 0
        lengths = np.zeros(2, np.int64)
        for side in range(2):
            mask = pairs[number, side]
            lengths[side] = _runs_inside(
                edges, starts[mask], starts[mask + 1], rectangle, runs[side]
            )
            _draw(runs[side, : lengths[side]], bits[side], size)
        shared, one, two = _counts(bits)
        if 2 * shared < min(one, two):
            continue
        result[number] = shared / max(one + two - shared, 1)
        are_all_kept = True
        for side in range(2):
            for at in range(lengths[side]):
                is_kept[side, at] = _touches(runs[side, at], bits[1 - side])
                are_all_kept &= is_kept[side, at]
        if are_all_kept:
            continue
        bits[0] &= bits[1]
        bits[1] = 0
        for side in range(2):
            mine = runs[side, : lengths[side]]
            _mark_connected(mine, parts, is_kept[side])
            _draw(mine[is_kept[side, : lengths[side]]], bits[1], size)
        shared, _, kept = _counts(bits)
        result[number] = shared / max(kept, 1)
    return result


@compiled
def _touches(run: np.ndarray, bits: np.ndarray) -> bool:
    """Return whether a run (row, left, right) has a pixel in bits (rows, words)."""
    row, left, right = run
    for word in range(left >> 6, ((right - 1) >> 6) + 1):
        if bits[row, word] & _ones(word, left, right):
            return True
    return False


@compiled
def _counts(bits: np.ndarray) -> tuple[int, int, int]:
    """Count the pixels of both of two bitmaps (2, rows, words), of the first and of the second."""
    both = one = two = 0
    for row in range(bits.shape[1]):
        for word in range(bits.shape[2]):
            both += _count(bits[0, row, word] & bits[1, row, word])
            one += _count(bits[0, row, word])
            two += _count(bits[1, row, word])
    return both, one, two
