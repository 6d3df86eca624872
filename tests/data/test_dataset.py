"""Samples, batches and masks to learn from: boxes, outlines, masks and pixels agree; masks are
those that will judge.
"""

import math

import cv2
import numpy as np
import torch

from tests.data.conftest import BARS, COLOURS, SHAPES, SIZE_PX
from yolo_seg_ddp.data.dataset import SegmentationDataset, collate
from yolo_seg_ddp.data.target_masks import MASK_STRIDE, draw_masks, draw_truth

INPUT_PX = 640  # of the outlines without a data set


def test_a_batch_names_each_target_by_its_image(plain_set: SegmentationDataset) -> None:
    batch = collate([plain_set[0, 6], plain_set[0, 0], plain_set[0, 1]])
    assert len(batch) == 3
    assert batch.images.shape == (3, SIZE_PX, SIZE_PX, 3)
    assert batch.images.dtype == torch.uint8
    assert batch.batch_index.tolist() == [1, 1, 2, 2]
    assert batch.boxes.shape == (4, 4)
    assert batch.masks.shape == (3, SIZE_PX // 4, SIZE_PX // 4)
    assert plain_set[0, 6].polygons == []  # it has no label file
    empty = collate([plain_set[0, 6]])
    assert (empty.boxes.shape, empty.class_ids.dtype, empty.boxes.dtype) == (
        (0, 4),
        torch.int64,
        torch.float32,
    )
    assert empty.masks.max() == 0


def test_letterboxed_boxes_match_outlines_masks_and_pixels(plain_set: SegmentationDataset) -> None:
    for index, (height, width) in enumerate(SHAPES[:-1]):
        sample = plain_set[0, index]
        longer = max(height, width)
        shown = np.array([width, height]) * SIZE_PX / longer
        assert sorted(sample.class_ids.tolist()) == [0, 1]
        for position, class_id in enumerate(sample.class_ids):
            polygon, box = sample.polygons[position], sample.boxes[position]
            np.testing.assert_allclose(box, [*polygon.min(0), *polygon.max(0)], atol=1e-4)
            expected = BARS[class_id] * shown + (SIZE_PX - shown) / 2
            # whole pixels of padding and size
            np.testing.assert_allclose(polygon, expected, atol=1.01)
            x1, y1, x2, y2 = np.rint(box).astype(int)
            part = sample.image[y1 + 1 : y2 - 1, x1 + 1 : x2 - 1]
            assert np.abs(part.astype(int) - COLOURS[class_id]).max() < 60
            rows, columns = (sample.masks == position + 1).nonzero()
            mask_box = (
                np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                * MASK_STRIDE
            )
            assert np.abs(mask_box - box).max() <= 1.25 * MASK_STRIDE


def wires(width: float) -> list[np.ndarray]:
    """Return forty wires of 500 pixels in all directions."""
    rng = np.random.default_rng(0)
    found = []
    for angle in rng.uniform(0, math.pi, 40):
        along = np.array([math.cos(angle), math.sin(angle)]) * 250
        across = np.array([-along[1], along[0]]) / 500 * width
        corners = np.array([-across - along, across - along, across + along, along - across])
        found.append(rng.uniform(300, 340, 2) + corners)
    return found


def blobs(num_blobs: int, seed: int) -> list[np.ndarray]:
    """Return round outlines of many sizes, anywhere, in pixels."""
    rng = np.random.default_rng(seed)
    angles = np.linspace(0, 2 * math.pi, 12, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return [
        (
            circle * rng.uniform(0.7, 1.3, (12, 1)) * rng.uniform(4, 60) + rng.uniform(80, 560, 2)
        ).astype(np.float32)
        for _ in range(num_blobs)
    ]


def test_masks_are_those_of_the_judge() -> None:
    """The truth of the evaluation walks each outline with 1000 points; ours, four to the pixel,
    must draw the same.
    """
    polygons = [*blobs(25, seed=0), *(outline.astype(np.float32) for outline in wires(3)[:10])]
    truth, ours = draw_truth(polygons, INPUT_PX), draw_masks(polygons, INPUT_PX)
    overlaps = [
        ((truth == value) & (ours == value)).sum()
        / max(((truth == value) | (ours == value)).sum(), 1)
        for value in range(1, len(polygons) + 1)
    ]
    assert np.mean(overlaps) > 0.95  # wires of one area that cross may lie the other way round
    plain = [filled_without_walking(polygon) for polygon in polygons[:25]]
    alone = [draw_truth([polygon], INPUT_PX) > 0 for polygon in polygons[:25]]
    walked = [draw_masks([polygon], INPUT_PX) > 0 for polygon in polygons[:25]]
    # The control: filled between its vertices alone an outline misses pixels that count.
    walked_errors, plain_errors = (
        np.mean([(a ^ b).sum() for a, b in zip(masks, alone, strict=True)])
        for masks in (walked, plain)
    )
    assert walked_errors < 1
    assert plain_errors > 3 * walked_errors


def filled_without_walking(polygon: np.ndarray) -> np.ndarray:
    """Fill an outline between its vertices, cut down to whole pixels, and shrink it."""
    full = np.zeros((INPUT_PX, INPUT_PX), np.uint8)
    cv2.fillPoly(full, [polygon.astype(np.int32)], 1)
    side = INPUT_PX // MASK_STRIDE
    return cv2.resize(full, (side, side), interpolation=cv2.INTER_LINEAR) > 0


def test_a_wire_as_wide_as_a_mask_pixel_stays_in_one_piece() -> None:
    masks = [
        (draw_masks([outline], INPUT_PX) > 0).astype(np.uint8) for outline in wires(MASK_STRIDE)
    ]
    # the background is one
    assert {cv2.connectedComponents(mask, connectivity=8)[0] for mask in masks} == {2}


def test_the_smallest_lies_on_top_whatever_the_order() -> None:
    large, small = [
        np.array([[0.0, 0], [side, 0], [side, side], [0, side]]) + 24 for side in (64, 16)
    ]
    for polygons, value in (([large, small], 2), ([small, large], 1)):
        masks = draw_masks(polygons, 128)
        assert (masks[7:9, 7:9] == value).all()
        assert masks[15, 15] == 3 - value


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
