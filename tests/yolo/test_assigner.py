"""Which anchors an object may be assigned to."""

from __future__ import annotations

import pytest
import torch

from utils.yolo.assigner import inside_boxes
from utils.yolo.boxes import AnchorGrid, anchor_grid

STRIDES = [8.0, 16.0, 32.0]
REACH_CELLS = 15  # YOLOv8 predicts distances of at most 15 cells


def anchors_in(box: list[float], size_px: int, reach_cells: int | None) -> tuple[torch.Tensor, AnchorGrid]:
    grid = anchor_grid(STRIDES, size_px, torch.device("cpu"))
    return inside_boxes(torch.tensor([[box]]), STRIDES, grid, reach_cells)[0, 0], grid


@pytest.mark.parametrize(
    ("size_px", "box"),
    [
        (320, [0, 100, 320, 107]),  # a level wire across the input
        (640, [0, 100, 640, 107]),
        (640, [300.3, 0, 305.1, 640]),
        (640, [0, 0, 640, 640]),
    ],
)
def test_every_anchor_of_a_long_object_can_predict_its_whole_box(size_px: int, box: list[float]) -> None:
    inside, grid = anchors_in(box, size_px, REACH_CELLS)
    true_sides = torch.tensor([-box[0], -box[1], box[2], box[3]])[:, None] - grid.sides
    is_reached = true_sides.amax(0) <= REACH_CELLS * grid.strides
    assert inside.any()
    assert (is_reached | (grid.strides == STRIDES[-1]))[inside].all()
    without, _ = anchors_in(box, size_px, None)
    assert not is_reached[without].all()


@pytest.mark.parametrize("box", [[40, 40, 52, 60], [100, 30, 106, 100], [50, 50, 160, 169]])
def test_the_anchors_of_a_short_object_stay_as_in_yolov8(box: list[float]) -> None:
    assert torch.equal(anchors_in(box, 320, REACH_CELLS)[0], anchors_in(box, 320, None)[0])


def test_an_object_longer_than_any_anchor_reaches_keeps_those_of_the_coarsest_level() -> None:
    inside, grid = anchors_in([0, 500, 1280, 506], 1280, REACH_CELLS)
    assert inside.any()
    assert set(grid.strides[inside].tolist()) == {STRIDES[-1]}
