"""One picture of what the network is really shown: the first augmented batch with its masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from utils.dataset import EpochBatches, SegmentationDataset
from utils.plots import draw_instances, image_grid, save_image
from utils.target_masks import MASK_STRIDE

MAX_IMAGES = 16


def save_first_batch(dataset: SegmentationDataset, batches: EpochBatches, names: tuple[str, ...], path: Path) -> None:
    """Draw up to 16 samples of the first batch of the first epoch, masks as the loss sees them."""
    pictures = []
    for key in next(iter(batches))[:MAX_IMAGES]:
        sample = dataset[key]
        masks = sample.masks[None] == np.arange(1, len(sample.class_ids) + 1)[:, None, None]
        masks = masks.repeat(MASK_STRIDE, axis=1).repeat(MASK_STRIDE, axis=2)
        pictures.append(draw_instances(sample.image, sample.class_ids, sample.boxes, masks, None, names))
    columns = int(np.ceil(np.sqrt(len(pictures))))
    save_image(path, image_grid(pictures, columns, max(dataset.size_px, 1)))
