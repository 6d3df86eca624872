from __future__ import annotations

import itertools

import numpy as np
import pytest

from utils.yolo.tiles import cut_tiles, overlap_px


@pytest.mark.parametrize("size", [(2800, 1900), (1281, 960), (641, 640), (4000, 500), (700, 3000)])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_tiles_cover_the_photograph_overlap_and_end_at_its_edges(size: tuple[int, int], share: float) -> None:
    width, height = size
    tiles = cut_tiles(width, height, 640, share)
    seen = np.zeros((height, width), np.uint16)
    for left, top, right, bottom in tiles:
        assert (right - left, bottom - top) == (min(640, width), min(640, height))
        seen[top:bottom, left:right] += 1
    assert seen.min() >= 1
    assert len(set(tiles)) == len(tiles)
    for low, high, length in ((0, 2, width), (1, 3, height)):
        sides = sorted({(tile[low], tile[high]) for tile in tiles})
        assert (sides[0][0], sides[-1][1]) == (0, length)
        overlaps = [before[1] - after[0] for before, after in itertools.pairwise(sides)]
        assert all(overlap >= max(128, share * 640) for overlap in overlaps)


def test_a_photograph_no_larger_than_a_tile_has_none() -> None:
    assert cut_tiles(640, 480, 640) == []
    assert len(cut_tiles(641, 480, 640)) == 2


def test_small_tiles_still_move_on() -> None:
    assert overlap_px(96, 0.2) == 86
    assert len(cut_tiles(300, 96, 96)) == 22
