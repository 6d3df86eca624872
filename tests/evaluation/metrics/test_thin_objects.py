"""Centreline recall, precision and pieces per object on wires whose answers are known by hand."""

from typing import Any

import cv2
import numpy as np
import pytest

from tests.evaluation.made_up import image_result
from yolo_seg_ddp.data.labels import ANY_CLASS
from yolo_seg_ddp.data.polygons import elongated_classes, elongation
from yolo_seg_ddp.evaluation.metrics import thin_objects
from yolo_seg_ddp.evaluation.metrics.matching import LEVELS
from yolo_seg_ddp.evaluation.metrics.thin_objects import (
    ThinRule,
    found_lengths,
    measure,
    summarise_thin,
)
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.predict.thinning import centreline

WIRE, OTHER = 2, 5
RATES = ("centreline_recall", "centreline_precision", "pieces_per_object")


def bar(left: int, top: int, length: int, width: int = 5) -> Region:
    return Region(left, top, np.ones((width, length), bool))


def scores_of(truth: list[Region], found: list[Region], **options: Any) -> dict[str, float | None]:
    """Return the wires' metrics when all regions are wires and all predictions certain."""
    return rates_of(wires(truth, found, **options))[WIRE]


def wires(truth: list[Region], found: list[Region], **options: Any) -> np.ndarray:
    """Compare regions that are all wires, and predictions that are all certain."""
    classes = [np.full(len(regions), WIRE) for regions in (truth, found)]
    ignored, rule = options.pop("ignored", ()), ThinRule((WIRE, OTHER), **options)
    return measure(truth, classes[0], found, classes[1], np.ones(len(found)), rule, ignored)


def summaries(*of_images: np.ndarray) -> list[dict[str, Any]]:
    """Return the metrics of each class over photographs with these rows of centrelines."""
    empty = [np.zeros(0)] * 6
    results = [
        image_result(number, *empty, centrelines=rows) for number, rows in enumerate(of_images)
    ]
    return summarise_thin(results, 8, (WIRE, OTHER))


def rates_of(*of_images: np.ndarray) -> list[dict[str, float | None]]:
    return [
        {name: value for name, value in one.items() if name in RATES}
        for one in summaries(*of_images)
    ]


def values(*expected: float | None) -> dict[str, Any]:
    """Return what is expected of recall, precision and pieces per object."""
    near = [value if value is None else pytest.approx(value, abs=0.01) for value in expected]
    return dict(zip(RATES, near, strict=True))


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
    slanted = [Region(x, 0, np.eye(200, dtype=bool)) for x in (0, 6)]  # 4.2 px beside
    assert scores_of(slanted[:1], slanted[1:])["centreline_recall"] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(("class_id", "precision"), [(WIRE, 1), (ANY_CLASS, 1), (OTHER, 2 / 3)])
def test_found_length_in_a_region_to_ignore_of_the_class_does_not_count(
    class_id: int, precision: float
) -> None:
    around, behind = [(class_id, bar(50, 290, 600, 30))], [(class_id, bar(1098, 0, 902, 400))]
    assert scores_of([WHOLE], [WHOLE, bar(100, 300, 500)], ignored=around) == values(
        1, precision, 1
    )
    assert scores_of([WHOLE], [bar(850, 50, 500)], ignored=behind) == values(
        0.25, 1 if precision == 1 else 0.5, 1
    )


def test_crossing_wires_are_told_apart() -> None:
    """Each prediction is a piece of the wire along which it runs, not of
    the one that it crosses.
    """
    upright = Region(600, 0, np.ones((400, 5), bool))
    assert scores_of([WHOLE, upright], [WHOLE, upright]) == values(1, 1, 1)
    only_one = scores_of([WHOLE, upright], [WHOLE])
    # of the other, 7 pixels are near the crossing
    assert only_one == values((1000 + 7) / 1400, 1, 1)
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
    given = (
        truth,
        np.array([WIRE, OTHER]),
        found,
        np.array([WIRE, OTHER, OTHER]),
        np.array([0.9, 0.8, 0.2]),
    )
    assert measure(*given, ThinRule((WIRE,)))[:, 0].tolist() == [WIRE]
    rows = measure(*given, ThinRule((WIRE, OTHER)))
    assert rows[:, 0].tolist() == [WIRE, OTHER]
    by_class = rates_of(rows)
    assert by_class[WIRE] == values(1, 1, 1)
    assert by_class[OTHER] == values(0, 0, None)  # its own prediction is below 0.25
    assert by_class[0] == values(None, None, None)


def test_sums_over_images_weigh_each_by_its_length() -> None:
    rows = [wires([WHOLE], [WHOLE]), wires([bar(0, 0, 200)], []), wires([], [bar(0, 0, 250)])]
    assert all(row.shape == (1, len(thin_objects.COLUMNS)) for row in rows)
    assert rates_of(*rows)[WIRE] == values(1000 / 1200, 1000 / 1250, 1)
    found, lengths = (
        summaries(*rows)[WIRE],
        {"length_px": 1200, "missed_px": 200, "invented_px": 250},
    )
    # thinning shortens each end by 2
    assert {name: found[name] for name in lengths} == pytest.approx(lengths, abs=9)


def test_lengths_of_slanted_wires_are_those_in_the_plane() -> None:
    # 200 pixels long, in 161 rows
    mask = cv2.line(np.zeros((200, 300), np.uint8), (20, 20), (140, 180), 1, 5)
    found = summaries(wires([Region(0, 0, mask.astype(bool))], []))
    assert found[WIRE]["length_px"] == found[WIRE]["missed_px"] == pytest.approx(200, abs=7)
    assert found[0]["length_px"] is None


def test_thin_classes_are_those_of_long_narrow_objects() -> None:
    strip = np.array([(0.0, 0.0), (900.0, 0.0), (900.0, 6.0), (0.0, 6.0)])
    assert elongation(strip) == pytest.approx(150, rel=1e-3)
    bend = np.array(
        [(0.0, 0.0), (300.0, 0.0), (300.0, 300.0), (294.0, 300.0), (294.0, 6.0), (0.0, 6.0)]
    )
    assert elongation(bend) == pytest.approx(600 / 6, rel=0.05)
    angles = np.linspace(0, 2 * np.pi, 60)
    assert elongation(np.stack([np.cos(angles), np.sin(angles)], axis=1) * 50) == pytest.approx(
        1, abs=0.3
    )
    values = [(0, 100), (0, 90), (0, 3), (1, 30), (1, 20), (1, 900), (2, 50)]
    assert elongated_classes(values) == (0, 2)
    assert elongated_classes([]) == ()


# --- centrelines ----------------------------------------------------------------------------------


def test_thinning_is_that_of_scikit_image() -> None:
    """It has the same passes in the other order, which is that of the
    mask turned by 180 degrees.
    """
    from skimage.morphology import thin

    rng = np.random.default_rng(3)
    for _ in range(8):
        coarse = rng.random((12, 15)).astype(np.float32)
        mask = cv2.resize(coarse, (75, 60), interpolation=cv2.INTER_CUBIC) > 0.55
        line = centreline(Region(40, 30, mask))
        picture = np.zeros(mask.shape, bool)
        picture[line[:, 1] - 30, line[:, 0] - 40] = True
        assert np.array_equal(picture[::-1, ::-1], thin(mask[::-1, ::-1]))


def test_an_empty_mask_has_no_centreline() -> None:
    assert centreline(Region(5, 5, np.zeros((4, 4), bool))).shape == (0, 2)
    assert centreline(Region(5, 5, np.zeros((0, 0), bool))).shape == (0, 2)


def test_lengths_at_each_confidence_are_those_of_the_evaluation_at_that_confidence() -> None:
    found, scores = (
        [bar(0, 50, 700), bar(300, 52, 500), bar(0, 90, 90)],
        np.array([0.8, 0.3, 0.2], np.float32),
    )
    ids = [np.array([WIRE, WIRE]), np.full(3, WIRE)]
    truth = [WHOLE, bar(0, 400, 60)]
    [row] = found_lengths(
        truth, ids[0], found, ids[1], scores, ThinRule((WIRE, OTHER), at_levels=True)
    )
    for level, found_px in zip(LEVELS, row[2:], strict=True):
        [expected] = measure(
            truth, ids[0], found, ids[1], scores, ThinRule((WIRE,), min_score=level)
        )
        assert [row[0], row[1], found_px] == expected[:3].tolist()
    assert found_lengths([], ids[0][:0], found, ids[1], scores, ThinRule((WIRE,))).shape == (
        0,
        2 + len(LEVELS),
    )
