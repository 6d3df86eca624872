"""Outlines cut at a window: the right area, one instance for each piece, and only pieces that can be seen."""

from __future__ import annotations

import numpy as np
import pytest

from utils.data.pieces import Sides, pieces_in, split_at_rectangle

ALL_CUT: Sides = (True, True, True, True)


def bar(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], float)


def is_inside(outlines: list[np.ndarray], points: np.ndarray) -> np.ndarray:
    """Return by the even-odd rule which points (N, 2) the outlines fill."""
    crossings = np.zeros(len(points), int)
    for outline in outlines:
        for (x1, y1), (x2, y2) in zip(outline, np.roll(outline, -1, axis=0), strict=True):
            spans = (y1 > points[:, 1]) != (y2 > points[:, 1])
            with np.errstate(divide="ignore", invalid="ignore"):
                crossings += spans & (points[:, 0] < x1 + (points[:, 1] - y1) / (y2 - y1) * (x2 - x1))
    return crossings % 2 == 1


@pytest.mark.parametrize("kind", ["star", "crossing itself", "on the border"])
def test_pieces_fill_what_the_outline_fills_inside_the_window(kind: str) -> None:
    rng = np.random.default_rng(0)
    num_split = 0
    for _ in range(150):
        count = int(rng.integers(3, 14))
        angles, radii = np.sort(rng.uniform(0, 2 * np.pi, count)), rng.uniform(10, 200, count)
        outline = np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None] + rng.uniform(0, 200, 2)
        if kind != "star":
            outline = rng.uniform(-100, 300, (count, 2))
        if kind == "on the border":  # vertices and edges on the sides of the window
            outline = np.rint(outline / 50) * 50
        pieces = split_at_rectangle(outline, 200, 150)
        num_split += len(pieces) > 1
        points = rng.uniform((1, 1), (199, 149), (100, 2))
        assert (is_inside(pieces, points) == is_inside([outline], points)).all()
        for piece in pieces:
            assert piece.min() >= -1e-6
            assert (piece <= (200 + 1e-6, 150 + 1e-6)).all()
    assert num_split >= 3


def test_a_wire_that_leaves_and_comes_back_is_two_instances() -> None:
    wire = np.array([[0, 20], [100, 160], [200, 20], [200, 26], [100, 166], [0, 26]], float)  # sags below the window
    owners, pieces = pieces_in([bar(10, 10, 60, 60), wire], 200, 100, ALL_CUT, 200)
    assert owners == [0, 1, 1]
    left, right = sorted(pieces[1:], key=lambda piece: piece[:, 0].min())
    assert left[:, 0].max() < 65
    assert right[:, 0].min() > 135
    # Taken together they would have an edge along the border from one to the other.
    assert np.ptp(left[:, 0]) < 70


@pytest.mark.parametrize(
    ("outline", "is_kept"),
    [
        (bar(100, 100, 103, 102), True),  # a whole object, however small
        (bar(-500, 300, 10, 306), False),  # a wire of which 10 pixels are left
        (bar(-500, 300, 30, 306), True),  # of which 30 are
        (bar(-10, 300, 10, 340), True),  # half an insulator
        (bar(-60, 300, 8, 340), False),  # an eighth of a transformer
        (bar(-60, 300, 25, 340), True),  # more than a quarter
        (bar(-60, 300, 17, 340), True),  # a fifth, deep enough
        (bar(-900, 300, 5, 900), False),  # a sliver of a house along the border
        (bar(-900, -900, 40, 40), True),  # a corner of it, 40 x 40
        (bar(-900, -3, 900, 3), False),  # half the width of a wire along the border
        (bar(-900, -1, 900, 7), True),  # a wire along the border, almost whole
    ],
)
def test_what_is_large_enough_to_see_is_kept(outline: np.ndarray, is_kept: bool) -> None:
    for factor in (1, 2.5):  # the rule holds in pixels of the network input, whatever part of the photograph they show
        owners, _ = pieces_in([outline * factor], 640 * factor, 640 * factor, ALL_CUT, 640)
        assert owners == [0] * is_kept


def test_the_edge_of_the_photograph_cuts_nothing_off() -> None:
    outline = bar(-900, 300, 5, 340)  # no more of it exists to the left
    assert pieces_in([outline], 640, 640, ALL_CUT, 640)[0] == []
    assert pieces_in([outline], 640, 640, (False, True, True, True), 640)[0] == [0]


def test_order_and_absence() -> None:
    inside, outside, cut = bar(10, 10, 90, 90), bar(700, 10, 720, 60), bar(500, 500, 700, 700)
    owners, pieces = pieces_in([cut, outside, inside, cut], 640, 640, ALL_CUT, 640)
    assert owners == [0, 2, 3]
    np.testing.assert_array_equal(pieces[1], inside)
    np.testing.assert_array_equal(pieces[0].max(0), (640, 640))
    assert pieces_in([outside], 640, 640, ALL_CUT, 640) == ([], [])
    assert pieces_in([], 640, 640, ALL_CUT, 640) == ([], [])
