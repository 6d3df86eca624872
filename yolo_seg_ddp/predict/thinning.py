"""Thins a mask to the line of pixels in its middle."""

from __future__ import annotations

from functools import cache

import numpy as np

from yolo_seg_ddp.predict.regions import Region


def centreline(region: Region) -> np.ndarray:
    """Return the pixels of a mask's centreline: int64 (K, 2), column and row in the photograph.

    Two alternating passes remove pixels of the outline, as long as the mask stays connected and
    keeps its ends (Guo and Hall, "Parallel thinning with two-subiteration algorithms", CACM 32
    (1989), algorithm A1). Neighbours touch by a side or a corner, so a straight line has as many
    pixels as its longer extent along x or y. Each end is about half the mask's width short.
    """
    rows, columns = region.mask.shape
    stride = columns + 2
    alive = np.zeros((rows + 2) * stride, bool)
    alive.reshape(rows + 2, stride)[1:-1, 1:-1] = region.mask
    # Clockwise from above.
    around = np.array([-stride, -stride + 1, 1, stride + 1, stride, stride - 1, -1, -stride - 1])
    front = np.flatnonzero(alive)
    front = front[
        ~(alive[front - stride] & alive[front + stride] & alive[front - 1] & alive[front + 1])
    ]
    queued = np.zeros(len(alive), bool)
    queued[front] = True
    is_stable = False
    while not is_stable:
        is_stable = True
        for table in _removable():
            code = alive[front + around[0]].view(np.uint8)
            for bit in range(1, 8):
                code = code | (alive[front + around[bit]].view(np.uint8) << bit)
            is_removed = table[code]
            removed = front[is_removed]
            if not len(removed):
                continue
            is_stable = False
            alive[removed] = False
            bare = (removed[:, None] + around[::2]).ravel()
            bare = bare[alive[bare] & ~queued[bare]]
            queued[bare] = True
            front = np.concatenate([front[~is_removed], np.unique(bare)])
    row, column = np.divmod(np.flatnonzero(alive), stride)
    return np.stack([column - 1 + region.left, row - 1 + region.top], axis=1)


@cache
def _removable() -> tuple[np.ndarray, np.ndarray]:
    """Return for each pass which pixels it removes, by their eight neighbours as bits, clockwise
    from above: bool (256,).
    """
    n, ne, e, se, s, sw, w, nw = ((np.arange(256) >> bit & 1).astype(bool) for bit in range(8))
    connections = sum(
        (~side & (corner | following)).astype(int)
        for side, corner, following in ((n, ne, e), (e, se, s), (s, sw, w), (w, nw, n))
    )
    pairs = [
        sum((first | second).astype(int) for first, second in couples)
        for couples in (((nw, n), (ne, e), (se, s), (sw, w)), ((n, ne), (e, se), (s, sw), (w, nw)))
    ]
    fewest = np.minimum(*pairs)
    is_outline = (connections == 1) & (fewest >= 2) & (fewest <= 3)
    return is_outline & ~((s | sw | ~nw) & w), is_outline & ~((n | ne | ~se) & e)
