"""Overlap of masks at prototype resolution: on the host and on a device, image by image and in batches."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.oracle import NAMES, SIZE_PX, Oracle, draw_photos
from utils.data.dataset import SegmentationDataset
from utils.data.loader import ShardBatches, get_dataloader
from utils.data.target_masks import draw_truth
from utils.evaluation import evaluate as evaluation
from utils.evaluation import input_masks
from utils.evaluation.input_masks import begin_mask_overlaps
from utils.evaluation.metrics import ImageResult
from utils.predict.detections import Detections, prototype_masks
from utils.yolo.loss import SegmentationLoss


@pytest.mark.parametrize("way", ["_shared_on_host", "_shared_on_device"])
def test_overlap_is_that_of_whole_masks(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = SegmentationDataset(draw_photos(tmp_path, 6), SIZE_PX)
    samples = [dataset[(0, index)] for index in range(6)]
    rng = torch.Generator().manual_seed(0)
    prototypes = torch.randn(6, 32, SIZE_PX // 4, SIZE_PX // 4, generator=rng)
    found = []
    for count in (30, 0, 1, 7, 0, 12):
        low, extent = (torch.rand(count, 2, generator=rng) * SIZE_PX for _ in range(2))
        ones = torch.ones(count)
        boxes = torch.cat([low - 20, low + extent], 1)
        found.append(Detections(boxes, ones, ones.long(), torch.randn(count, 32, generator=rng)))
    monkeypatch.setattr(input_masks, "_shared_on_host", getattr(input_masks, way))
    overlaps = begin_mask_overlaps(samples, found, prototypes)()
    for sample, detections, maps, (iou, areas) in zip(samples, found, prototypes, overlaps, strict=True):
        truth = draw_truth(sample.polygons, SIZE_PX) == np.arange(1, len(sample.polygons) + 1)[:, None, None]
        masks = prototype_masks(maps, detections, SIZE_PX).numpy()
        shared = np.einsum("myx,nyx->mn", truth.astype(np.float32), masks.astype(np.float32))
        union = truth.sum((1, 2))[:, None] + masks.sum((1, 2)) - shared
        np.testing.assert_allclose(iou, shared / np.maximum(union, 1e-7), rtol=1e-6)
        assert areas.tolist() == (masks.sum((1, 2)) * 16.0).tolist()
    assert max(iou.max() for iou, _ in overlaps if iou.size) > 0.1


def results_of(folder: Path, batch_size: int) -> list[ImageResult]:
    photos = draw_photos(folder, 9)
    loader = get_dataloader(SegmentationDataset(photos, SIZE_PX), ShardBatches(9, batch_size, 0, 1), 0, False)
    model = Oracle(photos)
    return evaluation.evaluate(model, loader, NAMES, SegmentationLoss(model), torch.device("cpu")).results


def test_results_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    alone = results_of(tmp_path, 1)
    assert sum(len(result.scores) for result in alone) > 20
    for batch_size in (4, 9):
        for one, other in zip(alone, results_of(tmp_path, batch_size), strict=True):
            for field in fields(ImageResult):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
