"""How well masks from two tiles agree, for many pairs at once: masks are drawn as bits, 64 pixels in a number.

A batch holds the pairs whose windows have about the same size. Its bitmaps are uint64 (words, ..., rows): pixel x of a row
is bit x % 64 of word x // 64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np

from utils.predict.regions import ROW, Corners, Runs, intersection, intersections

WIDEN_PX = 2  # masks are widened before they are compared: the edges of a thin wire are uncertain by a pixel
WIDEN_KERNEL = np.ones((2 * WIDEN_PX + 1,) * 2, np.uint8)
WORDS_AT_ONCE = 2**15  # of a batch's bitmap: 256 kB, so that a processor's cache holds some of them

ROWS_AT_ONCE = 2**15  # of pairs of masks
WORDS_IN_BAND = 2**23  # of all masks: 64 MB


def widen(mask: Runs, limits: Corners) -> Runs:
    """Widen a mask by WIDEN_PX on all sides, inside `limits`."""
    left, top, right, bottom = mask.corners
    around = intersection((left - WIDEN_PX, top - WIDEN_PX, right + WIDEN_PX, bottom + WIDEN_PX), limits)
    return Runs.of_cut(cv2.dilate(mask.window(around).view(np.uint8), WIDEN_KERNEL).view(bool), *around[:2])


@dataclass(frozen=True)
class _Rows:
    """Runs of many masks, each mask in a window of its own; int64 (n,) each, sorted by mask, row and column."""

    mask: np.ndarray
    row: np.ndarray
    left: np.ndarray
    right: np.ndarray  # excluded

    def chosen(self, chosen: np.ndarray) -> _Rows:
        """Return some of the runs."""
        return _Rows(self.mask[chosen], self.row[chosen], self.left[chosen], self.right[chosen])

    def draw(self, shape: tuple[int, int, int]) -> np.ndarray:
        """Return bitmaps of (words, masks, rows)."""
        bits = np.zeros(shape, np.uint64)
        _add_runs(bits.reshape(-1), self.mask * shape[2] + self.row, self.left, self.right, shape[1] * shape[2])
        return bits

    def touch(self, bits: np.ndarray) -> np.ndarray:
        """Return which runs have a pixel in the bitmaps (words, masks, rows): bool (n,)."""
        before = np.zeros((bits.shape[0] + 1, *bits.shape[1:]), np.int32)
        np.cumsum(np.bitwise_count(bits), axis=0, out=before[1:])
        flat, place, size = bits.reshape(-1), self.mask * bits.shape[2] + self.row, bits[0].size
        counts = []
        for column in (self.left, self.right):
            at = (column >> 6) * size + place
            counts.append(before.reshape(-1)[at] + np.bitwise_count(flat[at] & (_bit(column) - np.uint64(1))))
        return counts[1] > counts[0]

    def connected(self) -> np.ndarray:
        """Return for each run the number of its connected part, of which pixels touch by a side or corner: int64 (n,)."""
        line = (self.mask * (int(self.row.max(initial=0)) + 2) + self.row) * ROW
        above = line - ROW
        first = np.searchsorted(
            line + self.right, above + self.left
        )  # the first run of the row above that ends late enough
        after = np.searchsorted(line + self.left, above + self.right, side="right")
        numbers = np.arange(len(line))
        parts = np.where(first < after, first, numbers)
        while (parts[parts] != parts).any():
            parts = parts[parts]
        # A run that touches several runs above joins their parts.
        several = np.flatnonzero(after - first > 1)
        owner, more = _ragged(after[several] - first[several] - 1)
        run = several[owner]
        other = first[run] + 1 + more
        while len(run):
            one, two = parts[run], parts[other]
            differ = one != two
            if not differ.any():
                break
            run, other = run[differ], other[differ]
            np.minimum.at(parts, np.maximum(one, two)[differ], np.minimum(one, two)[differ])
            while (parts[parts] != parts).any():
                parts = parts[parts]
        return parts


def _add_runs(bits: np.ndarray, place: np.ndarray, left: np.ndarray, right: np.ndarray, step: int) -> None:
    """Draw runs into zeros, uint64 (n,); word w of a run's row is at `place + w * step`."""
    # A run in one word is the difference of two powers of two. One that goes on borrows from the next word.
    np.add.at(bits, place + (right >> 6) * step, _bit(right))
    np.subtract.at(bits, place + (left >> 6) * step, _bit(left))
    word, last = (left >> 6) + 1, right >> 6
    while len(word):
        place, word, last = (values[word <= last] for values in (place, word, last))
        bits[place + word * step] -= np.uint64(1)
        word = word + 1


def _bit(column: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint64(1), (column & 63).astype(np.uint64))


def _ragged(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for lists of some lengths one after the other, the list of each item and its number there: int64 (sum,)."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


class Masks:
    """Masks in a photograph, of which pairs are compared. A mask is named by its position, a pair is a row of int64 (n, 2)."""

    def __init__(self, masks: list[Runs]) -> None:
        self._corners = np.array([mask.corners for mask in masks]).reshape(-1, 4)
        edges = np.concatenate([np.zeros(0, np.int64), *(mask.edges for mask in masks)])
        self._mask = np.repeat(np.arange(len(masks)), [len(mask.edges) // 2 for mask in masks])
        self._row, self._left, self._right = edges[::2] // ROW, edges[::2] % ROW, edges[1::2] % ROW
        self._lines = self._mask * ROW + self._row

    def areas(self, masks: np.ndarray, windows: np.ndarray) -> np.ndarray:
        """Count the pixels of some masks, each in a window (left, top, right, bottom) of the photograph: int64 (n,)."""
        runs = self._inside(masks, windows)
        return np.bincount(runs.mask, runs.right - runs.left, len(masks)).astype(np.int64)

    def shared(self, pairs: np.ndarray) -> np.ndarray:
        """Count the pixels that both masks of each pair have: int64 (n,)."""
        counts = np.zeros(len(pairs), np.int64)
        windows = intersections(self._corners[pairs[:, 0]], self._corners[pairs[:, 1]])
        words = (windows[:, 2] - 1 >> 6) - (windows[:, 0] >> 6) + 1
        order = np.argsort(words, kind="stable")
        order = order[(windows[order, 2:] > windows[order, :2]).all(axis=1)]
        for top, bottom in self._bands():
            bits, places, strides = self._drawn(top, bottom)
            first = np.maximum(windows[:, 1], top)
            rows = np.minimum(windows[:, 3], bottom) - first
            chosen = order[rows[order] > 0]
            cuts = np.flatnonzero(np.diff(words[chosen]) | np.diff(np.cumsum(rows[chosen]) // ROWS_AT_ONCE)) + 1
            for batch in np.split(chosen, cuts) if len(chosen) else []:
                owner, line = _ragged(rows[batch])
                one, two = (
                    (places[mask] + first[batch] * strides[mask] + (windows[batch, 0] >> 6))[owner]
                    + line * strides[mask][owner]
                    for mask in pairs[batch].T
                )
                same = np.zeros(len(line), np.int32)
                for word in range(words[batch[0]]):
                    same += np.bitwise_count(bits[one + word] & bits[two + word])
                counts[batch] += np.add.reduceat(same, np.flatnonzero(line == 0), dtype=np.int64)
        return counts

    def _bands(self) -> list[tuple[int, int]]:
        """Return bands of rows of the photograph; the bitmaps take at most about WORDS_IN_BAND words in each."""
        if not len(self._corners):
            return []
        left, top, right, bottom = self._corners.T
        words = np.zeros(bottom.max() + 1, np.int64)
        np.add.at(words, top, (right >> 6) - (left >> 6) + 1)
        np.subtract.at(words, bottom, (right >> 6) - (left >> 6) + 1)
        ends = np.flatnonzero(np.diff(np.cumsum(np.cumsum(words)) // WORDS_IN_BAND, append=-1)) + 1
        return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))

    def _drawn(self, top: int, bottom: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw all masks in a band of rows; words begin at columns 0, 64, 128, ... of the photograph.

        Returns the words, where column 0 of row 0 of each mask would be, and the number of words in a row of each.
        """
        left, first, right, last = self._corners.T
        strides = (right >> 6) - (left >> 6) + 1
        first, last = first.clip(top, bottom), last.clip(top, bottom)
        sizes = (last - first) * strides
        places = np.cumsum(sizes) - sizes - first * strides - (left >> 6)
        bits = np.zeros(int(sizes.sum()), np.uint64)
        inside = (self._row >= top) & (self._row < bottom)
        mask = self._mask[inside]
        _add_runs(bits, places[mask] + self._row[inside] * strides[mask], self._left[inside], self._right[inside], 1)
        return bits, places, strides

    def agreement(self, pairs: np.ndarray, windows: np.ndarray) -> np.ndarray:
        """Return how well the two masks of each pair agree in its window, float64 (n,).

        windows int64 (n, 4): left, top, right, bottom in pixels of the photograph, not empty.

        It is the IoU of the masks, widened, without connected parts that only one of them has: a wire that leaves a tile and
        returns is two masks there and one in the next tile, and each of the two agrees with that. It is 0 if less than half
        of the smaller mask is shared.
        """
        result = np.zeros(len(pairs))
        words, height = (windows[:, 2] - windows[:, 0]) // 64 + 1, windows[:, 3] - windows[:, 1]
        order = np.lexsort((-height, words))
        while len(order):
            size = int(words[order[0]]), int(height[order[0]])
            batch = order[: max(1, WORDS_AT_ONCE // (2 * size[0] * size[1]))]
            batch = batch[words[batch] == size[0]]
            result[batch] = self._agreement(pairs[batch], windows[batch], size)
            order = order[len(batch) :]
        return result

    def _agreement(self, pairs: np.ndarray, windows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return the agreement of pairs, of which no window has more than size = (words, rows)."""
        number = len(pairs)
        runs = self._inside(pairs.T.ravel(), np.tile(windows, (2, 1)))  # mask `pair + number` is the pair's second
        inside = _rectangles(windows, size)
        wide = (
            _widened(runs.draw((size[0], 2 * number, size[1]))).reshape(size[0], 2, number, size[1]) & inside[:, None]
        )
        shared = wide[:, 0] & wide[:, 1]
        count, smaller = _count(shared), np.minimum(_count(wide[:, 0]), _count(wide[:, 1]))
        is_enough = 2 * count >= smaller
        result = np.where(is_enough, count / np.maximum(_count(wide[:, 0] | wide[:, 1]), 1), 0.0)
        runs = runs.chosen(is_enough[runs.mask % number])
        is_kept = runs.touch(wide[:, ::-1].reshape(size[0], 2 * number, size[1]))
        # Connected parts matter where some runs have no pixel near the other mask.
        partly = np.unique(runs.mask[~is_kept] % number)
        if not len(partly):
            return result
        position = np.full(number, -1)
        position[partly] = np.arange(len(partly))
        chosen = position[runs.mask % number] >= 0
        runs, is_kept = runs.chosen(chosen), is_kept[chosen]
        parts = runs.connected()
        runs = runs.chosen(np.isin(parts, parts[is_kept]))
        runs = replace(runs, mask=position[runs.mask % number] + len(partly) * (runs.mask // number))
        drawn = runs.draw((size[0], 2 * len(partly), size[1]))
        kept = _widened(drawn[:, : len(partly)] | drawn[:, len(partly) :]) & inside[:, partly]
        result[partly] = _count(kept & shared[:, partly]) / np.maximum(_count(kept), 1)
        return result

    def _inside(self, masks: np.ndarray, windows: np.ndarray) -> _Rows:
        """Return the runs of some masks, each in its window."""
        first, last = (np.searchsorted(self._lines, masks * ROW + windows[:, side]) for side in (1, 3))
        mask, line = _ragged(last - first)
        at = first[mask] + line
        corner = windows[mask]
        left, right = np.maximum(self._left[at], corner[:, 0]), np.minimum(self._right[at], corner[:, 2])
        runs = _Rows(mask, self._row[at] - corner[:, 1], left - corner[:, 0], right - corner[:, 0])
        return runs.chosen(left < right)


def _rectangles(windows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return bitmaps (words, n, rows) of windows that begin at the corner."""
    width, height = windows[:, 2] - windows[:, 0], windows[:, 3] - windows[:, 1]
    left = np.clip(width - 64 * np.arange(size[0])[:, None], 0, 64)
    words = np.where(left == 64, ~np.uint64(0), _bit(left) - np.uint64(1))
    return np.where(np.arange(size[1]) < height[:, None], words[..., None], np.uint64(0))


def _widened(bits: np.ndarray) -> np.ndarray:
    """Return bitmaps (words, n, rows) widened by WIDEN_PX on all sides."""
    one = np.uint64(1)
    for _ in range(WIDEN_PX):
        wide = bits << one
        wide |= bits
        wide |= bits >> one
        wide[1:] |= bits[:-1] >> np.uint64(63)
        wide[:-1] |= bits[1:] << np.uint64(63)
        bits = wide.copy()
        bits[..., 1:] |= wide[..., :-1]
        bits[..., :-1] |= wide[..., 1:]
    return bits


def _count(bits: np.ndarray) -> np.ndarray:
    """Count the pixels of bitmaps (words, n, rows): int64 (n,)."""
    return np.bitwise_count(bits).sum(axis=0, dtype=np.uint32).sum(axis=1, dtype=np.int64)
