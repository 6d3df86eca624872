"""A batch of the loader as inputs and targets of the network on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from utils.data.augment import jitter_colours
from utils.data.dataset import Batch


def prepare_images(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Turn uint8 (B, S, S, 3) into float (B, 3, S, S) in 0..1 on the device, channels last without a copy."""
    return images.to(device, non_blocking=True).permute(0, 3, 1, 2).float().div_(255)


def prepare_batch(batch: Batch, device: torch.device) -> tuple[torch.Tensor, Targets]:
    """Return the network input (B, 3, S, S) and the loss's targets, on the device."""
    images = prepare_images(batch.images, device)
    if batch.colour_gains is not None:
        images = jitter_colours(images, batch.colour_gains.to(device, non_blocking=True))
    targets = Targets(
        batch_index=batch.batch_index.to(device, non_blocking=True),
        class_ids=batch.class_ids.to(device, non_blocking=True),
        boxes=batch.boxes.to(device, non_blocking=True),
        masks=batch.masks.to(device, non_blocking=True),
        size_px=images.shape[-1],
        most_objects=max((len(sample.class_ids) for sample in batch.samples), default=0),
    )
    return images, targets


@dataclass(frozen=True)
class Targets:
    """What a batch should predict: rows as in `utils.data.dataset.Batch`, on the model's device, size in pixels.

    `most_objects` is the largest number of objects of an image; unset, the loss has to ask the device.
    """

    batch_index: torch.Tensor
    class_ids: torch.Tensor
    boxes: torch.Tensor
    masks: torch.Tensor
    size_px: int
    most_objects: int | None = None
