"""Wires as lines: centreline, width and gaps of ragged masks, and which detections continue each other."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.predict.tile_scenes import blur_edges, iou_of, stroke
from utils.predict.detections import Detections, PhotoPrediction
from utils.predict.lines.from_mask import Curve, SlicedMask, find_lines, medial_line
from utils.predict.lines.in_photo import likeness
from utils.predict.lines.line import Line
from utils.predict.lines.routes import find_routes
from utils.predict.prediction_files import PredictionWriter, Source
from utils.predict.regions import Region, fill_outline

SIZE = (900, 600)
Points = list[tuple[float, float]]


def parabola(start: float, end: float, sag: float) -> Points:
    x = np.linspace(start, end, 60)
    share = (x - 40) / 800
    return list(zip(x.tolist(), (150 + 200 * share + 4 * sag * share * (1 - share)).tolist(), strict=True))


STRAIGHT, SAGGING = parabola(40, 840, 0), parabola(40, 840, 40)
HOOK = [(450 - 200 * np.cos(a), 400 - 200 * np.sin(a)) for a in np.linspace(0, np.pi, 60)]
SPANS = [(20.0, 80.0), (270.0, 120.0), (880.0, 120.0)]  # of a wire over a support
CROSSARM = [(300.0, 420.0), (420.0, 30.0)]


def drawn(*strokes: Points, width_px: int = 9) -> np.ndarray:
    mask = np.zeros(SIZE[::-1], bool)
    for points in strokes:
        mask |= stroke(SIZE, points, width_px)
    return mask


@pytest.mark.parametrize(
    ("seen", "wires"),
    [
        ([STRAIGHT], [STRAIGHT]),
        ([SAGGING], [SAGGING]),
        ([HOOK], [HOOK]),  # no parabola: its medial axis
        ([STRAIGHT, CROSSARM], [STRAIGHT, CROSSARM]),  # two lines, the longer one first, neither bent by the other
        ([SAGGING, [(700, 60), (720, 66)]], [SAGGING]),  # an island
    ],
    ids=["straight", "sagging", "hook", "crossing", "island"],
)
def test_a_ragged_mask_becomes_the_lines_that_it_shows(seen: list[Points], wires: list[Points]) -> None:
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
        assert line.points[:, across] == pytest.approx(np.full(len(line.points), middle[across]), abs=0.1)
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
    cone = cv2.fillPoly(np.zeros(SIZE[::-1], np.uint8), [np.array([(40, 100), (840, 106), (840, 112), (40, 118)])], 1)
    (line,) = find_lines(Region(0, 0, cone.astype(bool)))
    widths = line.widths[np.argsort(line.points[:, 0])]
    assert (widths[0], widths[-1]) == pytest.approx((19, 7), abs=1.5)


def test_parts_of_a_mask_have_a_gap_between_them() -> None:
    (line,) = find_lines(Region(0, 0, drawn(parabola(40, 400, 40), parabola(460, 840, 40))))
    assert sorted(line.gaps[0][:, 0].tolist()) == pytest.approx([404, 456], abs=5)
    assert iou_of(fill_outline(line.outline, SIZE), drawn(SAGGING)) > 0.85  # it goes on over the gap


@pytest.mark.parametrize("mask", [np.zeros((5, 5), bool), np.ones((60, 60), bool), np.zeros((0, 0), bool)])
def test_what_is_no_line_has_none(mask: np.ndarray) -> None:
    assert find_lines(Region(3, 4, mask)) == []


def straight(*ends: tuple[float, float], width: float = 8) -> Line:
    return Line(np.array(ends, np.float64), np.full(len(ends), width), np.zeros((0, 2, 2)))


ACROSS, ALONG = np.mgrid[:600, :900]


@pytest.mark.parametrize(
    ("photo", "low", "high"),
    [
        (np.where(abs(ACROSS - 300) < 4, 90, 60), 0.85, 1.0),
        (np.where(abs(ACROSS - 300) < 4, 90, 60 + ALONG // 8), 0.6, 0.9),  # from dark ground to light ground
        (np.where(ACROSS < 300, 60, 180), 0.2, 0.5),  # an edge
        (np.where(abs(ACROSS - 300) < 4, 90, np.where((ALONG > 400) & (ALONG < 500), 200, 60)), 0.85, 1.0),  # a pole
        (np.full((600, 900), 60), 0.0, 0.0),
    ],
    ids=["wire", "ground", "edge", "pole", "nothing"],
)
def test_a_wire_differs_from_both_sides(photo: np.ndarray, low: float, high: float) -> None:
    whole = likeness(straight((50, 300), (850, 300)), photo.astype(np.uint8))
    assert low <= whole <= high
    assert likeness(straight((50, 300), (120, 300)), photo.astype(np.uint8)) <= 0.55 * high


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        (((0, 100), (300, 110)), ((360, 112), (600, 120)), True),  # behind a pole
        (((300, 110), (0, 100)), ((600, 120), (360, 112)), True),  # whichever way they run
        (((0, 100), (300, 110)), ((360, 132), (600, 140)), False),  # a wire beside it
        (((0, 100), (300, 110)), ((360, 112), (400, 200)), False),  # another direction
        (((0, 100), (300, 100)), ((360, 102), (600, 136)), True),  # 8 degrees
        (((0, 100), (300, 100)), ((304, 101), (600, 207)), False),  # 20 degrees, close by
        (((0, 100), (300, 110)), ((700, 124), (800, 127)), False),  # a gap longer than the shorter one
        (((0, 100), (300, 110)), ((100, 103), (260, 109)), False),  # the same part of the wire
    ],
)
def test_lines_that_continue_each_other_are_one_wire(first: Points, second: Points, is_one: bool) -> None:
    lines = [straight(*first), None, straight(*second)]
    routes = find_routes(lines, np.zeros(3, int))
    assert sorted(number for route in routes for number in route.members) == [0, 2]
    assert len(routes) == (1 if is_one else 2)
    assert len(find_routes(lines, np.array([0, 0, 1]))) == 2  # of two classes
    if is_one:
        (route,) = routes
        assert sorted(route.line.gaps[0][:, 0].tolist()) == [300, 360]
        assert np.ptp(route.line.points[:, 0]) == 600
        assert (np.diff(route.line.points[:, 0]) > 0).all() or (np.diff(route.line.points[:, 0]) < 0).all()


def test_three_parts_are_one_wire_in_their_order_and_a_ring_ends() -> None:
    parts = [straight((400, 0), (700, 0)), straight((0, 0), (300, 0)), straight((800, 0), (1100, 0))]
    (route,) = find_routes(parts, np.zeros(3, int))
    assert route.members in ((1, 0, 2), (2, 0, 1))
    assert route.line.length_px == 1100
    gaps = np.array([[(650, 0), (600, 0)], [(520, 0), (500, 0)]])
    (route,) = find_routes([straight((0, 0), (300, 0)), replace(straight((700, 0), (400, 0)), gaps=gaps)], np.zeros(2))
    assert route.line.gaps[..., 0].ravel().tolist() == [300, 400, 500, 520, 600, 650]
    corners = [(300 * np.cos(a), 300 * np.sin(a)) for a in np.linspace(0, 2 * np.pi, 73)]
    ring = [straight(*part) for part in itertools.pairwise(corners)]
    (round_trip,) = find_routes(ring, np.zeros(len(ring), int))
    assert sorted(round_trip.members) == list(range(72))


def test_predictions_json_has_lines_and_wires(tmp_path: Path) -> None:
    lines = [straight((10, 20), (310, 20)), None, straight((350, 20), (600, 20))]
    masks = [fill_outline(line.outline, SIZE) if line else Region(0, 0, np.ones((9, 9), bool)) for line in lines]
    found = Detections(torch.zeros(3, 4), torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 1, 0]), torch.zeros(3, 0))
    with PredictionWriter(tmp_path, ("wire", "cap")) as writer:
        boxes = np.zeros((3, 4))
        writer.add(Source(0, Path("a.jpg"), "a"), (600, 900, 3), PhotoPrediction(found, masks, boxes, lines))
        writer.add(Source(1, Path("b.jpg"), "b"), (600, 900, 3), PhotoPrediction(found, masks, boxes))
    with_wires, without = (json.loads(row.split("\t")[1]) for row in next(tmp_path.glob(".pred*")).open())
    first, cap, _ = with_wires["detections"]
    assert first["centreline"] == [[10, 20], [310, 20]]
    assert (first["width_px"], first["length_px"], first["gaps"]) == (8, 300, [])
    assert "centreline" not in cap
    (wire,) = with_wires["wires"]
    assert (wire["class"], wire["detections"], wire["length_px"]) == ("wire", [0, 2], 590)
    assert wire["gaps"] == [[[310, 20], [350, 20]]]
    assert "wires" not in without
