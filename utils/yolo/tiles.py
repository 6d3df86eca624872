"""Cuts photographs into overlapping tiles."""

from __future__ import annotations

from utils.yolo.regions import Corners

MIN_OVERLAP_PX = 128
OVERLAP = 0.2  # of a tile's side


def overlap_px(size_px: int, share: float) -> int:
    """Return by how many pixels neighbouring tiles overlap: a share of their side, at least 128 px, at most 90 %."""
    return min(max(round(share * size_px), MIN_OVERLAP_PX), size_px * 9 // 10)


def cut_tiles(width: int, height: int, size_px: int, share: float = OVERLAP) -> list[Corners]:
    """Return tiles of `size_px` that cover a photograph, row by row; none for a photograph no larger than one tile.

    The last tile of a row or column ends at the photograph's edge. A photograph narrower than a tile has narrower tiles.
    """
    if max(width, height) <= size_px:
        return []
    step = size_px - overlap_px(size_px, share)
    return [
        (left, top, min(left + size_px, width), min(top + size_px, height))
        for top in _starts(height, size_px, step)
        for left in _starts(width, size_px, step)
    ]


def _starts(length: int, size_px: int, step: int) -> list[int]:
    last = max(length - size_px, 0)
    return [*range(0, last, step), last]
