"""Samples and batches: boxes, outlines, masks and pixels agree."""

from __future__ import annotations

import numpy as np
import torch

from tests.data.conftest import BARS, COLOURS, SHAPES, SIZE_PX
from utils.data.dataset import SegmentationDataset, collate
from utils.data.target_masks import MASK_STRIDE


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
    assert (empty.boxes.shape, empty.class_ids.dtype, empty.boxes.dtype) == ((0, 4), torch.int64, torch.float32)
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
            np.testing.assert_allclose(polygon, expected, atol=1.01)  # whole pixels of padding and size
            x1, y1, x2, y2 = np.rint(box).astype(int)
            part = sample.image[y1 + 1 : y2 - 1, x1 + 1 : x2 - 1]
            assert np.abs(part.astype(int) - COLOURS[class_id]).max() < 60
            rows, columns = (sample.masks == position + 1).nonzero()
            mask_box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) * MASK_STRIDE
            assert np.abs(mask_box - box).max() <= 1.25 * MASK_STRIDE
