"""Pictures of a training: what the network is really shown, and how it is getting on."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np

from utils.dataset import EpochBatches, SegmentationDataset
from utils.plots import draw_instances, image_grid, plot_training_curves, save_image
from utils.run_records import read_epochs
from utils.target_masks import MASK_STRIDE

MAX_IMAGES = 16
REDRAW_S = 30.0  # drawing takes half a second, longer than an epoch of a small data set


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


class Curves:
    """`training_curves.png` of a run: drawn after its first epoch here, its last, and in between every half minute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._drawn_s = -math.inf

    def draw(self, is_last: bool) -> None:
        """Draw the run's epochs, unless they were drawn just now."""
        if is_last or time.monotonic() - self._drawn_s >= REDRAW_S:
            plot_training_curves(read_epochs(self.folder), self.folder / "training_curves.png")
            self._drawn_s = time.monotonic()
