"""Boxes, their losses, and the anchors that predict them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import complete_box_iou_loss

from utils.yolo import loss as module
from utils.yolo.assigner import inside_boxes
from utils.yolo.boxes import AnchorGrid, anchor_grid, complete_iou

pytestmark = pytest.mark.usefixtures("one_thread")


def random_sides(num_pairs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sides (4, N) of two boxes each: overlapping, one within the other, and apart."""
    generator = torch.Generator().manual_seed(seed)
    first, second = 0.2 + 6 * torch.rand(2, 4, num_pairs, generator=generator, dtype=torch.float64)
    second[:, ::3] = first[:, ::3] * 0.7
    second[0, 1::3] = -8 - second[2, 1::3]  # to the right of the first
    second[2, 1::3] += 16
    return first, second


def xyxy(sides: torch.Tensor) -> torch.Tensor:
    """Return the boxes (N, 4) of sides (4, N) from the point (0, 0)."""
    return (sides * torch.tensor([[-1], [-1], [1], [1]])).T


@pytest.mark.parametrize("seed", range(3))
def test_complete_iou_and_its_slope_equal_those_of_the_formula(seed: int) -> None:
    first, second = random_sides(60, seed)
    first.requires_grad_()
    expected = 1 - complete_box_iou_loss(xyxy(first), xyxy(second))  # (N,)
    (wanted,) = torch.autograd.grad(expected.sum(), first)
    found, slope = complete_iou(first.detach(), second, with_slope=True)
    assert (expected < 0).any()
    assert (expected > 0.3).any()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
    assert slope is not None
    torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=1e-6)
    assert complete_iou(first.detach(), second)[1] is None


@pytest.mark.parametrize(
    "sides", [(1, 2, 3, 4), (1, 2, -1, 4), (0, 0, 0, 0), (-9, -9, 9, 9)], ids=["equal", "no width", "no area", "apart"]
)
def test_degenerate_boxes_have_finite_numbers(sides: tuple[int, ...]) -> None:
    first, second = torch.tensor(sides, dtype=torch.float32), torch.tensor([1.0, 2, 3, 4])
    for pair in ((first, second), (second, first), (first, first)):
        found, slope = complete_iou(pair[0][:, None], pair[1][:, None], with_slope=True)
        assert slope is not None
        assert bool(torch.isfinite(found).all() and torch.isfinite(slope).all())
        assert float(found) <= 1


def test_the_weighted_class_part_passes_gradcheck_and_equals_pytorchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).mul_(4).requires_grad_()
    scores = torch.rand(2, 3, 7, generator=generator, dtype=torch.float64)
    weights = torch.tensor([[0.5], [1.0], [3.0]], dtype=torch.float64)

    def error(logits: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module._ClassError.apply(logits, logits.detach().sigmoid(), scores, weights)
        return found

    expected = F.binary_cross_entropy_with_logits(logits, scores, weight=weights, reduction="sum")
    torch.testing.assert_close(error(logits), expected, rtol=1e-7, atol=0)
    assert torch.autograd.gradcheck(error, logits)


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
