"""Outlines that are clipped, and the pieces of them that a window shows."""

import math

import numpy as np
import pytest
from shapely.geometry import Polygon, box

from tests.data.pictures import rectangle
from yolo_seg_ddp.data.pieces import Sides, pieces_in, split_at_rectangle
from yolo_seg_ddp.data.polygons import (
    clip_outlines,
    join_outlines,
    large_to_small,
    polygon_boxes,
    visible_outlines,
)


def star_polygon(rng: np.random.Generator) -> np.ndarray:
    """Return a simple polygon around a random centre, most of the time partly outside [0, 100]²."""
    count = int(rng.integers(3, 15))
    angles = np.sort(rng.uniform(0, 2 * math.pi, count))
    radii = rng.uniform(5, rng.choice([25, 90]), count)
    points = (
        rng.uniform(-20, 120, 2) + np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None]
    )
    return points if rng.random() < 0.5 else points[::-1]


def clip_polygon(points: np.ndarray, size_px: float) -> np.ndarray:
    """Clip one polygon (N, 2); the result may be empty (0, 2)."""
    return clip_outlines(points, np.zeros(len(points), np.int64), size_px)[0]


def test_clipping_agrees_with_shapely() -> None:
    rng = np.random.default_rng(0)
    square = box(0, 0, 100, 100)
    seen = {"inside": 0, "outside": 0, "cut": 0}
    for _ in range(400):
        points = star_polygon(rng)
        shape = Polygon(points)
        if not shape.is_valid:
            continue
        clipped = clip_polygon(points, 100)
        expected = shape.intersection(square).area
        assert Polygon(clipped).area == pytest.approx(expected, abs=1e-6)
        assert clipped.shape[1] == 2
        if len(clipped):
            assert clipped.min() >= -1e-9
            assert clipped.max() <= 100 + 1e-9
        seen[
            "outside"
            if expected == 0
            else "inside"
            if expected == pytest.approx(shape.area)
            else "cut"
        ] += 1
    assert min(seen.values()) >= 10, seen


def test_outlines_are_clipped_together_as_they_are_alone() -> None:
    rng = np.random.default_rng(1)
    polygons = [star_polygon(rng) for _ in range(200)]
    tiny = np.array([[50.0, 50], [51, 50], [51, 51]])
    class_ids, together = visible_outlines(np.arange(201), *join_outlines([*polygons, tiny]), 100)
    alone = [clip_polygon(polygon, 100) for polygon in polygons]
    for class_id, outline in zip(class_ids, together, strict=True):
        np.testing.assert_array_equal(outline, alone[class_id])
    missing = set(range(200)) - set(class_ids)
    assert 10 < len(missing) < 100
    for class_id in missing:
        whole, rest = polygons[class_id], alone[class_id]
        is_small = len(rest) and np.ptp(rest, axis=0).prod() < 0.0101 * np.ptp(whole, axis=0).prod()
        assert len(rest) < 3 or is_small or np.ptp(rest, axis=0).max() <= 2
    assert 200 not in class_ids


def test_order_and_boxes_of_joined_outlines_are_those_of_each() -> None:
    rng = np.random.default_rng(2)
    polygons = [star_polygon(rng) for _ in range(50)]
    areas = [Polygon(polygons[position]).area for position in large_to_small(polygons)]
    assert areas == sorted(areas, reverse=True)
    assert polygon_boxes(polygons).tolist() == [
        [*polygon.min(0), *polygon.max(0)] for polygon in polygons
    ]
    assert polygon_boxes([]).shape == (0, 4)
    assert large_to_small([]).tolist() == []


def test_copies_of_one_object_keep_their_order() -> None:
    polygon = star_polygon(np.random.default_rng(3))
    copies = [polygon * (-1, 1) + (shift / 3, shift / 7) for shift in range(40)]
    assert large_to_small(copies).tolist() == list(range(40))


ALL_CUT: Sides = (True, True, True, True)


def is_inside(outlines: list[np.ndarray], points: np.ndarray) -> np.ndarray:
    """Return by the even-odd rule which points (N, 2) the outlines fill."""
    crossings = np.zeros(len(points), int)
    for outline in outlines:
        for (x1, y1), (x2, y2) in zip(outline, np.roll(outline, -1, axis=0), strict=True):
            spans = (y1 > points[:, 1]) != (y2 > points[:, 1])
            with np.errstate(divide="ignore", invalid="ignore"):
                crossings += spans & (
                    points[:, 0] < x1 + (points[:, 1] - y1) / (y2 - y1) * (x2 - x1)
                )
    return crossings % 2 == 1


@pytest.mark.parametrize("kind", ["star", "crossing itself", "on the border"])
def test_pieces_fill_what_the_outline_fills_inside_the_window(kind: str) -> None:
    rng = np.random.default_rng(0)
    num_split = 0
    for _ in range(150):
        count = int(rng.integers(3, 14))
        angles, radii = np.sort(rng.uniform(0, 2 * np.pi, count)), rng.uniform(10, 200, count)
        outline = np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None] + rng.uniform(
            0, 200, 2
        )
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
    # sags below the window
    wire = np.array([[0, 20], [100, 160], [200, 20], [200, 26], [100, 166], [0, 26]], float)
    owners, pieces = pieces_in(
        [rectangle(10, 10, 60, 60), wire], 200, 100, ALL_CUT, 200, np.zeros(2, bool)
    )
    assert owners == [0, 1, 1]
    left, right = sorted(pieces[1:], key=lambda piece: piece[:, 0].min())
    assert left[:, 0].max() < 65
    assert right[:, 0].min() > 135
    # Taken together they would have an edge along the border from one to the other.
    assert np.ptp(left[:, 0]) < 70


@pytest.mark.parametrize(
    ("outline", "is_kept"),
    [
        (rectangle(100, 100, 103, 102), True),  # a whole object, however small
        (rectangle(-500, 300, 10, 306), False),  # a wire of which 10 pixels are left
        (rectangle(-500, 300, 30, 306), True),  # of which 30 are
        (rectangle(-10, 300, 10, 340), True),  # half an insulator
        (rectangle(-60, 300, 8, 340), False),  # an eighth of a transformer
        (rectangle(-60, 300, 25, 340), True),  # more than a quarter
        (rectangle(-60, 300, 17, 340), True),  # a fifth, deep enough
        (rectangle(-900, 300, 5, 900), False),  # a sliver of a house along the border
        (rectangle(-900, -900, 40, 40), True),  # a corner of it, 40 x 40
        (rectangle(-900, -3, 900, 3), False),  # half the width of a wire along the border
        (rectangle(-900, -1, 900, 7), True),  # a wire along the border, almost whole
    ],
)
def test_what_is_large_enough_to_see_is_kept(outline: np.ndarray, is_kept: bool) -> None:
    # the rule holds in pixels of the network input, whatever part of the photograph they show
    for factor in (1, 2.5):
        owners, _ = pieces_in(
            [outline * factor], 640 * factor, 640 * factor, ALL_CUT, 640, np.zeros(1, bool)
        )
        assert owners == [0] * is_kept


def test_the_edge_of_the_photograph_cuts_nothing_off() -> None:
    outline = rectangle(-900, 300, 5, 340)  # no more of it exists to the left
    assert pieces_in([outline], 640, 640, ALL_CUT, 640, np.zeros(1, bool))[0] == []
    assert pieces_in([outline], 640, 640, (False, True, True, True), 640, np.zeros(1, bool))[0] == [
        0
    ]


def test_order_and_absence() -> None:
    inside, outside, cut = (
        rectangle(10, 10, 90, 90),
        rectangle(700, 10, 720, 60),
        rectangle(500, 500, 700, 700),
    )
    owners, pieces = pieces_in(
        [cut, outside, inside, cut], 640, 640, ALL_CUT, 640, np.zeros(4, bool)
    )
    assert owners == [0, 2, 3]
    np.testing.assert_array_equal(pieces[1], inside)
    np.testing.assert_array_equal(pieces[0].max(0), (640, 640))
    assert pieces_in([outside], 640, 640, ALL_CUT, 640, np.zeros(1, bool)) == ([], [])
    assert pieces_in([], 640, 640, ALL_CUT, 640, np.zeros(0, bool)) == ([], [])
