"""Masks to learn from: in place, true in area, one value an outline, and wires in one piece."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest

from utils import target_masks
from utils.target_masks import MASK_STRIDE, belongs, draw_masks

SIZE_PX = 640


def wire(angle: float, length: float, width: float, centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a straight wire's outline (4, 2) and points along its middle (200, 2), in pixels."""
    along = np.array([math.cos(angle), math.sin(angle)])
    across = np.array([-along[1], along[0]]) * width / 2
    ends = centre - along * length / 2, centre + along * length / 2
    outline = np.array([ends[0] - across, ends[1] - across, ends[1] + across, ends[0] + across])
    return outline, ends[0] + (ends[1] - ends[0]) * np.linspace(0.01, 0.99, 200)[:, None]


def wires(width: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return forty wires of 500 pixels in all directions."""
    rng = np.random.default_rng(0)
    return [wire(angle, 500, width, rng.uniform(300, 340, 2)) for angle in rng.uniform(0, math.pi, 40)]


def length_kept(masks: np.ndarray, middle: np.ndarray) -> float:
    """Return the share of a wire's length that has a mask pixel at most a quarter of a mask pixel away."""
    hit = np.zeros(len(middle), bool)
    for shift in ((0.0, 0.0), (0.25, 0), (-0.25, 0), (0, 0.25), (0, -0.25)):
        columns, rows = (middle / MASK_STRIDE + shift).astype(int).T
        hit |= masks[rows, columns] > 0
    return float(hit.mean())


def filled_then_shrunk(polygon: np.ndarray) -> np.ndarray:
    """Draw an outline as Ultralytics' loader does, in whole pixels at full size."""
    full = np.zeros((SIZE_PX, SIZE_PX), np.uint8)
    cv2.fillPoly(full, [polygon.astype(np.int32)], 1)
    side = SIZE_PX // MASK_STRIDE
    return cv2.resize(full, (side, side), interpolation=cv2.INTER_LINEAR)


def num_pieces(mask: np.ndarray) -> int:
    """Return how many pieces a mask falls into, pixels that touch at a corner being one."""
    return int(cv2.connectedComponents((mask > 0).astype(np.uint8), connectivity=8)[0]) - 1


@pytest.mark.parametrize("width", [0.5, 1, 2, 3, 4, 6, 12])
def test_a_wire_of_any_width_stays_in_one_piece(width: float) -> None:
    assert {num_pieces(draw_masks([outline], SIZE_PX)) for outline, _ in wires(width)} == {1}


def test_thin_wires_keep_their_length_where_fill_and_shrink_lose_it() -> None:
    ours = [length_kept(draw_masks([outline], SIZE_PX), middle) for outline, middle in wires(1)]
    shrunk = [length_kept(filled_then_shrunk(outline), middle) for outline, middle in wires(1)]
    assert np.mean(ours) > 0.95
    assert np.mean(ours) > np.mean(shrunk) + 0.15
    # The control: drawn the other way wires fall to pieces.
    assert np.mean([num_pieces(filled_then_shrunk(outline)) for outline, _ in wires(1)]) > 3


@pytest.mark.parametrize(("width", "most"), [(4, 1.45), (8, 1.22), (24, 1.08)])
def test_the_area_is_that_of_the_outline_and_half_an_input_pixel_around(width: float, most: float) -> None:
    areas = [np.count_nonzero(draw_masks([outline], SIZE_PX)) for outline, _ in wires(width)]
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
    assert masks.shape == (24, 24)
    assert np.unique(masks).tolist() == [0, 1, 2, 3]
    assert [masks[2 + 6 * k, 2 + 6 * k] for k in range(3)] == [1, 2, 3]
    assert draw_masks([], 96).max() == 0


@pytest.mark.parametrize("quarter_turns", range(4))
def test_the_soft_edge_of_a_solid_object_does_not_belong_to_it(quarter_turns: int) -> None:
    covered = np.zeros((9, 9), np.uint8)
    covered[2:7, 2:7] = 255
    covered[7, 2:7] = (60, 90, 120, 90, 60)  # a peak along the edge, but beside the body
    assert np.count_nonzero(belongs(np.ascontiguousarray(np.rot90(covered, quarter_turns)))) == 25


def test_of_two_equal_rows_one_is_the_wire() -> None:
    covered = np.zeros((8, 9), np.uint8)
    covered[3:5, 1:8] = 110
    assert belongs(covered).any(0).tolist() == [False, *[True] * 7, False]
    assert np.count_nonzero(belongs(covered)) <= 8


def outlines_of_all_kinds() -> list[np.ndarray]:
    """Return wires, blocks and specks, many of which touch or cross the picture's border."""
    rng = np.random.default_rng(5)
    polygons = []
    for number in range(60):
        length, width = [(500, 2), (60, 40), (3, 2)][number % 3]
        outline, _ = wire(rng.uniform(0, math.pi), length, width, rng.uniform(0, SIZE_PX, 2))
        polygons.append(outline if number % 2 else outline.clip(0, SIZE_PX))
    return [polygon for polygon in polygons if np.ptp(polygon, axis=0).min() > 0]


def test_neighbours_on_the_sheet_do_not_touch_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    polygons = outlines_of_all_kinds()
    expected = np.zeros((SIZE_PX // MASK_STRIDE,) * 2, np.int32)
    for value, polygon in enumerate(polygons, start=1):
        expected[draw_masks([polygon], SIZE_PX) > 0] = value
    np.testing.assert_array_equal(draw_masks(polygons, SIZE_PX), expected)
    monkeypatch.setattr(target_masks, "_SHEET_AREA", 5000)
    np.testing.assert_array_equal(draw_masks(polygons, SIZE_PX), expected)
