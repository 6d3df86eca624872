"""Turns a batch of the loader into the network's input and the loss's targets, on the device."""

from dataclasses import dataclass
from typing import Any

import torch

from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.utils.devices import copy_to_device
from yolo_seg_ddp.yolo.colour_error import lab_colours


@dataclass(frozen=True)
class Targets:
    """The true objects of a batch, on the model's device; the tensors are those of
    `yolo_seg_ddp.data.dataset.Batch`.

    batch_index: ascending, so that the objects of an image follow one another.
    size_px: side of the input. most_objects: the largest number of objects in an image; if None,
    the loss reads it from the device, which costs a host synchronisation. ignored, ignored_of,
    rough, boxed: None without any. colours: of the images at the size of `masks`, see
    `yolo_seg_ddp.yolo.colour_error`; None without boxed objects.
    """

    batch_index: torch.Tensor
    class_ids: torch.Tensor
    boxes: torch.Tensor
    masks: torch.Tensor
    size_px: int
    most_objects: int | None = None
    ignored: torch.Tensor | None = None
    ignored_of: torch.Tensor | None = None
    rough: torch.Tensor | None = None
    boxed: torch.Tensor | None = None
    colours: torch.Tensor | None = None

    def is_ignored(self, at: torch.Tensor, batch_size: int, num_classes: int) -> torch.Tensor:
        """Return for which classes the places `at`, bool (K, ...) of the K maps `ignored`, are:
        bool (B, classes, ...).
        """
        assert self.ignored_of is not None
        image, class_id = self.ignored_of
        found = at.new_zeros(batch_size, num_classes + 1, *at.shape[1:])
        found[image, class_id] = at  # ANY_CLASS, which is -1, is the last row
        return found[:, :-1] | found[:, -1:]


def prepare_images(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Turn uint8 (B, S, S, 3) into float32 (B, 3, S, S) in 0..1 on the device, in channels-last
    memory format.
    """
    return copy_to_device(images, device).permute(0, 3, 1, 2).float().div_(255)


def prepare_batch(batch: Batch, device: torch.device) -> tuple[torch.Tensor, Targets]:
    """Return the network's input (B, 3, S, S) and the loss's targets, on the device.

    Colours are jittered there.
    """

    def moved(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    images = prepare_images(batch.images, device)
    if batch.colour_gains is not None:
        images = jitter_colours(images, moved(batch.colour_gains))
    targets = Targets(
        batch_index=moved(batch.batch_index),
        class_ids=moved(batch.class_ids),
        boxes=moved(batch.boxes),
        masks=moved(batch.masks),
        size_px=images.shape[-1],
        most_objects=max((len(sample.class_ids) for sample in batch.samples), default=0),
        ignored=moved(batch.ignored),
        ignored_of=moved(batch.ignored_of),
        rough=moved(batch.rough),
        boxed=moved(batch.boxed),
        colours=None if batch.boxed is None else lab_colours(images, batch.masks.shape[-1]),
    )
    return images, targets


def varies_colours_on(device: torch.device, colour: str) -> bool:
    """Return whether `--colour`, which is auto, loader or device, lets the device vary the colours,
    not the loader.
    """
    return colour == "device" or (colour == "auto" and device.type == "cuda")


def jitter_colours(images: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """Do the same for RGB images float (B, 3, H, W) in 0..1, gains (B, 3), on their device; returns
    channels last.
    """
    hue_gain, saturation_gain, value_gain = gains.to(images.dtype).T.reshape(3, -1, 1, 1, 1)
    red, green, blue = images.split(1, dim=1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    divisor = chroma.clamp(min=1e-6)
    # Hue in sixths of the circle, 0 is red, from the largest channel (Smith 1978, "Color gamut
    # transform pairs").
    from_red, from_green, from_blue = (
        (green - blue) / divisor,
        (blue - red) / divisor + 2,
        (red - green) / divisor + 4,
    )
    hue = (
        torch.where(value == red, from_red, torch.where(value == green, from_green, from_blue)) % 6
    )
    # 5, 3, 1, made on the device: `torch.tensor` would copy them from the host, which waits for the
    # device.
    steps = torch.arange(5, 0, -2, device=images.device, dtype=images.dtype)[:, None, None]
    position = torch.addcmul(steps, hue, hue_gain) % 6
    saturation = (chroma / value.clamp(min=1e-6) * saturation_gain).clamp_(max=1)
    value = (value * value_gain).clamp_(max=1)
    nearness = torch.minimum(position, 4 - position).clamp_(0, 1)
    changed = torch.addcmul(value, value * saturation, nearness, value=-1)
    return changed.contiguous(memory_format=torch.channels_last)
