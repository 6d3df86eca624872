"""Thinning: one pixel wide, connected, in the middle."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from utils.evaluation.metrics.thinning import centreline
from utils.predict.regions import Region


def drawn(points: list[tuple[int, int]], width_px: int) -> np.ndarray:
    mask = np.zeros((200, 300), np.uint8)
    cv2.polylines(mask, [np.array(points)], False, 1, width_px)
    return mask.astype(bool)


def test_a_bars_centreline_is_its_middle_row() -> None:
    line = centreline(Region(40, 30, np.ones((5, 60), bool)))
    assert set(line[:, 1].tolist()) == {32}
    assert len(line) >= 56
    assert np.array_equal(np.diff(np.sort(line[:, 0])), np.ones(len(line) - 1))


@pytest.mark.parametrize("end", [(280, 40), (280, 100), (280, 180), (60, 190)])
@pytest.mark.parametrize("width_px", [1, 2, 3, 6, 9])
def test_a_slanted_line_stays_connected_and_close_to_its_middle(end: tuple[int, int], width_px: int) -> None:
    start = (20, 20)
    line = centreline(Region(0, 0, drawn([start, end], width_px)))
    along = np.array(end) - start
    distance = np.abs((line - start) @ np.array([-along[1], along[0]])) / np.hypot(*along)
    assert distance.max() <= 1.6
    assert max(np.abs(along)) - width_px - 2 <= len(line) <= max(np.abs(along)) + width_px + 2
    picture = np.zeros((200, 300), np.uint8)
    picture[line[:, 1], line[:, 0]] = 1
    assert cv2.connectedComponents(picture, connectivity=8)[0] == 2


def test_a_cross_keeps_its_four_arms_and_a_ring_its_hole() -> None:
    cross = drawn([(20, 100), (280, 100)], 7) | drawn([(150, 10), (150, 190)], 7)
    assert len(centreline(Region(0, 0, cross))) == pytest.approx(260 + 180, abs=16)
    ring = np.zeros((200, 300), np.uint8)
    cv2.circle(ring, (150, 100), 60, 1, 7)
    line = centreline(Region(0, 0, ring.astype(bool)))
    assert np.abs(np.hypot(*(line - (150, 100)).T) - 60).max() < 2


def test_thinning_is_that_of_the_plain_algorithm() -> None:
    """The same passes over every pixel, without the list of outline pixels."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        coarse = rng.random((12, 15)).astype(np.float32)
        mask = cv2.resize(coarse, (75, 60), interpolation=cv2.INTER_CUBIC) > 0.55
        line = centreline(Region(0, 0, mask))
        picture = np.zeros(mask.shape, bool)
        picture[line[:, 1], line[:, 0]] = True
        assert np.array_equal(picture, plain_thinning(mask))


def plain_thinning(mask: np.ndarray) -> np.ndarray:
    image = np.pad(mask, 1)
    while True:
        before = image.copy()
        for second in (False, True):
            n, ne, e, se, s, sw, w, nw = (
                np.roll(image, shift, (0, 1))
                for shift in ((1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1))
            )
            count = (
                (~n & (ne | e)).astype(int)
                + (~e & (se | s)).astype(int)
                + (~s & (sw | w)).astype(int)
                + (~w & (nw | n)).astype(int)
            )
            one = (nw | n).astype(int) + (ne | e).astype(int) + (se | s).astype(int) + (sw | w).astype(int)
            two = (n | ne).astype(int) + (e | se).astype(int) + (s | sw).astype(int) + (w | nw).astype(int)
            fewest = np.minimum(one, two)
            kept = ((n | ne | ~se) & e) if second else ((s | sw | ~nw) & w)
            image = image & ~((count == 1) & (fewest >= 2) & (fewest <= 3) & ~kept)
        if np.array_equal(before, image):
            return image[1:-1, 1:-1]


def test_an_empty_mask_has_no_centreline() -> None:
    assert centreline(Region(5, 5, np.zeros((4, 4), bool))).shape == (0, 2)
    assert centreline(Region(5, 5, np.zeros((0, 0), bool))).shape == (0, 2)
