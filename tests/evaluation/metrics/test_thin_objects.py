"""Centreline recall, precision and pieces per object on wires whose answers are known by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from utils.evaluation.metrics import ImageResult, ThinRule, elongated_classes, elongation, measure, summarise_thin
from utils.evaluation.metrics.thin_objects import COLUMNS
from utils.predict.regions import Region

WIRE, OTHER = 2, 5


def bar(left: int, top: int, length: int, width: int = 5) -> Region:
    return Region(left, top, np.ones((width, length), bool))


def scores_of(truth: list[Region], found: list[Region], **options: Any) -> dict[str, float | None]:
    """Return the wires' metrics when all regions are wires and all predictions certain."""
    classes = [np.full(len(regions), WIRE) for regions in (truth, found)]
    rows = measure(truth, classes[0], found, classes[1], np.ones(len(found)), ThinRule((WIRE, OTHER), **options))
    return summarise_thin([image_result(0, rows)], 8, (WIRE, OTHER))[WIRE]


def image_result(image_id: int, rows: np.ndarray) -> ImageResult:
    empty = np.zeros(0)
    return ImageResult(image_id, empty, empty, empty, empty, empty, empty, centrelines=rows)


def values(recall: float | None, precision: float | None, pieces: float | None) -> dict[str, Any]:
    return {
        "centreline_recall": recall if recall is None else pytest.approx(recall, abs=0.01),
        "centreline_precision": precision if precision is None else pytest.approx(precision, abs=0.01),
        "pieces_per_object": pieces,
    }


WHOLE = bar(100, 50, 1000)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([WHOLE], values(1, 1, 1)),
        ([bar(100, 52, 1000)], values(1, 1, 1)),  # 2 pixels beside it
        ([bar(100, 55, 1000)], values(0, 0, None)),  # 5 pixels: beyond the tolerance of 3
        ([bar(100, 48, 1000, 9)], values(1, 1, 1)),  # too wide, but in its middle
        ([bar(100, 50, 300), bar(420, 50, 300), bar(800, 50, 300)], values(0.9, 1, 3)),
        ([bar(100, 50, 500)], values(0.5, 1, 1)),
        ([bar(600, 50, 1000)], values(0.5, 0.5, 1)),  # half of it beyond the wire's end
        ([], values(0, None, None)),
        ([WHOLE, bar(100, 300, 500)], values(1, 2 / 3, 1)),  # a wire that is none
        ([bar(100, 300, 500)], values(0, 0, None)),
        ([WHOLE, bar(100, 51, 1000)], values(1, 1, 2)),  # found twice
    ],
)
def test_one_wire(found: list[Region], expected: dict[str, Any]) -> None:
    assert scores_of([WHOLE], found) == expected


def test_the_tolerance_is_that_which_is_given() -> None:
    assert scores_of([WHOLE], [bar(100, 55, 1000)], tolerance_px=5) == values(1, 1, 1)
    assert scores_of([WHOLE], [bar(100, 52, 1000)], tolerance_px=1.5) == values(0, 0, None)


def test_crossing_wires_are_told_apart() -> None:
    """Each prediction is a piece of the wire along which it runs, not of the one that it crosses."""
    upright = Region(600, 0, np.ones((400, 5), bool))
    assert scores_of([WHOLE, upright], [WHOLE, upright]) == values(1, 1, 1)
    only_one = scores_of([WHOLE, upright], [WHOLE])
    assert only_one == values((1000 + 7) / 1400, 1, 1)  # of the other, 7 pixels are near the crossing
    both_halves = [bar(100, 50, 490), bar(610, 50, 490), upright]
    assert scores_of([WHOLE, upright], both_halves)["pieces_per_object"] == 1.5


def test_a_mask_over_two_wires_is_a_piece_of_one() -> None:
    lower = bar(100, 90, 1000)
    both = np.zeros((45, 1000), bool)
    both[:5], both[-5:, :400] = True, True
    found = scores_of([WHOLE, lower], [Region(100, 50, both)])
    assert found == values(0.7, 1, 1)


def test_classes_and_confidence_are_kept_apart() -> None:
    truth, found = [WHOLE, bar(100, 300, 800)], [WHOLE, WHOLE, bar(100, 300, 800)]
    rows = measure(
        truth,
        np.array([WIRE, OTHER]),
        found,
        np.array([WIRE, OTHER, OTHER]),
        np.array([0.9, 0.8, 0.2]),
        ThinRule((WIRE, OTHER)),
    )
    assert rows[:, 0].tolist() == [WIRE, OTHER]
    by_class = summarise_thin([image_result(0, rows)], 8, (WIRE, OTHER))
    assert by_class[WIRE] == values(1, 1, 1)
    assert by_class[OTHER] == values(0, 0, None)  # its own prediction is below 0.25
    assert by_class[0] == values(None, None, None)
    rows = measure(
        truth,
        np.array([WIRE, OTHER]),
        found,
        np.array([WIRE, OTHER, OTHER]),
        np.array([0.9, 0.8, 0.2]),
        ThinRule((WIRE,)),
    )
    assert rows[:, 0].tolist() == [WIRE]


def test_sums_over_images_weigh_each_by_its_length() -> None:
    rows = [
        measure(
            truth, np.full(len(truth), WIRE), found, np.full(len(found), WIRE), np.ones(len(found)), ThinRule((WIRE,))
        )
        for truth, found in (([WHOLE], [WHOLE]), ([bar(0, 0, 200)], []), ([], [bar(0, 0, 250)]))
    ]
    assert all(row.shape == (1, len(COLUMNS)) for row in rows)
    found = summarise_thin([image_result(number, row) for number, row in enumerate(rows)], 3, (WIRE,))[WIRE]
    assert found == values(1000 / 1200, 1000 / 1250, 1)


def test_thin_classes_are_those_of_long_narrow_objects() -> None:
    strip = np.array([(0.0, 0.0), (900.0, 0.0), (900.0, 6.0), (0.0, 6.0)])
    assert elongation(strip) == pytest.approx(150, rel=1e-3)
    bend = np.array([(0.0, 0.0), (300.0, 0.0), (300.0, 300.0), (294.0, 300.0), (294.0, 6.0), (0.0, 6.0)])
    assert elongation(bend) == pytest.approx(600 / 6, rel=0.05)
    angles = np.linspace(0, 2 * np.pi, 60)
    assert elongation(np.stack([np.cos(angles), np.sin(angles)], axis=1) * 50) == pytest.approx(1, abs=0.3)
    assert elongated_classes([0, 0, 0, 1, 1, 1, 2], [100, 90, 3, 30, 20, 900, 50]) == (0, 2)
    assert elongated_classes([], []) == ()
