"""One training sample, and several of them as a batch of tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

NO_GAINS = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Sample:
    """One network input with its targets, all in pixels of the (S, S) input.

    image uint8 (S, S, 3) RGB; class_ids int64 (N,); boxes float32 (N, 4) xyxy; masks int32 (S/4, S/4): 0 is background,
    k + 1 the k-th instance (smaller instances lie on top). The photograph fills `inner_size` (width, height) of its
    pixels, from `pad` (left, top) on.
    """

    index: int
    image: np.ndarray
    class_ids: np.ndarray
    boxes: np.ndarray
    masks: np.ndarray
    polygons: list[np.ndarray]
    inner_size: tuple[int, int] = (0, 0)
    pad: tuple[int, int] = (0, 0)
    colour_gains: tuple[float, ...] = NO_GAINS  # to be applied on the device


@dataclass
class Batch:
    """Samples as tensors: images uint8 (B, S, S, 3) RGB, and a row for each of the N targets of all images."""

    images: torch.Tensor
    batch_index: torch.Tensor  # int64 (N,), ascending: the target's image
    class_ids: torch.Tensor  # int64 (N,)
    boxes: torch.Tensor  # float32 (N, 4) xyxy pixels
    masks: torch.Tensor  # int32 (B, S/4, S/4): k + 1 is the image's k-th target row
    colour_gains: torch.Tensor | None  # float32 (B, 3), if colours are to be changed on the device
    samples: list[Sample]

    def __len__(self) -> int:
        return len(self.images)

    def pin_memory(self) -> Batch:
        """Copy the tensors to page-locked memory. Called by the DataLoader."""
        for name in ("images", "batch_index", "class_ids", "boxes", "masks", "colour_gains"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).pin_memory())
        self._share_pixels()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the samples' pixels: the batch's tensors already carry them, in shared memory."""
        nothing = np.zeros(0, np.uint8)
        samples = [replace(sample, image=nothing, masks=nothing) for sample in self.samples]
        return {**vars(self), "samples": samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_pixels()

    def _share_pixels(self) -> None:
        """Make each sample's image and masks views of the batch's tensors."""
        pixels = zip(self.samples, self.images.numpy(), self.masks.numpy(), strict=True)
        self.samples = [replace(sample, image=image, masks=masks) for sample, image, masks in pixels]


def collate(samples: list[Sample]) -> Batch:
    """Stack samples into a Batch."""
    counts = torch.tensor([len(sample.class_ids) for sample in samples])
    gains = [sample.colour_gains for sample in samples]
    return Batch(
        # In a loader worker `default_collate` writes directly into shared memory.
        images=default_collate([torch.from_numpy(sample.image) for sample in samples]),
        batch_index=torch.repeat_interleave(torch.arange(len(samples)), counts),
        class_ids=torch.from_numpy(np.concatenate([sample.class_ids for sample in samples])),
        boxes=torch.from_numpy(np.concatenate([sample.boxes for sample in samples])),
        masks=default_collate([torch.from_numpy(sample.masks) for sample in samples]),
        colour_gains=None if all((row == NO_GAINS) for row in gains) else torch.tensor(gains, dtype=torch.float32),
        samples=samples,
    )
