"""Masks to learn from: those that will judge, in place, true in area, one value an outline, the smallest on top."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
import torch

from utils.data.batch import Sample, collate
from utils.data.polygons import polygon_boxes
from utils.data.target_masks import MASK_STRIDE, boxes_for_training, densify, draw_masks, draw_truth

SIZE_PX = 640


def wire(angle: float, length: float, width: float, centre: np.ndarray) -> np.ndarray:
    """Return a straight wire's outline (4, 2) in pixels."""
    along = np.array([math.cos(angle), math.sin(angle)])
    across = np.array([-along[1], along[0]]) * width / 2
    ends = centre - along * length / 2, centre + along * length / 2
    return np.array([ends[0] - across, ends[1] - across, ends[1] + across, ends[0] + across])


def wires(width: float) -> list[np.ndarray]:
    """Return forty wires of 500 pixels in all directions."""
    rng = np.random.default_rng(0)
    return [wire(angle, 500, width, rng.uniform(300, 340, 2)) for angle in rng.uniform(0, math.pi, 40)]


def num_pieces(mask: np.ndarray) -> int:
    """Return how many pieces a mask falls into, pixels that touch at a corner being one."""
    return int(cv2.connectedComponents((mask > 0).astype(np.uint8), connectivity=8)[0]) - 1


def blobs(num_blobs: int, seed: int) -> list[np.ndarray]:
    """Return round outlines of many sizes, anywhere, in pixels."""
    rng = np.random.default_rng(seed)
    angles = np.linspace(0, 2 * math.pi, 12, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return [
        (circle * rng.uniform(0.7, 1.3, (12, 1)) * rng.uniform(4, 60) + rng.uniform(80, 560, 2)).astype(np.float32)
        for _ in range(num_blobs)
    ]


def test_masks_are_those_of_the_judge() -> None:
    """The truth of the evaluation walks each outline with 1000 points; ours, four to the pixel, must draw the same."""
    polygons = [*blobs(25, seed=0), *(outline.astype(np.float32) for outline in wires(3)[:10])]
    truth, ours = draw_truth(polygons, SIZE_PX), draw_masks(polygons, SIZE_PX)
    overlaps = [
        ((truth == value) & (ours == value)).sum() / max(((truth == value) | (ours == value)).sum(), 1)
        for value in range(1, len(polygons) + 1)
    ]
    assert np.mean(overlaps) > 0.95  # wires of one area that cross may lie the other way round
    plain = [filled_without_walking(polygon) for polygon in polygons[:25]]
    alone = [draw_truth([polygon], SIZE_PX) > 0 for polygon in polygons[:25]]
    walked = [draw_masks([polygon], SIZE_PX) > 0 for polygon in polygons[:25]]
    # The control: filled between its vertices alone an outline misses pixels that count.
    walked_errors, plain_errors = (
        np.mean([(a ^ b).sum() for a, b in zip(masks, alone, strict=True)]) for masks in (walked, plain)
    )
    assert walked_errors < 1
    assert plain_errors > 3 * walked_errors


def filled_without_walking(polygon: np.ndarray) -> np.ndarray:
    """Fill an outline between its vertices, cut down to whole pixels, and shrink it."""
    full = np.zeros((SIZE_PX, SIZE_PX), np.uint8)
    cv2.fillPoly(full, [polygon.astype(np.int32)], 1)
    side = SIZE_PX // MASK_STRIDE
    return cv2.resize(full, (side, side), interpolation=cv2.INTER_LINEAR) > 0


def test_a_wire_as_wide_as_a_mask_pixel_stays_in_one_piece() -> None:
    assert {num_pieces(draw_masks([outline], SIZE_PX)) for outline in wires(MASK_STRIDE)} == {1}


def test_the_smallest_lies_on_top_whatever_the_order() -> None:
    large, small = [np.array([[0.0, 0], [side, 0], [side, side], [0, side]]) + 24 for side in (64, 16)]
    for polygons, value in (([large, small], 2), ([small, large], 1)):
        masks = draw_masks(polygons, 128)
        assert (masks[7:9, 7:9] == value).all()
        assert masks[15, 15] == 3 - value


def test_walking_keeps_every_outline_closed_and_fine() -> None:
    outlines = [np.array([[0.0, 0], [10, 0], [10, 3]]), np.array([[5.0, 5], [5, 9]])]
    points, starts = densify(np.concatenate(outlines), np.array([0, 3]))
    assert starts.tolist() == [0, 40 + 12 + 42]
    for walked, outline in zip(np.split(points, starts[1:]), outlines, strict=True):
        assert np.array_equal(walked[0], outline[0])
        gaps = np.linalg.norm(np.diff(walked, axis=0, append=walked[:1]), axis=1)
        assert gaps.max() <= 0.25 + 1e-9


@pytest.mark.parametrize(("width", "most"), [(4, 1.5), (8, 1.25), (24, 1.08)])
def test_the_area_is_that_of_the_outline_and_half_an_input_pixel_around(width: float, most: float) -> None:
    areas = [np.count_nonzero(draw_masks([outline], SIZE_PX)) for outline in wires(width)]
    assert 0.98 < np.mean(areas) * MASK_STRIDE**2 / (500 * width) < most


def test_masks_are_not_shifted_against_the_outline() -> None:
    rng = np.random.default_rng(0)
    shifts, areas = [], []
    for _ in range(60):
        square = np.array([[80.0, 160], [240, 160], [240, 400], [80, 400]]) + rng.uniform(-8, 8, 2)
        rows, columns = draw_masks([square], SIZE_PX).nonzero()
        shifts.append(np.array([columns.mean(), rows.mean()]) + 0.5 - square.mean(0) / MASK_STRIDE)
        areas.append(len(rows))
    assert np.abs(np.mean(shifts, 0)).max() < 0.1
    assert np.abs(shifts).max() <= 0.5 + 1 / 16
    assert np.mean(areas) == pytest.approx(40.5 * 60.5, rel=0.01)


def test_an_object_smaller_than_a_mask_pixel_has_one() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        corner = rng.uniform(20, 40, 2)
        tiny = corner + np.array([[0.0, 0], [1.5, 0], [1.5, 1.5], [0, 1.5]])
        assert 1 <= np.count_nonzero(draw_masks([tiny], 64)) <= 3  # of the four it may touch


def test_an_outline_that_leaves_the_picture_is_cut_at_its_border() -> None:
    masks = draw_masks([np.array([[-30.0, 20], [200, 20], [200, 44], [-30, 44]])], 96)
    assert (masks[5:11] == 1).all()
    assert np.count_nonzero(masks) == 6 * 24
    assert draw_masks([np.array([[-30.0, -30], [-10, -30], [-10, -10]])], 96).max() == 0


def test_masks_have_one_value_for_each_outline() -> None:
    squares = [np.array([[0.0, 0], [16, 0], [16, 16], [0, 16]]) + 24 * k for k in range(3)]
    masks = draw_masks(squares, 96)
    assert masks.dtype == np.int32
    assert np.unique(masks).tolist() == [0, 1, 2, 3]
    assert draw_masks([], 96).max() == 0


@pytest.mark.parametrize(
    ("edge", "taught"),
    [(8.0, 7.5), (8.9, 7.5), (7.6, 7.5), (7.5, 7.5), (9.1, 9.1), (10.5, 10.5), (7.4, 7.4), (0.0, -0.5)],
)
def test_a_box_begins_before_the_corner_of_a_mask_pixel_that_is_near(edge: float, taught: float) -> None:
    boxes = np.array([[edge, 21.7, 40.2, 44.0], [21.7, edge, 40.2, 44.0]], np.float32)
    expected = [[taught, 21.7, 40.2, 44.0], [21.7, taught, 40.2, 44.0]]
    np.testing.assert_allclose(boxes_for_training(boxes), expected, rtol=1e-6)
    assert boxes[0, 0] == np.float32(edge)  # the true box stays


def test_the_box_of_a_level_or_upright_wire_stays() -> None:
    boxes = np.array([[9.6, 8.9, 200.0, 10.9], [8.9, 9.6, 12.1, 200.0]], np.float32)
    np.testing.assert_array_equal(boxes_for_training(boxes), boxes)


def test_masks_lose_less_at_the_edge_of_a_taught_box() -> None:
    kept = []
    for seed in range(20):
        outlines = blobs(12, seed)
        true = polygon_boxes(outlines).astype(np.float32)
        for number, both in enumerate(zip(true, boxes_for_training(true), strict=True)):
            rows, columns = draw_truth([outlines[number]], SIZE_PX).nonzero()
            inside = [
                (columns >= box[0]) & (columns < box[2]) & (rows >= box[1]) & (rows < box[3])
                for box in np.stack(both) / MASK_STRIDE
            ]
            kept.append([part.mean() for part in inside])
    lost = 1 - np.mean(kept, axis=0)
    assert lost[1] < 0.75 * lost[0]


def test_a_batch_teaches_these_boxes_and_its_samples_keep_the_true_ones() -> None:
    true = np.array([[8.5, 16.2, 40, 44]], np.float32)
    nothing = np.zeros((0,), np.uint8)
    sample = Sample(0, nothing, np.zeros(1, np.int64), true, nothing, [])
    batch = collate([sample])
    assert batch.boxes.tolist() == [[7.5, 15.5, 40, 44]]
    assert batch.samples[0].boxes is true
    of_windows = collate([sample], is_judged_on_grid=False)
    assert torch.equal(of_windows.boxes, torch.from_numpy(true))
