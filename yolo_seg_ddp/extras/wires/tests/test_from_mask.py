"""Ragged masks become lines with a width and gaps."""

import cv2
import numpy as np
import pytest

from tests.predict.tile_scenes import blur_edges, iou_of
from yolo_seg_ddp.extras.wires.from_mask import Curve, SlicedMask, find_lines, medial_line
from yolo_seg_ddp.extras.wires.tests.drawn import (
    CROSSARM,
    SAGGING,
    SIZE,
    STRAIGHT,
    Points,
    drawn,
    parabola,
)
from yolo_seg_ddp.predict.regions import Region, fill_outline

HOOK = [(450 - 200 * np.cos(a), 400 - 200 * np.sin(a)) for a in np.linspace(0, np.pi, 60)]
SPANS = [(20.0, 80.0), (270.0, 120.0), (880.0, 120.0)]  # of a wire over a support


@pytest.mark.parametrize(
    ("seen", "wires"),
    [
        ([STRAIGHT], [STRAIGHT]),
        ([SAGGING], [SAGGING]),
        ([HOOK], [HOOK]),  # no parabola: its medial axis
        # two lines, the longer one first, neither bent by the other
        ([STRAIGHT, CROSSARM], [STRAIGHT, CROSSARM]),
        ([SAGGING, [(700, 60), (720, 66)]], [SAGGING]),  # an island
    ],
    ids=["straight", "sagging", "hook", "crossing", "island"],
)
def test_a_ragged_mask_becomes_the_lines_that_it_shows(
    seen: list[Points], wires: list[Points]
) -> None:
    mask = blur_edges(drawn(*seen), np.random.default_rng(1), 0.3)
    lines = find_lines(Region(0, 0, mask))
    assert len(lines) == len(wires)
    for line, wire in zip(lines, wires, strict=True):
        assert iou_of(fill_outline(line.outline, SIZE), drawn(wire)) > 0.8
        length = cv2.arcLength(np.array(wire, np.float32), False)
        assert line.width_px == pytest.approx(drawn(wire).sum() / length, abs=1)
        assert line.length_px == pytest.approx(length + 9, abs=9)  # with its round ends
        assert len(line.gaps) == 0


@pytest.mark.parametrize("shape", [(7, 200), (200, 7)])
def test_a_line_lies_in_the_middle_of_its_pixels(shape: tuple[int, int]) -> None:
    region = Region(7, 4, np.ones(shape, bool))
    middle, across = np.array([7, 4]) + np.array(shape[::-1]) / 2, int(shape[1] > shape[0])
    for line in (*find_lines(region), medial_line(region, 7.0)):
        assert line is not None
        assert line.points[:, across] == pytest.approx(
            np.full(len(line.points), middle[across]), abs=0.1
        )
        assert line.points[[0, -1], 1 - across].mean() == pytest.approx(middle[1 - across], abs=2)


def test_a_line_that_is_steep_beside_its_axis_keeps_the_masks_width() -> None:
    rows, columns = np.nonzero(drawn([(300.0, 100.0), (500.0, 500.0)]))
    steep = Curve(np.array([400.0, 300.0]), np.eye(2), np.array([0.0, 2.0, 0.0]))
    wire = SlicedMask.of(np.stack([columns, rows], axis=1) + 0.5, 9.0, steep)
    assert wire is not None
    assert wire.explained > 0.97
    assert wire.line().width_px == pytest.approx(len(rows) / np.hypot(200, 400), abs=0.6)


def test_a_line_grows_over_a_support_where_its_parabola_ends() -> None:
    rows, columns = np.nonzero(drawn(SPANS, width_px=3))
    level = Curve(np.array([600.0, 120.0]), np.eye(2), np.zeros(3))
    wire = SlicedMask.of(np.stack([columns, rows], axis=1) + 0.5, 3.0, level)
    assert wire is not None
    assert (wire.ends + 600).tolist() == pytest.approx([19, 882], abs=5)


def test_a_wire_that_becomes_thinner_keeps_both_widths() -> None:
    cone = cv2.fillPoly(
        np.zeros(SIZE[::-1], np.uint8),
        [np.array([(40, 100), (840, 106), (840, 112), (40, 118)])],
        1,
    )
    (line,) = find_lines(Region(0, 0, cone.astype(bool)))
    widths = line.widths[np.argsort(line.points[:, 0])]
    assert (widths[0], widths[-1]) == pytest.approx((19, 7), abs=1.5)


def test_parts_of_a_mask_have_a_gap_between_them() -> None:
    (line,) = find_lines(Region(0, 0, drawn(parabola(40, 400, 40), parabola(460, 840, 40))))
    assert sorted(line.gaps[0][:, 0].tolist()) == pytest.approx([404, 456], abs=5)
    # it goes on over the gap
    assert iou_of(fill_outline(line.outline, SIZE), drawn(SAGGING)) > 0.85


@pytest.mark.parametrize(
    "mask", [np.zeros((5, 5), bool), np.ones((60, 60), bool), np.zeros((0, 0), bool)]
)
def test_what_is_no_line_has_none(mask: np.ndarray) -> None:
    assert find_lines(Region(3, 4, mask)) == []
