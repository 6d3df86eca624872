"""Lines that continue each other are one wire."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from yolo_seg_ddp.extras.wires.routes import find_routes
from yolo_seg_ddp.extras.wires.tests.drawn import SIZE, Points, straight
from yolo_seg_ddp.predict.detections import Detections, PhotoPrediction
from yolo_seg_ddp.predict.prediction_files import PredictionWriter, Source
from yolo_seg_ddp.predict.regions import Region, fill_outline


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        (((0, 100), (300, 110)), ((360, 112), (600, 120)), True),  # behind a pole
        (((300, 110), (0, 100)), ((600, 120), (360, 112)), True),  # whichever way they run
        (((0, 100), (300, 110)), ((360, 138), (600, 146)), False),  # a wire beside it
        (((0, 100), (300, 110)), ((360, 112), (400, 200)), False),  # another direction
        (((0, 100), (300, 100)), ((360, 102), (600, 136)), True),  # 8 degrees
        (((0, 100), (300, 100)), ((304, 101), (600, 207)), False),  # 20 degrees, close by
        # a gap longer than the shorter one
        (((0, 100), (300, 110)), ((700, 124), (800, 127)), False),
        (((0, 100), (300, 110)), ((100, 103), (260, 109)), False),  # the same part of the wire
    ],
)
def test_lines_that_continue_each_other_are_one_wire(
    first: Points, second: Points, is_one: bool
) -> None:
    lines = [straight(*first), None, straight(*second)]
    routes = find_routes(lines, np.zeros(3, int))
    assert sorted(number for route in routes for number in route.members) == [0, 2]
    assert len(routes) == (1 if is_one else 2)
    assert len(find_routes(lines, np.array([0, 0, 1]))) == 2  # of two classes
    if is_one:
        (route,) = routes
        assert sorted(route.line.gaps[0][:, 0].tolist()) == [300, 360]
        assert np.ptp(route.line.points[:, 0]) == 600
        assert (np.diff(route.line.points[:, 0]) > 0).all() or (
            np.diff(route.line.points[:, 0]) < 0
        ).all()


def test_three_parts_are_one_wire_in_their_order_and_a_ring_ends() -> None:
    parts = [
        straight((400, 0), (700, 0)),
        straight((0, 0), (300, 0)),
        straight((800, 0), (1100, 0)),
    ]
    (route,) = find_routes(parts, np.zeros(3, int))
    assert route.members in ((1, 0, 2), (2, 0, 1))
    assert route.line.length_px == 1100
    gaps = np.array([[(650, 0), (600, 0)], [(520, 0), (500, 0)]])
    (route,) = find_routes(
        [straight((0, 0), (300, 0)), replace(straight((700, 0), (400, 0)), gaps=gaps)], np.zeros(2)
    )
    assert route.line.gaps[..., 0].ravel().tolist() == [300, 400, 500, 520, 600, 650]
    corners = [(300 * np.cos(a), 300 * np.sin(a)) for a in np.linspace(0, 2 * np.pi, 73)]
    ring = [straight(*part) for part in itertools.pairwise(corners)]
    (round_trip,) = find_routes(ring, np.zeros(len(ring), int))
    assert sorted(round_trip.members) == list(range(72))


def test_predictions_json_has_lines_and_wires(tmp_path: Path) -> None:
    lines = [straight((10, 20), (310, 20)), None, straight((350, 20), (600, 20))]
    masks = [
        fill_outline(line.outline, SIZE) if line else Region(0, 0, np.ones((9, 9), bool))
        for line in lines
    ]
    found = Detections(
        torch.zeros(3, 4), torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 1, 0]), torch.zeros(3, 0)
    )
    with PredictionWriter(tmp_path, ("wire", "cap")) as writer:
        boxes = np.zeros((3, 4))
        writer.add(
            Source(0, Path("a.jpg"), "a"),
            (600, 900, 3),
            PhotoPrediction(found, masks, boxes, lines),
        )
        writer.add(
            Source(1, Path("b.jpg"), "b"), (600, 900, 3), PhotoPrediction(found, masks, boxes)
        )
    with_wires, without = (
        json.loads(row.split("\t")[1]) for row in next(tmp_path.glob(".pred*")).open()
    )
    first, cap, _ = with_wires["detections"]
    assert first["centreline"] == [[10, 20], [310, 20]]
    assert (first["width_px"], first["length_px"], first["gaps"]) == (8, 300, [])
    assert "centreline" not in cap
    (wire,) = with_wires["wires"]
    assert (wire["class"], wire["detections"], wire["length_px"]) == ("wire", [0, 2], 590)
    assert wire["gaps"] == [[[310, 20], [350, 20]]]
    assert "wires" not in without
